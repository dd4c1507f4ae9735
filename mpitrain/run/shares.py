"""Parts of a checkpoint's tensors: those that each rank writes, and the whole tensors that every rank reads."""

from __future__ import annotations

import torch

from mpitrain.checkpoint import Manifest, Part, TensorSpec
from mpitrain.layout.boxes import Box, Piece

_SHARED = 4096  # elements from which a tensor is written by all ranks


def shared_parts(tensors: dict[str, torch.Tensor], rank: int, size: int) -> list[Part]:
    """Return the parts that this rank writes: a share of each large tensor, and some of the small ones.

    Args:
        tensors: Flat tensors by name, equal on all ranks.
        rank: Number of this rank.
        size: Number of ranks.
    """
    parts = []
    for number, (name, x) in enumerate(tensors.items()):
        n = x.numel()
        lo, hi = (n * rank // size, n * (rank + 1) // size) if n >= _SHARED else (0, n if number % size == rank else 0)
        spec = TensorSpec(name, (n,), str(x.dtype).removeprefix("torch."))
        if lo < hi or (n == 0 and number % size == rank):
            parts.append(Part(spec, Piece(name, Box.whole(n), lo, hi), x[lo:hi]))
    return parts


def whole_parts(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> list[Part]:
    """Return parts for all tensors of a checkpoint.

    Args:
        manifest: Contents of the checkpoint.
        tensors: Dictionary that receives the memory of the parts, as flat tensors by name.
    """
    tensors.clear()
    tensors.update({n: torch.empty(s.numel, dtype=getattr(torch, s.dtype)) for n, s in manifest.tensors.items()})
    return [Part(manifest.tensors[n], Piece.whole(n, x.numel()), x) for n, x in tensors.items()]
