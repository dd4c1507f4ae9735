"""Low-rank adaptation of a linear layer (Hu et al. 2021, LoRA).

    y = x W^T + b  +  alpha / rank * dropout(x) A^T B^T        A [rank, in], B [out, rank]

W and b are frozen; A and B are trained. B begins as zeros, so that the layer begins as it was.

The frozen weights under adapters are not saved, but come from their source again, and must be the same (`BaseWeights`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mpitrain.errors import refusal
from mpitrain.storage.hdf5 import crc32


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter, under the names that the layer had: weight, bias, lora_a, lora_b.

    A is drawn as torch draws the weight of an nn.Linear, from its default generator.

    Args:
        weight: W, [out, in], or [in, out] if it is transposed; it is frozen here.
        bias: b, frozen as well, or None.
        rank: Of the product B A.
        alpha: The adapter's output is multiplied with alpha / rank.
        dropout: Probability with which each of its inputs is left out in training.
        transposed: Whether W is kept as [in, out].

    Shape:
        Input [..., in], output [..., out].
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        outputs, inputs = reversed(weight.shape) if transposed else weight.shape
        self.rank, self.alpha, self.dropout, self.transposed = rank, alpha, dropout, transposed
        self.scale = alpha / rank  # of the adapter's output
        self.weight, self.bias = weight, bias
        weight.requires_grad_(False)
        if bias is not None:
            bias.requires_grad_(False)
        self.lora_a = nn.Parameter(weight.new_empty(rank, inputs))
        self.lora_b = nn.Parameter(weight.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight.t() if self.transposed else self.weight, self.bias)
        inner = functional.linear(functional.dropout(x, self.dropout, self.training), self.lora_a)
        return y + functional.linear(inner, self.lora_b) * self.scale

    def merged(self) -> torch.Tensor:
        """The weight of the plain layer that computes the same in evaluation: W + alpha / rank * B A."""
        change = (self.lora_b @ self.lora_a) * self.scale
        return self.weight + (change.t() if self.transposed else change)

    def extra_repr(self) -> str:
        outputs, inputs = self.lora_b.shape[0], self.lora_a.shape[1]
        return f"in_features={inputs}, out_features={outputs}, rank={self.rank}, alpha={self.alpha}"


@dataclass(frozen=True)
class LinearParts:
    """The parts of a linear layer, y = x W^T + b.

    Attributes:
        weight: W, [out_features, in_features], or the other way round where it is transposed.
        bias: b, or None.
        transposed: Whether the weight is kept as [in_features, out_features], as Conv1D does.
        training: The layer's mode.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool
    training: bool

    @property
    def in_features(self) -> int:
        """Size of an input."""
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Size of an output."""
        return self.weight.shape[1 if self.transposed else 0]


def linear_parts(module: nn.Module) -> LinearParts | None:
    """The parts of a plain linear layer; None for any other module, and for subclasses, which may compute otherwise."""
    kind = type(module)
    transposed = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if isinstance(module, LoraLinear):
        return LinearParts(module.weight, module.bias, module.transposed, module.training)
    if kind is nn.Linear or transposed:
        return LinearParts(module.weight, module.bias, transposed, module.training)  # type: ignore[arg-type]
    return None


@dataclass(frozen=True)
class BaseWeights:
    """What is frozen in a model with adapters.

    Attributes:
        source: Where it comes from, the setting.
        names: Of the parameters, in the whole model.
        crc: Of their names, shapes and values.
        adapter: What the adapters are: rank, alpha and the like.
        seed: Of torch's generator when the model was made, from which weights without a file come.
        checkpoint: The folder that they come from, where model.base names one.
    """

    source: str
    names: frozenset[str]
    crc: int
    adapter: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    checkpoint: str = ""

    @staticmethod
    def of(module: nn.Module, source: str, adapter: dict[str, Any] | None = None, checkpoint: str = "") -> BaseWeights:
        """Of a whole model that was just made, what it does not train. Every value is read once."""
        names, crc = set[str](), 0
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                names.add(name)
                crc = crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), crc)
                data = parameter.detach().cpu().contiguous().reshape(-1)
                crc = crc32(data.view(torch.uint8).numpy(), crc) if data.numel() else crc
        return BaseWeights(source, frozenset(names), crc, adapter or {}, torch.initial_seed(), checkpoint)

    def values(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        told = {"source": self.source, "crc32": self.crc, "seed": self.seed, "adapter": self.adapter}
        return told | ({"checkpoint": self.checkpoint} if self.checkpoint else {})

    def require(self, found: Any) -> None:
        """Raise InputError, on all ranks alike, unless a checkpoint's values are of these weights and adapters."""
        if not isinstance(found, dict):
            raise refusal(
                f"the checkpoint holds a whole model, and this run trains adapters of {self.source}; give another "
                "run.dir, or set model.lora to 0"
            )
        if found.get("crc32") != self.crc:
            raise refusal(
                f"the checkpoint's adapters are for other base weights than those of {self.source} now (they came from "
                f"{found.get('source')}, run.seed {found.get('seed')}); give these again, or another run.dir"
            )
        if (there := found.get("adapter")) != self.adapter:
            raise refusal(
                f"the checkpoint's adapters are {_told(there)}, and this run's {_told(self.adapter)}; set model.lora, "
                "lora_alpha and lora_targets as they were, or give another run.dir"
            )


def require_whole(found: Any) -> None:
    """Raise InputError, on all ranks alike, for a checkpoint's values that are of adapters, where a model is whole."""
    if isinstance(found, dict):
        raise refusal(
            f"the checkpoint holds adapters of {found.get('source')} alone ({_told(found.get('adapter'))}); set "
            "model.lora and model.factory as they were, or give another run.dir"
        )


def _told(adapter: Any) -> str:
    known = adapter if isinstance(adapter, dict) else {}
    names = known.get("layers", ())
    more = f" in {len(names)} layers" if names else ""
    return f"of rank {known.get('rank')} and alpha {known.get('alpha')}{more}" if known else "others"
