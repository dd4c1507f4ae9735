"""The functions between what all ranks of the tensor axis have and what each has its part of, with their gradients.

                        forward                       backward
    copy                the same tensor               sum over the ranks          f of Shoeybi et al. (2019), fig. 3
    reduce              sum over the ranks            the same tensor             g
    gather              all parts along a dimension   this rank's part
    scatter             this rank's part              all parts
    all_gather          all parts                     this rank's part of the sum    g of Korthikanti et al. (2022)
    reduce_scatter      this rank's part of the sum   all parts                      g-bar, section 4.2.2

`gather` is for what all ranks then use alike, `all_gather` for what each then uses in its own way. Parts are those
of `layout.split`, any length. On one rank all of them are the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpitrain.tensor.axis import Axis

Gradient = Callable[[torch.Tensor], torch.Tensor]  # of the output to that of the input


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """x itself; backward sums its gradient over the ranks."""
    return _exchanged(x, axis, lambda x: (x.view_as(x), axis.all_reduce))


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's x; backward gives each rank the gradient as it is."""
    return _exchanged(x, axis, lambda x: (axis.all_reduce(x), lambda grad: grad))


def gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's x put together along a dimension; backward gives each rank its part of the gradient."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, Gradient]:
        whole, lengths = axis.all_gather(x, dim)
        return whole, lambda grad: grad.narrow(dim, sum(lengths[: axis.rank]), lengths[axis.rank])

    return _exchanged(x, axis, forward)


def scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of x along a dimension; backward puts the gradients of all parts together."""
    lengths = [hi - lo for lo, hi in pairwise(axis.bounds(x.shape[dim]))]
    return _exchanged(
        x, axis, lambda x: (axis.own(x, dim).contiguous(), lambda grad: axis.all_gather(grad, dim, lengths=lengths)[0])
    )


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's x put together along a dimension; backward sums the gradients and gives each rank its part."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, Gradient]:
        whole, lengths = axis.all_gather(x, dim)
        return whole, lambda grad: axis.reduce_scatter(grad, dim, lengths)

    return _exchanged(x, axis, forward)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of the sum of every rank's x; backward puts the gradients of all parts together."""
    lengths = [hi - lo for lo, hi in pairwise(axis.bounds(x.shape[dim]))]
    return _exchanged(
        x, axis, lambda x: (axis.reduce_scatter(x, dim), lambda grad: axis.all_gather(grad, dim, lengths=lengths)[0])
    )


def _exchanged(
    x: torch.Tensor, axis: Axis, forward: Callable[[torch.Tensor], tuple[torch.Tensor, Gradient]]
) -> torch.Tensor:
    """What `forward` makes of x, which also gives what backward makes of the gradient; x itself on one rank."""
    return _Exchange.apply(x, forward) if axis.size > 1 else x


class _Exchange(torch.autograd.Function):
    """One of these functions and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], tuple[torch.Tensor, Gradient]]) -> Any:
        out, ctx.of_gradient = function(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.of_gradient(grad), None
