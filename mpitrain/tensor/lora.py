"""Adapters (LoRA) of linear layers that are divided over the ranks of the tensor axis.

    column   y_r += s (x A^T) B_r^T           B is divided like the outputs, A is replicated
    row      y   += s (sum_r x_r A_r^T) B^T   A is divided like the inputs, B is replicated; `rank` numbers are summed

Of what a column layer's ranks compute with a replicated A, the gradients are summed where B's parts begin.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mpitrain.errors import refusal
from mpitrain.layers.lora import LinearParts, LoraLinear
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.features import Features, part_of
from mpitrain.tensor.functions import copy, reduce
from mpitrain.tensor.linear import ColumnParallelLinear, RowParallelLinear


class ColumnParallelLora(ColumnParallelLinear):
    """A column layer with an adapter.

    Args:
        parts: Of the whole layer.
        adapter: The whole layer with its adapter, the same on all ranks.
        axis: The ranks.
        features: How the outputs are divided.
        gather_output: Give the whole output.
        paired: A row layer takes what becomes of the output.
    """

    def __init__(
        self,
        parts: LinearParts,
        adapter: LoraLinear,
        axis: Axis,
        features: Features,
        *,
        gather_output: bool,
        paired: bool,
    ) -> None:
        super().__init__(parts, axis, features, gather_output=False, paired=paired)
        _refuse_dropout(adapter, axis)
        self.scale, self._whole = adapter.scale, gather_output
        self.lora_a = adapter.lora_a
        self.lora_b = part_of(adapter.lora_b, 0, features, axis.rank, axis.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = copy(functional.linear(x, self.lora_a), self.axis)
        y = super().forward(x) + functional.linear(inner, self.lora_b) * self.scale
        return self.gathered(y) if self._whole else y


class RowParallelLora(RowParallelLinear):
    """A row layer with an adapter.

    Args:
        parts: Of the whole layer.
        adapter: The whole layer with its adapter, the same on all ranks.
        axis: The ranks.
        features: How the inputs are divided.
    """

    def __init__(self, parts: LinearParts, adapter: LoraLinear, axis: Axis, features: Features) -> None:
        super().__init__(parts, axis, features)
        _refuse_dropout(adapter, axis)
        self.scale = adapter.scale
        self.lora_a = part_of(adapter.lora_a, 1, features, axis.rank, axis.size)
        self.lora_b = adapter.lora_b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        inner = reduce(functional.linear(x, self.lora_a), self.axis)
        return y + functional.linear(inner, self.lora_b) * self.scale


def refuse_sequence(name: str) -> None:
    """Adapters of layers whose input is a part of the sequence are not made."""
    raise refusal(f"{name} has an adapter, which does not go with parallel.sequence; set that to false")


def _refuse_dropout(adapter: LoraLinear, axis: Axis) -> None:
    if adapter.dropout and axis.size > 1:
        raise refusal(
            f"model.lora_dropout {adapter.dropout} would draw other numbers on each tensor rank; set it to 0, or "
            "parallel.tensor to 1"
        )
