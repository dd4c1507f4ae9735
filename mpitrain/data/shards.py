"""One shard file: written front to back in bounded memory, read at any rows with every extent checked once.

HDF5 makes the structure of a shard and assigns the offset of each field (its data sets are contiguous, see format.py).
The data itself is written and read with positioned calls on the plain file:

    create_structure   HDF5 creates the data sets in memory and gives their offsets; we write its few KiB of metadata
    ShardWriter        pwrite of rows at the offsets, then of the tables of hashes, then fsync
    OpenShard          pread; needs no lock, so reader threads do not wait for each other as in the HDF5 library

So a full or failing disk raises an error in the call that met it. HDF5 2.0 may crash the process if the disk is full
when it closes a file, and a memory map crashes it in any case.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpitrain.data.format import EXTENT_BYTES, DatasetManifest, FieldSpec, ShardSpec
from mpitrain.errors import InputError
from mpitrain.storage import hdf5
from mpitrain.storage.disk import open_plain

_COPY_BYTES = 8 << 20
_TABLE = np.dtype("<u4")


class ShardWriter:
    """Writer of one shard: call `append` any number of times, then `finish` or `abandon`.

    Args:
        path: File to make.
        fields: Fields of a row.
        capacity: Largest number of rows in the shard.

    Attributes:
        rows: Number of rows appended so far.
    """

    def __init__(self, path: Path, fields: Sequence[FieldSpec], capacity: int) -> None:
        self._path, self._fields, self._capacity = path, fields, capacity
        self._hashers = [hdf5.ExtentHasher(field.extent_rows(EXTENT_BYTES)) for field in fields]
        self._places = create_structure(path, fields, capacity)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.rows = 0

    @property
    def room(self) -> int:
        """Number of rows that still fit."""
        return self._capacity - self.rows

    def append(self, columns: Sequence[npt.NDArray[Any]]) -> None:
        """Append k rows, which must fit.

        Args:
            columns: One contiguous array [k, *shape] of the stored dtype for each field.
        """
        for field, hasher, (begin, _), column in zip(self._fields, self._hashers, self._places, columns, strict=True):
            hasher.update(column)
            hdf5.write_at(self._descriptor, hdf5.bytes_of_array(column), begin + self.rows * field.row_bytes)
        self.rows += len(columns[0])

    def finish(self) -> ShardSpec:
        """Complete the shard with the rows appended so far, and flush it to the disk.

        Returns:
            The shard's entry for the manifest.
        """
        if self.room:
            self._shorten()
        crcs = {}
        for field, hasher, (_, begin) in zip(self._fields, self._hashers, self._places, strict=True):
            table = np.array(hasher.hashes(), _TABLE)
            hdf5.write_at(self._descriptor, hdf5.bytes_of_array(table), begin)
            crcs[field.name] = hdf5.crc32(table.data)
        os.fsync(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        os.close(self._descriptor)
        return ShardSpec(file=self._path.name, rows=self.rows, bytes=size, tables=crcs)

    def abandon(self) -> None:
        """Close an incomplete shard that will not be used."""
        os.close(self._descriptor)

    def _shorten(self) -> None:
        """Copy the rows into a new shard of the right size, because a contiguous data set cannot shrink.

        This happens for the last shard of a split.
        """
        long, places = self._descriptor, self._places
        self._path.unlink()
        self._places = create_structure(self._path, self._fields, self.rows)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for field, (old, _), (new, _) in zip(self._fields, places, self._places, strict=True):
                size = self.rows * field.row_bytes
                for start in range(0, size, _COPY_BYTES):
                    piece = os.pread(long, min(_COPY_BYTES, size - start), old + start)
                    hdf5.write_at(self._descriptor, memoryview(piece), new + start)
        finally:
            os.close(long)


def create_structure(path: Path, fields: Sequence[FieldSpec], rows: int) -> list[tuple[int, int]]:
    """Create a shard file whose data sets have their full size but no content yet.

    Args:
        path: File to make.
        fields: Fields of a row.
        rows: Number of rows in the shard.

    Returns:
        For each field, the offsets of its rows and of its table of hashes, in bytes from the beginning of the file.
    """
    image = hdf5.Image()
    with hdf5.hdf5_image(image) as shard:
        shard.create_group("crc32")
        places = [
            (
                _create_data_set(shard, field.name, (rows, *field.shape), field.stored),
                _create_data_set(shard, f"crc32/{field.name}", (field.extents(rows, EXTENT_BYTES),), _TABLE),
            )
            for field in fields
        ]
    hdf5.begin_file(path, image)
    return places


def _create_data_set(file: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Create an empty data set; return the offset of its bytes in the file."""
    space, kind = h5py.h5s.create_simple(shape), h5py.h5t.py_create(dtype)
    return int(h5py.h5d.create(file.id, name.encode(), kind, space, hdf5.contiguous()).get_offset())


