"""What a linear layer is made of, whichever class it has: nn.Linear, Conv1D of transformers, or one with LoRA."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


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
    from mpitrain.layers.lora import LoraLinear

    kind = type(module)
    transposed = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if isinstance(module, LoraLinear):
        return LinearParts(module.weight, module.bias, module.transposed, module.training)
    if kind is nn.Linear or transposed:
        return LinearParts(module.weight, module.bias, transposed, module.training)  # type: ignore[arg-type]
    return None
