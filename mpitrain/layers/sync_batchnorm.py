"""Batch normalization over the batches of all ranks, so that training does not depend on the number of ranks.

The forward pass sums counts, values and squares over the ranks; the backward pass sums the two sums in its formula
(Ioffe and Szegedy 2015, section 3). Each pass is one all-reduce. In training, every rank must take part in every
forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm1d, 2d or 3d that normalizes with the statistics of all ranks of `comm` in training.

    In evaluation it equals the plain layer. Forward and backward are collective in training.

    Args:
        features: Size of the second dimension.
        comm: Ranks whose batches are normalized as one.
        options: Options of torch's BatchNorm: eps, momentum, affine, track_running_stats.

    Shape:
        Input and output [batch, features, ...]; ranks may have batches of different sizes.
    """

    def __init__(self, features: int, comm: Communicator, **options: Any) -> None:
        super().__init__(features, **options)
        self.comm = comm
        self._sums: _Sums = {}

    @staticmethod
    def convert(module: nn.Module, comm: Communicator) -> nn.Module:
        """Replace every BatchNorm in a module, in place; parameters and statistics are kept.

        Args:
            module: Module to change.
            comm: Ranks whose batches are normalized as one.

        Returns:
            The module; a new layer if the module itself is a BatchNorm.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            return SyncBatchNorm._of(module, comm)
        for name, child in list(module.named_children()):
            setattr(module, name, SyncBatchNorm.convert(child, comm))
        return module

    @staticmethod
    def _of(old: _BatchNorm, comm: Communicator) -> SyncBatchNorm:
        """Return a layer with the parameters, statistics and options of a plain one."""
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
        out, mean, variance, count = _SyncBatchNormFunction.apply(
            input, self.weight, self.bias, self.eps, self.comm, self._sums
        )
        if self.track_running_stats:
            self._track(mean, variance, count)
        return out

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running statistics with those of this batch.

        Args:
            mean: Mean of each feature over all ranks, [features].
            variance: Biased variance of each feature over all ranks, [features].
            count: Number of values per feature over all ranks.
        """
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


@contextmanager
def pause_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let BatchNorms leave their running statistics as they are in the `with` block, which computes a batch again.

    Args:
        modules: Modules with BatchNorms in them.
    """
    norms = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm)]
    statistics = [(norm, norm._buffers.copy()) for norm in norms]
    for norm in norms:  # copies take the updates; autograd saves the same tensors as before
        norm._buffers.update({name: t if t is None else t.clone() for name, t in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in statistics:
            norm._buffers.update(buffers)


_Sums = dict[tuple[int, torch.device], torch.Tensor]  # buffers of one layer, kept at their addresses


def _sums_buffer(memory: _Sums, numel: int, device: torch.device) -> torch.Tensor:
    """Return a rank's float64 buffer for `numel` sums on a device; each call returns the same one."""
    if (numel, device) not in memory:
        memory[numel, device] = torch.empty(numel, dtype=torch.float64, device=device)
    return memory[numel, device]


class _SyncBatchNormFunction(torch.autograd.Function):
    """Autograd function that normalizes x, and also returns the mean, biased variance and count over all ranks.

    The layers are often small, so the time depends on the number of torch operations. Elementwise work on x uses
    torch's fused kernels for given statistics; few operations remain beside them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        comm: Communicator,
        memory: _Sums,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        features = x.shape[1]
        sums = _moments(x, _sums_buffer(memory, 2 * features + 1, x.device))
        comm.all_reduce(sums)
        count = sums[-1].clone()
        means = sums / count
        mean = means[:features]
        variance = torch.addcmul(means[features:-1], mean, mean, value=-1).clamp_(min=0)
        statistics = mean.to(_precision(x)), variance.to(_precision(x))
        ctx.save_for_backward(x, weight, count, *statistics)
        ctx.comm, ctx.memory, ctx.eps, ctx.has_bias = comm, memory, eps, bias is not None
        ctx.mark_non_differentiable(*statistics, count)
        return _affine(x, *statistics, weight, bias, eps), *statistics, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, count, mean, variance = ctx.saved_tensors
        features = x.shape[1]
        local_sums = sums_of_weight, sums_of_bias = _gradient_sums(grad, x, mean, variance, ctx.eps)
        sums = torch.cat(local_sums, out=_sums_buffer(ctx.memory, 2 * features, x.device))
        ctx.comm.all_reduce(sums)
        factor = (variance + ctx.eps).rsqrt_()
        factor = factor if weight is None else factor * weight
        of_weight, of_bias = ((sums / count).view(2, features) * -factor).to(factor.dtype).unbind()
        grad_x = _affine(x, mean, variance, of_weight, of_bias, ctx.eps)
        grad_x.addcmul_(grad, factor.to(grad.dtype).view([1, features] + [1] * (x.dim() - 2)))
        of_parameters = sums_of_weight if weight is not None else None, sums_of_bias if ctx.has_bias else None
        return grad_x, *of_parameters, None, None, None


def _precision(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the statistics of x."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _moments(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Compute the sums of values and of squares for each feature, then the count.

    The squares are first summed as distances from this rank's own mean in x's precision, then shifted in float64 to
    sums about zero. So no digits are lost, neither here nor in the sum over ranks, if the mean is large compared to the
    deviation.

    Args:
        x: Values [batch, features, ...]; the batch may be empty.
        into: Buffer float64 [2 features + 1] for the sums, which is returned.
    """
    features, count = x.shape[1], x.numel() // max(1, x.shape[1])
    if count == 0:
        return into.zero_()
    mean, variance = torch.batch_norm_update_stats(x.to(_precision(x)), None, None, 0.0)
    torch.cat([mean, variance, mean.new_ones(1)], out=into)
    into[features:-1].addcmul_(into[:features], into[:features])
    return into.mul_(count)


def _affine(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)


def _gradient_sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each feature, the sum of the gradient times the normalized x, and the sum of the gradient."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    output_mask = [False, True, True]  # compute the gradients of x, of a weight, of a bias
    backward = torch.ops.aten.native_batch_norm_backward
    _, of_weight, of_bias = backward(grad, x, None, mean, variance, None, None, False, eps, output_mask)
    return of_weight, of_bias