class OpenShard:
    """A shard that is open for reading. Threads may share it; the file is closed when the last reference is dropped.

    Some methods take `trusted`: one byte for each extent of a field, 1 if its hash was checked and is right. It
    outlives this object, so an extent is checked once per process, even if its file is opened several times.

    Args:
        folder: Folder of the data set.
        spec: The shard's entry in the manifest.
        manifest: Manifest of the data set.

    Raises:
        InputError: The file is missing, not readable, or not the one that the manifest lists.
    """

    def __init__(self, folder: Path, spec: ShardSpec, manifest: DatasetManifest) -> None:
        self._label = f"data set {folder}: shard {spec.file}"
        self._rows, self._fields = spec.rows, manifest.fields
        self._row_bytes = [field.row_bytes for field in self._fields]
        self._extent_rows = [field.extent_rows(manifest.extent_bytes) for field in self._fields]
        path = folder / spec.file
        try:
            with open_plain(path) as file:
                self._descriptor = os.dup(file.fileno())
        except PermissionError:
            raise InputError(f"{self._label}: no permission to read it; ask its owner for access") from None
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror})") from None
        if os.pread(self._descriptor, len(hdf5.SIGNATURE), 0) != hdf5.SIGNATURE:
            raise self._error("is not an HDF5 file")
        if (size := os.fstat(self._descriptor).st_size) != spec.bytes:
            raise self._error(f"has {size} bytes where the manifest says {spec.bytes}")
        self._offsets, self._tables = self._read_structure(path, spec)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def extents(self, field: int) -> int:
        """Return the number of extents of a field."""
        return len(self._tables[field])

    def read_into(self, field: int, start: int, out: npt.NDArray[Any], trusted: bytearray) -> None:
        """Read consecutive rows of a field, and check the extents that are not trusted yet.

        Args:
            field: Index of the field.
            start: First row.
            out: Contiguous memory [k, *shape] of the stored dtype, which is filled with rows start to start + k - 1.
            trusted: One byte per extent of the field, 1 if its hash was checked; updated by this call.

        Raises:
            InputError: An extent is damaged; the message names shard, field and extent.
        """
        size, stop = self._extent_rows[field], start + len(out)
        first, last = start // size, (stop - 1) // size
        if trusted.find(0, first, last + 1) < 0:
            self._pread(field, start, out)
            return
        for extent in range(first, last + 1):
            begin = extent * size
            low, high = max(start, begin), min(stop, begin + size)
            if trusted[extent]:
                self._pread(field, low, out[low - start : high - start])
            else:
                rows = self.checked_extent(field, extent)
                trusted[extent] = 1
                out[low - start : high - start] = rows[low - begin : high - begin]

    def gather(
        self, field: int, starts: Sequence[int], out: npt.NDArray[Any], places: Sequence[int], trusted: bytearray
    ) -> None:
        """Read ranges of k rows of a field, which may start anywhere; extents are checked as in `read_into`.

        Args:
            field: Index of the field.
            starts: First row of each range.
            out: Contiguous memory [n, k, *shape] of the stored dtype.
            places: Index in `out` of each range.
            trusted: One byte per extent of the field, 1 if its hash was checked; updated by this call.
        """
        size, count = self._extent_rows[field], out.shape[1]
        row_bytes, base = self._row_bytes[field], self._offsets[field]
        nbytes = count * row_bytes
        data = out.reshape(-1).view(np.uint8).data
        for start, place in zip(starts, places, strict=True):
            first, last = start // size, (start + count - 1) // size
            if trusted[first] and trusted[last] and last - first < 2:
                into = data[place * nbytes : (place + 1) * nbytes]
                try:
                    if os.preadv(self._descriptor, [into], base + start * row_bytes) == nbytes:
                        continue
                except OSError:
                    pass  # read_into meets the same error, and reports it
            self.read_into(field, start, out[place], trusted)

    def checked_extent(self, field: int, extent: int) -> npt.NDArray[Any]:
        """Read the rows of one extent and check their hash.

        Args:
            field: Index of the field.
            extent: Index of the extent.

        Raises:
            InputError: The hash is wrong, or the rows cannot be read.
        """
        begin = extent * self._extent_rows[field]
        end = min(begin + self._extent_rows[field], self._rows)
        spec = self._fields[field]
        rows = np.empty((end - begin, *spec.shape), spec.stored)
        self._pread(field, begin, rows)
        if hdf5.crc32(rows.data) != self._tables[field][extent]:
            raise self._error(f"field {spec.name}, extent {extent} (rows {begin} to {end - 1}) is damaged")
        return rows

    def _pread(self, field: int, start: int, out: npt.NDArray[Any]) -> None:
        offset = self._offsets[field] + start * self._row_bytes[field]
        try:
            done = hdf5.read_at(self._descriptor, hdf5.bytes_of_array(out), offset)
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror})") from error
        if done < out.nbytes:
            raise self._error("ends too early")

    def _read_structure(self, path: Path, spec: ShardSpec) -> tuple[list[int], list[npt.NDArray[np.uint32]]]:
        offsets, tables = [], []
        try:
            # locking=False: shards never change, and locks fail on many network file systems
            with h5py.File(path, "r", locking=False) as file:
                for field, size in zip(self._fields, self._extent_rows, strict=True):
                    rows = _data_set(file, field.name, (spec.rows, *field.shape), field.stored, spec.bytes)
                    table = _data_set(file, f"crc32/{field.name}", (-(-spec.rows // size),), _TABLE, spec.bytes)
                    if rows is None or table is None:
                        raise self._error(f"field {field.name} has another shape or dtype than the manifest says")
                    offsets.append(rows.id.get_offset())
                    tables.append(table[...].astype(_TABLE))
        except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self._error(f"cannot be read as HDF5 ({reason})") from None
        for field, table in zip(self._fields, tables, strict=True):
            if hdf5.crc32(table.data) != spec.tables[field.name]:
                raise self._error(f"field {field.name}: its table of hashes is damaged")
        return offsets, tables

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self._label} {problem}; restore that file or prepare the data set again")


def _data_set(
    file: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int
) -> h5py.Dataset | None:
    """Return a data set of the file, or None if it is unsuitable.

    It is unsuitable if it is missing, has another form, or is not stored within the file's `nbytes` bytes. HDF5 itself
    would follow a link into another file, and would allocate terabytes to hold a fill value.
    """
    parts = name.split("/")
    for depth in range(1, len(parts) + 1):
        if not isinstance(file.get("/".join(parts[:depth]), getlink=True), h5py.HardLink):
            return None
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset) or dataset.shape != shape or dataset.dtype != dtype:
        return None
    properties = dataset.id.get_create_plist()
    offset = dataset.id.get_offset()
    if properties.get_layout() != h5py.h5d.CONTIGUOUS or properties.get_external_count() or offset is None:
        return None
    return dataset if offset + math.prod(shape) * dtype.itemsize <= nbytes else None


def verify(folder: Path, manifest: DatasetManifest) -> Iterator[str]:
    """Read every byte of every shard and check it.

    Args:
        folder: Folder of the data set.
        manifest: Manifest of the data set.

    Yields:
        One line for each extent or file that is damaged.
    """
    for spec in manifest.shards:
        try:
            shard = OpenShard(folder, spec, manifest)
        except InputError as error:
            yield str(error)
            continue
        for field in range(len(manifest.fields)):
            for extent in range(shard.extents(field)):
                try:
                    shard.checked_extent(field, extent)
                except InputError as error:
                    yield str(error)
