"""model.h5: the whole model as one HDF5 file, for any HDF5 tool.

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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod

import h5py
import numpy as np

from mpitrain.checkpoint.files import dataset_names, hdf5_type, link
from mpitrain.checkpoint.manifest import DTYPES, MODEL, Extent, TensorSpec, grouped
from mpitrain.checkpoint.reading import distinct
from mpitrain.layout import Box, Piece
from mpitrain.storage.hdf5 import Image, hdf5_image

VIEW = "model.h5"


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
        for extent, dataset in zip(listed, dataset_names([e.piece.name for e in listed]), strict=True):
            sources.setdefault(extent.piece.name, []).append((extent, dataset))
    names = [name for name in tensors if name.startswith(MODEL)]
    image = Image()
    with hdf5_image(image) as file:
        for name, shown in zip(names, dataset_names([n.removeprefix(MODEL) for n in names]), strict=True):
            spec = tensors[name]
            if spec.shape:
                link(file, shown, _virtual(file, spec, sources.get(name, [])))
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
    kind = hdf5_type(DTYPES[spec.dtype])
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
    axis = _axis(piece.box, shape)
    if axis is None and piece.box != Box.whole(prod(shape)):  # a box that is no slice of one dimension
        for start, length, place in zip(*(a.tolist() for a in piece.runs()), strict=True):
            for first, size, more in _cut(start, start + length, shape):
                yield first, size, place + more
        return
    within = list(shape)
    if axis is not None:
        within[axis] = piece.box.stop - piece.box.start
    for first, size, place in _cut(piece.lo, piece.hi, within):
        if axis is not None:
            first = (*first[:axis], first[axis] + piece.box.start, *first[axis + 1 :])
        yield first, size, place


def _axis(box: Box, shape: Sequence[int]) -> int | None:
    """The dimension a box is a slice along."""
    for axis in range(len(shape)):
        if (box.outer, box.dim, box.inner) == (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])):
            return axis
    return None


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
