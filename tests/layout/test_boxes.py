"""Ownership of tensors: pieces, and the elements of one layout in another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.layout.boxes import Box, Piece, Slice, common_intervals, compose, shares, split


@given(st.integers(0, 1000), st.integers(1, 40))
def test_split_covers_a_range_in_nearly_equal_parts(length, parts):
    bounds = split(length, parts)
    assert bounds[0] == 0 and bounds[-1] == length
    assert max(np.diff(bounds)) - min(np.diff(bounds)) <= 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.integers(1, 9), st.sampled_from([1, 16]))
def test_shares_give_every_element_to_exactly_one_rank(sizes, parts, multiple):
    owners = [np.zeros(size, dtype=int) for size in sizes]
    for part in range(parts):
        for number, lo, hi in shares(sizes, parts, part, multiple):
            owners[number][lo:hi] += 1
    assert all((owner == 1).all() for owner in owners)


@st.composite
def _layout(draw, shape):
    """Return pieces that make up a tensor: cells of a grid over any of its dimensions, cut into intervals.

    A dimension may be merged with the one before it, as in a fused layer.
    """
    view = list(shape)
    for d in reversed(range(1, len(view))):
        if draw(st.integers(0, 3)) == 0:
            view[d - 1 : d + 1] = [view[d - 1] * view[d]]
    cuts = [list(itertools.pairwise(split(n, draw(st.sampled_from([1, 1, 2, 3]))))) for n in view]
    pieces, parts = [], draw(st.integers(1, 3))
    for cell in itertools.product(*cuts):
        box = Box(tuple(view), tuple(lo for lo, _ in cell), tuple(hi for _, hi in cell))
        pieces += [Piece("t", box, a, b) for a, b in itertools.pairwise(split(box.numel, parts))]
    return pieces


_SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).filter(lambda shape: np.prod(shape) <= 200)


@settings(max_examples=200, deadline=None)
@given(_SHAPES, st.data())
def test_any_layout_can_be_filled_from_any_other(shape, data):
    whole = np.arange(np.prod(shape)).reshape(shape)

    def content(piece):
        return piece.box.of(whole).reshape(-1)[piece.lo : piece.hi]

    source, target = data.draw(_layout(shape)), data.draw(_layout(shape))
    for target_piece in target:
        values = np.full(target_piece.numel, -1)
        for source_piece in source:
            for at, to, length in zip(*common_intervals(source_piece, target_piece), strict=True):
                assert (values[to : to + length] == -1).all()
                values[to : to + length] = content(source_piece)[at : at + length]
        assert (values == content(target_piece)).all()


@settings(max_examples=200, deadline=None)
@given(_SHAPES, st.data())
def test_runs_are_the_longest_intervals_that_are_contiguous_in_the_tensor(shape, data):
    whole = np.arange(np.prod(shape)).reshape(shape)
    for piece in data.draw(_layout(shape)):
        elements = piece.box.of(whole).reshape(-1)[piece.lo : piece.hi]
        runs = [range(start, start + length) for start, length, _ in zip(*piece.runs(), strict=True)]
        assert [at for run in runs for at in run] == elements.tolist()
        assert [place for _, _, place in zip(*piece.runs(), strict=True)] == [
            0,
            *itertools.accumulate(map(len, runs)),
        ][: len(runs)]
        assert all(one.stop != other.start for one, other in itertools.pairwise(runs))


def test_equal_parts_of_a_tensor_are_equal_boxes():
    assert Box((2, 3, 4), (0, 1, 0), (2, 2, 4)) == Box.along((2, 3, 4), 1, 1, 2)
    assert Box((5, 2, 3, 4, 6), (0, 0, 1, 0, 0), (5, 2, 2, 4, 6)) == Box.along((10, 3, 24), 1, 1, 2)
    assert Box((1, 4, 1, 6), (0, 2, 0, 0), (1, 4, 1, 6)) == Box.along((4, 6), 0, 2, 4)
    assert Box((2, 3, 4), (0, 0, 0), (2, 3, 4)) == Box.whole(24) == Box.along((2, 3, 4), 1, 0, 3)
    assert Box.whole(1) == Box((), (), ()) and Box.whole(1).numel == 1
    assert Box((4, 6), (0, 2), (2, 4)).shape == (4, 6)
    with pytest.raises(ValueError):
        Box((4, 6), (0,), (2,))


@st.composite
def _slab(draw, shape):
    """Return a box of a tensor along any of its dimensions, and its slices."""
    ranges = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    start, stop = tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges)
    return Box(tuple(shape), start, stop), tuple(map(slice, start, stop))


@settings(max_examples=300, deadline=None)
@given(_SHAPES, st.data())
def test_a_slice_of_a_slice_equals_slicing_twice(shape, data):
    whole = np.arange(np.prod(shape)).reshape(shape)
    outer, outer_slices = data.draw(_slab(shape))
    outer_part = whole[outer_slices]
    inner, inner_slices = data.draw(_slab(outer_part.shape))
    part = compose(Slice(tuple(shape), (outer,)), Slice(outer_part.shape, (inner,)))
    [box] = part.boxes
    assert part.shape == tuple(shape)
    assert (box.of(whole).reshape(-1) == outer_part[inner_slices].reshape(-1)).all()
    ranges = [(a.start + b.start, a.start + b.stop) for a, b in zip(outer_slices, inner_slices, strict=True)]
    assert box == Box(tuple(shape), *zip(*ranges, strict=True))
