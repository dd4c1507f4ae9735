"""HDF5 files made in memory: the structure is HDF5's, every byte that reaches a disk is written by us.

So HDF5 never gets to see a disk that could be full (see `storage.hdf5`). Only the pages it writes into are kept: data
sets that nobody has filled take no memory.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import h5py
import torch

from mpitrain.storage.hdf5 import VERSIONS

_PAGE = 4096


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


def link(file: h5py.File, name: str, dataset: h5py.h5d.DatasetID) -> None:
    """Give a data set its name, and make the groups in that."""
    how = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    how.set_create_intermediate_group(True)
    how.set_char_encoding(h5py.h5t.CSET_UTF8)
    h5py.h5o.link(dataset, file["/"].id, name.encode(), lcpl=how)


def hdf5_type(dtype: torch.dtype) -> h5py.h5t.TypeID:
    """The HDF5 type of a torch dtype; bfloat16 is a float type of its own that other tools read as float32."""
    if dtype == torch.bfloat16:
        kind = h5py.h5t.IEEE_F32LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
        kind.set_ebias(127)
        return kind
    if dtype == torch.bool:
        dtype = torch.uint8
    return h5py.h5t.py_create(torch.empty(0, dtype=dtype).numpy().dtype)
