"""IDX files, the format of MNIST: images and labels in pairs, plain or .gz.

    bytes 0 0 | type | dimensions | size of each dimension, 4 bytes big-endian ... | values, big-endian, row by row

(Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section on file formats.)
Files named t10k-... or ...-test-... are the input's own held-out set. Images of bytes are kept as [1, height,
width] and handed over as value / 255.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from mpitrain.data.commit import os_errors
from mpitrain.data.format import FieldSpec
from mpitrain.data.sources.split import partition, stream_rows
from mpitrain.data.writer import GATHER_BYTES, MOST_DIMENSIONS, Columns, Source
from mpitrain.errors import InputError

_NAME = re.compile(r"[-.]idx\d-(ubyte|byte|short|int|float|double)(\.gz)?$", re.IGNORECASE)
_HELD_OUT = re.compile(r"t10k|(^|[-_])test[-_]", re.IGNORECASE)
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class _Idx:
    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def blocks(self, step: int) -> Iterator[npt.NDArray[Any]]:
        with _reading(self.path), _open(self.path) as file:
            _header(file, self.path)
            cut_off = f"IDX file {self.path} ends too early: it is cut off; get it again"
            yield from stream_rows(file, self.dtype, self.shape, step, cut_off)


def is_idx(path: Path) -> bool:
    """Whether a file has the name of an IDX file."""
    return bool(_NAME.search(path.name))


def idx_source(files: Sequence[Path]) -> Source:
    """Describe IDX files: a pair of images and labels, and perhaps a second pair that is held out."""
    train, test = _pairs(files)
    images, labels = train
    channel = (1,) if len(images.shape) == 3 else ()
    if labels.dtype.kind not in "iu" or len(labels.shape) != 1:
        raise InputError(f"IDX file {labels.path} holds no class numbers; give the labels file")
    given: Literal["unit", "float"] = "unit" if images.dtype.kind == "u" else "float"
    x = FieldSpec(name="x", dtype=_name(images), shape=channel + images.shape[1:], given=given)
    y = FieldSpec(name="y", dtype=_name(labels), shape=(), given="integer")
    step = max(1, GATHER_BYTES // max(1, x.row_bytes + y.row_bytes))

    def rows(pair: tuple[_Idx, _Idx]) -> Iterator[Columns]:
        for pixels, classes in zip(pair[0].blocks(step), pair[1].blocks(step), strict=True):
            yield pixels.reshape(len(pixels), *x.shape), classes

    blocks = partition(rows, train, test)
    return Source("arrays", (x, y), blocks, files=len(files))


def _name(idx: _Idx) -> str:
    return str(idx.dtype.newbyteorder("=").name)


def _pairs(files: Sequence[Path]) -> tuple[tuple[_Idx, _Idx], tuple[_Idx, _Idx] | None]:
    """The training pair and, where there is one, the test pair, of images and labels."""
    by_key = {_key(path): path for path in files}
    pairs: dict[bool, tuple[_Idx, _Idx]] = {}
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
            raise InputError(f"IDX files {pairs[own_test][0].path} and {path} are two sets of images; give one")
        images, labels = _read_header(path), _read_header(by_key[key.replace("images", "labels")])
        if images.shape[0] != labels.shape[0]:
            raise InputError(
                f"IDX file {path} holds {images.shape[0]} images, {labels.path} {labels.shape[0]} labels; "
                "give files that belong together"
            )
        pairs[own_test] = (images, labels)
    if False not in pairs:
        return pairs[True], None
    return pairs[False], pairs.get(True)


def _key(path: Path) -> str:
    """What a file of images and its file of labels have in common, but for that one word."""
    return _NAME.sub("", path.name).lower()


def _open(path: Path) -> IO[bytes]:
    packed = path.suffix.lower() == ".gz"
    return cast("IO[bytes]", gzip.open(path, "rb") if packed else open(path, "rb"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn every way in which reading such a file fails into one line."""
    with os_errors(f"IDX file {path} cannot be read"):
        try:
            yield
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"IDX file {path} is not a whole .gz file ({error}); get it again") from None


def _read_header(path: Path) -> _Idx:
    with _reading(path), _open(path) as file:
        return _header(file, path)


def _header(file: IO[bytes], path: Path) -> _Idx:
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
    return _Idx(path, np.dtype(_TYPES[head[2]]), shape)
