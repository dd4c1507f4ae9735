"""Shared parts of the HDF5 files of data sets and checkpoints.

HDF5 builds the file structure in memory and assigns each data set an offset in the file. We write all bytes to the disk
ourselves, at these offsets. A full or failing disk then raises OSError in the call that met it, threads need no lock,
and writing is as fast as the disk; HDF5 2.0 may crash the process if the disk is full when it closes a file. An
in-memory image keeps only the pages that HDF5 writes to, so data sets without content take no memory.

The system may transfer a large request in parts; `write_at` and `read_at` loop until all of it is done. An extent is a
range of a file that has a CRC-32 (ISO 3309) of its own.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

try:  # the same results as zlib in a fraction of the time; both release the GIL
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

SIGNATURE = b"\x89HDF\r\n\x1a\n"  # the first bytes of every HDF5 file
VERSIONS = ("v110", "v110")  # bounds of the file format: metadata has checksums, and HDF5 1.10 can read it
_PAGE = 4096


def contiguous() -> h5py.h5p.PropDCID:
    """Return the HDF5 creation properties of a data set that is contiguous, allocated at once and never filled.

    The `get_offset()` of a data set created with them is the offset of its first byte in the file.
    """
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return how


class Image(io.RawIOBase):
    """A sparse file in memory, with the methods that HDF5 calls on a Python file object.

    Attributes:
        size: Size of the file in bytes.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._position = 0
        self.size = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence] + offset
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self._position))
        for number, at, done, length in self._intervals(count):
            page = self._pages.get(number)
            buffer[done : done + length] = page[at : at + length] if page is not None else bytes(length)
        self._position += count
        return count

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for number, at, done, length in self._intervals(len(view)):
            page = self._pages.setdefault(number, bytearray(_PAGE))
            page[at : at + length] = view[done : done + length]
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def _intervals(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        done = 0
        while done < count:
            number, at = divmod(self._position + done, _PAGE)
            length = min(_PAGE - at, count - done)
            yield number, at, done, length
            done += length

    def content(self) -> Iterator[tuple[int, bytes]]:
        """Yield the written data as (offset, bytes), in ascending order, with adjacent pages merged."""
        for _, run in groupby(enumerate(sorted(self._pages)), lambda page: page[1] - page[0]):  # runs without a gap
            numbers = [number for _, number in run]
            first = numbers[0] * _PAGE
            yield first, b"".join(self._pages[number] for number in numbers)[: max(0, self.size - first)]


def image_bytes(image: Image) -> bytes:
    """Return the content of the whole in-memory file."""
    image.seek(0)
    return image.readall()


def hdf5_image(image: Image) -> h5py.File:
    """Return a new HDF5 file that is written to `image` until it is closed."""
    return h5py.File(image, "w", libver=VERSIONS)


def begin_file(path: Path, image: Image) -> None:
    """Create a file with the metadata that HDF5 wrote to `image`, and space for the data sets. Raises OSError.

    Args:
        path: File to create; it must not exist.
        image: In-memory file, closed by HDF5.
    """
    with open(path, "xb") as file:
        file.truncate(image.size)
        for offset, data in image.content():
            write_at(file.fileno(), memoryview(data), offset)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` at an offset of an open file. Raises OSError.

    Args:
        descriptor: File descriptor that is open for writing.
        data: Bytes to write.
        offset: Offset in the file, in bytes.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill a buffer with the bytes at an offset of an open file. Raises OSError.

    Args:
        descriptor: File descriptor that is open for reading.
        into: Buffer to fill.
        offset: Offset in the file, in bytes.

    Returns:
        Number of bytes read; smaller than the buffer only if the file ends before.
    """
    nbytes_read = 0
    while nbytes_read < len(into):
        count = os.preadv(descriptor, [into[nbytes_read:]], offset + nbytes_read)
        if count == 0:
            break
        nbytes_read += count
    return nbytes_read


def evenly(
    firsts: np.ndarray, places: np.ndarray, lengths: np.ndarray
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Group byte ranges into matrices: runs of ranges of equal length whose sources and targets are evenly spaced.

    Args:
        firsts: Offset of each range in the source, int64 [n].
        places: Offset of each range in the target, int64 [n].
        lengths: Length of each range in bytes, int64 [n].

    Yields:
        (source offset, target offset, rows, bytes of a row, stride of rows in the source, and in the target).
    """
    count, same = len(firsts), lengths[1:] == lengths[:-1]
    even = same[1:] & same[:-1] & (np.diff(firsts, 2) == 0) & (np.diff(places, 2) == 0)  # a range and the next two
    ends = [*(np.flatnonzero(~even) + 2).tolist(), count]  # ends of the matrices
    begin = 0
    while begin < count:
        end, steps = begin + 1, (1, 1)
        if end < count and same[begin]:
            end = ends[bisect_left(ends, begin + 2)]
            steps = int(firsts[begin + 1] - firsts[begin]), int(places[begin + 1] - places[begin])
        yield int(firsts[begin]), int(places[begin]), end - begin, int(lengths[begin]), *steps
        begin = end


def bytes_of_array(values: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return values.reshape(-1).view(np.uint8).data


class ExtentHasher:
    """CRC-32 of each extent of a sequence that arrives in pieces; pieces need not end at the borders of extents.

    Args:
        length: Items per extent; the last extent may be shorter. The items of a piece are counted by its `len`: bytes
            of a memoryview, rows of an array.
    """

    def __init__(self, length: int) -> None:
        self._length, self._filled, self._crc = length, 0, 0
        self._hashes: list[int] = []

    def update(self, items: memoryview | npt.NDArray[Any]) -> None:
        """Hash the next items, which are contiguous in memory."""
        taken = 0
        while taken < len(items):
            piece = items[taken : taken + self._length - self._filled]
            self._crc = crc32(piece, self._crc)
            self._filled += len(piece)
            taken += len(piece)
            if self._filled == self._length:
                self._hashes.append(self._crc)
                self._filled, self._crc = 0, 0

    def hashes(self) -> Sequence[int]:
        """Return the CRC-32 of each extent so far; the last one may cover an incomplete extent."""
        return [*self._hashes, *([self._crc] if self._filled else [])]
