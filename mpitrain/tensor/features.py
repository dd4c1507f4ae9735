"""How the features of a layer are divided among the ranks, and the part of a parameter that goes with them.

Nothing here communicates.

Features are sections laid one after the other, and each section is divided in whole units: the output of a fused
query, key and value layer is three sections of heads, and a rank has the same heads of each. Two ranks, four heads:

    section         query       key         value
    head            0 1 2 3     0 1 2 3     0 1 2 3
    rank 0 has      x x . .     x x . .     x x . .

How an attention layer's linear layers are divided: by whole heads, and of a fused one the same heads of each part.

The number of heads is read from the module that holds the layers, by the attributes that are usual; where it has
none, a linear layer is divided feature by feature, which is right for an MLP.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mpitrain.choices import one_of
from mpitrain.errors import InputError, refusal
from mpitrain.layers.lora import LinearParts, linear_parts
from mpitrain.layout import Box, Slice, mark, split


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


def part_of(whole: torch.Tensor, dim: int, features: Features, rank: int, size: int) -> nn.Parameter:
    """A rank's part of a parameter, in memory of its own, marked with what it is a part of (see `layout.mark`).

    Args:
        whole: The parameter.
        dim: The dimension that is divided.
        features: How it is divided.
        rank: Whose part.
        size: The ranks of the tensor axis.
    """
    ranges = features.ranges(rank, size)
    with torch.no_grad():
        data = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    part = nn.Parameter(data, requires_grad=whole.requires_grad)
    mark(part, Slice(tuple(whole.shape), _boxes(whole.shape, dim, features.sections, ranges)))
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
    unit = sections[0] // heads if heads else _head_size(parent, sections[0])
    if unit is None:
        if len(sections) > 1 and _FUSED.search(last):
            raise refusal(
                f"{name} is fused, but {type(parent).__name__} has no attribute that tells its heads; say "
                "Column(sections=3, heads=...)"
            )
        return Features(tuple(sections))
    _check_heads(name, sections, unit, ranks)
    return Features(tuple(sections), unit)


def row_features(name: str, linear: LinearParts, parent: nn.Module, ranks: int, heads: int | None) -> Features:
    """How the inputs of a row layer are divided: like the outputs of the column layer that they come from."""
    unit = linear.in_features // heads if heads else _head_size(parent, linear.in_features)
    if unit is None:
        return Features((linear.in_features,))
    _check_heads(name, [linear.in_features], unit, ranks)
    return Features((linear.in_features,), unit)


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


def _check_heads(name: str, sections: Sequence[int], unit: int, ranks: int) -> None:
    """Raise InputError unless every section is whole heads of `unit` features, which the ranks can share evenly."""
    for section in sections:
        heads, rest = divmod(section, unit)
        if rest or unit < 1:
            raise refusal(f"{name}: {section} features are not heads of {unit}; give the right number of heads")
        if heads % ranks:
            raise _unshareable(name, heads, ranks, "heads" if section == sections[0] else "key-value heads")


def _unshareable(name: str, heads: int, ranks: int, what: str = "heads") -> InputError:
    """The error that names numbers of ranks and of heads that would fit."""
    fitting = [n for n in range(1, heads + 1) if heads % n == 0]
    lower, upper = heads // ranks * ranks, -(-heads // ranks) * ranks
    near = f"{lower} or {upper}" if lower else f"{upper}"
    return refusal(
        f"{name}: {heads} {what} cannot be shared evenly by {ranks} tensor ranks; use {one_of(fitting)} ranks, or "
        f"{near} {what}"
    )
