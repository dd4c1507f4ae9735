"""Linear layers whose weight is divided over the ranks of the tensor axis (Shoeybi et al. 2019, section 3).

    column   y_r = x W_r^T + b_r              each rank has some of the outputs; x is whole
    row      y   = sum_r x_r W_r^T  + b       each rank has some of the inputs; y is whole, the bias added once

A column layer followed by a row layer needs only one sum, and everything between them (activations, attention heads)
belongs to one rank. With `sequence` (Korthikanti et al. 2022), activations outside the pair are divided along the
sequence (the last dimension but one): the column layer gathers its input, and the sum of the row layer stays divided.

Adapters (LoRA) of these layers:

    column   y_r += s (x A^T) B_r^T           B is divided like the outputs, A is replicated
    row      y   += s (sum_r x_r A_r^T) B^T   A is divided like the inputs, B is replicated

The sum in a row layer has only as many numbers per token as the rank of the adapter. In a column layer, the gradients
that the ranks compute for the replicated A are summed at the input of B.

Features consist of consecutive sections, and each section is divided in whole units. The output of a fused query, key
and value layer is three sections of heads, and a rank has the same heads of each. Two ranks, four heads:

    section         query       key         value
    head            0 1 2 3     0 1 2 3     0 1 2 3
    rank 0 has      x x . .     x x . .     x x . .

The number of heads is read from the usual attributes of the module that contains the layers. If it has none of them, a
linear layer is divided feature by feature, which is correct for an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from mpitrain.choices import one_of
from mpitrain.errors import InputError, refusal
from mpitrain.layers.lora import LinearParts, LoraLinear, linear_parts
from mpitrain.layout.boxes import Box, Slice, compose, divided_by, logical_of, mark, split
from mpitrain.tensor.axis import Axis, all_gather, copy, gather, reduce, reduce_scatter, scatter

SEQUENCE = -2  # dimension of the sequence
SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _ParallelLinear(nn.Module):
    """Base of linear layers of which this rank has a part of the weight.

    Args:
        linear: Whole layer, the same on all ranks; this rank's part of it is kept.
        axis: Ranks of the tensor axis.
        dim: Dimension of a weight [out_features, in_features] that is divided.
        features: Division of this dimension.
        sequence: If true, activations outside a pair of layers are divided along the sequence.
    """

    bias: torch.Tensor | None

    def __init__(
        self, linear: nn.Linear | LinearParts, axis: Axis, dim: int, features: Features, sequence: bool
    ) -> None:
        super().__init__()
        self.axis, self.sequence, self.training = axis, sequence, linear.training
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.transposed = isinstance(linear, LinearParts) and linear.transposed
        self.weight = part_of(linear.weight, dim ^ self.transposed, features, axis)

    def extra_repr(self) -> str:
        part = f"{tuple(self.weight.shape)} of the weight"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {part}"


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are divided over the ranks of the tensor axis.

    Several paired layers may use the same input (query, key, value); the input and its gradient are then communicated
    once.

    Args:
        linear: Whole layer, the same on all ranks; this rank's part of it is kept.
        axis: Ranks of the tensor axis.
        features: Division of the outputs; None to divide them evenly, feature by feature.
        gather_output: If true, return the whole output; if false, this rank's part of it.
        sequence: If true, the input is this rank's part of the sequence.
        paired: If true, a row layer follows; in training, random numbers between the two are drawn from this rank's own
            stream.

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
        self.bias = None if linear.bias is None else part_of(linear.bias, 0, features, axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        column_input = self.axis.column_input
        # another layer with the same input may have set it
        if not (isinstance(column_input, ColumnInput) and column_input.is_for(x)):
            column_input = ColumnInput(x, self.axis, self.sequence)
            self.axis.column_input = column_input if self.paired else None
        with saved_tensors_hooks(*column_input.saved_hooks) if column_input.saved_hooks else nullcontext():
            y = functional.linear(column_input.whole, self.weight.t() if self.transposed else self.weight, self.bias)
        if self.gather_output:
            return gather(y, self.axis, -1)
        if self.paired and self.training:
            self.axis.rng.enter(self, y.device)
        return y


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are divided over the ranks of the tensor axis.

    Args:
        linear: Whole layer, the same on all ranks; this rank's part of it is kept.
        axis: Ranks of the tensor axis.
        features: Division of the inputs; None to divide them evenly, feature by feature.
        scatter_input: If true, the input is whole and this rank uses its part; if false, the input is this part.
        sequence: If true, leave the output divided along the sequence.

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
        return y if self.bias is None else y.add_(self.bias.to(y.dtype))  # in place: y is new and not saved


def sum_gradient(parameter: torch.Tensor, axis: Axis) -> None:
    """Register a hook that sums a replicated parameter's gradient over the ranks.

    This is needed if each rank uses the parameter on its part of the sequence or on its heads. The hook sums each
    gradient before autograd adds it to `.grad`, so several backward passes may be accumulated.

    Args:
        parameter: Parameter that every rank has whole.
        axis: Ranks of the tensor axis.
    """
    if axis.size > 1 and parameter.requires_grad:
        tag = axis.new_tag()
        parameter.register_hook(lambda gradient: axis.all_reduce(gradient, tag))


class ColumnInput:
    """An input of column layers, prepared once for all layers that use it.

    Args:
        x: Input; with `sequence` this rank's part of it.
        axis: Ranks of the tensor axis.
        sequence: If true, the input is divided along the sequence.

    Attributes:
        whole: Whole input; with `sequence`, gathered from the ranks' parts.
        saved_hooks: Hooks with which autograd saves the input, with `sequence`; otherwise None.
    """

    def __init__(self, x: torch.Tensor, axis: Axis, sequence: bool) -> None:
        self._x, self._version, self._graph = x, x._version, torch.is_grad_enabled()
        self.saved_hooks: SavedTensorHooks | None = None
        if not sequence or axis.size == 1:
            self.whole = copy(x, axis)
            return
        if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as autocast would, but before the exchange
        self.whole = all_gather(x, axis, SEQUENCE)
        self.saved_hooks = _save_part_hooks(self.whole, x.detach(), axis)

    def is_for(self, x: torch.Tensor) -> bool:
        """Return True if this input was made from `x` in the present grad mode, and `x` has not changed since."""
        return self._x is x and self._version == x._version and self._graph == torch.is_grad_enabled()


def _save_part_hooks(whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> SavedTensorHooks:
    """Return hooks by which autograd saves this rank's part instead of the whole, and gathers it in backward."""
    storage, numel, tag = whole.untyped_storage()._cdata, whole.numel(), axis.new_tag()  # fake tensors have no address

    def pack(saved: torch.Tensor) -> Any:
        return saved.shape if saved.numel() == numel and saved.untyped_storage()._cdata == storage else saved

    def unpack(packed: Any) -> torch.Tensor:
        return axis.all_gather(part, SEQUENCE, tag)[0].view(packed) if isinstance(packed, torch.Size) else packed

    return pack, unpack


