"""The files of a checkpoint: an HDF5 structure, and the bytes in it written at their places, hashed on the way.

A file belongs to a rank, or to all ranks of a node: the first of them makes the structure, then each writes its
own pieces. HDF5 is only asked where the data sets lie; all bytes are written with positioned writes, so
that a full disk is an OSError of ours, and writing is as fast as the disk.

model.h5: the whole model as one HDF5 file, for any HDF5 tool.

Each parameter and buffer is a virtual data set under its PyTorch name, in its whole shape, whose elements HDF5
fetches from the rank files beside it. It is a view for people and tools and never restored from: where a rank
file is missing HDF5 shows fill values (NaN) without an error.

A flat stretch of a tensor is not a rectangle of it. It is cut into rectangles, at most 2 n - 1 of them in n
dimensions; here [7, 22) of a [4, 8] tensor:

    . . . . . . . a        a: the end of a row
    b b b b b b b b        b: whole rows
    c c c c c c . .        c: the beginning of a row
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


def _dataset_names(names: Sequence[str]) -> list[str]:
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
        for (spec, piece), name in zip(places, _dataset_names([spec.name for spec, _ in places]), strict=True):
            space = h5py.h5s.create_simple((piece.numel,)) if spec.shape else scalar
            made = h5py.h5d.create(file.id, None, _hdf5_type(DTYPES[spec.dtype]), space, how)
            _link(file, name, made)
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
    there = [number for number, part in enumerate(parts) if not part.data.is_cpu]
    hashers = [ExtentHasher(HASHED) for _ in parts]
    with ThreadPoolExecutor(1, "mpitrain-hash") as pool, opened(path, os.O_WRONLY) as descriptor:
        file = _Writing(descriptor, min(offsets, default=0))
        if there:
            from mpitrain.checkpoint.device_memory import host_pieces

            for at, first, data in host_pieces([parts[number].data for number in there]):
                hashed = pool.submit(hashers[there[at]].update, data)
                file.write(data, offsets[there[at]] + first)
                hashed.result()  # then the memory is used again
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


class _Writing:
    """A file that is being written. begun: the first byte that the disk has not been told to write."""

    def __init__(self, descriptor: int, begun: int) -> None:
        self._descriptor, self._begun = descriptor, begun

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset; the disk begins to when there are enough. Raises OSError."""
        write_at(self._descriptor, data, offset)
        end = offset + len(data)
        if end - self._begun >= _WRITTEN:
            if _sync_file_range is not None:  # only a hint to the kernel
                stretch = ctypes.c_int64(self._begun), ctypes.c_int64(end - self._begun)
                _sync_file_range(self._descriptor, *stretch, _WRITE)
            self._begun = end


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous CPU tensor, shared with it."""
    return tensor.detach().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _link(file: h5py.File, name: str, dataset: h5py.h5d.DatasetID) -> None:
    """Give a data set its name, and make the groups in that."""
    how = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    how.set_create_intermediate_group(True)
    how.set_char_encoding(h5py.h5t.CSET_UTF8)
    h5py.h5o.link(dataset, file["/"].id, name.encode(), lcpl=how)


def _hdf5_type(dtype: torch.dtype) -> h5py.h5t.TypeID:
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


def make_view(tensors: Mapping[str, TensorSpec], extents: Sequence[Extent], tied: Mapping[str, str]) -> Image:
    """Make the view of the tensors whose names begin with MODEL.

    Args:
        tensors: The logical tensors, by their names.
        extents: Where their pieces lie.
        tied: Further names of parameters, and the names that they are saved under.
    """
    sources: dict[str, list[tuple[Extent, str]]] = {}
    # each file's in its order, as its data sets were named
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
                with suppress(OSError, ValueError, RuntimeError):  # where its path leads through a data set
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
    """Cut a piece into rectangles of its tensor, each of which is contiguous in the piece.

    Args:
        piece: The piece.
        shape: The shape of the tensor.

    Yields:
        (the first index of a rectangle, its extent, its place in the piece).
    """
    ranges = piece.box.ranges(shape)
    if ranges is None:  # a box of a view that has other dimensions
        for start, length, place in zip(*(a.tolist() for a in piece.runs()), strict=True):
            for first, size, more in _cut(start, start + length, shape):
                yield first, size, place + more
        return
    begin = [start for start, _ in ranges]
    for first, size, place in _cut(piece.lo, piece.hi, [stop - start for start, stop in ranges]):
        yield tuple(map(add, begin, first)), size, place


def _cut(lo: int, hi: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Elements [lo, hi) of a row-major tensor as rectangles, in order: (first, extent, place after lo)."""
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
        for first, size, place in _cut(inside, inside + end - at, shape[1:]):
            yield (number, *first), (1, *size), at - lo + place
        at = end
