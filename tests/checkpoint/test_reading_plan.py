"""The reading plan: the bytes that each rank reads when it restores a checkpoint."""

from __future__ import annotations

import zlib
from itertools import pairwise
from math import prod

import numpy as np
import torch
from checkpoint_states import part
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.checkpoint.manifest import HASHED, Extent, Manifest, TensorSpec
from mpitrain.checkpoint.reading import common_intervals, covered, plan, union
from mpitrain.layout.boxes import Box, Piece
from mpitrain.storage.hdf5 import crc32, evenly


@st.composite
def pieces(draw, shape):
    if draw(st.booleans()):
        box = Box.whole(prod(shape))
    else:
        axis = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, shape[axis] - 1))
        box = Box.along(shape, axis, start, draw(st.integers(start + 1, shape[axis])))
    lo = draw(st.integers(0, box.numel))
    return Piece("x", box, lo, draw(st.integers(lo, box.numel)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_common_intervals_are_the_elements_of_both_pieces(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    a, b = data.draw(pieces(shape)), data.draw(pieces(shape))
    tensor = torch.arange(prod(shape)).reshape(shape)
    x = part("x", tensor, a.lo, a.hi, a.box).data.tolist()
    y = part("x", tensor, b.lo, b.hi, b.box).data.tolist()
    elements = []
    common = list(zip(*(each.tolist() for each in common_intervals(a, b)), strict=True))
    for source, target, length in common:
        assert x[source : source + length] == y[target : target + length]
        elements += x[source : source + length]
    assert elements == sorted(set(x) & set(y))
    for (s, t, n), (s2, t2, _) in pairwise(common):  # no two that are one
        assert s + n < s2 or t + n < t2
    assert covered([a, b]) == len(set(x) | set(y))


def test_union_counts_every_element_once():
    assert union(np.array([5, 0, 2, 9]), np.array([3, 4, 1, 0])) == 7
    assert union(np.array([0, 1]), np.array([10, 2])) == 10


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(0, 1)), max_size=12))
def test_rows_of_matrices_cover_exactly_the_given_intervals(drawn):
    """Draw for each interval its length and the gaps that follow it in the source and in the target."""
    lengths, *gaps = np.array(drawn, dtype=np.int64).reshape(-1, 3).T
    firsts, places = (np.cumsum(lengths + gap) - lengths - gap for gap in gaps)
    result = []
    for first, place, rows, width, from_step, to_step in evenly(firsts, places, lengths):
        result += [(first + row * from_step, place + row * to_step, width) for row in range(rows)]
    assert result == list(zip(firsts.tolist(), places.tolist(), lengths.tolist(), strict=True))


def test_whole_blocks_are_read_in_place_and_columns_by_block(tmp_path):
    rows, columns = 3000, 1024  # 12 MB: three blocks
    spec = TensorSpec("x", (rows, columns), "float32")
    whole = Piece.whole("x", rows * columns)
    manifest = Manifest(1, {"x": spec}, {"f": 1}, (Extent(whole, "f", 100, (0, 0, 0)),))
    blocks = plan(tmp_path, manifest, [part("x", torch.zeros(rows, columns), 0, rows * columns)])
    assert [len(block.direct_memory or b"") for block in blocks] == [HASHED, HASHED, 4 * rows * columns - 2 * HASHED]
    box = Box.along((rows, columns), 1, 10, 20)
    blocks = plan(tmp_path, manifest, [part("x", torch.zeros(rows, columns), 0, box.numel, box)])
    assert [len(block.uses) for block in blocks] == [1, 1, 1] and all(block.direct_memory is None for block in blocks)
    rows_of_last = rows - 2 * HASHED // (4 * columns)
    assert [len(block.uses[0].lengths) for block in blocks] == [1024, 1024, rows_of_last]
    few = Piece("x", Box.whole(rows * columns), 5, 9)  # only the block that holds the elements is read
    target = part("x", torch.zeros(rows, columns), few.lo, few.hi)
    assert [block.number for block in plan(tmp_path, manifest, [target])] == [0]


@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1))
def test_hashes_are_crc32_whichever_package_computes_them(data, value):
    assert crc32(data) == zlib.crc32(data) and crc32(data, value) == zlib.crc32(data, value)
