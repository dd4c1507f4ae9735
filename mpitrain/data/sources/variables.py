"""Variables of HDF5 files, NetCDF-4 files (which are HDF5) and Zarr stores: their axes, units and stored numbers.

Files are only read. HDF5 itself would follow links into other files, and Zarr would unpickle objects if the metadata of
a store asked for it, so links are skipped and only codecs that decode numbers are accepted. NetCDF packs numbers as the
CF conventions say (section 8.1): number = stored * scale_factor + add_offset, and `_FillValue` marks missing ones.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpitrain.data.folders import os_errors, require_package
from mpitrain.data.format import EXTENT_BYTES, LARGEST_CHUNK
from mpitrain.errors import InputError, printable, refusing
from mpitrain.storage.disk import from_json, read_plain
from mpitrain.storage.hdf5 import crc32

_HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4")
_NETCDF = (".nc", ".nc4")
_ZARR = (".zgroup", ".zarray", "zarr.json")
_MOST_COUNTED = 1 << 24  # chunks whose number is compared with the shape
_DEEPEST = 16  # groups within groups
_MOST_VARIABLES = 10_000
_LARGEST_METADATA = 16 << 20  # bytes of the metadata of a Zarr array
_NETCDF_FILL = 9.969209968386869e36  # of float and double, where a file names no other
_MARKS = ("_FillValue", "missing_value")
_ATTRIBUTES = ("units", "calendar", "scale_factor", "add_offset", "_Unsigned", *_MARKS)
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32"}
_CODECS = frozenset((
    "bytes", "transpose", "sharding_indexed", "blosc", "gzip", "zlib", "zstd", "lz4", "bz2", "lzma", "crc32", "crc32c",
    "adler32", "fletcher32", "shuffle", "delta", "fixedscaleoffset", "quantize", "bitround", "packbits", "astype",
))  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """A variable of one file.

    Attributes:
        path: The file, or the folder of a Zarr store.
        name: Name of the variable in it, with its groups.
        dimensions: Names of its axes.
        shape: Shape.
        dtype: Stored dtype.
        chunk: Shape of a chunk; None if the variable is contiguous.
        attributes: Units, calendar, packing and the marks of missing numbers, as the file says.
        problem: Reason why the numbers cannot be read; "" if there is none.
        origin: Index in the file of the first element, if a part was selected.
    """

    path: Path
    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...] | None
    attributes: dict[str, str | float | list[float]]
    problem: str = ""
    origin: tuple[int, ...] = ()

    def select(self, axis: str, first: int, stop: int) -> Variable:
        """Return a part of the variable; the variable itself if it has no such axis.

        Args:
            axis: Name of an axis.
            first: First index on it.
            stop: Index after the last one.
        """
        if axis not in self.dimensions:
            return self
        number = self.dimensions.index(axis)
        shape, origin = list(self.shape), list(self.origin or (0,) * len(self.shape))
        shape[number], origin[number] = stop - first, origin[number] + first
        return replace(self, shape=tuple(shape), origin=tuple(origin))

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"variable {self.name} of {self.path}"

    @property
    def is_coordinate(self) -> bool:
        """True if the variable contains the coordinates of an axis of its own name."""
        return self.dimensions == (self.name.rpartition("/")[2],)

    @property
    def missing(self) -> tuple[float, ...]:
        """Stored numbers that mark missing values, besides NaN: only those that the dtype can hold."""
        if self.dtype.kind not in "iuf":
            return ()
        named = [key for key in _MARKS if key in self.attributes]
        marks = [mark for key in named for mark in _numbers(self.attributes[key])]
        if not named and self.dtype.kind == "f" and self.dtype.itemsize > 2 and self.path.suffix.lower() in _NETCDF:
            marks = [_NETCDF_FILL]
        with np.errstate(all="ignore"):
            stored = np.array(marks, np.float64).astype(self.dtype).astype(np.float64).tolist()
        pairs = zip(stored, marks, strict=True)
        return tuple(sorted({s for s, mark in pairs if math.isfinite(s) and (s == mark or self.dtype.kind == "f")}))

    def number(self, attribute: str, default: float) -> float:
        """Return an attribute that is a finite number.

        Args:
            attribute: Name of the attribute.
            default: Number if the variable does not have it.

        Raises:
            InputError: It is something else.
        """
        value = _number(self.attributes.get(attribute, default))
        if value is None or not math.isfinite(value):
            raise InputError(f"{self.label}: its attribute {attribute} is not a number; correct it")
        return value


def _numbers(value: Any) -> list[float]:
    """Return the numbers of an attribute; none if it contains something else."""
    try:
        numbers: list[float] = np.asarray(value).reshape(-1).astype(np.float64).tolist()
    except (TypeError, ValueError):
        return []
    return numbers


def _number(value: Any) -> float | None:
    return next(iter(_numbers(value)), None)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error that a library raises about a file into an InputError of one line."""
    with os_errors(f"source {path} cannot be read"), refusing(f"source {path} is damaged", "restore it"):
        try:
            yield
        except OSError as error:
            if error.errno is not None:  # an error of the disk, not of HDF5
                raise
            if "already open for write" in str(error):
                fix = "wait until it ends, or run h5clear -s if it died"
                raise InputError(f"source {path} is open in a program that writes it; {fix}") from None
            raise ValueError(error) from error


