"""Adasum: the sum of two gradients without the part that both of them contain.

    a, b  ->  (1 - a.b / (2 a.a)) a  +  (1 - a.b / (2 b.b)) b

Orthogonal gradients are added, parallel ones averaged. Ranks combine in a binary tree, each gradient on its own
(Maleki et al. 2021, Scaling Distributed Training with Adaptive Summation, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.comm import Communicator

_TAG = 28_200


def adasum(comm: Communicator, flat: torch.Tensor, sizes: Sequence[int]) -> None:
    """Combine the vectors of all ranks in place. The number of ranks must be a power of two. Collective.

    Each of log2(size) rounds exchanges the whole vector with one other rank.

    Args:
        comm: Ranks.
        flat: Vectors of this rank end to end, floating point.
        sizes: Length of each vector.
    """
    other, distance = torch.empty_like(flat), 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        receive, send = comm.irecv(other, partner, _TAG), comm.isend(flat, partner, _TAG)
        receive.wait()
        send.wait()
        # both ranks of a pair compute from the same operands in the same order, so that they get the same bits
        lower, upper = (flat, other) if comm.rank < partner else (other, flat)
        for mine, a, b in zip(flat.split(sizes), lower.split(sizes), upper.split(sizes), strict=True):
            mine.copy_(combine(a, b))
        distance *= 2


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the Adasum of two vectors. Products are computed in float64.

    Args:
        a, b: Vectors of equal length.
    """
    x, y = a.double(), b.double()
    dot, of_x, of_y = x.dot(y), x.dot(x), y.dot(y)
    one = torch.ones_like(dot)
    factor_x = torch.where(of_x > 0, one - dot / (2 * of_x), one)
    factor_y = torch.where(of_y > 0, one - dot / (2 * of_y), one)
    return (factor_x * x + factor_y * y).to(a.dtype)
