"""Linear layers whose weight is divided over the ranks of the tensor axis (Shoeybi et al. 2019, section 3).

    column   y_r = x W_r^T + b_r              each rank has some of the outputs; x is whole
    row      y   = sum_r x_r W_r^T  + b       each rank has some of the inputs; y is whole, the bias added once

A row layer after a column layer makes two layers with one sum, and what lies between them, activations, heads of
attention, is each rank's own. With `sequence` (Korthikanti et al. 2022) what is outside the pair is divided along
the sequence (the last dimension but one): the column layer gathers it, the row layer's sum is left divided.

Adapters (LoRA) of these layers:

    column   y_r += s (x A^T) B_r^T           B is divided like the outputs, A is replicated
    row      y   += s (sum_r x_r A_r^T) B^T   A is divided like the inputs, B is replicated; `rank` numbers are summed

Of what a column layer's ranks compute with a replicated A, the gradients are summed where B's parts begin.

Features are sections laid one after the other, and each section is divided in whole units: the output of a fused
query, key and value layer is three sections of heads, and a rank has the same heads of each. Two ranks, four heads:

    section         query       key         value
    head            0 1 2 3     0 1 2 3     0 1 2 3
    rank 0 has      x x . .     x x . .     x x . .

The number of heads is read from the module that holds the layers, by the attributes that are usual; where it has
none, a linear layer is divided feature by feature, which is right for an MLP.
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
        self.weight = part_of(linear.weight, dim ^ self.transposed, features, axis)

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
        self.bias = None if linear.bias is None else part_of(linear.bias, 0, features, axis)

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
        return saved.shape if saved.numel() == numel and saved.untyped_storage()._cdata == storage else saved

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
        self.lora_b = part_of(adapter.lora_b, 0, features, axis)

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
        self.lora_a = part_of(adapter.lora_a, 1, features, axis)
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


# -- How features are divided among the ranks, and the part of a parameter that goes with them: nothing communicates


@dataclass(frozen=True)
class Features:
    """Features in sections, each of which is divided among the ranks.

    Attributes:
        sections: How many features each has.
        unit: Features that stay together, as of a head; every section is a multiple of it.
    """

    sections: tuple[int, ...]
    unit: int = 1

    def __post_init__(self) -> None:
        if self.unit < 1 or any(section % self.unit for section in self.sections):
            raise ValueError(f"sections {self.sections} are not multiples of {self.unit}")

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """The features a rank has, [start, stop) in each section, counted from the first section's begin."""
        found, begin = [], 0
        for section in self.sections:
            bounds = split(section // self.unit, size)
            found.append((begin + bounds[rank] * self.unit, begin + bounds[rank + 1] * self.unit))
            begin += section
        return found


def part_of(whole: torch.Tensor, dim: int, features: Features, axis: Axis) -> nn.Parameter:
    """Return a rank's part of a parameter, in memory of its own, marked with what it is a part of (see `layout.mark`).

    Args:
        whole: The parameter, which other axes may have divided along another dimension.
        dim: The dimension that is divided.
        features: How it is divided.
        axis: The ranks that divide it.
    """
    ranges = features.ranges(axis.rank, axis.size)
    with torch.no_grad():
        data = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    part = nn.Parameter(data, requires_grad=whole.requires_grad)
    own = Slice(tuple(whole.shape), _boxes(whole.shape, dim, features.sections, ranges))
    mark(part, compose(logical_of(whole), own), (*divided_by(whole), *axis.names))
    return part


def _boxes(
    shape: Sequence[int], dim: int, sections: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> tuple[Box, ...]:
    """The boxes whose elements, one box after the other, are those of the ranges put together along `dim`.

    Equal sections are one more dimension before the divided one: then one box holds all of them. Sections that are not
    equal are boxes one after the other, which they are along the first dimension alone.
    """
    if len(ranges) == 1:
        return (Box.along(shape, dim, *ranges[0]),)
    if len(set(sections)) == 1:
        return (Box.along([*shape[:dim], len(sections), sections[0], *shape[dim + 1 :]], dim + 1, *ranges[0]),)
    if dim != 0:
        raise ValueError("only the first dimension can have sections that are not equal")
    return tuple(Box.along(shape, 0, start, stop) for start, stop in ranges)


_COUNTS = ["num_heads", "n_heads", "n_head", "heads", "num_attention_heads"]
_COUNTS += ["num_kv_heads", "n_kv_heads", "num_key_value_heads"]
_GROUPS = ("num_key_value_groups",)  # query heads for each head of keys and values
_WIDTHS = ("split_size",)  # of all heads of q, by which a fused layer's output is cut up (GPT-2 of transformers)
_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size")
_FUSED = re.compile(r"qkv|c_attn", re.IGNORECASE)  # by custom [3, heads, head_dim]
_UNKNOWN_ORDER = re.compile(r"query_key_value|in_proj|^kv|to_kv", re.IGNORECASE)


def column_features(
    name: str,
    linear: LinearParts,
    parent: nn.Module,
    ranks: int,
    sections: int | Sequence[int] | None,
    heads: int | None,
) -> Features:
    """How the outputs of a column layer are divided.

    Args:
        name: Of the layer in the model, for messages and for what it tells of fused layers.
        linear: The layer.
        parent: The module that holds it, whose attributes tell the heads.
        ranks: Of the tensor axis.
        sections: How many equal parts, or the features of each part, a fused layer has; None: by its name.
        heads: Of the first section; None: read from `parent`.

    Raises:
        InputError: On all ranks alike, where the outputs cannot be divided by whole heads.
    """
    width, last = linear.out_features, name.rpartition(".")[2]
    if sections is None:
        if _UNKNOWN_ORDER.search(last):
            raise refusal(
                f"{name}: its name does not tell the order of its parts; say Column(sections=3, heads=...) for [3, "
                "heads, head_dim], Column(sections=1, heads=...) for [heads, 3, head_dim]"
            )
        sections = _fused_sections(width, parent) if _FUSED.search(last) else 1
    if isinstance(sections, int):
        if width % sections:
            raise refusal(f"{name} has {width} outputs, not {sections} equal parts; give their sizes")
        sections = [width // sections] * sections
    elif sum(sections) != width:
        raise refusal(
            f"{name} has {width} outputs, but the sections {list(sections)} sum to {sum(sections)}; make them agree"
        )
    if len(sections) > 1 and _FUSED.search(last) and not heads and _head_size(parent, sections[0]) is None:
        raise refusal(
            f"{name} is fused, but {type(parent).__name__} has no attribute that tells its heads; say "
            "Column(sections=3, heads=...)"
        )
    return in_heads(name, sections, parent, ranks, heads)


def in_heads(name: str, sections: Sequence[int], parent: nn.Module, ranks: int, heads: int | None) -> Features:
    """Divide sections by whole heads, such as the inputs of a row layer; feature by feature where nothing tells of any.

    Args:
        name: Of the layer in the model, for messages.
        sections: Features of each.
        parent: The module that holds the layer, whose attributes tell the heads.
        ranks: Of the tensor axis.
        heads: Of the first section; None: read from `parent`.

    Raises:
        InputError: A section is not whole heads, or the ranks cannot share them evenly.
    """
    unit = sections[0] // heads if heads else _head_size(parent, sections[0])
    if unit is None:
        return Features(tuple(sections))
    for section in sections:
        count, rest = divmod(section, unit)
        if rest or unit < 1:
            raise refusal(f"{name}: {section} features are not heads of {unit}; give the right number of heads")
        if count % ranks:
            raise _unshareable(name, count, ranks, "heads" if section == sections[0] else "key-value heads")
    return Features(tuple(sections), unit)


def localize_heads(name: str, parent: nn.Module, ranks: int, planned: Sequence[str]) -> dict[str, int]:
    """New values of the attributes by which an attention module counts its heads: those of one rank.

    Args:
        name: Of the attention module.
        parent: The attention module.
        ranks: Of the tensor axis.
        planned: Names of the module's own children in the plan.

    Raises:
        InputError: Some of its linear layers are not in the plan: one count cannot be right for them and the others.
    """
    counts = _numbers(parent, _COUNTS)
    if not counts:
        return {}
    left = [key for key, child in parent.named_children() if linear_parts(child) is not None and key not in planned]
    if left:
        raise refusal(
            f"{name}.{next(iter(counts))} counts the heads of all its linear layers, but the plan leaves "
            f"{', '.join(left)} out; name them too"
        )
    for key, count in counts.items():
        if count % ranks:
            raise _unshareable(f"{name}.{key}", count, ranks)
    return {key: count // ranks for key, count in (counts | _numbers(parent, _WIDTHS)).items()}


def _fused_sections(width: int, parent: nn.Module) -> int | list[int]:
    """Queries, keys and values of a fused layer: three equal parts, or as many queries more as share keys."""
    for groups in _numbers(parent, _GROUPS).values():
        if width % (groups + 2) == 0:
            return [groups * width // (groups + 2), width // (groups + 2), width // (groups + 2)]
    return 3


def _head_size(parent: nn.Module, width: int) -> int | None:
    """Features of a head, as the module that holds the layer tells them; None where it does not."""
    sizes = [*_numbers(parent, _SIZES).values()]
    sizes += [width // count for count in _numbers(parent, _COUNTS).values() if width % count == 0]
    return sizes[0] if sizes else None


def _numbers(parent: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """The attributes among `names` that are positive integers."""
    found = {name: getattr(parent, name, None) for name in names}
    return {name: n for name, n in found.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def _unshareable(name: str, heads: int, ranks: int, what: str = "heads") -> InputError:
    """The error that names numbers of ranks and of heads that would fit."""
    fitting = [n for n in range(1, heads + 1) if heads % n == 0]
    lower, upper = heads // ranks * ranks, -(-heads // ranks) * ranks
    near = f"{lower} or {upper}" if lower else f"{upper}"
    return refusal(
        f"{name}: {heads} {what} cannot be shared evenly by {ranks} tensor ranks; use {one_of(fitting)} ranks, or "
        f"{near} {what}"
    )
