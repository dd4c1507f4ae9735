"""IDX files, the format of MNIST: images and labels in pairs, plain or .gz.

    bytes 0 0 | type | dimensions | size of each dimension, 4 bytes big-endian ... | values, big-endian, row by row

(Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section on file formats.)
Files named t10k-... or ...-test-... are the input's own held-out set. Images of bytes are kept as [1, height,
width] and handed over as value / 255.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import FieldSpec
from mpitrain.data.sources.arrays import Array, Pair, source_of_pairs
from mpitrain.data.sources.split import stream_rows
from mpitrain.data.sources.streams import opened
from mpitrain.data.writer import MOST_DIMENSIONS, Source
from mpitrain.errors import InputError

_NAME = re.compile(r"[-.]idx\d-(ubyte|byte|short|int|float|double)(\.gz)?$", re.IGNORECASE)
_HELD_OUT = re.compile(r"t10k|(^|[-_])test[-_]", re.IGNORECASE)
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def is_idx(path: Path) -> bool:
    """Whether a file has the name of an IDX file."""
    return bool(_NAME.search(path.name))


def idx_source(files: Sequence[Path], *, allow_nonfinite: bool = False) -> Source:
    """Describe IDX files: a pair of images and labels, and perhaps a second pair that is held out."""
    train, test = _pairs(files)
    images, labels = train
    channel = (1,) if len(images.shape) == 3 else ()
    if labels.dtype.kind not in "iu" or len(labels.shape) != 1:
        raise InputError(f"IDX file {labels.label} holds no class numbers; give the labels file")
    given: Literal["unit", "float"] = "unit" if images.dtype.kind == "u" else "float"
    x = FieldSpec(name="x", dtype=images.dtype.name, shape=channel + images.shape[1:], given=given)
    y = FieldSpec(name="y", dtype=labels.dtype.name, shape=(), given="integer")
    return source_of_pairs(x, y, train, test, len(files), allow_nonfinite=allow_nonfinite)


def _pairs(files: Sequence[Path]) -> tuple[Pair, Pair | None]:
    """The training pair and, where there is one, the test pair, of images and labels."""
    by_key = {_key(path): path for path in files}
    pairs: dict[bool, Pair] = {}
    for key, path in by_key.items():
        if "labels" in key:
            if key.replace("labels", "images") not in by_key:
                raise InputError(f"IDX file {path} has no images beside it; give both files")
            continue
        if key.replace("images", "labels") not in by_key or "images" not in key:
            raise InputError(
                f"IDX file {path} has no labels beside it; give both files, named ...images... and ...labels..."
            )
        own_test = bool(_HELD_OUT.search(path.name))
        if own_test in pairs:
            raise InputError(f"IDX files {pairs[own_test][0].label} and {path} are two sets of images; give one")
        images, labels = _array(path), _array(by_key[key.replace("images", "labels")])
        if images.shape[0] != labels.shape[0]:
            raise InputError(
                f"IDX file {path} holds {images.shape[0]} images, {labels.label} {labels.shape[0]} labels; "
                "give files that belong together"
            )
        pairs[own_test] = (images, labels)
    if False not in pairs:
        return pairs[True], None
    return pairs[False], pairs.get(True)


def _key(path: Path) -> str:
    """What a file of images and its file of labels have in common, but for that one word."""
    return _NAME.sub("", path.name).lower()


def _array(path: Path) -> Array:
    with opened(path) as file:
        dtype, shape = _header(file, path)

    def blocks(step: int) -> Iterator[npt.NDArray[Any]]:
        with opened(path) as file:
            _header(file, path)
            cut_off = f"IDX file {path} ends too early: it is cut off; get it again"
            yield from stream_rows(file, dtype, shape, step, cut_off)

    return Array(str(path), dtype, shape, blocks)


def _header(file: IO[bytes], path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    head = file.read(4)
    if not head:
        raise InputError(f"IDX file {path} is empty; give a file with data")
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES or not head[3]:
        raise InputError(f"{path} is not an IDX file, although its name says so; get it again")
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise InputError(f"IDX file {path} ends too early: it is cut off; get it again")
    shape = struct.unpack(f">{head[3]}I", sizes)
    if 0 in shape or len(shape) > MOST_DIMENSIONS:
        raise InputError(f"IDX file {path} holds no samples (its sizes are {list(shape)!s:.100}); get it again")
    return np.dtype(_TYPES[head[2]]), shape
