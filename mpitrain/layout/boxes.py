"""Which rank owns which slice of which tensor. No other module computes an offset into a share.

Tensors here are logical: a name, a shape, elements numbered in row-major order, wherever they are kept. A rank
holds `Piece`s of them. A piece is a stretch [lo, hi) of a `Box`, a hyperslab of the tensor: all of it, or the part that
a rank has where axes of the mesh divide one or several of its dimensions:

    tensor [4, 6], box = columns 2 to 4:   . . 0 1 . .      the box's own order of elements;
                                           . . 2 3 . .      a piece [3, 6) of it is
                                           . . 4 5 . .      elements 3, 4, 5: two stretches
                                           . . 6 7 . .      of the tensor's rows 1 and 2

Whatever layout wrote a piece, any other layout can find its elements in it by `stretches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import sub
from typing import Any

import numpy as np

_DIVIDED = "_mpitrain_divided"  # attribute of a parameter that is a part of the model's: the part, axes


def split(length: int, parts: int) -> list[int]:
    """Divide `length` into nearly equal parts, the longer ones first; returns the parts + 1 bounds."""
    base, extra = divmod(length, parts)
    return [p * base + min(p, extra) for p in range(parts + 1)]


@dataclass(frozen=True)
class Box:
    """A hyperslab of a tensor: the range [start, stop) along each dimension of a view of it.

    Neighbouring dimensions of which the box has everything are made one, and those of length 1 are left out, so that
    the same part of a tensor is the same box. All of a tensor is [numel]; a part along one dimension is [dim],
    [outer, dim], [dim, inner] or [outer, dim, inner], of which it has all but [start, stop) of `dim` whole.

    Attributes:
        shape: The view of the tensor.
        start: First index along each of its dimensions.
        stop: One more than the last.

    Raises:
        ValueError: The three differ in length.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        shape: list[int] = []
        start: list[int] = []
        stop: list[int] = []
        merges = False
        for length, lo, hi in zip(self.shape, self.start, self.stop, strict=True):
            whole = lo == 0 and hi == length
            if whole and merges:
                shape[-1] = stop[-1] = shape[-1] * length
            elif length != 1 or not whole:
                merges = whole
                shape.append(length)
                start.append(lo)
                stop.append(hi)
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "start", tuple(start))
        object.__setattr__(self, "stop", tuple(stop))

    @staticmethod
    def whole(numel: int) -> Box:
        """All of a tensor of `numel` elements."""
        return Box((numel,), (0,), (numel,))

    @staticmethod
    def along(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
        """The part [start, stop) of a tensor along one axis."""
        outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :])
        return Box((outer, shape[axis], inner), (0, start, 0), (outer, stop, inner))

    @property
    def counts(self) -> tuple[int, ...]:
        """Indices along each dimension of the view."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(map(sub, self.stop, self.start))

    @property
    def divided(self) -> list[int]:
        """Dimensions of the view of which the box has only a part."""
        ranges = zip(self.shape, self.start, self.stop, strict=True)
        return [d for d, (length, lo, hi) in enumerate(ranges) if lo or hi != length]

    def of(self, tensor: Any) -> Any:
        """Return the box's elements of a whole tensor or array, in the shape `counts`; a view where that can be."""
        return tensor.reshape(self.shape)[tuple(map(slice, self.start, self.stop))]

    def ranges(self, shape: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the box as a range [start, stop) of each dimension of `shape`; None where it is not such a part."""
        if 0 in shape:
            return None
        found, own = [], list(zip(self.shape, self.start, self.stop, strict=True))
        whole = 1  # elements of a whole dimension of the box that the dimensions of `shape` so far do not have
        for length in reversed(shape):
            if whole == 1 and length != 1:
                if not own:
                    return None
                whole, lo, hi = own.pop()
                if (lo, hi) != (0, whole):
                    if whole != length:
                        return None
                    found.append((lo, hi))
                    whole = 1
                    continue
            if whole % length:
                return None
            found.append((0, length))
            whole //= length
        return found[::-1] if whole == 1 and not own else None


@dataclass(frozen=True)
class Piece:
    """Elements [lo, hi) of a box of the tensor `name`, contiguous where they are kept."""

    name: str
    box: Box
    lo: int
    hi: int

    @staticmethod
    def whole(name: str, numel: int) -> Piece:
        """All of a tensor of `numel` elements."""
        return Piece(name, Box.whole(numel), 0, numel)

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return self.hi - self.lo

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The piece as stretches that are contiguous in the tensor.

        Returns:
            Three int64 arrays with one number for each stretch: its first element in the tensor, its length, and its
            first element in the piece.
        """
        if self.hi <= self.lo:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, empty
        box = self.box
        last = box.divided[-1] if box.divided else 0  # from it on, elements lie together in both
        row, stride = prod(box.counts[last:]), prod(box.shape[last:])
        rows = np.arange(self.lo // row, -(-self.hi // row), dtype=np.int64)
        first = np.maximum(rows * row, self.lo)
        length = np.minimum((rows + 1) * row, self.hi) - first
        starts = first - rows * row
        if box.divided:
            starts += box.start[last] * prod(box.shape[last + 1 :])
        for d in reversed(range(last)):
            rows, index = np.divmod(rows, box.counts[d]) if d else (rows, rows)
            starts += (index + box.start[d]) * stride
            stride *= box.shape[d]
        return starts, length, first - self.lo


def stretches(source: Piece, target: Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The elements that two pieces of one tensor have in common, as the longest stretches contiguous in both.

    Returns:
        Three int64 arrays with one number for each stretch, in ascending order: its first element in the source, its
        first element in the target, and its length.
    """
    a_starts, a_lengths, a_places = source.runs()
    b_starts, b_lengths, b_places = target.runs()
    first = np.searchsorted(a_starts + a_lengths, b_starts, side="right")
    counts = np.maximum(np.searchsorted(a_starts, b_starts + b_lengths, side="left") - first, 0)
    b = np.repeat(np.arange(len(b_starts)), counts)
    a = np.arange(len(b)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    lo = np.maximum(a_starts[a], b_starts[b])
    hi = np.minimum((a_starts + a_lengths)[a], (b_starts + b_lengths)[b])
    sources, targets, lengths = a_places[a] + lo - a_starts[a], b_places[b] + lo - b_starts[b], hi - lo
    if not len(lengths):
        return sources, targets, lengths
    ends = (sources[:-1] + lengths[:-1] != sources[1:]) | (targets[:-1] + lengths[:-1] != targets[1:])
    heads = np.concatenate([[0], np.flatnonzero(ends) + 1])
    return sources[heads], targets[heads], np.add.reduceat(lengths, heads)


def shares(sizes: Sequence[int], parts: int, part: int, multiple: int = 16) -> list[tuple[int, int, int]]:
    """One of `parts` nearly equal shares of tensors laid end to end.

    Args:
        sizes: Elements of the tensors.
        parts: How many shares.
        part: Which share.
        multiple: Shares begin at multiples of so many elements of the whole.

    Returns:
        (number of the tensor, lo, hi) of each stretch of a tensor in the share.
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


@dataclass(frozen=True)
class Slice:
    """What part of a logical tensor a rank's tensor is.

    Attributes:
        shape: Of the logical tensor.
        boxes: Whose elements the rank's tensor has, one box after the other.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Slice:
        """All of a tensor of this shape."""
        return Slice(tuple(shape), (Box.whole(prod(shape)),))

    @property
    def numel(self) -> int:
        """Elements of the rank's tensor."""
        return sum(box.numel for box in self.boxes)

    def pieces(self, name: str, lo: int, hi: int) -> list[tuple[int, Piece]]:
        """Elements [lo, hi) of the rank's tensor, as pieces of the logical tensor `name`.

        Returns:
            (where the piece begins, counted from lo; the piece) of each box that the stretch touches.
        """
        found, begin = [], 0
        for box in self.boxes:
            first, last = max(lo, begin), min(hi, begin + box.numel)
            if first < last:
                found.append((first - lo, Piece(name, box, first - begin, last - begin)))
            begin += box.numel
        return found


def compose(outer: Slice, inner: Slice) -> Slice:
    """Return what part of a tensor a part of a part of it is.

    Args:
        outer: The part, of one box.
        inner: What is taken of the rank's tensor that has that part: a slice in its shape.

    Raises:
        ValueError: `outer` is several boxes, or `inner` cuts across the ranges of its dimensions.
    """
    if len(outer.boxes) > 1:
        raise ValueError("a part of several boxes cannot be divided further; divide the tensor in the other order")
    return Slice(outer.shape, tuple(_within(outer.boxes[0], box) for box in inner.boxes))


def _within(outer: Box, inner: Box) -> Box:
    """Return a box of the elements of another, numbered as these are, as a box of the tensor."""
    if not outer.numel:
        return outer
    whole = list(zip(outer.shape, outer.start, outer.stop, strict=True))
    part = list(zip(inner.shape, inner.start, inner.stop, strict=True))
    found: list[tuple[int, int, int]] = []
    while whole and part:  # the last dimensions of both, where need be cut in two, so that they are equally long
        length, lo, hi = whole.pop()
        count, first, last = part.pop()
        inside = min(hi - lo, count)
        if hi - lo > inside:
            whole.append(_cut_off((length, lo, hi), inside))
            length, lo, hi = inside, 0, inside
        elif count > inside:
            part.append(_cut_off((count, first, last), inside))
            count, first, last = inside, 0, inside
        found.append((length, lo + first, lo + last))
    shape, start, stop = zip(*(whole + part + found[::-1]), strict=True) if whole or part or found else ((), (), ())
    return Box(shape, start, stop)


def _cut_off(dimension: tuple[int, int, int], inside: int) -> tuple[int, int, int]:
    """Return what is left of a dimension (length, start, stop) without its last `inside` indices, as a dimension."""
    if inside == 0 or any(number % inside for number in dimension):
        raise ValueError("a part of a part cuts across its ranges; divide the tensor in the other order")
    length, start, stop = dimension
    return length // inside, start // inside, stop // inside


def logical_of(tensor: Any) -> Slice:
    """Return what part of the model's tensor a rank's parameter is: the whole, unless `mark` said otherwise."""
    noted = getattr(tensor, _DIVIDED, None)
    return noted[0] if noted else Slice.whole(tensor.shape)


def divided_by(tensor: Any) -> tuple[str, ...]:
    """Return the names of the axes that divide a rank's parameter, as `mark` said; empty: every rank has all of it."""
    noted = getattr(tensor, _DIVIDED, None)
    return noted[1] if noted else ()


def mark(tensor: Any, part: Slice, axes: Sequence[str]) -> None:
    """Note on a parameter what it is a part of; the note stays with the object, whatever becomes of its data.

    Args:
        tensor: The parameter.
        part: What it is a part of.
        axes: Names of the axes that divide the model's tensor so.
    """
    setattr(tensor, _DIVIDED, (part, tuple(axes)))


def is_replicated(tensor: Any) -> bool:
    """Return whether no axis divides the parameter, so that norms must count it once."""
    return not divided_by(tensor)


@dataclass(frozen=True)
class FlatPlace:
    """Where a tensor's elements lie in a flat layout, and in which bucket of it."""

    offset: int
    numel: int
    bucket: int


@dataclass(frozen=True)
class Flat:
    """Tensors of one dtype laid end to end in buckets, each of which is divided into equal shares.

        bucket 0                | bucket 1
        share 0   | share 1     | share 0   | share 1          parts = 2

    Tensors begin at multiples of 64 bytes, and buckets are as long as `parts` equal shares need; the gaps hold zeros.

    Attributes:
        places: Where each tensor lies, in order.
        bounds: Element offsets of the buckets, one more than there are buckets.
        parts: Shares of each bucket.
    """

    places: tuple[FlatPlace, ...]
    bounds: tuple[int, ...]
    parts: int

    @property
    def numel(self) -> int:
        """Elements of the whole, gaps included."""
        return self.bounds[-1]

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return len(self.bounds) - 1

    def share(self, bucket: int, part: int) -> tuple[int, int]:
        """One part's share of a bucket: [lo, hi) in elements of the whole."""
        lo, hi = self.bounds[bucket], self.bounds[bucket + 1]
        length = (hi - lo) // self.parts
        return lo + part * length, lo + (part + 1) * length

    def within(self, lo: int, hi: int) -> list[tuple[int, int, int, int]]:
        """What of the tensors lies in elements [lo, hi) of the whole.

        Returns:
            (number of the tensor, first, last, offset) of each: its elements [first, last) begin at `offset`.
        """
        found = []
        for number, place in enumerate(self.places):
            first, last = max(lo, place.offset), min(hi, place.offset + place.numel)
            if first < last:
                found.append((number, first - place.offset, last - place.offset, first))
        return found


def lay_out(buckets: Sequence[Sequence[int]], itemsize: int, parts: int = 1, multiple: int = 16) -> Flat:
    """Lay tensors end to end in buckets.

    Args:
        buckets: Of each bucket the sizes of its tensors, in elements.
        itemsize: Bytes of an element.
        parts: Shares of each bucket.
        multiple: Elements that a share is a multiple of.
    """
    unit = max(1, 64 // itemsize)
    places: list[FlatPlace] = []
    bounds = [0]
    for number, sizes in enumerate(buckets):
        offset = bounds[-1]
        for size in sizes:
            places.append(FlatPlace(offset, size, number))
            offset += -(-size // unit) * unit
        whole = parts * max(multiple, unit)
        bounds.append(bounds[-1] + -(-(offset - bounds[-1]) // whole) * whole)
    return Flat(tuple(places), tuple(bounds), parts)


def in_buckets(sizes: Sequence[int], itemsize: int, bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Divide tensors, in order, into buckets of about `bucket_bytes`, the first of about `first_bytes`.

    Args:
        sizes: Elements of each tensor.
        itemsize: Bytes of an element.
        bucket_bytes: Bytes from which on a bucket is full.
        first_bytes: The same of the first bucket, which is smaller so that its reduction starts early.

    Returns:
        Of each bucket the numbers of its tensors.
    """
    found: list[list[int]] = [[]]
    limit, held = min(first_bytes, bucket_bytes), 0
    for number, size in enumerate(sizes):
        if held >= limit:
            found.append([])
            limit, held = bucket_bytes, 0
        found[-1].append(number)
        held += size * itemsize
    return found