def is_store(path: Path) -> bool:
    """Return True if a folder is a Zarr store."""
    return path.is_dir() and any((path / name).is_file() for name in _ZARR)


def has_variables(path: Path) -> bool:
    """Return True if a path is a Zarr store, or its name is that of an HDF5 or NetCDF file."""
    return is_store(path) if path.is_dir() else path.suffix.lower() in _HDF5


def list_variables(path: Path) -> dict[str, Variable]:
    """Return the variables of a file by name.

    Args:
        path: HDF5 or NetCDF-4 file, or the folder of a Zarr store.

    Raises:
        InputError: The file is damaged or of another format.
    """
    with reading(path):
        variables = list(_zarr_variables(path) if path.is_dir() else _hdf5_variables(path))
    return {variable.name: variable for variable in variables}


def open_variable(path: Path, name: str) -> Any:
    """Return an h5py.Dataset or zarr.Array, whose slices are the stored numbers.

    Args:
        path: File or Zarr store.
        name: Name of the variable in it.
    """
    if path.is_dir():
        with require_package("Zarr stores need", "zarr", "zarr"):
            import zarr
        with reading(path):
            return zarr.open_array(str(path / name), mode="r")
    with reading(path):
        return h5py.File(path, "r", locking=False)[name]


@dataclass(frozen=True)
class ChunkTable:
    """Places of the chunks of a variable in its file.

    Attributes:
        chunk: Shape of a chunk. Rows of a contiguous variable are divided into chunks of about 64 KiB.
        filters: Filters that HDF5 applied to each chunk; None for a contiguous variable, and for Zarr.
        places: Offset and bytes of each chunk, int64 [n, 2], in the order of their places in the array. In a Zarr
            store, each chunk is a file, which may be missing (0 bytes).
    """

    chunk: tuple[int, ...]
    filters: tuple[str, ...] | None
    places: npt.NDArray[np.int64]


