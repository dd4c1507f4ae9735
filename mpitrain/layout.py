"""Who owns which slice of which tensor. Nobody else computes an offset into somebody's share.

Tensors here are logical: a name, a shape, elements numbered in row-major order, wherever they are kept. A rank
holds `Piece`s of them. A piece is a stretch [lo, hi) of a `Box`, which is the tensor, or the part of it along
one dimension that a tensor-parallel rank has:

    tensor [4, 6], box = columns 2 to 4:   . . 0 1 . .      the box's own order of elements;
                                           . . 2 3 . .      a piece [3, 6) of it is
                                           . . 4 5 . .      elements 3, 4, 5: two stretches
                                           . . 6 7 . .      of the tensor's rows 1 and 2

Whatever layout wrote a piece, any other layout can find its elements in it by `overlaps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


def split(length: int, parts: int) -> list[int]:
    """Bounds (parts + 1) that cut `length` into nearly equal parts, the longer ones first."""
    base, extra = divmod(length, parts)
    return [p * base + min(p, extra) for p in range(parts + 1)]


@dataclass(frozen=True)
class Box:
    """A tensor viewed as [outer, dim, inner], and of it the part [:, start:stop, :]."""

    outer: int
    dim: int
    inner: int
    start: int
    stop: int

    @staticmethod
    def whole(numel: int) -> Box:
        return Box(1, numel, 1, 0, numel)

    @staticmethod
    def along(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
        """The part [start, stop) of a tensor along one axis."""
        return Box(prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]), start, stop)

    @property
    def row(self) -> int:
        """Elements that are contiguous in both the box and the tensor."""
        return (self.stop - self.start) * self.inner

    @property
    def numel(self) -> int:
        return self.outer * self.row


@dataclass(frozen=True)
class Piece:
    """Elements [lo, hi) of a box of the tensor `name`, contiguous where they are kept."""

    name: str
    box: Box
    lo: int
    hi: int

    @staticmethod
    def whole(name: str, numel: int) -> Piece:
        return Piece(name, Box.whole(numel), 0, numel)

    @property
    def numel(self) -> int:
        return self.hi - self.lo

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The piece as stretches of the tensor: first elements there, lengths, and places in the piece."""
        if self.hi <= self.lo:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, empty
        row = self.box.row
        rows = np.arange(self.lo // row, -(-self.hi // row), dtype=np.int64)
        first = np.maximum(rows * row, self.lo)
        last = np.minimum((rows + 1) * row, self.hi)
        starts = rows * (self.box.dim * self.box.inner) + self.box.start * self.box.inner + first - rows * row
        return starts, last - first, first - self.lo


@dataclass(frozen=True)
class Overlap:
    """`length` elements at `source` of one piece are those at `target` of another."""

    source: int
    target: int
    length: int


def overlaps(source: Piece, target: Piece) -> Iterator[Overlap]:
    """The elements two pieces of one tensor have in common, as stretches contiguous in both, in target order."""
    a_starts, a_lengths, a_places = source.runs()
    b_starts, b_lengths, b_places = target.runs()
    if not len(a_starts) or not len(b_starts):
        return
    a_ends = a_starts + a_lengths
    for start, length, place in zip(b_starts, b_lengths, b_places, strict=True):
        first = int(np.searchsorted(a_ends, start, side="right"))
        for i in range(first, len(a_starts)):
            lo, hi = max(int(start), int(a_starts[i])), min(int(start + length), int(a_ends[i]))
            if lo >= hi:
                break
            yield Overlap(int(a_places[i]) + lo - int(a_starts[i]), int(place) + lo - int(start), hi - lo)


def shares(sizes: Sequence[int], parts: int, part: int, multiple: int = 16) -> list[tuple[int, int, int]]:
    """One of `parts` nearly equal shares of tensors laid end to end: (tensor number, lo, hi) of each stretch in it.

    sizes: elements of the tensors. Cuts fall on multiples of `multiple` elements of the whole.
    """
    total = sum(sizes)
    units = split(-(-total // multiple), parts)
    lo, hi = min(units[part] * multiple, total), min(units[part + 1] * multiple, total)
    found, begin = [], 0
    for number, size in enumerate(sizes):
        first, last = max(lo, begin), min(hi, begin + size)
        if first < last:
            found.append((number, first - begin, last - begin))
        begin += size
    return found
