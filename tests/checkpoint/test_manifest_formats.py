"""Manifest formats: the older one wherever it can express the boxes, the newer one otherwise."""

from __future__ import annotations

import json
import zlib

import pytest

from mpitrain.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    NEWER,
    Extent,
    Manifest,
    TensorSpec,
    decode,
    encode,
    read_manifest,
)
from mpitrain.errors import CheckpointError
from mpitrain.layout.boxes import Box, Piece


def _manifest(*pieces: Piece) -> Manifest:
    """Return a manifest of float32 tensors [4, 6], each stored whole in a file, and of these further pieces."""
    names = sorted({piece.name for piece in pieces})
    every = [*(Piece.whole(name, 24) for name in names), *pieces]
    extents = tuple(Extent(piece, "rank-00000.h5", 96 * n, (n,)) for n, piece in enumerate(every))
    tensors = {name: TensorSpec(name, (4, 6), "float32") for name in names}
    return Manifest(3, tensors, {"rank-00000.h5": 96 * len(every)}, extents, {}, {"rank-00000.h5": 1})


ROWS = Piece("x", Box.along((4, 6), 0, 1, 3), 2, 9)
COLUMNS = Piece("x", Box.along((4, 6), 1, 1, 3), 0, 8)
FUSED = Piece("x", Box.along((2, 2, 6), 1, 0, 1), 0, 12)
CELL = Piece("x", Box((4, 6), (1, 2), (3, 5)), 1, 6)


def _put(folder, payload):
    text = json.dumps(payload)
    (folder / MANIFEST).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "payload": {text}}}\n')


def test_boxes_along_one_dimension_are_written_in_format_2():
    manifest = _manifest(ROWS, COLUMNS, FUSED)
    payload = json.loads(encode(manifest))["payload"]
    assert payload["format"] == FORMAT == "mpitrain checkpoint 2"
    assert [numbers for _, numbers, *_ in payload["extents"]] == [
        [1, 24, 1, 0, 24, 0, 24],
        [1, 4, 6, 1, 3, 2, 9],
        [4, 6, 1, 1, 3, 0, 8],
        [2, 2, 6, 0, 1, 0, 12],
    ]
    assert decode(encode(manifest)) == manifest


def test_boxes_along_several_dimensions_are_written_in_format_3():
    manifest = _manifest(ROWS, CELL)
    payload = json.loads(encode(manifest))["payload"]
    assert payload["format"] == NEWER == "mpitrain checkpoint 3"
    assert [numbers for _, numbers, *_ in payload["extents"]] == [
        [1, 24, 1, 0, 24, 0, 24],
        [1, 4, 6, 1, 3, 2, 9],
        [[4, 6], [1, 2], [3, 5], 1, 6],
    ]
    assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize("unknown", ["mpitrain checkpoint 1", "mpitrain checkpoint 4", None, 7])
def test_an_unknown_format_is_refused_with_the_fix(tmp_path, unknown):
    _put(tmp_path, json.loads(encode(_manifest(CELL)))["payload"] | {"format": unknown})
    with pytest.raises(CheckpointError, match="use the version of mpitrain that wrote it") as refused:
        read_manifest(tmp_path)
    assert str(tmp_path / MANIFEST) in str(refused.value) and repr(unknown) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "numbers",
    [
        [[4, 6], [1, 2], [3, 7], 1, 6],
        [[4, 6], [1, 5], [3, 2], 0, 0],
        [[4, 6], [1, 2], [3], 1, 6],
        [[4, 6], [1, 2], [3, 5], 1, 7],
        [[4, 6], [1, 2], [3, 5], 6, 1],
        [[4, 7], [1, 2], [3, 5], 1, 6],
        [[4, 6], [-1, 2], [3, 5], 1, 6],
        [[4, 6], [1, 2.0], [3, 5], 1, 6],
        [[2] * 65, [0] * 65, [1] * 65, 0, 1],
        [[4, 6], [1, 2], [3, 5]],
        [],
    ],
)
def test_a_box_outside_its_tensor_is_refused_in_one_line(tmp_path, numbers):
    payload = json.loads(encode(_manifest(CELL)))["payload"]
    payload["extents"][1][1] = numbers
    _put(tmp_path, payload)
    with pytest.raises(CheckpointError, match="is damaged") as refused:
        read_manifest(tmp_path)
    assert "\n" not in str(refused.value)
