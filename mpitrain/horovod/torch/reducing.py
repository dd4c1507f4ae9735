"""Reductions of tensors over ranks, in the four forms of Horovod's interface.

Names ending in `_async` return a handle for `poll` and `synchronize`; names ending in `_` work in place. Operations
that are neither let gradients through. Grouped operations complete together.
"""

from __future__ import annotations

from typing import Any

import torch

from mpitrain.horovod.torch.compression import Compressions, Compressor
from mpitrain.horovod.torch.handles import Tensors, differentiable, results, submit, synchronize
from mpitrain.horovod.torch.session import ProcessSet, global_process_set
from mpitrain.horovod.torch.submission import HorovodArgumentError, ReduceOp, Submission, UnsupportedError

_WHOLE = global_process_set


def _reduction(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that `op`, or the older argument `average`, asks for."""
    if op is not None and average is not None:
        raise HorovodArgumentError("pass op or average, not both")
    if op is None:
        return ReduceOp.Sum if average is False else ReduceOp.Average
    return ReduceOp(op)


def begin_allreduce(
    tensors: Tensors,
    in_place: bool,
    is_group: bool,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Submission:
    if op == ReduceOp.Adasum:
        _check_adasum(tensors, process_set)
    return submit(
        "allreduce",
        tensors,
        name,
        process_set,
        outputs=None if in_place else [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors],
        reduction=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        is_group=is_group,
    )


def _check_adasum(tensors: Tensors, process_set: ProcessSet) -> None:
    if process_set.process_set_id != 0:
        raise UnsupportedError("Adasum works with the global process set only; leave out process_set")
    size = process_set.size() or 1
    if size & (size - 1):
        raise UnsupportedError(f"Adasum needs a power of two of ranks, not {size}; use op=hvd.Average")
    if not all(x.is_floating_point() for x in tensors):
        raise HorovodArgumentError("Adasum needs floating-point tensors; use op=hvd.Sum")


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Submission:
    """Begin to reduce a tensor over ranks, and return a handle.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: Arguments of `allreduce`.
    """
    reduction = _reduction(op, average)
    return begin_allreduce([tensor], False, False, name, reduction, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Submission:
    """Begin to reduce a tensor over ranks in place, and return a handle.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: Arguments of `allreduce`.
    """
    reduction = _reduction(op, average)
    return begin_allreduce([tensor], True, False, name, reduction, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Submission:
    """Begin to reduce several tensors over ranks, and return a handle.

    Args:
        tensors, average, name, op, prescale_factor, postscale_factor, process_set: Arguments of `allreduce`.
    """
    reduction = _reduction(op, average)
    return begin_allreduce(tensors, False, True, name, reduction, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Submission:
    """Begin to reduce several tensors over ranks in place, and return a handle.

    Args:
        tensors, average, name, op, prescale_factor, postscale_factor, process_set: Arguments of `allreduce`.
    """
    reduction = _reduction(op, average)
    return begin_allreduce(tensors, True, True, name, reduction, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compressions.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> torch.Tensor:
    """Return the reduction of a tensor over the ranks of a process set. Collective over it.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        average: Older form of op: true for Average, false for Sum.
        name: Name of the operation, the same on all ranks; by default calls are numbered.
        compression: Form in which the tensor is sent.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
        process_set: Ranks that take part.

    Raises:
        HorovodInternalError: Shapes, dtypes or options differ between ranks.
    """
    options = average, op, prescale_factor, postscale_factor, process_set
    return _differentiable_allreduce([tensor], False, name, compression, *options)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compressions.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors, which complete together.

    Args:
        tensors, average, name, op, prescale_factor, postscale_factor, process_set: Arguments of `allreduce`.
    """
    options = average, op, prescale_factor, postscale_factor, process_set
    return _differentiable_allreduce(tensors, True, name, compression, *options)


def _differentiable_allreduce(
    tensors: Tensors,
    is_group: bool,
    name: str | None,
    compression: type[Compressor],
    average: bool | None,
    op: int | None,
    *options: Any,
) -> list[torch.Tensor]:
    reduction = _reduction(op, average)

    def run(inputs: Tensors, name: str | None) -> Tensors:
        return results(begin_allreduce(inputs, False, is_group, name, reduction, *options))

    small, contexts = zip(*(compression.compress(x) for x in tensors), strict=True)
    outputs = differentiable(lambda inputs: run(inputs, name), lambda grads: run(grads, None), small)
    return [compression.decompress(x, ctx) for x, ctx in zip(outputs, contexts, strict=True)]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> torch.Tensor:
    """Reduce a tensor over ranks in place, and return it. Collective.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: Arguments of `allreduce`.
    """
    synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensor


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Tensors:
    """Reduce several tensors over ranks in place, and return them. Collective.

    Args:
        tensors, average, name, op, prescale_factor, postscale_factor, process_set: Arguments of `allreduce`.
    """
    synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensors
