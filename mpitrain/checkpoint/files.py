"""Files of a checkpoint: an HDF5 structure, into which tensor bytes are written at their offsets and hashed.

A file belongs to one rank, or to all ranks of a node: the first of them creates the structure, then each writes its
own pieces. HDF5 only determines where the data sets lie. All bytes are written with positioned writes, so that a full
disk is reported as an OSError and writing is as fast as the disk.

model.h5 presents the whole model as one HDF5 file, for any HDF5 tool.

Each parameter and buffer is a virtual data set under its PyTorch name, in its full shape, whose elements HDF5 fetches
from the rank files beside it. It is a view for people and tools, and checkpoints are never restored from it: if a rank
file is missing, HDF5 shows fill values (NaN) without an error.

A flat range of a tensor's elements is in general not a rectangle. It is cut into at most 2 n - 1 rectangles in n
dimensions; here the range [7, 22) of a [4, 8] tensor:

    . . . . . . . a        a: end of a row
    b b b b b b b b        b: whole rows
    c c c c c c . .        c: beginning of a row
    . . . . . . . .
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from operator import add
from pathlib import Path

import h5py
import numpy as np
import torch

from mpitrain.checkpoint.manifest import DTYPES, HASHED, MODEL, Extent, TensorSpec, distinct, grouped
from mpitrain.layout.boxes import Piece
from mpitrain.storage.disk import opened
from mpitrain.storage.hdf5 import ExtentHasher, Image, contiguous, crc32, hdf5_image, write_at

VIEW = "model.h5"
PlannedPiece = tuple[TensorSpec, Piece]  # tensor, and the piece of it that will be written to a file
_WRITTEN = 8 << 20  # bytes of one write
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2), which Python's os lacks
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


@dataclass(frozen=True)
class Part:
    """Piece of a tensor held by a rank.

    Attributes:
        spec: Tensor.
        piece: Piece of the tensor.
        data: Elements of the piece, in a flat contiguous tensor, on the host or on a device.
    """

    spec: TensorSpec
    piece: Piece
    data: torch.Tensor


@dataclass(frozen=True)
class Structure:
    """HDF5 file without its data.

    Attributes:
        image: Bytes that HDF5 writes itself.
        offsets: First byte of each piece.
        rest: CRC-32 of all bytes of the file outside the pieces.
    """

    image: Image
    offsets: tuple[int, ...]
    rest: int


def _dataset_names(names: Sequence[str]) -> list[str]:
    """Return the HDF5 names of pieces in one file.

    Args:
        names: Tensor name of each piece.

    Returns:
        Tensor name of each piece, with #1, #2, ... appended for further pieces of the same tensor. The first piece gets
        #0 if its name is also a group in another name's path. A number is skipped if the result is the name of a
        tensor.
    """
    tensors = set(names)
    groups = {name[:at] for name in tensors for at in range(1, len(name)) if name[at] == "/"}
    counts: dict[str, int] = {}
    dataset_names = []
    for name in names:
        number = counts.get(name, 0)
        shown = f"{name}#{number}" if number or name in groups else name
        while shown != name and (shown in tensors or shown in groups):
            number += 1
            shown = f"{name}#{number}"
        counts[name] = number + 1
        dataset_names.append(shown)
    return dataset_names


def make_structure(places: Sequence[PlannedPiece]) -> Structure:
    """Create the structure of a file that holds these pieces, one data set after the other."""
    properties, scalar = contiguous(), h5py.h5s.create(h5py.h5s.SCALAR)
    pair, number = h5py.h5s.create_simple((2,)), h5py.h5t.STD_I64LE
    offsets = []
    image = Image()
    with hdf5_image(image) as file:
        for (spec, piece), name in zip(places, _dataset_names([spec.name for spec, _ in places]), strict=True):
            space = h5py.h5s.create_simple((piece.numel,)) if spec.shape else scalar
            dataset = h5py.h5d.create(file.id, None, _hdf5_type(DTYPES[spec.dtype]), space, properties)
            _link(file, name, dataset)
            h5py.h5a.create(dataset, b"elements", number, pair).write(np.array([piece.lo, piece.hi], dtype=np.int64))
            shape = np.array(spec.shape, dtype=np.int64)
            h5py.h5a.create(dataset, b"shape", number, h5py.h5s.create_simple(shape.shape)).write(shape)
            offsets.append(dataset.get_offset() or 0)
    crc = 0
    for lo, hi in gaps([(o, p.numel * s.itemsize) for o, (s, p) in zip(offsets, places, strict=True)], image.size):
        image.seek(lo)
        crc = crc32(image.read(hi - lo), crc)
    return Structure(image, tuple(offsets), crc)


def gaps(occupied: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return the ranges [lo, hi) of a file that are not occupied.

    Args:
        occupied: Offset and length of each occupied range in bytes.
        size: Size of the file in bytes.
    """
    ranges, end = [], 0
    for offset, nbytes in sorted(s for s in occupied if s[1]):
        if offset > end:
            ranges.append((end, offset))
        end = max(end, offset + nbytes)
    if size > end:
        ranges.append((end, size))
    return ranges


def write_parts(path: Path, parts: Sequence[Part], offsets: Sequence[int]) -> list[Extent]:
    """Write parts into a file that already has its `Structure`, and fsync it.

    Another thread hashes the data at the same time. The disk starts writing before all data is in the page cache.

    Args:
        path: Path of the file.
        parts: Parts to write.
        offsets: First byte of each part in the file.

    Returns:
        Extent of each part for the manifest.

    Raises:
        OSError: The disk is full or fails.
    """
    there = [number for number, part in enumerate(parts) if not part.data.is_cpu]
    hashers = [ExtentHasher(HASHED) for _ in parts]
    with ThreadPoolExecutor(1, "mpitrain-hash") as pool, opened(path, os.O_WRONLY) as descriptor:
        file = _FileWriter(descriptor, min(offsets, default=0))
        if there:
            from mpitrain.checkpoint.device_memory import host_pieces

            for at, first, data in host_pieces([parts[number].data for number in there]):
                hashed = pool.submit(hashers[there[at]].update, data)
                file.write(data, offsets[there[at]] + first)
                hashed.result()  # the memory is reused after this
        hashing = []
        for part, offset, hasher in zip(parts, offsets, hashers, strict=True):
            raw = bytes_of(part.data) if part.data.is_cpu else memoryview(b"")
            hashing.append(pool.submit(hasher.update, raw))
            for lo in range(0, len(raw), _WRITTEN):
                file.write(raw[lo : lo + _WRITTEN], offset + lo)
        os.fsync(descriptor)
        for hashed in hashing:
            hashed.result()
    return [
        Extent(part.piece, path.name, offset, tuple(hasher.hashes()))
        for part, offset, hasher in zip(parts, offsets, hashers, strict=True)
    ]


class _FileWriter:
    """File that is being written. begun: first byte whose writeback has not been started."""

    def __init__(self, descriptor: int, begun: int) -> None:
        self._descriptor, self._begun = descriptor, begun

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset, and start the writeback after every 8 MiB.

        Args:
            data: Bytes to write.
            offset: Position in the file, in bytes.

        Raises:
            OSError: The disk is full or fails.
        """
        write_at(self._descriptor, data, offset)
        end = offset + len(data)
        if end - self._begun >= _WRITTEN:
            if _sync_file_range is not None:  # only a hint to the kernel
                written = ctypes.c_int64(self._begun), ctypes.c_int64(end - self._begun)
                _sync_file_range(self._descriptor, *written, _WRITE)
            self._begun = end


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat contiguous CPU tensor; they share its memory."""
    return tensor.detach().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _link(file: h5py.File, name: str, dataset: h5py.h5d.DatasetID) -> None:
    """Link a data set under its name, creating the groups in its path."""
    how = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    how.set_create_intermediate_group(True)
    how.set_char_encoding(h5py.h5t.CSET_UTF8)
    h5py.h5o.link(dataset, file["/"].id, name.encode(), lcpl=how)


def _hdf5_type(dtype: torch.dtype) -> h5py.h5t.TypeID:
    """Return the HDF5 type of a torch dtype; bfloat16 is a custom float type that other tools read as float32."""
    if dtype == torch.bfloat16:
        kind = h5py.h5t.IEEE_F32LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
        kind.set_ebias(127)
        return kind
    if dtype == torch.bool:
        dtype = torch.uint8
    return h5py.h5t.py_create(torch.empty(0, dtype=dtype).numpy().dtype)


