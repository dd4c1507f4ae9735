"""NumPy and IDX arrays: x.npy and y.npy, or one .npz with x and y; also x_train, y_train, x_test, y_test.

Arrays have one row per sample, along the first axis. The dtype determines how x is returned: floating point and bool as
float32, uint8 as float32 of value / 255 (images), other integers as int64 codes. y is returned as float32 if it is
floating point, else as int64. Nothing is ever unpickled, and no array is loaded as a whole: .npy files are memory
mapped, the members of a .npz are read as streams.

IDX files, the format of MNIST, contain images and labels in pairs, plain or as .gz.

    bytes 0 0 | type | dimensions | size of each dimension, 4 bytes big-endian ... | values, big-endian, row by row

(Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section on file formats.)
Files named t10k-... or ...-test-... are the input's own held-out set. Images of bytes are stored as [1, height,
width] and returned as value / 255.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from mpitrain.data.folders import os_errors
from mpitrain.data.format import FieldSpec
from mpitrain.data.sources import GATHER_BYTES, MOST_DIMENSIONS, Columns, PrepareOptions, Source, finite, partition
from mpitrain.data.sources.streams import open_stream
from mpitrain.errors import InputError, refusing

_NAMES = "x and y, or x_train and y_train (and x_test, y_test)"


@dataclass(frozen=True)
class Array:
    """An array in a file: its name in messages, dtype, shape, and its rows in blocks of a given length."""

    label: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Callable[[int], Iterator[npt.NDArray[Any]]]


Pair = tuple[Array, Array]  # x and y, or images and labels


def is_array(path: Path) -> bool:
    """Return True if the file name is one of a NumPy file."""
    return path.suffix.lower() in (".npy", ".npz")


def arrays_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe one .npz file, or .npy files whose names are those of its members.

    Args:
        files: The .npz file, or the .npy files.
        options: Options of the input.

    Raises:
        InputError: Arrays are missing or do not fit each other.
    """
    archives = [path for path in files if path.suffix.lower() == ".npz"]
    if len(archives) > 1 or (archives and len(files) > 1):
        raise InputError(f"source {files[0]}: use one .npz file, or .npy files named {_NAMES}")
    arrays = _read_members(archives[0]) if archives else {path.stem.lower(): _map_array(path) for path in files}
    train, test = _pair_arrays(arrays, str(files[0] if archives else files[0].parent))
    x, y = (make_field(name, array) for name, array in zip(("x", "y"), train, strict=True))
    if test:
        for train_array, test_array in zip(train, test, strict=True):
            if train_array.dtype != test_array.dtype or train_array.shape[1:] != test_array.shape[1:]:
                raise InputError(
                    f"{test_array.label} has rows of {test_array.dtype} {test_array.shape[1:]}, "
                    f"{train_array.label} has {train_array.dtype} {train_array.shape[1:]}; use one dtype and shape"
                )
    return source_of_pairs(x, y, train, test, len(files), options)


