"""Reader of a data set in place: arrays that stay in the user's HDF5, NetCDF or Zarr files, with an index of them.

    dataset.json   paths, shapes and chunks of the arrays
    index.bin      for each chunk of each array: its offset and bytes in the file, and a CRC-32

    file a.nc      | header | chunk 0 | chunk 1 | attributes | chunk 2 | ...      found by offsets, never by HDF5

Chunks of HDF5 files are read at the offsets of the index and decoded here: no thread waits for the lock of the HDF5
library, and nothing but the chunk's bytes can affect what is read. For a contiguous array, the index divides its rows
into chunks of about 64 KiB. In a Zarr store, a chunk or shard is a file, which Zarr's library decodes.

A chunk is checked when it is first read, before it is decoded: damaged bytes could crash a decoder. The hashes of a
Zarr store include the metadata of its arrays.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.conversion import parts_of
from mpitrain.data.folders import OpenFiles
from mpitrain.data.format import INDEX, LARGEST_CHUNK, DatasetManifest, InPlaceSpec, PlacedArray
from mpitrain.data.sources.grids import pieces
from mpitrain.data.sources.variables import ZarrChunks, list_variables, open_variable, reading
from mpitrain.data.split_rows import count, rows_of
from mpitrain.errors import InputError, printable
from mpitrain.storage import hdf5
from mpitrain.storage.disk import open_plain, read_plain

ENTRY = np.dtype([("offset", "<i8"), ("bytes", "<i8"), ("crc32", "<u4")])
Index = npt.NDArray[Any]


class PlacedArrays:
    """Arrays of user files, read by row. Threads may share it.

    Args:
        label: Beginning of messages.
        spec: Files and arrays.
        index: Index, one `ENTRY` for each chunk of each array.
        check: If false, hashes are not checked, because the index does not have them yet.
    """

    def __init__(self, label: str, spec: InPlaceSpec, index: Index, *, check: bool = True) -> None:
        self._label, self._spec, self.index = label, spec, index
        self._firsts = list(accumulate((array.chunks for array in spec.arrays), initial=0))
        self._numbers = {(array.file, array.name): number for number, array in enumerate(spec.arrays)}
        self._trusted = bytearray((0 if check else 1).to_bytes(1, "little") * len(index))
        self._stores = {number for number, file in enumerate(spec.files) if file.store == "zarr"}
        self._open: OpenFiles[Any, Any] = OpenFiles()

    def read(self, file: int, name: str, first: int, stop: int) -> npt.NDArray[Any]:
        """Return rows `first` to `stop` - 1 of an array, as stored.

        Args:
            file: Number of the file.
            name: Name of the array.
            first: First row in the file.
            stop: Row after the last one.

        Raises:
            InputError: A chunk is damaged, or the file was changed.
        """
        number = self._numbers[file, name]
        array = self._spec.arrays[number]
        out = np.empty((stop - first, *array.shape[1:]), np.dtype(array.dtype))
        step = array.chunk[0]
        for block in range(first // step, (stop - 1) // step + 1):
            low, high = max(first, block * step), min(stop, (block + 1) * step)
            into = out[low - first : high - first]
            if array.file in self._stores:
                self._require_whole(number, block)
                into[...] = self._zarr_rows(array, low, high)
            elif not self._read_trusted(number, block, low, into):
                rows = self.block(number, block)
                into[...] = rows[low - block * step : high - block * step]
        return out

    def block(self, number: int, block: int) -> npt.NDArray[Any]:
        """Return all rows of the chunks that begin at row `block` * rows of a chunk, and check their hashes.

        Args:
            number: Number of the array.
            block: Number of the chunks along the axis of rows.
        """
        array = self._spec.arrays[number]
        dtype, step = np.dtype(array.dtype), array.chunk[0]
        rows = min(step, array.shape[0] - block * step)
        if array.file in self._stores:
            self._require_whole(number, block)
            return self._zarr_rows(array, block * step, block * step + rows)
        if array.filters is None:
            ((entry, corner),) = self._entries(number, block)
            return np.frombuffer(self._stored(array, entry, corner), dtype).reshape(rows, *array.shape[1:])
        out = np.empty((rows, *array.shape[1:]), dtype)
        for entry, corner in self._entries(number, block):
            chunk = self._decode(array, self._stored(array, entry, corner), block)
            begins = [index * length for index, length in zip(corner[1:], array.chunk[1:], strict=True)]
            ends = [min(b + n, size) for b, n, size in zip(begins, array.chunk[1:], array.shape[1:], strict=True)]
            where = (slice(None), *map(slice, begins, ends))
            into = out[where]
            into[...] = chunk[tuple(slice(0, length) for length in into.shape)]
        return out

    def hashes(self, number: int, block: int) -> list[int]:
        """Return the CRC-32 of each chunk of a block, for a new index.

        Args:
            number: Number of the array.
            block: Number of the chunks along the axis of rows.
        """
        array = self._spec.arrays[number]
        return [self._crc32(array, self._stored(array, *place)) for place in self._entries(number, block)]

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._open.close()

    def _read_trusted(self, number: int, block: int, first: int, into: npt.NDArray[Any]) -> bool:
        """Read rows of a contiguous array without the rest of their chunk, if that was checked before."""
        array = self._spec.arrays[number]
        entry = self._firsts[number] + block
        if array.filters is not None or not self._trusted[entry]:
            return False
        row_bytes = np.dtype(array.dtype).itemsize * math.prod(array.shape[1:])
        offset = int(self.index["offset"][entry]) + (first - block * array.chunk[0]) * row_bytes
        self._pread(array, block, offset, hdf5.bytes_of_array(into))
        return True

    def _entries(self, number: int, block: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the entry in the index, and the place in the grid, of each chunk of a block."""
        grid = self._spec.arrays[number].grid
        first = self._firsts[number] + block * math.prod(grid[1:])
        for place, corner in enumerate(product(*map(range, grid[1:]))):
            yield first + place, (block, *corner)

    def _require_whole(self, number: int, block: int) -> None:
        """Check the files of a block of a Zarr array, except those that were checked before."""
        for entry, corner in self._entries(number, block):
            if not self._trusted[entry]:
                self._stored(self._spec.arrays[number], entry, corner)

    def _stored(self, array: PlacedArray, entry: int, corner: tuple[int, ...]) -> memoryview:
        """Return the bytes of a chunk, after a check of their hash."""
        size, block = int(self.index["bytes"][entry]), corner[0]
        if not 0 <= size <= 2 * LARGEST_CHUNK:
            raise self._error(array, block, "has an impossible size in the index")
        if array.file in self._stores:
            data = self._read_file(array, corner)
        else:
            data = memoryview(bytearray(size))
            self._pread(array, block, int(self.index["offset"][entry]), data)
        if not self._trusted[entry]:
            if len(data) != size or self._crc32(array, data) != self.index["crc32"][entry]:
                raise self._error(array, block, "was changed or damaged after it was indexed")
            self._trusted[entry] = 1
        return data

    def _crc32(self, array: PlacedArray, data: memoryview) -> int:
        return hdf5.crc32(data, self._zarr(array)[1].crc32 if array.file in self._stores else 0)

    def _read_file(self, array: PlacedArray, corner: tuple[int, ...]) -> memoryview:
        """Return the content of the file of a chunk of a Zarr store; none if the chunk was never written."""
        try:
            return memoryview(read_plain(self._zarr(array)[1].path(corner), 2 * LARGEST_CHUNK))
        except FileNotFoundError:
            return memoryview(b"")
        except OSError as error:
            raise self._error(array, corner[0], f"cannot be read ({error.strerror})") from error

    def _decode(self, array: PlacedArray, stored: memoryview, block: int) -> npt.NDArray[Any]:
        dtype, data = np.dtype(array.dtype), bytes(stored)
        nbytes = math.prod(array.chunk) * dtype.itemsize
        for name in reversed(array.filters or ()):
            if name == "fletcher32":
                data = data[:-4]
            elif name == "deflate":
                try:
                    data = zlib.decompressobj().decompress(data, nbytes + 64)
                except zlib.error as error:
                    raise self._error(array, block, f"cannot be decompressed ({error})") from None
            elif len(data) == nbytes:
                data = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1).T.tobytes()
        if len(data) != nbytes:
            raise self._error(array, block, "has another size than its shape")
        return np.frombuffer(data, dtype).reshape(array.chunk)

    def _zarr_rows(self, array: PlacedArray, first: int, stop: int) -> npt.NDArray[Any]:
        with reading(Path(self._spec.files[array.file].path)):
            rows = np.ascontiguousarray(self._zarr(array)[0][first:stop])
        if rows.shape != (stop - first, *array.shape[1:]) or rows.dtype.str != array.dtype:
            raise self._error(array, first // array.chunk[0], "was changed after it was indexed")
        return rows

    def _zarr(self, array: PlacedArray) -> tuple[Any, ZarrChunks]:
        """Return a Zarr array and the files of its chunks."""
        return self._open.get((array.file, array.name), lambda: self._open_zarr(array))

    def _open_zarr(self, array: PlacedArray) -> tuple[Any, ZarrChunks]:
        path = Path(self._spec.files[array.file].path)
        if not path.is_dir():
            raise InputError(f"{self._label}: the Zarr store {path} does not exist; restore it, or prepare again")
        variable = list_variables(path).get(array.name)  # also checks its codecs
        if variable is None or variable.problem or (variable.shape, variable.dtype.str) != (array.shape, array.dtype):
            raise self._error(array, 0, "was changed after it was indexed")
        with reading(path):
            chunks = ZarrChunks(path / array.name)
        if chunks.shape != array.chunk:
            raise self._error(array, 0, "was changed after it was indexed")
        return open_variable(path, array.name), chunks

    def _pread(self, array: PlacedArray, block: int, offset: int, into: memoryview) -> None:
        file = self._open.get(array.file, lambda: self._open_hdf5(array.file))
        try:
            done = hdf5.read_at(file.fileno(), into, offset) if offset >= 0 else 0
        except OSError as error:
            raise self._error(array, block, f"cannot be read ({error.strerror})") from error
        if done < len(into):
            raise self._error(array, block, "ends too early")

    def _open_hdf5(self, number: int) -> Any:
        spec = self._spec.files[number]
        label = f"{self._label}: file {printable(spec.path)}"
        try:
            file = open_plain(Path(spec.path))
        except OSError as error:
            raise InputError(
                f"{label} cannot be read ({error.strerror}); restore it, or prepare the data set again"
            ) from None
        is_hdf5 = os.pread(file.fileno(), len(hdf5.SIGNATURE), 0) == hdf5.SIGNATURE
        if not is_hdf5 or (size := os.fstat(file.fileno()).st_size) != spec.bytes:
            problem = f"has {size} bytes where the index says {spec.bytes}" if is_hdf5 else "is not an HDF5 file"
            raise InputError(f"{label} {problem}; restore it, or prepare the data set again")
        return file

    def _error(self, array: PlacedArray, block: int, problem: str) -> InputError:
        first = block * array.chunk[0]
        last = min(first + array.chunk[0], array.shape[0]) - 1
        path = printable(self._spec.files[array.file].path)
        where = f"file {path}, variable {printable(array.name)}, rows {first} to {last}"
        return InputError(f"{self._label}: {where} {problem}; restore that file, or prepare the data set again")


class PlacedReader:
    """Rows of one split of a data set in place, with the methods of `RowReader`.

    Args:
        folder: Folder of the data set.
        split: Name of the split.
        manifest: Manifest of the data set, with `in_place`.

    Raises:
        InputError: The index is missing or damaged, the manifest contradicts itself, or the first file is missing.
    """

    def __init__(self, folder: Path, split: str, manifest: DatasetManifest) -> None:
        assert manifest.in_place is not None
        self._manifest, self._spec = manifest, manifest.in_place
        self._rows = self._spec.samples[split]
        _require_consistent(folder, split, manifest, self._spec)
        self._arrays = PlacedArrays(f"data set {folder}", self._spec, read_index(folder, self._spec))
        first = self._spec.arrays[0]
        self._arrays.read(first.file, first.name, 0, 1)  # reports a missing or unreadable first file at once

    def read_into(self, field: int, start: int, out: npt.NDArray[Any]) -> None:
        """Read consecutive samples of a field.

        Args:
            field: Index of the field.
            start: First sample.
            out: Memory [k, *shape] of the stored dtype, which is filled with samples start to start + k - 1.
        """
        rows = rows_of(self._rows, np.arange(start, start + len(out), dtype=np.int64)) + self._spec.ahead * field
        begin = 0
        for end in [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]:
            self._read_rows(field, int(rows[begin]), out[begin:end])
            begin = end

    def gather(self, field: int, starts: npt.NDArray[np.int64], out: npt.NDArray[Any], places: Any) -> None:
        """Read ranges of k samples of a field, which may start anywhere.

        Args:
            field: Index of the field.
            starts: First sample of each range, int64 [n].
            out: Memory [n, k, *shape] of the stored dtype.
            places: Index in `out` of each range, int64 [n].
        """
        for start, place in zip(starts.tolist(), places.tolist(), strict=True):
            self.read_into(field, start, out[place])

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._arrays.close()

    def _read_rows(self, field: int, first: int, out: npt.NDArray[Any]) -> None:
        counts = [file.rows for file in self._spec.files]
        for variable, part in parts_of(self._manifest.variables or (), self._manifest.fields[field], out):
            done = 0
            for file, low, high in pieces(counts, first, first + len(out)):
                into = part[done : done + high - low]
                into[...] = self._arrays.read(file, variable.name, low, high).reshape(into.shape)
                done += high - low


def read_index(folder: Path, spec: InPlaceSpec) -> Index:
    """Return the index of a data set in place.

    Args:
        folder: Folder of the data set.
        spec: Files and arrays.

    Raises:
        InputError: It is missing, or damaged.
    """
    entries = sum(array.chunks for array in spec.arrays)
    try:
        data = read_plain(folder / INDEX, entries * ENTRY.itemsize)
    except OSError as error:
        raise InputError(f"data set {folder}: {INDEX} cannot be read ({error.strerror}); prepare it again") from None
    if len(data) != entries * ENTRY.itemsize or hdf5.crc32(data) != spec.index_crc32:
        raise InputError(f"data set {folder}: {INDEX} is damaged; restore it, or prepare the data set again")
    return np.frombuffer(data, ENTRY)


def _require_consistent(folder: Path, split: str, manifest: DatasetManifest, spec: InPlaceSpec) -> None:
    """Raise InputError if the parts of a manifest contradict each other; it has a hash, but a person may write it."""
    arrays = {(array.file, array.name): array for array in spec.arrays}
    samples, rows = spec.samples[split], sum(file.rows for file in spec.files)
    fits = count(samples) == manifest.splits[split].rows and samples.stop + spec.ahead <= rows
    for field in manifest.fields:
        sizes = 0
        for variable in manifest.variables or ():
            if variable.field == field.name:
                here = [arrays.get((file, variable.name)) for file in range(len(spec.files))]
                fits &= all(a is not None and a.shape[0] == f.rows for a, f in zip(here, spec.files, strict=True))
                sizes += math.prod(here[0].shape[1:]) if here and here[0] else 0
                fits &= len({a.shape[1:] for a in here if a is not None}) == 1
        fits &= sizes == math.prod(field.shape)
    if not fits:
        raise InputError(f"data set {folder}: the arrays of its manifest do not fit each other; prepare it again")


def verify_in_place(folder: Path, manifest: DatasetManifest) -> Iterator[str]:
    """Read every chunk of the files of a data set in place, and check it.

    Args:
        folder: Folder of the data set.
        manifest: Manifest of the data set, with `in_place`.

    Yields:
        One line for each block of chunks, or file, that is damaged.
    """
    spec = manifest.in_place
    assert spec is not None
    try:
        arrays = PlacedArrays(f"data set {folder}", spec, read_index(folder, spec))
    except InputError as error:
        yield str(error)
        return
    for number, array in enumerate(spec.arrays):
        for block in range(array.grid[0]):
            try:
                arrays.block(number, block)
            except InputError as error:
                yield str(error)
