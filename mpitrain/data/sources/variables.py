"""Variables of HDF5 files, NetCDF-4 files (which are HDF5) and Zarr stores: their axes, units and stored numbers.

Files are only read. HDF5 itself would follow links into other files, and Zarr would unpickle objects if the metadata of
a store asked for it, so links are skipped and only codecs that decode numbers are accepted. NetCDF packs numbers as the
CF conventions say (section 8.1): number = stored * scale_factor + add_offset, and `_FillValue` marks missing ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpitrain.data.folders import os_errors, require_package
from mpitrain.data.format import LARGEST_CHUNK
from mpitrain.errors import InputError, refusing
from mpitrain.storage.disk import read_plain

_HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4")
_NETCDF = (".nc", ".nc4")
_ZARR = (".zgroup", ".zarray", "zarr.json")
_MOST_COUNTED = 1 << 24  # chunks whose number is compared with the shape
_DEEPEST = 16  # groups within groups
_MOST_VARIABLES = 10_000
_LARGEST_METADATA = 16 << 20  # bytes of the metadata of a Zarr array
_NETCDF_FILL = 9.969209968386869e36  # of float and double, where a file names no other
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
        attributes: Attributes of the variable that are numbers or texts.
    """

    path: Path
    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...] | None
    attributes: dict[str, Any]

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"variable {self.name} of {self.path}"

    @property
    def is_coordinate(self) -> bool:
        """True if the variable contains the coordinates of an axis of its own name."""
        return self.dimensions == (self.name.rpartition("/")[2],)

    @property
    def missing(self) -> float | None:
        """Stored number that marks a missing value, besides NaN."""
        for key in ("_FillValue", "missing_value"):
            if key in self.attributes:
                marker = _number(self.attributes[key])
                return marker if marker is not None and math.isfinite(marker) else None
        if self.dtype.kind == "f" and self.path.suffix.lower() in _NETCDF:
            return float(self.dtype.type(_NETCDF_FILL)) if self.dtype.itemsize > 2 else None
        return None

    def number(self, attribute: str, default: float) -> float:
        """Return an attribute that is a finite number.

        Raises:
            InputError: It is something else.
        """
        value = _number(self.attributes.get(attribute, default))
        if value is None or not math.isfinite(value):
            raise InputError(f"{self.label}: its attribute {attribute} is not a number; correct it")
        return value


