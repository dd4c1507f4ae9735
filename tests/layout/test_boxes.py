"""Who owns what: pieces of tensors, and finding one layout's elements in another's."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.layout.boxes import Box, Piece, shares, split, stretches


@given(st.integers(0, 1000), st.integers(1, 40))
def test_split_covers_everything_nearly_evenly(length, parts):
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


def _pieces(shape, axis, parts, pieces):
    """Pieces that together are the whole tensor: boxes along an axis, each cut into stretches."""
    bounds = split(shape[axis], parts)
    for lo, hi in itertools.pairwise(bounds):
        box = Box.along(shape, axis, lo, hi)
        cuts = split(box.numel, pieces)
        for a, b in itertools.pairwise(cuts):
            yield Piece("t", box, a, b)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.data(),
)
def test_any_layout_finds_all_its_elements_in_any_other(shape, data):
    whole = np.arange(np.prod(shape)).reshape(shape)

    def content(piece):
        view = whole.reshape(piece.box.outer, piece.box.dim, piece.box.inner)
        return view[:, piece.box.start : piece.box.stop, :].reshape(-1)[piece.lo : piece.hi]

    axis = st.integers(0, len(shape) - 1)
    source = list(_pieces(shape, data.draw(axis), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))))
    target = list(_pieces(shape, data.draw(axis), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))))
    for wanted in target:
        got = np.full(wanted.numel, -1)
        for have in source:
            for at, to, length in zip(*stretches(have, wanted), strict=True):
                assert (got[to : to + length] == -1).all()
                got[to : to + length] = content(have)[at : at + length]
        assert (got == content(wanted)).all()
