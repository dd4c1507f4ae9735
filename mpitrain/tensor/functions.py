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

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpitrain.tensor.axis import Axis


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """x itself; backward sums its gradient over the ranks."""
    return _Copy.apply(x, axis) if axis.size > 1 else x


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's x; backward gives each rank the gradient as it is."""
    return _Reduce.apply(x, axis) if axis.size > 1 else x


def gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's x put together along a dimension; backward gives each rank its part of the gradient."""
    return _Gather.apply(x, axis, dim) if axis.size > 1 else x


def scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of x along a dimension; backward puts the gradients of all parts together."""
    return _Scatter.apply(x, axis, dim) if axis.size > 1 else x


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's x put together along a dimension; backward sums the gradients and gives each rank its part."""
    return _AllGather.apply(x, axis, dim) if axis.size > 1 else x


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of the sum of every rank's x; backward puts the gradients of all parts together."""
    return _ReduceScatter.apply(x, axis, dim) if axis.size > 1 else x


class _Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.axis.all_reduce(grad), None


class _Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return axis.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    """All-gather forward, own part backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        out, lengths = axis.all_gather(x, dim)
        ctx.dim, ctx.start, ctx.length = dim, sum(lengths[: axis.rank]), lengths[axis.rank]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None


class _Scatter(torch.autograd.Function):
    """Own part forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.own(x, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.axis.all_gather(grad, ctx.dim)[0], None, None


class _AllGather(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        out, ctx.lengths = axis.all_gather(x, dim)
        ctx.axis, ctx.dim = axis, dim
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.axis.reduce_scatter(grad, ctx.dim, ctx.lengths), None, None


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.axis.all_gather(grad, ctx.dim)[0], None, None
