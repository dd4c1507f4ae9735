"""What the HDF5 files of data sets and checkpoints have in common.

HDF5 makes the structure, in memory, and says where each data set's bytes lie. Every byte that reaches a disk is written
by us (`extents`): HDF5 2.0 may crash the process when it first meets a full disk while closing a file. Of an image in
memory only the pages that HDF5 writes into are kept: data sets that nobody has filled take no memory.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import h5py

from mpitrain.storage.extents import write_at

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
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = base + offset
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
