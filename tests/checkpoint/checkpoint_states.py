"""States to save, and ways to divide them among ranks."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch

from mpitrain.checkpoint import Part, TensorSpec
from mpitrain.layout.boxes import Box, Piece, shares, split

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.complex64)


def some_tensors(prefix="", seed=3):
    """Return tensors of every relevant dtype and number of dimensions; the largest have more than one hash."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (1,), (5, 7), (0, 3), (300, 41), (1_100_000,)]
    tensors = {}
    for number, shape in enumerate(shapes):
        dtype = DTYPES[number % len(DTYPES)]
        tensors[f"{prefix}t{number}.weight"] = (torch.rand(shape, generator=generator) * 100).to(dtype)
    tensors[f"{prefix}last"] = torch.arange(2_500_000, dtype=torch.float32) + seed
    return tensors


def small_tensors(prefix="model/", seed=3):
    """Return a few kilobytes of tensors of several shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (11, 7), "b.weight": (3, 5, 6), "c.bias": (13,), "d.table": (40, 2, 3, 2), "n": ()}
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.int64]
    return {
        prefix + name: (torch.rand(shape, generator=generator) * 100).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


def spec(name, tensor):
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def part(name, tensor, lo, hi, box=None):
    """Return elements [lo, hi) of a tensor, or of a box inside it, as a `Part`."""
    within = box or Box.whole(tensor.numel())
    piece = Piece(name, within, lo, hi)
    data = within.of(tensor).reshape(-1)[lo:hi].clone()
    return Part(spec(name, tensor), piece, data)


def in_shares(tensors, rank, size):
    """Give each rank its share of the elements, as when a replicated model is written."""
    names = list(tensors)
    intervals = shares([tensors[n].numel() for n in names], size, rank, multiple=4)
    parts = [part(names[number], tensors[names[number]], lo, hi) for number, lo, hi in intervals]
    return parts + ([part(n, t, 0, 0) for n, t in tensors.items() if not t.numel()] if rank == 0 else [])


def in_slices(tensors, rank, size):
    """Give each rank a flat slice of each tensor, as ZeRO does."""
    return [part(n, t, *split(t.numel(), size)[rank : rank + 2]) for n, t in tensors.items()]


def in_boxes(tensors, rank, size):
    """Give each rank a slice along the second dimension, or a copy of the whole tensor, as tensor parallelism does."""
    parts = []
    for name, tensor in tensors.items():
        box = None
        if tensor.dim() >= 2 and tensor.numel():
            box = Box.along(tensor.shape, 1, *split(tensor.shape[1], size)[rank : rank + 2])
        parts.append(part(name, tensor, 0, box.numel if box else tensor.numel(), box))
    return parts


def in_grid(tensors, rank, size):
    """Give each rank one column of a grid of cells: two axes divide each tensor's first and last dimension."""
    parts = []
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or min(tensor.shape) == 0:
            parts.append(part(name, tensor, 0, tensor.numel()))
            continue
        lo, hi = split(tensor.shape[-1], size)[rank : rank + 2]
        for top, bottom in pairwise(split(tensor.shape[0], 2)):
            middle = tensor.shape[1:-1]
            box = Box(tuple(tensor.shape), (top, *(0 for _ in middle), lo), (bottom, *middle, hi))
            parts.append(part(name, tensor, 0, box.numel, box))
    return parts


def empty(parts):
    """Return parts like these, with memory to load into."""
    return [Part(p.spec, p.piece, torch.zeros_like(p.data)) for p in parts]


def whole_parts(tensors):
    return empty([part(n, t, 0, t.numel()) for n, t in tensors.items()])


def same(parts, others):
    """Return whether both lists of parts have the same bits."""
    return len(parts) == len(others) and all(
        torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) if a.data.numel() else a.piece == b.piece
        for a, b in zip(parts, others, strict=True)
    )


def nbytes(parts):
    return sum(prod(p.data.shape) * p.data.element_size() for p in parts)