class ColumnParallelLora(ColumnParallelLinear):
    """A column layer with an adapter.

    Args:
        adapter: Whole layer with its adapter, the same on all ranks.
        axis: Ranks of the tensor axis.
        features: Division of the outputs.
        gather_output: If true, return the whole output; if false, a row layer must follow.
    """

    def __init__(self, adapter: LoraLinear, axis: Axis, features: Features, *, gather_output: bool) -> None:
        super().__init__(_parts_of(adapter, axis), axis, features, paired=not gather_output)
        self.scale, self._whole = adapter.scale, gather_output
        self.lora_a = adapter.lora_a
        self.lora_b = part_of(adapter.lora_b, 0, features, axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = copy(functional.linear(x, self.lora_a), self.axis)
        y = super().forward(x) + functional.linear(inner, self.lora_b) * self.scale
        return gather(y, self.axis, -1) if self._whole else y


class RowParallelLora(RowParallelLinear):
    """A row layer with an adapter.

    Args:
        adapter: Whole layer with its adapter, the same on all ranks.
        axis: Ranks of the tensor axis.
        features: Division of the inputs.
    """

    def __init__(self, adapter: LoraLinear, axis: Axis, features: Features) -> None:
        super().__init__(_parts_of(adapter, axis), axis, features)
        self.scale = adapter.scale
        self.lora_a = part_of(adapter.lora_a, 1, features, axis)
        self.lora_b = adapter.lora_b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        inner = reduce(functional.linear(x, self.lora_a), self.axis)
        return y + functional.linear(inner, self.lora_b) * self.scale


def _parts_of(adapter: LoraLinear, axis: Axis) -> LinearParts:
    """Return the parts of the layer under an adapter. Raises InputError if dropout would differ between the ranks."""
    if adapter.dropout and axis.size > 1:
        raise refusal(
            f"model.lora_dropout {adapter.dropout} would draw different random numbers on each tensor rank; set it to "
            "0, or parallel.tensor to 1"
        )
    parts = linear_parts(adapter)
    assert parts is not None
    return parts


# -- Division of features among the ranks, and the corresponding part of a parameter; no communication


@dataclass(frozen=True)
class Features:
    """Features in consecutive sections, each of which is divided over the ranks.

    Attributes:
        sections: Number of features of each section.
        unit: Number of features that stay together, such as those of a head; every section is a multiple of it.
    """

    sections: tuple[int, ...]
    unit: int = 1

    def __post_init__(self) -> None:
        if self.unit < 1 or any(section % self.unit for section in self.sections):
            raise ValueError(f"sections {self.sections} are not multiples of {self.unit}")

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Return a rank's features: [start, stop) for each section, counted from the start of the first section.

        Args:
            rank: Number of the rank.
            size: Number of ranks.
        """
        ranges, begin = [], 0
        for section in self.sections:
            bounds = split(section // self.unit, size)
            ranges.append((begin + bounds[rank] * self.unit, begin + bounds[rank + 1] * self.unit))
            begin += section
        return ranges


def part_of(whole: torch.Tensor, dim: int, features: Features, axis: Axis) -> nn.Parameter:
    """Return this rank's part of a parameter in new memory, marked with its place in the whole (see `layout.mark`).

    Args:
        whole: Parameter, which other axes may already have divided along another dimension.
        dim: Dimension that is divided.
        features: Division of this dimension.
        axis: Ranks that divide it.
    """
    ranges = features.ranges(axis.rank, axis.size)
    with torch.no_grad():
        data = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    part = nn.Parameter(data, requires_grad=whole.requires_grad)
    local_slice = Slice(tuple(whole.shape), _boxes(whole.shape, dim, features.sections, ranges))
    mark(part, compose(logical_of(whole), local_slice), (*divided_by(whole), *axis.names))
    return part


def _boxes(
    shape: Sequence[int], dim: int, sections: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> tuple[Box, ...]:
    """Return boxes that contain, one box after the other, the elements of the ranges concatenated along `dim`.

    Sections of equal length become an additional dimension before the divided one, so one box contains all of them.
    Sections of different lengths become separate boxes, which is only possible along the first dimension.
    """
    if len(ranges) == 1:
        return (Box.along(shape, dim, *ranges[0]),)
    if len(set(sections)) == 1:
        return (Box.along([*shape[:dim], len(sections), sections[0], *shape[dim + 1 :]], dim + 1, *ranges[0]),)
    if dim != 0:
        raise ValueError("sections of different lengths are possible only along the first dimension")
    return tuple(Box.along(shape, 0, start, stop) for start, stop in ranges)


_COUNTS = ["num_heads", "n_heads", "n_head", "heads", "num_attention_heads"]
_COUNTS += ["num_kv_heads", "n_kv_heads", "num_key_value_heads"]
_GROUPS = ("num_key_value_groups",)  # query heads for each head of keys and values
_WIDTHS = ("split_size",)  # width of all query heads, by which a fused layer's output is split (GPT-2 of transformers)
_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size")
_FUSED = re.compile(r"qkv|c_attn", re.IGNORECASE)  # usually [3, heads, head_dim]
_UNKNOWN_ORDER = re.compile(r"query_key_value|in_proj|^kv|to_kv", re.IGNORECASE)


def column_features(
    name: str,
    linear: LinearParts,
    parent: nn.Module,
    ranks: int,
    sections: int | Sequence[int] | None,
    heads: int | None,
) -> Features:
    """Return the division of the outputs of a column layer.

    Args:
        name: Name of the layer in the model, for messages and to recognize fused layers.
        linear: Layer.
        parent: Module that contains it, whose attributes define the heads.
        ranks: Number of ranks of the tensor axis.
        sections: Number of equal parts of a fused layer, or the features of each part; None to derive it from the name.
        heads: Number of heads in the first section; None to read it from `parent`.

    Raises:
        InputError: On all ranks, if the outputs cannot be divided by whole heads.
    """
    width, last = linear.out_features, name.rpartition(".")[2]
    if sections is None:
        if _UNKNOWN_ORDER.search(last):
            raise refusal(
                f"{name}: its name does not show the order of its parts; plan Column(sections=3, heads=...) for [3, "
                "heads, head_dim], or Column(sections=1, heads=...) for [heads, 3, head_dim]"
            )
        sections = _fused_sections(width, parent) if _FUSED.search(last) else 1
    if isinstance(sections, int):
        if width % sections:
            raise refusal(f"{name} has {width} outputs, not {sections} equal parts; pass the sizes of the parts")
        sections = [width // sections] * sections
    elif sum(sections) != width:
        raise refusal(
            f"{name} has {width} outputs, but the sections {list(sections)} sum to {sum(sections)}; make them agree"
        )
    if len(sections) > 1 and _FUSED.search(last) and not heads and _head_size(parent, sections[0]) is None:
        raise refusal(
            f"{name} is fused, but {type(parent).__name__} has no attribute with the number of heads; "
            "plan Column(sections=3, heads=...)"
        )
    return in_heads(name, sections, parent, ranks, heads)


def in_heads(name: str, sections: Sequence[int], parent: nn.Module, ranks: int, heads: int | None) -> Features:
    """Divide sections of features, such as the inputs of a row layer, between heads; or anywhere, if heads are unknown.

    Args:
        name: Name of the layer in the model, for messages.
        sections: Number of features of each section.
        parent: Module that contains the layer, whose attributes define the heads.
        ranks: Number of ranks of the tensor axis.
        heads: Number of heads in the first section; None to read it from `parent`.

    Raises:
        InputError: A section does not consist of whole heads, or the ranks cannot share the heads evenly.
    """
    unit = sections[0] // heads if heads else _head_size(parent, sections[0])
    if unit is None:
        return Features(tuple(sections))
    for section in sections:
        count, rest = divmod(section, unit)
        if rest or unit < 1:
            raise refusal(
                f"{name}: {section} features are not a multiple of the head size {unit}; set the number of heads"
            )
        if count % ranks:
            raise _uneven_heads_error(name, count, ranks, "heads" if section == sections[0] else "key-value heads")
    return Features(tuple(sections), unit)


def localize_heads(name: str, parent: nn.Module, ranks: int, planned: Sequence[str]) -> dict[str, int]:
    """Return the values that the attributes with numbers of heads of an attention module need on one rank.

    Args:
        name: Name of the attention module.
        parent: Attention module.
        ranks: Number of ranks of the tensor axis.
        planned: Names of the module's own children in the plan.

    Raises:
        InputError: The plan omits some of its linear layers, so one number of heads cannot be correct for all of them.
    """
    counts = _numbers(parent, _COUNTS)
    if not counts:
        return {}
    left = [key for key, child in parent.named_children() if linear_parts(child) is not None and key not in planned]
    if left:
        raise refusal(
            f"{name}.{next(iter(counts))} is the number of heads of all its linear layers, but the plan omits "
            f"{', '.join(left)}; add them to the plan"
        )
    for key, count in counts.items():
        if count % ranks:
            raise _uneven_heads_error(f"{name}.{key}", count, ranks)
    return {key: count // ranks for key, count in (counts | _numbers(parent, _WIDTHS)).items()}


def _fused_sections(width: int, parent: nn.Module) -> int | list[int]:
    """Return the sections of a fused layer: three equal parts, or more queries if several query heads share keys."""
    for groups in _numbers(parent, _GROUPS).values():
        if width % (groups + 2) == 0:
            return [groups * width // (groups + 2), width // (groups + 2), width // (groups + 2)]
    return 3


def _head_size(parent: nn.Module, width: int) -> int | None:
    """Return the number of features of a head from the attributes of the parent module; None if it has none of them."""
    sizes = [*_numbers(parent, _SIZES).values()]
    sizes += [width // count for count in _numbers(parent, _COUNTS).values() if width % count == 0]
    return sizes[0] if sizes else None


def _numbers(parent: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return the attributes among `names` that are positive integers."""
    attributes = {name: getattr(parent, name, None) for name in names}
    return {name: n for name, n in attributes.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def _uneven_heads_error(name: str, heads: int, ranks: int, what: str = "heads") -> InputError:
    """Return the error that names suitable numbers of ranks and heads."""
    fitting = [n for n in range(1, heads + 1) if heads % n == 0]
    lower, upper = heads // ranks * ranks, -(-heads // ranks) * ranks
    near = f"{lower} or {upper}" if lower else f"{upper}"
    return refusal(
        f"{name}: {heads} {what} cannot be divided evenly over {ranks} tensor ranks; use {one_of(fitting)} ranks, or "
        f"{near} {what}"
    )