def make_view(tensors: Mapping[str, TensorSpec], extents: Sequence[Extent], tied: Mapping[str, str]) -> Image:
    """Return the image of model.h5, which shows the tensors whose names begin with MODEL.

    Args:
        tensors: Logical tensors by name.
        extents: Locations of their pieces.
        tied: Other names of tied parameters, with the names they are saved under.
    """
    sources: dict[str, list[tuple[Extent, str]]] = {}
    # in the order within each file, which determined the names of its data sets
    for listed in grouped(extents, lambda extent: extent.file).values():
        for extent, dataset in zip(listed, _dataset_names([e.piece.name for e in listed]), strict=True):
            sources.setdefault(extent.piece.name, []).append((extent, dataset))
    names = [name for name in tensors if name.startswith(MODEL)]
    image = Image()
    with hdf5_image(image) as file:
        for name, shown in zip(names, _dataset_names([n.removeprefix(MODEL) for n in names]), strict=True):
            spec = tensors[name]
            if spec.shape:
                _link(file, shown, _virtual(file, spec, sources.get(name, [])))
            elif name in sources:  # HDF5 has no virtual scalars
                extent, dataset = sources[name][0]
                file[shown] = h5py.ExternalLink(extent.file, dataset)
        for alias, name in tied.items():
            if name in file and alias not in file:
                with suppress(OSError, ValueError, RuntimeError):  # if its path leads through a data set
                    file[alias] = file[name]
    return image


def _virtual(file: h5py.File, spec: TensorSpec, sources: Sequence[tuple[Extent, str]]) -> h5py.h5d.DatasetID:
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    kind = _hdf5_type(DTYPES[spec.dtype])
    if DTYPES[spec.dtype].is_floating_point:
        how.set_fill_value(np.array(np.nan, dtype=np.float32))
    elif DTYPES[spec.dtype].is_complex:
        how.set_fill_value(np.array(complex(np.nan, np.nan), dtype=spec.dtype))
    whole = h5py.h5s.create_simple(spec.shape)
    once = {id(extent) for extent in distinct(extent for extent, _ in sources)}
    mapped = [(e, dataset) for e, dataset in sources if id(e) in once and e.piece.numel]
    if mapped:
        how.set_layout(h5py.h5d.VIRTUAL)
    ones = (1,) * len(spec.shape)
    for extent, dataset in mapped:
        source = h5py.h5s.create_simple((extent.piece.numel,))
        for first, size, place in rectangles(extent.piece, spec.shape):
            whole.select_hyperslab(first, ones, block=size)
            source.select_hyperslab((place,), (1,), block=(prod(size),))
            how.set_virtual(whole, extent.file.encode(), f"/{dataset}".encode(), source)
    return h5py.h5d.create(file.id, None, kind, h5py.h5s.create_simple(spec.shape), how)


def rectangles(piece: Piece, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Divide a piece into rectangles of its tensor, each contiguous in the piece.

    Args:
        piece: Piece to divide.
        shape: Shape of the tensor.

    Yields:
        (first index of a rectangle, its extent in each dimension, its offset in the piece in elements).
    """
    ranges = piece.box.ranges(shape)
    if ranges is None:  # the box belongs to a view with other dimensions
        for start, length, place in zip(*(a.tolist() for a in piece.runs()), strict=True):
            for first, size, more in _rectangles_of_range(start, start + length, shape):
                yield first, size, place + more
        return
    begin = [start for start, _ in ranges]
    for first, size, place in _rectangles_of_range(piece.lo, piece.hi, [stop - start for start, stop in ranges]):
        yield tuple(map(add, begin, first)), size, place


def _rectangles_of_range(
    lo: int, hi: int, shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield elements [lo, hi) of a row-major tensor as rectangles in order: (first index, extent, offset from lo)."""
    if lo >= hi:
        return
    row = prod(shape[1:])
    if len(shape) == 1:
        yield (lo,), (hi - lo,), 0
        return
    at = lo
    while at < hi:
        number, inside = divmod(at, row)
        if inside == 0 and hi - at >= row:  # whole rows
            rows = (hi - at) // row
            yield (number, *(0 for _ in shape[1:])), (rows, *shape[1:]), at - lo
            at += rows * row
            continue
        end = min(hi, (number + 1) * row)
        for first, size, place in _rectangles_of_range(inside, inside + end - at, shape[1:]):
            yield (number, *first), (1, *size), at - lo + place
        at = end
