"""Reductions of which each rank gets some rows."""

from __future__ import annotations

import torch

from mpitrain.horovod.torch.compression import Compressions, Compressor
from mpitrain.horovod.torch.handles import Tensors, differentiable, results, submit
from mpitrain.horovod.torch.moving import begin_allgather
from mpitrain.horovod.torch.session import ProcessSet, global_process_set
from mpitrain.horovod.torch.submission import HorovodArgumentError, HorovodInternalError, ReduceOp, Submission

_WHOLE = global_process_set


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = _WHOLE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Submission:
    """Begin to reduce a tensor and divide the result among the ranks; return a handle.

    Args:
        tensor, name, op, process_set, prescale_factor, postscale_factor: Arguments of `reducescatter`.
    """
    return _reducescatter([tensor], False, name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = _WHOLE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Submission:
    """Begin to reduce several tensors and divide the results; return a handle.

    Args:
        tensors, name, op, process_set, prescale_factor, postscale_factor: Arguments of `reducescatter`.
    """
    return _reducescatter(tensors, True, name, op, process_set, prescale_factor, postscale_factor)


def _reducescatter(
    tensors: Tensors,
    is_group: bool,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Submission:
    if any(x.dim() == 0 for x in tensors):
        raise HorovodArgumentError("reducescatter: a scalar has no rows to divide; use allreduce")
    if ReduceOp(op) == ReduceOp.Adasum:
        raise HorovodInternalError("reducescatter: Adasum is not possible; use allreduce")
    return submit(
        "reducescatter",
        tensors,
        name,
        process_set,
        reduction=ReduceOp(op),
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        is_group=is_group,
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compressions.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = _WHOLE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over ranks, and return this rank's rows of the result. Collective.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks. If its rows cannot be divided equally, the first ranks
            get one more.
        name: Name of the operation, the same on all ranks.
        compression: Form in which the tensor is sent.
        op: Average, Sum, Min, Max or Product.
        process_set: Ranks that take part.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
    """
    options = op, process_set, prescale_factor, postscale_factor
    return _differentiable_reducescatter([tensor], False, name, compression, *options)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compressions.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = _WHOLE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, and return this rank's rows of each. Collective.

    Args:
        tensors, name, op, process_set, prescale_factor, postscale_factor: Arguments of `reducescatter`.
    """
    options = op, process_set, prescale_factor, postscale_factor
    return _differentiable_reducescatter(tensors, True, name, compression, *options)


def _differentiable_reducescatter(
    tensors: Tensors,
    is_group: bool,
    name: str | None,
    compression: type[Compressor],
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> list[torch.Tensor]:
    def run(inputs: Tensors) -> Tensors:
        options = op, process_set, prescale_factor, postscale_factor
        return results(_reducescatter(inputs, is_group, name, *options))

    def gradient(grads: Tensors) -> Tensors:
        factor = prescale_factor * postscale_factor * (process_set.size() or 1 if op == ReduceOp.Sum else 1)
        return results(begin_allgather([g * factor if factor != 1 else g for g in grads], True, None, process_set))

    small, contexts = zip(*(compression.compress(x) for x in tensors), strict=True)
    outputs = differentiable(run, gradient, small)
    return [compression.decompress(x, ctx) for x, ctx in zip(outputs, contexts, strict=True)]
