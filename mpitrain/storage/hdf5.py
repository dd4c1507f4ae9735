"""What the HDF5 files of data sets and checkpoints have in common.

HDF5 makes the structure, in memory, and says where each data set's bytes lie. Every byte that reaches a disk is written
by us, at its place: a full or failing disk is then an OSError at the call that met it, threads need no lock, and
writing is as fast as the disk. HDF5 2.0 may crash the process when it first meets a full disk while closing a file. Of
an image in memory only the pages that HDF5 writes into are kept: data sets that nobody has filled take no memory.

A large request is met in parts; `write_at` and `read_at` see to all of it. An extent is a stretch of a file with a
CRC-32 (ISO 3309) of its own.
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

try:  # the same numbers as zlib's in a fraction of the time; both let other threads run meanwhile
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

SIGNATURE = b"\x89HDF\r\n\x1a\n"  # what every HDF5 file begins with
VERSIONS = ("v110", "v110")  # of the file format: metadata with checksums, and readable by HDF5 1.10
_PAGE = 4096


def contiguous() -> h5py.h5p.PropDCID:
    """How to create a data set whose bytes lie in one piece, which HDF5 places at once and never touches.

    Its `get_offset()` is then the place of its first byte in the file.
    """
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return how


class Image(io.RawIOBase):
    """A sparse file in memory, with the methods that HDF5 calls.

    Attributes:
        size: How many bytes the file has.
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
        for number, at, done, length in self._stretches(count):
            page = self._pages.get(number)
            buffer[done : done + length] = page[at : at + length] if page is not None else bytes(length)
        self._position += count
        return count

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for number, at, done, length in self._stretches(len(view)):
            page = self._pages.setdefault(number, bytearray(_PAGE))
            page[at : at + length] = view[done : done + length]
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def _stretches(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        done = 0
        while done < count:
            number, at = divmod(self._position + done, _PAGE)
            length = min(_PAGE - at, count - done)
            yield number, at, done, length
            done += length

    def content(self) -> Iterator[tuple[int, bytes]]:
        """What was written: (offset, bytes) in ascending order, neighbouring pages together."""
        for _, run in groupby(enumerate(sorted(self._pages)), lambda page: page[1] - page[0]):  # without a gap
            numbers = [number for _, number in run]
            first = numbers[0] * _PAGE
            yield first, b"".join(self._pages[number] for number in numbers)[: max(0, self.size - first)]


def image_bytes(image: Image) -> bytes:
    """The bytes of the whole file."""
    image.seek(0)
    return image.readall()


def hdf5_image(image: Image) -> h5py.File:
    """A new HDF5 file whose bytes go into the image, until it is closed."""
    return h5py.File(image, "w", libver=VERSIONS)


def begin_file(path: Path, image: Image) -> None:
    """Make a new file with what HDF5 wrote into the image, and room for the data sets. Raises OSError."""
    with open(path, "xb") as file:
        file.truncate(image.size)
        for offset, data in image.content():
            write_at(file.fileno(), memoryview(data), offset)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset of an open file, all of them. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill `into` from an offset of an open file. Raises OSError.

    Returns:
        The bytes read: fewer than `into` has only where the file ends.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def evenly(
    firsts: np.ndarray, places: np.ndarray, lengths: np.ndarray
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield stretches of bytes, and their places elsewhere, as rows of matrices: as long ones at even distances.

    Yields:
        (first byte, its place, rows, bytes of a row, bytes from row to row here, and there).
    """
    count, same = len(firsts), lengths[1:] == lengths[:-1]
    even = same[1:] & same[:-1] & (np.diff(firsts, 2) == 0) & (np.diff(places, 2) == 0)  # a stretch and the next two
    ends = [*(np.flatnonzero(~even) + 2).tolist(), count]  # of matrices that began before
    begin = 0
    while begin < count:
        end, steps = begin + 1, (1, 1)
        if end < count and same[begin]:
            end = ends[bisect_left(ends, begin + 2)]
            steps = int(firsts[begin + 1] - firsts[begin]), int(places[begin + 1] - places[begin])
        yield int(firsts[begin]), int(places[begin]), end - begin, int(lengths[begin]), *steps
        begin = end


def bytes_of_array(values: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, shared with it."""
    return values.reshape(-1).view(np.uint8).data


class ExtentHasher:
    """The CRC-32 of each extent of a sequence that comes in pieces, which need not end where extents do.

    Args:
        length: Items of an extent; the last one may be shorter. An item is what `len` of a piece counts: a byte of a
            memoryview, a row of an array.
    """

    def __init__(self, length: int) -> None:
        self._length, self._filled, self._crc = length, 0, 0
        self._done: list[int] = []

    def update(self, items: memoryview | npt.NDArray[Any]) -> None:
        """Hash the next items, which lie one after the other in memory."""
        taken = 0
        while taken < len(items):
            piece = items[taken : taken + self._length - self._filled]
            self._crc = crc32(piece, self._crc)
            self._filled += len(piece)
            taken += len(piece)
            if self._filled == self._length:
                self._done.append(self._crc)
                self._filled, self._crc = 0, 0

    def hashes(self) -> Sequence[int]:
        """Of the extents so far; the last one as far as it came."""
        return [*self._done, *([self._crc] if self._filled else [])]
