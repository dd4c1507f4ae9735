"""Batch normalization over the batch of all ranks, so that a model trains alike on any number of them.

Forward sums counts, values and squares over the ranks, backward the two sums of its formula (Ioffe and Szegedy 2015,
section 3); each is one all-reduce. Every rank must take part in every forward and backward pass in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm1d, 2d or 3d whose statistics in training are those of all ranks of `comm`.

    In evaluation it is the plain layer. Forward and backward are collective in training.

    Args:
        features: Size of the second dimension.
        comm: The ranks whose batches are normalized as one.
        options: Of torch's BatchNorm: eps, momentum, affine, track_running_stats.

    Shape:
        Input and output [batch, features, ...]; ranks may have batches of different sizes.
    """

    def __init__(self, features: int, comm: Communicator, **options: Any) -> None:
        super().__init__(features, **options)
        self.comm = comm

    @staticmethod
    def convert(module: nn.Module, comm: Communicator) -> nn.Module:
        """The module with every BatchNorm in it replaced, in place; parameters and statistics are kept.

        Returns a new layer where the module is a BatchNorm itself.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            return SyncBatchNorm._of(module, comm)
        for name, child in list(module.named_children()):
            setattr(module, name, SyncBatchNorm.convert(child, comm))
        return module

    @staticmethod
    def _of(old: _BatchNorm, comm: Communicator) -> SyncBatchNorm:
        """A layer with the parameters, statistics and options of a plain one."""
        options = {name: getattr(old, name) for name in ("eps", "momentum", "affine", "track_running_stats")}
        new = SyncBatchNorm(old.num_features, comm, **options)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
            setattr(new, name, getattr(old, name))
        return new

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.comm.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        out, mean, variance, count = _SyncBatchNormFunction.apply(input, self.weight, self.bias, self.eps, self.comm)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return out

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Move the running statistics towards those of this batch; variance: biased, count: of all ranks."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _SyncBatchNormFunction(torch.autograd.Function):
    """Normalizes x, and gives the mean, biased variance and count of all ranks beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        comm: Communicator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.double()  # sums of squares of ranks' parts lose the digits that one rank's mean would keep
        sums = torch.cat([wide.sum(dims), (wide * wide).sum(dims), wide.new_full((1,), x.numel() / max(1, x.shape[1]))])
        comm.all_reduce(sums)
        features = x.shape[1]
        count = sums[-1]
        mean = sums[:features] / count
        variance = (sums[features:-1] / count - mean * mean).clamp_(min=0)
        inverse = (variance + eps).rsqrt()
        shape = [1, features] + [1] * (x.dim() - 2)
        normal = ((x - mean.to(x.dtype).view(shape)) * inverse.to(x.dtype).view(shape)).to(x.dtype)
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.comm, ctx.has_bias = comm, bias is not None
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normal, inverse, weight, count = ctx.saved_tensors
        features = normal.shape[1]
        dims = [d for d in range(normal.dim()) if d != 1]
        shape = [1, features] + [1] * (normal.dim() - 2)
        own_bias, own_weight = grad.sum(dims), (grad * normal).sum(dims)
        sums = torch.cat([own_bias.double(), own_weight.double()])
        ctx.comm.all_reduce(sums)
        of_grad = (sums[:features] / count).to(grad.dtype).view(shape)
        of_product = (sums[features:] / count).to(grad.dtype).view(shape)
        factor = inverse.to(grad.dtype)
        factor = factor if weight is None else factor * weight
        into = (grad - of_grad - normal * of_product) * factor.view(shape)
        return into, own_weight if weight is not None else None, own_bias if ctx.has_bias else None, None, None
