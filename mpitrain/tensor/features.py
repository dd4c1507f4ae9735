"""How the features of a layer are divided among the ranks, and the part of a parameter that goes with them.

Nothing here communicates.

Features are sections laid one after the other, and each section is divided in whole units: the output of a fused
query, key and value layer is three sections of heads, and a rank has the same heads of each. Two ranks, four heads:

    section         query       key         value
    head            0 1 2 3     0 1 2 3     0 1 2 3
    rank 0 has      x x . .     x x . .     x x . .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

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