def chunk_table(path: Path, name: str) -> ChunkTable:
    """Return the place of the chunks of a variable.

    Args:
        path: File or Zarr store.
        name: Name of the variable in it.

    Raises:
        InputError: The chunks cannot be read without the library.
    """
    array = open_variable(path, name)
    if path.is_dir():
        with reading(path):
            chunks = ZarrChunks(path / name)
            sizes = [
                file.stat().st_size if file.exists() else 0 for file in map(chunks.path, chunks.corners(array.shape))
            ]
        return ChunkTable(chunks.shape, None, np.array([(0, size) for size in sizes], np.int64).reshape(-1, 2))
    with reading(path):
        if array.chunks is not None:
            return ChunkTable(array.chunks, _filters(array), _chunk_places(array))
        row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
        step, begin = max(1, EXTENT_BYTES // max(1, row_bytes)), array.id.get_offset()
        if begin is None:
            raise InputError(f"variable {name} of {path} is not stored as contiguous numbers; {COPY}")
        rows = np.arange(0, array.shape[0], step, dtype=np.int64)
        places = np.stack([begin + rows * row_bytes, np.minimum(step, array.shape[0] - rows) * row_bytes], 1)
        return ChunkTable((step, *(max(1, length) for length in array.shape[1:])), None, places)


COPY = "prepare it without --in-place, which makes a copy"


# -- HDF5


def _hdf5_variables(path: Path) -> Iterator[Variable]:
    with open(path, "rb") as file:
        if file.read(3) == b"CDF":
            raise InputError(f"source {path} is NetCDF 3, not NetCDF 4; convert it with nccopy -k nc4 {path} NEW.nc")
    with h5py.File(path, "r", locking=False) as file:
        if file.userblock_size:
            raise InputError(f"source {path} has a user block; copy it with h5repack -u NONE, or h5copy")
        for name, dataset in _data_sets(file, "", 0):
            if dataset is None:
                yield _unreadable(path, name, "it is a link into another file, and such links are not followed")
                continue
            plist = dataset.id.get_create_plist()
            if plist.get_external_count() or dataset.is_virtual:  # in other files, which may be anybody's
                yield _unreadable(path, name, "its numbers lie in other files, which are not opened")
                continue
            if dataset.shape is None or _is_dimension_only(dataset):
                continue
            dimensions, attributes = _dimensions(name, dataset), _attributes(dataset.attrs)
            problem = _storage_problem(dataset)
            yield Variable(path, name, dimensions, dataset.shape, dataset.dtype, dataset.chunks, attributes, problem)


def _unreadable(path: Path, name: str, problem: str) -> Variable:
    """Return a variable that matters only if it is chosen."""
    return Variable(path, name, (), (), np.dtype("V1"), None, {}, problem)


def _storage_problem(dataset: h5py.Dataset) -> str:
    """Return a problem if the file's content does not fill the shape, which may claim terabytes, or needs a plugin."""
    size, chunk = dataset.id.get_storage_size(), dataset.chunks
    plist = dataset.id.get_create_plist()
    for code in (plist.get_filter(number)[0] for number in range(plist.get_nfilters())):
        if not h5py.h5z.filter_avail(code):
            return f"it needs a plugin for the HDF5 filter {code} in a folder of HDF5_PLUGIN_PATH, as hdf5plugin has it"
    if chunk is None:
        written = size >= math.prod(dataset.shape) * dataset.dtype.itemsize
    else:
        if math.prod(chunk) * dataset.dtype.itemsize > LARGEST_CHUNK:
            return f"it has chunks of {chunk}"
        needed = math.prod(-(-length // step) for length, step in zip(dataset.shape, chunk, strict=True))
        written = size >= needed if needed > _MOST_COUNTED else dataset.id.get_num_chunks() == needed
    return "" if written else "parts of it were never written"


def _attributes(attributes: Any) -> dict[str, str | float | list[float]]:
    """Return the attributes that have a meaning here, from a mapping of any."""
    values: dict[str, str | float | list[float]] = {}
    for key in _ATTRIBUTES:
        if key in attributes:
            value = attributes[key]
            value = value.decode(errors="replace") if isinstance(value, bytes) else value
            number = None if isinstance(value, str) else _number(value)
            values[key] = _numbers(value) if key in _MARKS else str(value) if number is None else number
    return values


def _filters(dataset: h5py.Dataset) -> tuple[str, ...]:
    plist = dataset.id.get_create_plist()
    codes = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    for code in codes:
        if code not in _FILTERS:
            raise InputError(
                f"variable {dataset.name} of {dataset.file.filename} has the HDF5 filter {code}, not deflate, shuffle "
                f"or fletcher32; {COPY}"
            )
    return tuple(_FILTERS[code] for code in codes)


def _chunk_places(dataset: h5py.Dataset) -> npt.NDArray[np.int64]:
    """Return offset and bytes of each chunk, int64 [n, 2], in the order of their places."""
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    skipped = 0

    def note(info: Any) -> None:
        nonlocal skipped
        places[tuple(info.chunk_offset)] = (int(info.byte_offset), int(info.size))
        skipped |= int(info.filter_mask)

    dataset.id.chunk_iter(note)
    corners = product(*(range(0, n, step) for n, step in zip(dataset.shape, dataset.chunks, strict=True)))
    problem = "to which its filters were not applied" if skipped else ""
    try:
        result = np.array([places[corner] for corner in corners], np.int64).reshape(-1, 2)
    except KeyError:
        problem = "that were never written"
    if problem:
        raise InputError(f"variable {dataset.name} of {dataset.file.filename} has chunks {problem}; {COPY}")
    return result


def _data_sets(group: h5py.Group, prefix: str, depth: int) -> Iterator[tuple[str, h5py.Dataset | None]]:
    """Yield the data sets of a group and of those in it, with their names; None for a link into another file."""
    for count, name in enumerate(group):
        if count >= _MOST_VARIABLES or depth > _DEEPEST:
            raise ValueError("too many variables or groups")
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            yield prefix + name, None
        elif isinstance(link, h5py.HardLink):
            item = group[name]
            if isinstance(item, h5py.Dataset):
                yield prefix + name, item
            elif isinstance(item, h5py.Group):
                yield from _data_sets(item, f"{prefix}{name}/", depth + 1)


def _is_dimension_only(dataset: h5py.Dataset) -> bool:
    """Return True for a NetCDF dimension that is not a variable, which NetCDF stores as a data set without numbers."""
    label = dataset.attrs.get("NAME", b"")
    return bytes(label)[:53] == b"This is a netCDF dimension but not a netCDF variable."


def _dimensions(name: str, dataset: h5py.Dataset) -> tuple[str, ...]:
    if h5py.h5ds.is_scale(dataset.id) and len(dataset.shape) == 1:
        return (name.rpartition("/")[2],)
    names = []
    for number, axis in enumerate(dataset.dims):
        scales = [axis[0].name] if len(axis) else []
        names.append(str(scales[0]).rpartition("/")[2] if scales and scales[0] else axis.label or f"axis {number}")
    return tuple(names)


# -- Zarr


def _zarr_variables(path: Path) -> Iterator[Variable]:
    for folder in _array_folders(path, 0):
        name = folder.relative_to(path).as_posix()
        try:
            yield _zarr_variable(path, name)
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # perhaps never chosen
            reason = f"its metadata is damaged or unusual ({type(error).__name__}: {error})"
            yield _unreadable(path, name, printable(reason, 300))


def _zarr_variable(path: Path, name: str) -> Variable:
    meta = metadata_file(path / name)
    content = from_json(read_plain(meta, _LARGEST_METADATA))
    if meta.name == ".zarray":
        extra = path / name / ".zattrs"
        attributes = from_json(read_plain(extra, _LARGEST_METADATA)) if extra.is_file() else {}
        dtype, chunk, dimensions = (
            np.dtype(str(content["dtype"])),
            content["chunks"],
            attributes.get("_ARRAY_DIMENSIONS"),
        )
        codecs = [content.get("compressor"), *(content.get("filters") or ())]
        if dimensions and content.get("fill_value") is not None:  # xarray keeps the mark of missing values here
            attributes.setdefault("_FillValue", content["fill_value"])
    else:
        attributes, codecs, dimensions = (
            content.get("attributes") or {},
            content["codecs"],
            content.get("dimension_names"),
        )
        dtype, chunk = np.dtype(str(content["data_type"])), content["chunk_grid"]["configuration"]["chunk_shape"]
        for codec in codecs:
            chunk = (codec.get("configuration") or {}).get("chunk_shape", chunk)  # of a shard's inner chunks
        mark = attributes.get("_FillValue")
        if isinstance(mark, str) and dtype.kind == "f":  # xarray writes the bytes of a double, in base 64
            attributes["_FillValue"] = struct.unpack("<d", base64.b64decode(mark))[0]
    _require_plain_codecs(codecs)
    shape, chunk = tuple(content["shape"]), tuple(chunk)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *chunk)) or len(shape) != len(chunk):
        raise ValueError(f"shape {shape} in chunks of {chunk}")
    if 0 in chunk or math.prod(chunk) * dtype.itemsize > LARGEST_CHUNK:
        raise ValueError(f"chunks of {chunk}")
    dims = tuple(str(n) for n in dimensions or [f"axis {i}" for i in range(len(shape))])
    if len(dims) != len(shape):
        raise ValueError(f"{len(dims)} names for {len(shape)} axes")
    return Variable(path, name, dims, shape, dtype, chunk, _attributes(attributes))


class ZarrChunks:
    """Files of the chunks of a Zarr array; a shard of several chunks is one file.

    Args:
        folder: Folder of the array.

    Attributes:
        shape: Shape of what a file contains.
        crc32: CRC-32 of the metadata, on which the meaning of the files depends.
    """

    def __init__(self, folder: Path) -> None:
        meta = metadata_file(folder)
        data = read_plain(meta, _LARGEST_METADATA)
        content = from_json(data)
        if meta.name == ".zarray":
            chunk, prefix, separator = content["chunks"], "", content.get("dimension_separator") or "."
        else:
            encoding = content["chunk_key_encoding"]
            is_default = encoding["name"] == "default"
            separator = (encoding.get("configuration") or {}).get("separator", "/" if is_default else ".")
            chunk, prefix = content["chunk_grid"]["configuration"]["chunk_shape"], f"c{separator}" * is_default
        if separator not in ("/", "."):
            raise ValueError(f"chunks are named with the separator {separator!r}")
        self.shape: tuple[int, ...] = tuple(map(int, chunk))
        self.crc32 = crc32(data)
        self._folder, self._prefix, self._separator = folder, prefix, separator

    def path(self, corner: tuple[int, ...]) -> Path:
        """Return the file of a chunk, by its place in the grid of chunks."""
        return self._folder / (self._prefix + self._separator.join(map(str, corner)))

    def corners(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the places of all chunks of an array."""
        return product(*(range(-(-length // step)) for length, step in zip(shape, self.shape, strict=True)))


def _array_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of all arrays below a group. Folders of chunks are not searched: they may have millions."""
    if _is_array(folder):
        yield folder
    elif depth <= _DEEPEST:
        for inner in sorted(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()):
            yield from _array_folders(inner, depth + 1)


def metadata_file(folder: Path) -> Path:
    """Return the file with the metadata of a Zarr array or group."""
    return next((folder / name for name in (".zarray", "zarr.json") if (folder / name).is_file()), folder / ".zgroup")


def _is_array(folder: Path) -> bool:
    meta = metadata_file(folder)
    if meta.name != "zarr.json":
        return meta.name == ".zarray"
    return from_json(read_plain(meta, _LARGEST_METADATA)).get("node_type") == "array"


def _require_plain_codecs(codecs: Any) -> None:
    """Raise ValueError unless all codecs are known to decode numbers and nothing else (one of Zarr's unpickles)."""
    for codec in codecs:
        if codec is None:
            continue
        name = str(codec.get("name") or codec.get("id")).removeprefix("numcodecs.")
        if name not in _CODECS:
            raise ValueError(f"its codec {name} is none of those that mpitrain accepts")
        inner = codec.get("configuration") or {}
        _require_plain_codecs([*inner.get("codecs", ()), *inner.get("index_codecs", ())])
