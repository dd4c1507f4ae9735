"""Boxes, pieces and shares: the arithmetic of which rank has which elements of which tensor.

No other module computes an offset into a share.

Tensors here are logical: a name, a shape, and elements numbered in row-major order, independent of where they are
stored. A rank has `Piece`s of them. A piece is the range [lo, hi) of elements of a `Box`. A box is a hyperslab of the
tensor: the whole tensor, or the part that a rank has if axes of the mesh divide one or several dimensions:

    tensor [4, 6], box = columns 2 to 4:   . . 0 1 . .      the numbers are the box's own order of elements;
                                           . . 2 3 . .      its piece [3, 6) consists of
                                           . . 4 5 . .      elements 3, 4 and 5: two contiguous intervals
                                           . . 6 7 . .      in rows 1 and 2 of the tensor

`common_intervals` finds the elements that two pieces share, so a piece written in one layout can be read in any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import sub
from typing import Any

import numpy as np

_DIVIDED = "_mpitrain_divided"  # attribute of a parameter set by `mark`: (slice of the model's tensor, names of axes)


def split(length: int, parts: int) -> list[int]:
    """Divide a range into nearly equal parts, longer ones first.

    Args:
        length: Length of the range.
        parts: Number of parts.

    Returns:
        The parts + 1 bounds: part p is [bounds[p], bounds[p + 1]).
    """
    base, extra = divmod(length, parts)
    return [p * base + min(p, extra) for p in range(parts + 1)]


@dataclass(frozen=True)
class Box:
    """A hyperslab of a tensor: the range [start, stop) along each dimension of a view of the tensor.

    The constructor normalizes the view, so that equal parts of a tensor are equal boxes: adjacent dimensions that the
    box covers completely are merged, and dimensions of length 1 are dropped. The view of a whole tensor is [numel]. The
    view of a part along one dimension is [dim], [outer, dim], [dim, inner] or [outer, dim, inner]; the box has
    [start, stop) of `dim`, and covers `outer` and `inner` completely.

    Attributes:
        shape: Shape of the view.
        start: First index along each dimension of the view.
        stop: Last index + 1 along each dimension of the view.

    Raises:
        ValueError: `shape`, `start` and `stop` differ in length.
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
        """Return the box that covers a whole tensor of `numel` elements."""
        return Box((numel,), (0,), (numel,))

    @staticmethod
    def along(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
        """Return the box with the indices [start, stop) of one axis of a tensor, and all indices of the other axes.

        Args:
            shape: Shape of the tensor.
            axis: Number of the axis, not negative.
            start: First index along the axis.
            stop: Last index + 1 along the axis.
        """
        outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :])
        return Box((outer, shape[axis], inner), (0, start, 0), (outer, stop, inner))

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of indices along each dimension of the view: the shape of the box."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(map(sub, self.stop, self.start))

    @property
    def divided(self) -> list[int]:
        """Numbers of the dimensions of the view that the box covers only in part."""
        ranges = zip(self.shape, self.start, self.stop, strict=True)
        return [d for d, (length, lo, hi) in enumerate(ranges) if lo or hi != length]

    def of(self, tensor: Any) -> Any:
        """Return the box's elements of a whole tensor or array, in shape `counts`; a view if its strides allow that."""
        return tensor.reshape(self.shape)[tuple(map(slice, self.start, self.stop))]

    def ranges(self, shape: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the box as a range [start, stop) of each dimension of `shape`; None if it is not a hyperslab of it."""
        if 0 in shape:
            return None
        ranges, dims = [], list(zip(self.shape, self.start, self.stop, strict=True))
        whole = 1  # part of the box's current dimension that the dimensions of `shape` so far leave over
        for length in reversed(shape):
            if whole == 1 and length != 1:
                if not dims:
                    return None
                whole, lo, hi = dims.pop()
                if (lo, hi) != (0, whole):
                    if whole != length:
                        return None
                    ranges.append((lo, hi))
                    whole = 1
                    continue
            if whole % length:
                return None
            ranges.append((0, length))
            whole //= length
        return ranges[::-1] if whole == 1 and not dims else None


@dataclass(frozen=True)
class Piece:
    """Elements [lo, hi) of a box of the tensor `name`, which lie contiguously in the memory that stores them."""

    name: str
    box: Box
    lo: int
    hi: int

    @staticmethod
    def whole(name: str, numel: int) -> Piece:
        """Return the piece that is the whole tensor.

        Args:
            name: Name of the tensor.
            numel: Number of its elements.
        """
        return Piece(name, Box.whole(numel), 0, numel)

    @property
    def numel(self) -> int:
        """Number of elements in the piece."""
        return self.hi - self.lo

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the intervals of the piece that are contiguous in the tensor.

        Returns:
            Three int64 arrays with one entry per interval: its first element in the tensor, its length, and its first
            element in the piece.
        """
        if self.hi <= self.lo:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, empty
        box = self.box
        last = box.divided[-1] if box.divided else 0  # from this dimension on, elements are contiguous in both
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


def common_intervals(source: Piece, target: Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the elements that two pieces of one tensor have in common, as the longest intervals contiguous in both.

    Args:
        source: Piece from which elements are copied.
        target: Piece of the same tensor into which they are copied.

    Returns:
        Three int64 arrays with one entry per interval, in ascending order: its first element in the source, its first
        element in the target, and its length.
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
    """Return one of `parts` nearly equal shares of tensors laid end to end.

    Args:
        sizes: Number of elements of each tensor.
        parts: Number of shares.
        part: Number of the share to return, from 0.
        multiple: Alignment: each share begins at a multiple of this number of elements; default 16.

    Returns:
        One (index of the tensor, lo, hi) for each tensor with elements [lo, hi) in the share.
    """
    total = sum(sizes)
    units = split(-(-total // multiple), parts)
    lo, hi = min(units[part] * multiple, total), min(units[part + 1] * multiple, total)
    ranges, begin = [], 0
    for number, size in enumerate(sizes):
        first, last = max(lo, begin), min(hi, begin + size)
        if first < last:
            ranges.append((number, first - begin, last - begin))
        begin += size
    return ranges


@dataclass(frozen=True)
class Slice:
    """The part of a logical tensor that one rank has.

    Attributes:
        shape: Shape of the logical tensor.
        boxes: Boxes of the logical tensor whose elements form the rank's tensor, one box after the other.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Slice:
        """Return the slice that is a whole tensor of this shape."""
        return Slice(tuple(shape), (Box.whole(prod(shape)),))

    @property
    def numel(self) -> int:
        """Number of elements of the rank's tensor."""
        return sum(box.numel for box in self.boxes)

    def pieces(self, name: str, lo: int, hi: int) -> list[tuple[int, Piece]]:
        """Return elements [lo, hi) of the rank's tensor as pieces of the logical tensor.

        Args:
            name: Name of the logical tensor.
            lo: First element of the rank's tensor.
            hi: Last element + 1 of the rank's tensor.

        Returns:
            One (offset, piece) for each box with elements in [lo, hi); the piece begins at element lo + offset.
        """
        pieces, begin = [], 0
        for box in self.boxes:
            first, last = max(lo, begin), min(hi, begin + box.numel)
            if first < last:
                pieces.append((first - lo, Piece(name, box, first - begin, last - begin)))
            begin += box.numel
        return pieces


def compose(outer: Slice, inner: Slice) -> Slice:
    """Return a slice of a slice as a slice of the logical tensor.

    Args:
        outer: Slice of the logical tensor, with a single box.
        inner: Slice of the tensor that `outer` describes, in that tensor's shape.

    Raises:
        ValueError: `outer` has several boxes, or `inner` is not a hyperslab of the logical tensor.
    """
    if len(outer.boxes) > 1:
        raise ValueError("a part of several boxes cannot be divided further; divide the tensor in the other order")
    return Slice(outer.shape, tuple(_within(outer.boxes[0], box) for box in inner.boxes))


def _within(outer: Box, inner: Box) -> Box:
    """Return `inner`, a box of the elements of `outer` in their order, as a box of the tensor."""
    if not outer.numel:
        return outer
    whole = list(zip(outer.shape, outer.start, outer.stop, strict=True))
    part = list(zip(inner.shape, inner.start, inner.stop, strict=True))
    dims: list[tuple[int, int, int]] = []
    while whole and part:  # match the last dimensions of both; cut the longer one in two
        length, lo, hi = whole.pop()
        count, first, last = part.pop()
        inside = min(hi - lo, count)
        if hi - lo > inside:
            whole.append(_split_off((length, lo, hi), inside))
            length, lo, hi = inside, 0, inside
        elif count > inside:
            part.append(_split_off((count, first, last), inside))
            count, first, last = inside, 0, inside
        dims.append((length, lo + first, lo + last))
    shape, start, stop = zip(*(whole + part + dims[::-1]), strict=True) if whole or part or dims else ((), (), ())
    return Box(shape, start, stop)


def _split_off(dimension: tuple[int, int, int], inside: int) -> tuple[int, int, int]:
    """Split the inner `inside` indices off a dimension (length, start, stop) and return the outer dimension."""
    if inside == 0 or any(number % inside for number in dimension):
        raise ValueError("a part of a part cuts across its ranges; divide the tensor in the other order")
    length, start, stop = dimension
    return length // inside, start // inside, stop // inside


def logical_of(tensor: Any) -> Slice:
    """Return the slice of the model's tensor that a rank's parameter is, as set by `mark`; by default, all of it."""
    noted = getattr(tensor, _DIVIDED, None)
    return noted[0] if noted else Slice.whole(tensor.shape)


def divided_by(tensor: Any) -> tuple[str, ...]:
    """Return the names of the axes that divide a parameter, as set by `mark`; empty if every rank has all of it."""
    noted = getattr(tensor, _DIVIDED, None)
    return noted[1] if noted else ()


def mark(tensor: Any, part: Slice, axes: Sequence[str]) -> None:
    """Record on a parameter which slice of the model's tensor it is.

    The record is an attribute of the parameter object and remains if its data is replaced.

    Args:
        tensor: This rank's parameter.
        part: Slice of the model's tensor that the parameter is.
        axes: Names of the axes of the mesh that divide the model's tensor.
    """
    setattr(tensor, _DIVIDED, (part, tuple(axes)))


def is_replicated(tensor: Any) -> bool:
    """Return True if no axis divides the parameter; a norm over all ranks must then count it only once."""
    return not divided_by(tensor)


@dataclass(frozen=True)
class FlatPlace:
    """The position of a tensor in a flat layout: offset and length in elements, and the number of its bucket."""

    offset: int
    numel: int
    bucket: int


@dataclass(frozen=True)
class Flat:
    """A layout of tensors of one dtype, laid end to end in buckets, each of which is divided into equal shares.

        bucket 0                | bucket 1
        share 0   | share 1     | share 0   | share 1          parts = 2

    Each tensor begins at a multiple of 64 bytes, and each bucket is padded to `parts` equal shares. Padding is zero.

    Attributes:
        places: Position of each tensor, in order.
        bounds: Element offset of each bucket, followed by the end of the last one.
        parts: Number of shares of each bucket.
    """

    places: tuple[FlatPlace, ...]
    bounds: tuple[int, ...]
    parts: int

    @property
    def numel(self) -> int:
        """Number of elements of the whole layout, padding included."""
        return self.bounds[-1]

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.bounds) - 1

    def share(self, bucket: int, part: int) -> tuple[int, int]:
        """Return the range [lo, hi), in elements of the whole layout, of one share of a bucket.

        Args:
            bucket: Number of the bucket.
            part: Number of the share, from 0.
        """
        lo, hi = self.bounds[bucket], self.bounds[bucket + 1]
        length = (hi - lo) // self.parts
        return lo + part * length, lo + (part + 1) * length

    def within(self, lo: int, hi: int) -> list[tuple[int, int, int, int]]:
        """Return the tensors with elements in the range [lo, hi) of the whole layout.

        Args:
            lo: First element of the range.
            hi: Last element + 1 of the range.

        Returns:
            One (index, first, last, offset) per tensor: elements [first, last) of tensor `index` begin at element
            `offset` of the layout.
        """
        tensors = []
        for number, place in enumerate(self.places):
            first, last = max(lo, place.offset), min(hi, place.offset + place.numel)
            if first < last:
                tensors.append((number, first - place.offset, last - place.offset, first))
        return tensors


def lay_out(buckets: Sequence[Sequence[int]], itemsize: int, parts: int = 1, multiple: int = 16) -> Flat:
    """Return the layout of tensors laid end to end in buckets.

    Args:
        buckets: For each bucket, the number of elements of each of its tensors.
        itemsize: Bytes per element.
        parts: Number of shares of each bucket, default 1.
        multiple: Alignment of shares: the length of each is a multiple of this number of elements; default 16.
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


def divide_into_buckets(sizes: Sequence[int], itemsize: int, bucket_bytes: int, first_bytes: int) -> list[list[int]]:
    """Divide tensors, in order, into buckets of about `bucket_bytes`, the first of about `first_bytes`.

    Args:
        sizes: Number of elements of each tensor.
        itemsize: Bytes per element.
        bucket_bytes: Size in bytes from which a bucket is full.
        first_bytes: Size in bytes from which the first bucket is full; smaller, so that its reduction starts early.

    Returns:
        For each bucket, the indices of its tensors.
    """
    buckets: list[list[int]] = [[]]
    limit, nbytes = min(first_bytes, bucket_bytes), 0
    for number, size in enumerate(sizes):
        if nbytes >= limit:
            buckets.append([])
            limit, nbytes = bucket_bytes, 0
        buckets[-1].append(number)
        nbytes += size * itemsize
    return buckets
