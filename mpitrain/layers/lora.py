"""Low-rank adaptation (LoRA) of a linear layer (Hu et al. 2021).

    y = x W^T + b  +  alpha / rank * dropout(x) A^T B^T        A [rank, in], B [out, rank]

W and b are frozen; A and B are trained. B starts as zeros, so the layer starts with its original output.

Checkpoints do not contain the frozen weights below adapters. They are loaded from their source again and must be
unchanged; `BaseWeights` checks that.
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
    """A frozen linear layer with an adapter.

    Parameters weight and bias keep the names of the original layer; lora_a and lora_b are new. A is initialized like
    the weight of an nn.Linear, from torch's default generator.

    Args:
        weight: W, [out, in], or [in, out] if `transposed`; this constructor freezes it.
        bias: b [out], also frozen, or None.
        rank: Rank of the product B A.
        alpha: Scale of the adapter; its output is multiplied by alpha / rank.
        dropout: Probability of dropping an input of the adapter in training.
        transposed: If true, W is stored as [in, out].

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
        self.scale = alpha / rank  # factor of the adapter's output
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

    def merged_weight(self) -> torch.Tensor:
        """Return the weight of a plain layer with the same output in evaluation: W + alpha / rank * B A."""
        change = (self.lora_b @ self.lora_a) * self.scale
        return self.weight + (change.t() if self.transposed else change)

    def extra_repr(self) -> str:
        outputs, inputs = self.lora_b.shape[0], self.lora_a.shape[1]
        return f"in_features={inputs}, out_features={outputs}, rank={self.rank}, alpha={self.alpha}"


@dataclass(frozen=True)
class LinearParts:
    """Parts of a linear layer, y = x W^T + b.

    Attributes:
        weight: W, [out_features, in_features], or [in_features, out_features] if `transposed`.
        bias: b, or None.
        transposed: If true, the weight is stored as [in_features, out_features], as in Conv1D of transformers.
        training: Mode of the layer: training or evaluation.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool
    training: bool

    @property
    def in_features(self) -> int:
        """Size of the last axis of an input."""
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Size of the last axis of an output."""
        return self.weight.shape[1 if self.transposed else 0]


def linear_parts(module: nn.Module) -> LinearParts | None:
    """Return the parts of a linear layer, or None for any other module.

    The layer is an nn.Linear, a Conv1D of transformers or a `LoraLinear`. Subclasses are excluded, because their
    forward may differ.
    """
    kind = type(module)
    transposed = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if isinstance(module, LoraLinear):
        return LinearParts(module.weight, module.bias, module.transposed, module.training)
    if kind is nn.Linear or transposed:
        return LinearParts(module.weight, module.bias, transposed, module.training)  # type: ignore[arg-type]
    return None


@dataclass(frozen=True)
class BaseWeights:
    """Fingerprint of the frozen weights in a model with adapters.

    Attributes:
        source: Setting that names the origin of the weights.
        names: Names of the frozen parameters in the whole model.
        crc: CRC-32 of their names, shapes, dtypes and values.
        adapter: Settings of the adapters, such as rank and alpha.
        seed: Initial seed of torch's generator, on which weights depend that come from no file.
        checkpoint: Folder that the weights were loaded from, if model.base names one; else empty.
    """

    source: str
    names: frozenset[str]
    crc: int
    adapter: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    checkpoint: str = ""

    @staticmethod
    def of(module: nn.Module, source: str, adapter: dict[str, Any] | None = None, checkpoint: str = "") -> BaseWeights:
        """Compute the fingerprint of the frozen parameters of a newly built model. Every value is read once.

        Args:
            module: Whole model.
            source: Setting that names the origin of the weights.
            adapter: Settings of the adapters.
            checkpoint: Folder that model.base names; empty if it names none.
        """
        names, crc = set[str](), 0
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                names.add(name)
                crc = crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), crc)
                data = parameter.detach().cpu().contiguous().reshape(-1)
                crc = crc32(data.view(torch.uint8).numpy(), crc) if data.numel() else crc
        return BaseWeights(source, frozenset(names), crc, adapter or {}, torch.initial_seed(), checkpoint)

    def values(self) -> dict[str, Any]:
        """Return the dictionary that a checkpoint stores."""
        record = {"source": self.source, "crc32": self.crc, "seed": self.seed, "adapter": self.adapter}
        return record | ({"checkpoint": self.checkpoint} if self.checkpoint else {})

    def require(self, record: Any) -> None:
        """Raise InputError, the same on every rank, unless a checkpoint was made with these weights and adapters.

        Args:
            record: The checkpoint's value of `values`; anything but a dictionary stands for a whole model.
        """
        if not isinstance(record, dict):
            raise refusal(
                f"the checkpoint contains a whole model, but this run trains adapters of {self.source}; use another "
                "run.dir, or set model.lora to 0"
            )
        if record.get("crc32") != self.crc:
            raise refusal(
                f"the checkpoint's adapters are for other base weights than those of {self.source} now (they came from "
                f"{record.get('source')}, run.seed {record.get('seed')}); use those again, or another run.dir"
            )
        if (there := record.get("adapter")) != self.adapter:
            raise refusal(
                f"the checkpoint's adapters have {_describe(there)}, but this run's have {_describe(self.adapter)}; "
                "set model.lora, lora_alpha and lora_targets as they were, or use another run.dir"
            )


def require_whole(record: Any) -> None:
    """Raise InputError, the same on every rank, if a checkpoint has only adapters but the run trains a whole model.

    Args:
        record: The checkpoint's value of `BaseWeights.values`, or None.
    """
    if isinstance(record, dict):
        raise refusal(
            f"the checkpoint contains only adapters of {record.get('source')} ({_describe(record.get('adapter'))}); "
            "set model.lora and model.factory as they were, or use another run.dir"
        )


def _describe(adapter: Any) -> str:
    """Describe an adapter's settings for a message."""
    known = adapter if isinstance(adapter, dict) else {}
    names = known.get("layers", ())
    more = f" in {len(names)} layers" if names else ""
    return f"rank {known.get('rank')} and alpha {known.get('alpha')}{more}" if known else "unknown settings"
