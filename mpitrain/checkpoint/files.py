"""The files of a checkpoint: an HDF5 structure, and the bytes in it written at their places, hashed on the way.

A file belongs to a rank, or to all ranks of a node: the first of them makes the structure, then each writes its
own pieces. HDF5 is only asked where the data sets lie; all bytes are written with positioned writes, so
that a full disk is an OSError of ours, and writing is as fast as the disk.

Names and types of tensors in the HDF5 images of checkpoints (see `storage.hdf5`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

from mpitrain.checkpoint.manifest import DTYPES, HASHED, Extent, TensorSpec
from mpitrain.layout import Piece
from mpitrain.storage.disk import opened
from mpitrain.storage.extents import ExtentHasher, crc32, write_at
from mpitrain.storage.hdf5 import Image, contiguous, hdf5_image

PlannedPiece = tuple[TensorSpec, Piece]  # a piece in a file that is yet to be written, and its tensor
_WRITTEN = 8 << 20  # bytes of one write
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2), which Python's os lacks
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor.

    Attributes:
        spec: The tensor.
        piece: The piece of it.
        data: The elements of the piece, in a flat contiguous tensor, on the host or on a device.
    """

    spec: TensorSpec
    piece: Piece
    data: torch.Tensor


@dataclass(frozen=True)
class Structure:
    """A file without its data.

    Attributes:
        image: The bytes that are HDF5's own.
        offsets: Where each piece begins, in bytes.
        rest: The CRC-32 of all bytes of the file that are no piece's.
    """

    image: Image
    offsets: tuple[int, ...]
    rest: int


def dataset_names(names: Sequence[str]) -> list[str]:
    """The HDF5 names of pieces in one file.

    Args:
        names: Of each piece the name of its tensor.

    Returns:
        Of each piece the tensor's name, with #1, #2, ... appended for further pieces of it. The first one gets #0 where
        the name is also the beginning of another's path; a number is passed over where a tensor is called that.
    """
    tensors = set(names)
    groups = {name[:at] for name in tensors for at in range(1, len(name)) if name[at] == "/"}
    seen: dict[str, int] = {}
    found = []
    for name in names:
        number = seen.get(name, 0)
        shown = f"{name}#{number}" if number or name in groups else name
        while shown != name and (shown in tensors or shown in groups):
            number += 1
            shown = f"{name}#{number}"
        seen[name] = number + 1
        found.append(shown)
    return found


def make_structure(places: Sequence[PlannedPiece]) -> Structure:
    """Lay out the file that holds these pieces, a data set for each, one after the other."""
    how, scalar = contiguous(), h5py.h5s.create(h5py.h5s.SCALAR)
    pair, number = h5py.h5s.create_simple((2,)), h5py.h5t.STD_I64LE
    offsets = []
    image = Image()
    with hdf5_image(image) as file:
        for (spec, piece), name in zip(places, dataset_names([spec.name for spec, _ in places]), strict=True):
            space = h5py.h5s.create_simple((piece.numel,)) if spec.shape else scalar
            made = h5py.h5d.create(file.id, None, hdf5_type(DTYPES[spec.dtype]), space, how)
            link(file, name, made)
            h5py.h5a.create(made, b"elements", number, pair).write(np.array([piece.lo, piece.hi], dtype=np.int64))
            shape = np.array(spec.shape, dtype=np.int64)
            h5py.h5a.create(made, b"shape", number, h5py.h5s.create_simple(shape.shape)).write(shape)
            offsets.append(made.get_offset() or 0)
    crc = 0
    for lo, hi in gaps([(o, p.numel * s.itemsize) for o, (s, p) in zip(offsets, places, strict=True)], image.size):
        image.seek(lo)
        crc = crc32(image.read(hi - lo), crc)
    return Structure(image, tuple(offsets), crc)


def gaps(stretches: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The parts [lo, hi) of a file of `size` bytes that lie in none of the stretches (offset, bytes)."""
    found, end = [], 0
    for offset, nbytes in sorted(s for s in stretches if s[1]):
        if offset > end:
            found.append((end, offset))
        end = max(end, offset + nbytes)
    if size > end:
        found.append((end, size))
    return found


def write_parts(path: Path, parts: Sequence[Part], offsets: Sequence[int]) -> list[Extent]:
    """Write parts into a file that has its structure; they are on the disk afterwards.

    Another thread hashes while this one writes, and the disk begins before all is in the page cache.

    Args:
        path: The file.
        parts: What is written.
        offsets: Where each part begins, in bytes.

    Returns:
        What the manifest lists of each part.

    Raises:
        OSError: The disk is full, or fails.
    """
    here = [number for number, part in enumerate(parts) if part.data.is_cpu]
    there = [number for number, part in enumerate(parts) if not part.data.is_cpu]
    hashes: dict[int, tuple[int, ...]] = {}
    with ThreadPoolExecutor(1, "mpitrain-hash") as pool, opened(path, os.O_WRONLY) as descriptor:
        file = _Writing(descriptor, min(offsets, default=0))
        if there:
            hashes |= _write_from_device(file, parts, offsets, there, pool)
        raws = {number: bytes_of(parts[number].data) for number in here}
        hashing = pool.submit(lambda: {number: block_hashes(raw) for number, raw in raws.items()})
        for number, raw in raws.items():
            for lo in range(0, len(raw), _WRITTEN):
                file.write(raw[lo : lo + _WRITTEN], offsets[number] + lo)
        os.fsync(descriptor)
        hashes |= hashing.result()
    return [
        Extent(part.piece, path.name, offset, hashes[number])
        for number, (part, offset) in enumerate(zip(parts, offsets, strict=True))
    ]


def _write_from_device(
    file: _Writing, parts: Sequence[Part], offsets: Sequence[int], there: Sequence[int], pool: ThreadPoolExecutor
) -> dict[int, tuple[int, ...]]:
    """Write those of the parts that lie on a device; returns the hashes of each."""
    from mpitrain.checkpoint.device_memory import host_pieces

    hashers = {number: ExtentHasher(HASHED) for number in there}
    for at, first, data in host_pieces([parts[number].data for number in there]):
        number = there[at]
        hashing = pool.submit(hashers[number].update, data)
        file.write(data, offsets[number] + first)
        hashing.result()  # then the memory is used again
    return {number: tuple(hasher.hashes()) for number, hasher in hashers.items()}


class _Writing:
    """A file that is being written. begun: the first byte that the disk has not been told to write."""

    def __init__(self, descriptor: int, begun: int) -> None:
        self._descriptor, self._begun = descriptor, begun

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset; the disk begins to when there are enough. Raises OSError."""
        write_at(self._descriptor, data, offset)
        end = offset + len(data)
        if end - self._begun >= _WRITTEN:
            _start_writeback(self._descriptor, self._begun, end - self._begun)
            self._begun = end


def block_hashes(raw: memoryview) -> tuple[int, ...]:
    """CRC-32 of each HASHED bytes."""
    hasher = ExtentHasher(HASHED)
    hasher.update(raw)
    return tuple(hasher.hashes())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous CPU tensor, shared with it."""
    return tensor.detach().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to write these bytes to the disk; only a hint."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _WRITE)


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
