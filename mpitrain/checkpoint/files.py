"""One rank's file: an HDF5 structure, and the bytes in it written and read at their places.

HDF5 lays the data sets out and is closed; the bytes go in with positioned writes, hashed on the way. So a full
disk is met by our calls and not inside HDF5 (2.0 may crash closing a file it cannot flush), and writing is as
fast as the disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

from mpitrain.checkpoint.manifest import HASHED, Extent, TensorSpec
from mpitrain.errors import CheckpointError
from mpitrain.layout import Piece, overlaps

VERSION = ("v110", "v110")  # metadata with checksums, and readable by HDF5 1.10
_STRUCTURE = 4096  # bytes allowed per data set for HDF5's own records


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor: the piece, and its elements in a flat contiguous tensor."""

    spec: TensorSpec
    piece: Piece
    data: torch.Tensor


def write_file(path: Path, parts: Sequence[Part]) -> list[Extent]:
    """Write the parts into a new file, durable; returns where each lies. Raises OSError."""
    offsets = _create(path, parts)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        extents = []
        for part, offset in zip(parts, offsets, strict=True):
            raw = _bytes_of(part.data)
            hashes = []
            for lo in range(0, len(raw), HASHED):
                block = raw[lo : lo + HASHED]
                hashes.append(zlib.crc32(block))
                _write_all(descriptor, block, offset + lo)
            extents.append(Extent(part.piece, path.name, offset, tuple(hashes)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return extents


def read_part(folder: Path, extents: Sequence[Extent], part: Part, open_files: OpenFiles) -> None:
    """Fill a part from the extents of its tensor, whoever wrote them. Raises CheckpointError, OSError.

    Every byte used is checked against its hash.
    """
    item, filled = part.data.element_size(), 0
    target = _bytes_of(part.data)
    for extent in extents:
        for overlap in overlaps(extent.piece, part.piece):
            into = target[overlap.target * item : (overlap.target + overlap.length) * item]
            _read_checked(folder, extent, overlap.source * item, into, extent.piece.numel * item, open_files)
            filled += overlap.length
    if filled != part.piece.numel:
        raise CheckpointError(
            f"{folder} holds {filled} of the {part.piece.numel} elements wanted of {part.spec.name}; "
            "it was not written whole"
        )


class OpenFiles:
    """The files of a checkpoint, opened when first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[name]

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def _read_checked(folder: Path, extent: Extent, first: int, into: memoryview, size: int, files: OpenFiles) -> None:
    """Copy bytes [first, first + len(into)) of an extent of `size` bytes, hashing every block they lie in."""
    descriptor, done = files.descriptor(extent.file), 0
    while done < len(into):
        number = (first + done) // HASHED
        lo, hi = number * HASHED, min((number + 1) * HASHED, size)
        begin, end = first + done, min(hi, first + len(into))
        whole = begin == lo and end == hi
        block = into[done : done + end - begin] if whole else memoryview(bytearray(hi - lo))
        _read_all(descriptor, block, extent.offset + lo, folder / extent.file)
        if zlib.crc32(block) != extent.hashes[number]:
            raise CheckpointError(
                f"{folder / extent.file}: bytes {extent.offset + lo} to {extent.offset + hi} ({extent.piece.name}) "
                "are damaged: their hash does not match"
            )
        if not whole:
            into[done : done + end - begin] = block[begin - lo : end - lo]
        done += end - begin


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous CPU tensor, shared with it."""
    return tensor.detach().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _create(path: Path, parts: Sequence[Part]) -> list[int]:
    """Make the file with a data set per part, without content; the offset of each, in bytes."""
    content = sum(part.data.numel() * part.data.element_size() for part in parts)
    with open(path, "xb") as file:  # met here, a full disk is an OSError
        file.write(bytes(_STRUCTURE * (len(parts) + 2)))
        file.truncate(content + _STRUCTURE * (len(parts) + 2))
        os.fsync(file.fileno())
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    offsets = []
    with h5py.File(path, "w", libver=VERSION, locking=False) as file:  # ours alone, in a folder of ours
        for part in parts:
            space = h5py.h5s.create_simple((part.data.numel(),))
            made = h5py.h5d.create(file.id, None, hdf5_type(part.data.dtype), space, how)
            h5py.h5o.link(made, file["/"].id, part.spec.name.encode(), lcpl=links)
            dataset = h5py.Dataset(made)
            dataset.attrs["shape"] = np.array(part.spec.shape, dtype=np.int64)
            dataset.attrs["elements"] = np.array([part.piece.lo, part.piece.hi], dtype=np.int64)
            offsets.append(made.get_offset() or 0)
    return offsets


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


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _read_all(descriptor: int, into: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {offset + done}; it was cut short")
        done += count
