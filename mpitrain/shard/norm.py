"""The norm of gradients of which every rank has all: each rank reads its part, and the sums of squares are added.

bucket 0          bucket 1                  A bucket of N ranks is read once instead of N times, so the norm takes
| rank 0 | rank 1 | rank 0   | rank 1   |   1/N of the memory traffic of torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import torch

from mpitrain.comm import Communicator
from mpitrain.layout.boxes import split
from mpitrain.shard.gradients import Gradients


def rank_parts(gradients: Gradients, comm: Communicator) -> list[torch.Tensor]:
    """Return this rank's part of each bucket, as views; together the ranks have each gradient once.

    The gaps between gradients are zeros and do not change the norm.

    Args:
        gradients: Gradients that every rank has whole.
        comm: Ranks that divide the work.
    """
    pairs = zip(gradients.groups, gradients.flat, strict=True)
    buckets = [bucket for group, flat in pairs for bucket in group.buckets(flat)]
    bounds = [split(bucket.numel(), comm.size)[comm.rank :][:2] for bucket in buckets]
    return [bucket[lo:hi] for bucket, (lo, hi) in zip(buckets, bounds, strict=True)]


def sum_squares(tensors: list[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of all elements.

    Args:
        tensors: Tensors on one device; may be empty.
        into: Memory for the result, float64 [1], on the same device. Collectives are bound to its address, so it should
            be the same at each call.

    Returns:
        `into`; not finite if an element is not finite.
    """
    if not tensors:
        return into.zero_()
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=wide_dtype(*tensors)))
    return into.copy_(norms.double().square_().sum())


def wide_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the squares of these tensors are summed."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