def source_of_pairs(
    x: FieldSpec, y: FieldSpec, train: Pair, test: Pair | None, files: int, options: PrepareOptions
) -> Source:
    """Return a source of two arrays, x and y, whose rows are the samples.

    Args:
        x: Field of x; its shape may differ from that of the array's rows.
        y: Field of y.
        train: Arrays x and y.
        test: Arrays of the input's own test set, if it has one.
        files: Number of files of the input.
        options: Options of the input; with `allow_nonfinite`, nan and infinite numbers are accepted and counted in the
            notes.
    """
    nonfinite: dict[str, int] = {}

    def notes() -> tuple[str, ...]:
        return tuple(f"{label} has {count} numbers that are not finite" for label, count in nonfinite.items() if count)

    step = max(1, GATHER_BYTES // max(1, x.row_bytes + y.row_bytes))

    def rows(pair: Pair) -> Iterator[Columns]:
        counts = nonfinite if options.allow_nonfinite else None
        for xs, ys in zip(*(_check_finite(array, array.blocks(step), counts) for array in pair), strict=True):
            yield xs.reshape(len(xs), *x.shape), ys

    return Source("arrays", (x, y), partition(rows, train, test), files=files, found=notes)


def _check_finite(
    array: Array, blocks: Iterator[npt.NDArray[Any]], counts: dict[str, int] | None
) -> Iterator[npt.NDArray[Any]]:
    """Yield blocks of an array, and check that all numbers are finite as float32.

    Args:
        array: Array that the blocks belong to.
        blocks: Blocks of its rows.
        counts: Dictionary in which other numbers are counted, by label of the array; if None, they raise InputError.
    """
    if array.dtype.kind != "f":
        yield from blocks
        return
    row = 0
    for block in blocks:
        fits = finite(block)
        if bad := fits.size - np.count_nonzero(fits):
            if counts is None:
                first = row + int((~fits).reshape(len(block), -1).any(1).argmax())
                total = bad + sum(rest.size - np.count_nonzero(finite(rest)) for rest in blocks)
                raise InputError(
                    f"{array.label}, row {first}: {total} numbers from here on are nan, infinite or too large for "
                    "float32; fix them, or accept them with --allow-nonfinite"
                )
            counts[array.label] = counts.get(array.label, 0) + bad
        row += len(block)
        yield block


def _pair_arrays(arrays: dict[str, Array], label: str) -> tuple[Pair, Pair | None]:
    def pair(x: str, y: str) -> Pair:
        if x not in arrays or y not in arrays:
            missing = y if x in arrays else x
            raise InputError(f"source {label} has {', '.join(arrays)}, but not {missing}; name its arrays {_NAMES}")
        xs, ys = arrays[x], arrays[y]
        if not xs.shape or not ys.shape or xs.shape[0] != ys.shape[0]:
            raise InputError(
                f"{xs.label} has the shape {xs.shape}, but {ys.label} has {ys.shape}; save equal numbers of rows"
            )
        if 0 in xs.shape + ys.shape:
            raise InputError(f"{xs.label} is empty (shape {xs.shape}, y {ys.shape}); save at least one row")
        return xs, ys

    train = pair("x_train", "y_train") if "x_train" in arrays else pair("x", "y")
    return train, pair("x_test", "y_test") if "x_test" in arrays else None


def make_field(name: str, array: Array) -> FieldSpec:
    """Return the field x or y of a data set whose rows are those of an array.

    Args:
        name: "x" or "y".
        array: Array of the field.

    Raises:
        InputError: The array has too many dimensions, or a dtype that no model gets.
    """
    kind, size = array.dtype.kind, array.dtype.itemsize
    if len(array.shape) > MOST_DIMENSIONS:
        raise InputError(f"{array.label} has {len(array.shape)} dimensions; use at most {MOST_DIMENSIONS}")
    value_kind: Literal["integer", "float", "unit"]
    if kind == "b" or (kind == "f" and size <= 8):
        value_kind = "float"
    elif kind in "iu" and (size < 8 or kind == "i"):
        value_kind = "unit" if name == "x" and array.dtype == np.uint8 else "integer"
    elif kind == "O":
        raise InputError(f"{array.label} contains Python objects, which are never loaded; save it as numbers")
    else:
        raise InputError(f"{array.label} has the dtype {array.dtype}; save it as floating point, int64 or smaller")
    return FieldSpec(name=name, dtype=array.dtype.name, shape=array.shape[1:], given=value_kind)


def _map_array(path: Path) -> Array:
    label = f"array {path}"
    with os_errors(f"{label} cannot be read"):
        if path.stat().st_size == 0:
            raise InputError(f"{label} is empty; use a file with data")
        with refusing(f"{label} is not a plain .npy array", "save it again"):
            array = np.lib.format.open_memmap(path, mode="r")

    def blocks(step: int) -> Iterator[npt.NDArray[Any]]:
        for start in range(0, len(array), step):
            yield np.ascontiguousarray(array[start : start + step])

    return Array(label, array.dtype, array.shape, blocks)


def _read_members(path: Path) -> dict[str, Array]:
    with (
        os_errors(f"archive {path} cannot be read"),
        refusing(f"archive {path} is not a complete .npz file", "save it again"),
        zipfile.ZipFile(path) as archive,
    ):
        names = [name for name in archive.namelist() if name.endswith(".npy")]
    return {name[:-4].lower(): _describe_member(path, name) for name in names}


def _describe_member(path: Path, name: str) -> Array:
    label = f"array {name[:-4]} of {path}"

    @contextmanager
    def member() -> Iterator[IO[bytes]]:
        with (
            os_errors(f"{label} cannot be read"),
            refusing(f"{label} is damaged", "save it again"),
            zipfile.ZipFile(path) as archive,
            archive.open(name) as file,
        ):
            yield file

    def header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        shape, fortran, dtype = npy_header(file, label)
        if fortran and len(shape) > 1:
            raise InputError(f"{label} is in Fortran order; save np.ascontiguousarray(array)")
        return shape, dtype

    return _describe_stream(label, member, header, f"{label} ends too early; save it again")


def _describe_stream(
    label: str,
    opening: Callable[[], AbstractContextManager[IO[bytes]]],
    header: Callable[[IO[bytes]], tuple[tuple[int, ...], np.dtype[Any]]],
    cut_off: str,
) -> Array:
    """Describe an array that follows a header with its shape and dtype.

    Args:
        label: Name of the array in messages.
        opening: Function that opens the stream.
        header: Function that reads the header from the stream.
        cut_off: Message for a stream that ends too early.
    """
    with opening() as file:
        shape, dtype = header(file)
    row_bytes = dtype.itemsize * math.prod(shape[1:])

    def blocks(step: int) -> Iterator[npt.NDArray[Any]]:
        with opening() as file:
            header(file)
            for start in range(0, shape[0], step):
                rows = min(step, shape[0] - start)
                raw = file.read(rows * row_bytes)
                if len(raw) != rows * row_bytes:
                    raise InputError(cut_off)
                yield np.frombuffer(raw, dtype).reshape(rows, *shape[1:])

    return Array(label, dtype, shape, blocks)


def npy_header(member: IO[bytes], label: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy file.

    Args:
        member: Stream at the beginning of the file.
        label: Name of the file in messages.

    Returns:
        (shape, True if the array is in Fortran order, dtype).

    Raises:
        InputError: The header is not one of a plain array.
    """
    with refusing(f"{label} is not a plain array", "save it again"):
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(member)
        if not all(type(length) is int and 0 <= length < 2**63 for length in shape):
            raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype


# -- IDX files


_IDX_NAME = re.compile(r"[-.]idx\d-(ubyte|byte|short|int|float|double)(\.gz)?$", re.IGNORECASE)
_IDX_TEST = re.compile(r"t10k|(^|[-_])test[-_]", re.IGNORECASE)
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def is_idx(path: Path) -> bool:
    """Return True if the file name is one of an IDX file."""
    return bool(_IDX_NAME.search(path.name))


def idx_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe IDX files: a pair of images and labels, and optionally a second pair that is held out.

    Args:
        files: IDX files.
        options: Options of the input.

    Raises:
        InputError: A file has no partner, or the two do not fit each other.
    """
    train, test = _pair_idx_files(files)
    images, labels = train
    channel = (1,) if len(images.shape) == 3 else ()
    if labels.dtype.kind not in "iu" or len(labels.shape) != 1:
        raise InputError(f"IDX file {labels.label} contains no class numbers; use the labels file")
    value_kind: Literal["unit", "float"] = "unit" if images.dtype.kind == "u" else "float"
    x = FieldSpec(name="x", dtype=images.dtype.name, shape=channel + images.shape[1:], given=value_kind)
    y = FieldSpec(name="y", dtype=labels.dtype.name, shape=(), given="integer")
    return source_of_pairs(x, y, train, test, len(files), options)


def _pair_idx_files(files: Sequence[Path]) -> tuple[Pair, Pair | None]:
    """Return the training pair and, if there is one, the test pair of images and labels."""
    # name without the ending; those of images and of their labels differ in that one word only
    by_key = {_IDX_NAME.sub("", path.name).lower(): path for path in files}
    pairs: dict[bool, Pair] = {}
    for key, path in by_key.items():
        if "labels" in key:
            if key.replace("labels", "images") not in by_key:
                raise InputError(f"IDX file {path} has no images file next to it; use both files")
            continue
        if key.replace("images", "labels") not in by_key or "images" not in key:
            raise InputError(f"IDX file {path} has no labels file next to it; name them ...images... and ...labels...")
        own_test = bool(_IDX_TEST.search(path.name))
        if own_test in pairs:
            raise InputError(f"IDX files {pairs[own_test][0].label} and {path} are two sets of images; use one")
        images, labels = _describe_idx(path), _describe_idx(by_key[key.replace("images", "labels")])
        if images.shape[0] != labels.shape[0]:
            raise InputError(
                f"IDX file {path} has {images.shape[0]} images, but {labels.label} has {labels.shape[0]} labels; "
                "use two files of the same data"
            )
        pairs[own_test] = (images, labels)
    return (pairs[False], pairs.get(True)) if False in pairs else (pairs[True], None)


def _describe_idx(path: Path) -> Array:
    cut_off = f"IDX file {path} ends too early; download it again"
    return _describe_stream(
        str(path), partial(open_stream, path), partial(_read_idx_header, path=path, cut_off=cut_off), cut_off
    )


def _read_idx_header(file: IO[bytes], path: Path, cut_off: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    head = file.read(4)
    if not head:
        raise InputError(f"IDX file {path} is empty; use a file with data")
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not head[3]:
        raise InputError(f"{path} is not an IDX file, although its name says so; download it again")
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise InputError(cut_off)
    shape = struct.unpack(f">{head[3]}I", sizes)
    if 0 in shape or len(shape) > MOST_DIMENSIONS:
        raise InputError(f"IDX file {path} has no samples (its sizes are {list(shape)!s:.100}); download it again")
    return shape, np.dtype(_IDX_TYPES[head[2]])
