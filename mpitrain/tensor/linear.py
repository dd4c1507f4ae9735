"""Linear layers whose weight is divided over the ranks of the tensor axis (Shoeybi et al. 2019, section 3).

    column   y_r = x W_r^T + b_r              each rank has some of the outputs; x is whole
    row      y   = sum_r x_r W_r^T  + b       each rank has some of the inputs; y is whole, the bias added once

A row layer after a column layer makes two layers with one sum, and what lies between them, activations, heads of
attention, is each rank's own. With `sequence` (Korthikanti et al. 2022) what is outside the pair is divided along
the sequence (the last dimension but one): the column layer gathers it, the row layer's sum is left divided.

Adapters (LoRA) of linear layers that are divided over the ranks of the tensor axis.

    column   y_r += s (x A^T) B_r^T           B is divided like the outputs, A is replicated
    row      y   += s (sum_r x_r A_r^T) B^T   A is divided like the inputs, B is replicated; `rank` numbers are summed

Of what a column layer's ranks compute with a replicated A, the gradients are summed where B's parts begin.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from mpitrain.errors import refusal
from mpitrain.layers.lora import LinearParts, LoraLinear, linear_parts
from mpitrain.tensor.axis import Axis, all_gather, copy, gather, reduce, reduce_scatter, scatter
from mpitrain.tensor.features import Features, part_of

SEQUENCE = -2  # the dimension
Keeping = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _ParallelLinear(nn.Module):
    """A linear layer of whose weight this rank has a part.

    Args:
        linear: The whole layer, the same on all ranks, of which this rank's part is kept.
        axis: The ranks.
        dim: The dimension of a weight [out_features, in_features] that is divided.
        features: How it is divided.
        sequence: Whether what is outside of a pair of layers is divided along the sequence.
    """

    bias: torch.Tensor | None

    def __init__(
        self, linear: nn.Linear | LinearParts, axis: Axis, dim: int, features: Features, sequence: bool
    ) -> None:
        super().__init__()
        self.axis, self.sequence, self.training = axis, sequence, linear.training
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.transposed = isinstance(linear, LinearParts) and linear.transposed
        self.weight = part_of(linear.weight, dim ^ self.transposed, features, axis.rank, axis.size)

    def extra_repr(self) -> str:
        part = f"{tuple(self.weight.shape)} of the weight"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {part}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are divided over the ranks of the tensor axis.

    Several paired layers may take one input (query, key, value): it and its gradient then travel once.

    Args:
        linear: The whole layer, the same on all ranks, of which this rank's part is kept.
        axis: The ranks.
        features: How the outputs are divided; None: evenly, one by one.
        gather_output: Give the whole output; else this rank's part of it.
        sequence: The input is this rank's part of the sequence.
        paired: A row layer takes what becomes of the output; in training random numbers up to there are this rank's
            own.

    Shape:
        Input [..., in_features], the same on all ranks; with `sequence` [..., part of sequence, in_features].
        Output [..., this rank's outputs], or [..., out_features] with `gather_output`.
    """

    def __init__(
        self,
        linear: nn.Linear | LinearParts,
        axis: Axis,
        features: Features | None = None,
        *,
        gather_output: bool = False,
        sequence: bool = False,
        paired: bool = False,
    ) -> None:
        features = features or Features((linear.out_features,))
        super().__init__(linear, axis, 0, features, sequence)
        self.gather_output, self.paired = gather_output, paired and axis.size > 1
        self.bias = None if linear.bias is None else part_of(linear.bias, 0, features, axis.rank, axis.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.axis.column_input
        if not (isinstance(given, ColumnInput) and given.is_for(x)):  # another layer's of the same tensor
            given = ColumnInput(x, self.axis, self.sequence)
            self.axis.column_input = given if self.paired else None
        with saved_tensors_hooks(*given.keeping) if given.keeping else nullcontext():
            y = functional.linear(given.whole, self.weight.t() if self.transposed else self.weight, self.bias)
        if self.gather_output:
            return gather(y, self.axis, -1)
        if self.paired and self.training:
            self.axis.rng.enter(self, y.device)
        return y


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are divided over the ranks of the tensor axis.

    Args:
        linear: The whole layer, the same on all ranks, of which this rank's part is kept.
        axis: The ranks.
        features: How the inputs are divided; None: evenly, one by one.
        scatter_input: The input is whole, and this rank takes its part; else it is that part.
        sequence: Leave the output divided along the sequence.

    Shape:
        Input [..., this rank's inputs], or [..., in_features] with `scatter_input`.
        Output [..., out_features], the same on all ranks; with `sequence` [..., part of sequence, out_features].
    """

    def __init__(
        self,
        linear: nn.Linear | LinearParts,
        axis: Axis,
        features: Features | None = None,
        *,
        scatter_input: bool = False,
        sequence: bool = False,
    ) -> None:
        super().__init__(linear, axis, 1, features or Features((linear.in_features,)), sequence)
        self.scatter_input, self.bias = scatter_input, linear.bias
        if sequence and self.bias is not None:
            sum_gradient(self.bias, axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.axis.rng.leave()
        self.axis.column_input = None
        if self.scatter_input:
            x = scatter(x, self.axis, -1)
        part = functional.linear(x, self.weight.t() if self.transposed else self.weight)
        y = reduce_scatter(part, self.axis, SEQUENCE) if self.sequence else reduce(part, self.axis)
        return y if self.bias is None else y.add_(self.bias.to(y.dtype))  # in place: y is new, and nobody keeps it


def sum_gradient(parameter: torch.Tensor, axis: Axis) -> None:
    """Sum a replicated parameter's gradient over the ranks.

    Each of them used it on its part of the sequence, or on its heads. A hook sums each gradient before autograd adds it
    to `.grad`, so that several backward passes may add up.
    """
    if axis.size > 1 and parameter.requires_grad:
        tag = axis.new_tag()
        parameter.register_hook(lambda gradient: axis.all_reduce(gradient, tag))


class ColumnInput:
    """An input of column layers, prepared once for all of them.

    Attributes:
        whole: The input; in sequence parallel gathered from the ranks' parts.
        keeping: In sequence parallel, the hooks by which autograd keeps it.
    """

    def __init__(self, x: torch.Tensor, axis: Axis, sequence: bool) -> None:
        self._x, self._version, self._graph = x, x._version, torch.is_grad_enabled()
        self.keeping: Keeping | None = None
        if not sequence or axis.size == 1:
            self.whole = copy(x, axis)
            return
        if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # before it travels, and what autocast would keep
        self.whole = all_gather(x, axis, SEQUENCE)
        self.keeping = _only_the_part(self.whole, x.detach(), axis)

    def is_for(self, x: torch.Tensor) -> bool:
        """Whether it was made of this very tensor, unchanged since, in the same mode of autograd."""
        return self._x is x and self._version == x._version and self._graph == torch.is_grad_enabled()


def _only_the_part(whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> Keeping:
    """Hooks by which autograd keeps this rank's part in the place of the whole, and gathers it again in backward."""
    storage, numel, tag = whole.untyped_storage()._cdata, whole.numel(), axis.new_tag()  # fake tensors have no address

    def keep(saved: torch.Tensor) -> Any:
        same = saved.numel() == numel and saved.untyped_storage()._cdata == storage
        return saved.shape if same else saved

    def bring(kept: Any) -> torch.Tensor:
        return axis.all_gather(part, SEQUENCE, tag)[0].view(kept) if isinstance(kept, torch.Size) else kept

    return keep, bring


class ColumnParallelLora(ColumnParallelLinear):
    """A column layer with an adapter.

    Args:
        adapter: The whole layer with its adapter, the same on all ranks.
        axis: The ranks.
        features: How the outputs are divided.
        gather_output: Give the whole output; else a row layer takes what becomes of it.
    """

    def __init__(self, adapter: LoraLinear, axis: Axis, features: Features, *, gather_output: bool) -> None:
        super().__init__(_parts_of(adapter, axis), axis, features, paired=not gather_output)
        self.scale, self._whole = adapter.scale, gather_output
        self.lora_a = adapter.lora_a
        self.lora_b = part_of(adapter.lora_b, 0, features, axis.rank, axis.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = copy(functional.linear(x, self.lora_a), self.axis)
        y = super().forward(x) + functional.linear(inner, self.lora_b) * self.scale
        return gather(y, self.axis, -1) if self._whole else y


class RowParallelLora(RowParallelLinear):
    """A row layer with an adapter.

    Args:
        adapter: The whole layer with its adapter, the same on all ranks.
        axis: The ranks.
        features: How the inputs are divided.
    """

    def __init__(self, adapter: LoraLinear, axis: Axis, features: Features) -> None:
        super().__init__(_parts_of(adapter, axis), axis, features)
        self.scale = adapter.scale
        self.lora_a = part_of(adapter.lora_a, 1, features, axis.rank, axis.size)
        self.lora_b = adapter.lora_b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        inner = reduce(functional.linear(x, self.lora_a), self.axis)
        return y + functional.linear(inner, self.lora_b) * self.scale


def _parts_of(adapter: LoraLinear, axis: Axis) -> LinearParts:
    """Return the parts of the layer under an adapter. Raises InputError where the ranks' dropout would differ."""
    if adapter.dropout and axis.size > 1:
        raise refusal(
            f"model.lora_dropout {adapter.dropout} would draw other numbers on each tensor rank; set it to 0, or "
            "parallel.tensor to 1"
        )
    parts = linear_parts(adapter)
    assert parts is not None
    return parts