def _number(value: Any) -> float | None:
    try:
        return float(np.asarray(value).reshape(-1)[0])
    except (TypeError, ValueError, IndexError):
        return None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error that a library raises about a file into an InputError of one line."""
    with os_errors(f"source {path} cannot be read"), refusing(f"source {path} is damaged", "restore it"):
        yield


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


def open_variable(variable: Variable) -> Any:
    """Return an h5py.Dataset or zarr.Array, whose slices are the stored numbers."""
    if variable.path.is_dir():
        with require_package("Zarr stores need", "zarr", "zarr"):
            import zarr
        with reading(variable.path):
            return zarr.open_array(str(variable.path / variable.name), mode="r")
    with reading(variable.path):
        return h5py.File(variable.path, "r", locking=False)[variable.name]


# -- HDF5


def _hdf5_variables(path: Path) -> Iterator[Variable]:
    with open(path, "rb") as file:
        if file.read(3) == b"CDF":
            raise InputError(f"source {path} is NetCDF 3, not NetCDF 4; convert it with nccopy -k nc4 {path} NEW.nc")
    with h5py.File(path, "r", locking=False) as file:
        if file.userblock_size:
            raise InputError(f"source {path} has a user block; copy it with h5repack -u NONE, or h5copy")
        for name, dataset in _data_sets(file, "", 0):
            plist = dataset.id.get_create_plist()
            elsewhere = plist.get_external_count() or dataset.is_virtual  # in other files, which may be anybody's
            if dataset.shape is None or elsewhere or _is_dimension_only(dataset):
                continue
            _require_written(name, dataset)
            dimensions, attributes = _dimensions(name, dataset), _attributes(dataset)
            yield Variable(path, name, dimensions, dataset.shape, dataset.dtype, dataset.chunks, attributes)


def _require_written(name: str, dataset: h5py.Dataset) -> None:
    """Raise ValueError for a shape that the file's content does not fill: it may claim terabytes."""
    size, chunk = dataset.id.get_storage_size(), dataset.chunks
    if chunk is None:
        written = size >= math.prod(dataset.shape) * dataset.dtype.itemsize
    else:
        if math.prod(chunk) * dataset.dtype.itemsize > LARGEST_CHUNK:
            raise ValueError(f"variable {name} has chunks of {chunk}")
        needed = math.prod(-(-length // step) for length, step in zip(dataset.shape, chunk, strict=True))
        written = size >= needed if needed > _MOST_COUNTED else dataset.id.get_num_chunks() == needed
    if not written and len(dataset.shape) > 1:
        raise ValueError(f"parts of variable {name} were never written")


def _data_sets(group: h5py.Group, prefix: str, depth: int) -> Iterator[tuple[str, h5py.Dataset]]:
    for count, name in enumerate(group):
        if count >= _MOST_VARIABLES or depth > _DEEPEST:
            raise ValueError("too many variables or groups")
        if isinstance(group.get(name, getlink=True), h5py.HardLink):
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
    own = name.rpartition("/")[2]
    if h5py.h5ds.is_scale(dataset.id) and len(dataset.shape) == 1:
        return (own,)
    names = []
    for number, axis in enumerate(dataset.dims):
        scales = [axis[0].name] if len(axis) else []
        names.append(str(scales[0]).rpartition("/")[2] if scales and scales[0] else axis.label or f"axis {number}")
    return tuple(names)


def _attributes(dataset: h5py.Dataset) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in ("units", "scale_factor", "add_offset", "_FillValue", "missing_value"):
        if key in dataset.attrs:
            value = dataset.attrs[key]
            value = value.decode(errors="replace") if isinstance(value, bytes) else value
            values[key] = value if isinstance(value, (str, int, float)) else np.asarray(value).reshape(-1)[:1]
    return values


# -- Zarr


def _zarr_variables(path: Path) -> Iterator[Variable]:
    for folder in _array_folders(path, 0):
        name = folder.relative_to(path).as_posix()
        meta = metadata_file(folder)
        content = json.loads(read_plain(meta, _LARGEST_METADATA))
        is_old = meta.name == ".zarray"
        if is_old:
            extra = folder / ".zattrs"
            attributes = json.loads(read_plain(extra, _LARGEST_METADATA)) if extra.is_file() else {}
            dtype, chunk = np.dtype(str(content["dtype"])), content["chunks"]
            dimensions = attributes.get("_ARRAY_DIMENSIONS")
            codecs = [content.get("compressor"), *(content.get("filters") or ())]
            if dimensions and content.get("fill_value") is not None:  # xarray keeps the mark of missing values here
                attributes.setdefault("_FillValue", content["fill_value"])
        else:
            attributes, codecs = content.get("attributes") or {}, content["codecs"]
            dtype, chunk = np.dtype(str(content["data_type"])), content["chunk_grid"]["configuration"]["chunk_shape"]
            dimensions = content.get("dimension_names")
            for codec in codecs:
                chunk = (codec.get("configuration") or {}).get("chunk_shape", chunk)  # of a shard's inner chunks
        _require_plain_codecs(codecs)
        shape, chunk = tuple(content["shape"]), tuple(chunk)
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *chunk)) or len(shape) != len(chunk):
            raise ValueError(f"array {name} has the shape {shape} in chunks of {chunk}")
        if math.prod(chunk) * dtype.itemsize > LARGEST_CHUNK:
            raise ValueError(f"array {name} has chunks of {chunk}")
        dims = tuple(str(n) for n in dimensions or [f"axis {i}" for i in range(len(shape))])
        if len(dims) != len(shape):
            raise ValueError(f"array {name} has {len(dims)} names for {len(shape)} axes")
        yield Variable(path, name, dims, shape, dtype, chunk, attributes)


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
    return json.loads(read_plain(meta, _LARGEST_METADATA)).get("node_type") == "array"


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


def read_rows(array: Any, axis: int, first: int, stop: int) -> npt.NDArray[Any]:
    """Read a range of an axis of an open variable; that axis comes first in the result.

    Args:
        array: Result of `open_variable`.
        axis: Axis of the rows.
        first: First row.
        stop: Row after the last one.
    """
    values = np.asarray(array[(slice(None),) * axis + (slice(first, stop),)])
    return np.moveaxis(values, axis, 0)
