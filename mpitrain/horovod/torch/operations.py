"""Horovod's operations on tensors.

Names ending in `_async` return a handle for `poll` and `synchronize`; names ending in `_` work in place. Operations that
are neither let gradients through. Grouped operations complete together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.horovod.torch.compression import Compression, Compressor
from mpitrain.horovod.torch.operation import ArgumentError, HorovodInternalError, Operation, Reduction, UnsupportedError
from mpitrain.horovod.torch.session import ProcessSet, global_process_set, rank

Tensors = Sequence[torch.Tensor]
_WHOLE = global_process_set


def poll(handle: Operation) -> bool:
    """Return whether an operation is complete.

    If it is not, this call may wait until every rank waits for an operation or polls.

    Args:
        handle: Handle of an asynchronous operation.
    """
    if not handle.polled:
        handle.polled = True  # what was submitted just now has hardly arrived everywhere
        return handle.is_complete
    return handle.process_set.require().poll(handle)


def synchronize(handle: Operation) -> Any:
    """Wait for an operation, and return its result. Collective over its process set.

    Args:
        handle: Handle of an asynchronous operation.

    Raises:
        HorovodInternalError: The ranks disagree on the operation, or a rank died.
    """
    if not handle.is_complete or handle.error is not None:
        handle.process_set.require().wait(handle)
    return handle.result


def barrier(process_set: ProcessSet = _WHOLE) -> None:
    """Wait until all ranks of a process set are here. Collective over it."""
    synchronize(_submit("barrier", (), None, process_set))


def join(device: int = -1) -> int:
    """Take part in the other ranks' all-reduces with zeros until all ranks have joined. Collective.

    Args:
        device: Not used; zeros are made on the kind of device that the others use.

    Returns:
        The last rank that joined.
    """
    return _WHOLE.require().join()


def _submit(kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet, **options: Any) -> Operation:
    """Submit an operation, and return its handle."""
    negotiation = process_set.require()
    if any(not isinstance(x, torch.Tensor) for x in tensors):
        raise ArgumentError(f"{kind}: pass torch tensors, not {[type(x).__name__ for x in tensors][:3]}")
    tensors = [x.detach() for x in tensors]
    outputs = options.pop("outputs", None)
    full_name = negotiation.full_name(kind, name)
    operation = Operation(kind, full_name, tensors, tensors if outputs is None else outputs, **options)
    operation.process_set = process_set
    return negotiation.submit(operation)


# -- allreduce


def _reduction(op: int | None, average: bool | None) -> Reduction:
    """Return the reduction that `op`, or the older argument `average`, asks for."""
    if op is not None and average is not None:
        raise ArgumentError("pass op or average, not both")
    if op is None:
        return Reduction.Sum if average is False else Reduction.Average
    return Reduction(op)


def _allreduce(
    tensors: Tensors,
    in_place: bool,
    is_group: bool,
    name: str | None,
    op: Reduction,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    if op == Reduction.Adasum:
        _check_adasum(tensors, process_set)
    return _submit(
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
        raise ArgumentError("Adasum needs floating-point tensors; use op=hvd.Sum")


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Operation:
    """Begin to reduce a tensor over ranks, and return a handle. See `allreduce`."""
    reduction = _reduction(op, average)
    return _allreduce([tensor], False, False, name, reduction, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Operation:
    """Begin to reduce a tensor over ranks in place, and return a handle. See `allreduce`."""
    reduction = _reduction(op, average)
    return _allreduce([tensor], True, False, name, reduction, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Operation:
    """Begin to reduce several tensors over ranks, and return a handle. See `allreduce`."""
    reduction = _reduction(op, average)
    return _allreduce(tensors, False, True, name, reduction, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> Operation:
    """Begin to reduce several tensors over ranks in place, and return a handle. See `allreduce`."""
    reduction = _reduction(op, average)
    return _allreduce(tensors, True, True, name, reduction, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
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
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _WHOLE,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors, which complete together. See `allreduce`."""
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
        return _results(_allreduce(inputs, False, is_group, name, reduction, *options))

    small, contexts = zip(*(compression.compress(x) for x in tensors), strict=True)
    outputs = _differentiable(lambda inputs: run(inputs, name), lambda grads: run(grads, None), small)
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
    """Reduce a tensor over ranks in place, and return it. Collective. See `allreduce`."""
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
    """Reduce several tensors over ranks in place, and return them. Collective. See `allreduce`."""
    synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensors


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = _WHOLE
) -> Callable[[], torch.Tensor]:
    """Begin to sum or average a sparse tensor, and return a function that returns the result, not coalesced.

    Args:
        tensor: Sparse tensor in COO layout.
        name: Name of the operation.
        op: Average or Sum.
        process_set: Ranks that take part.
    """
    if Reduction(op) not in (Reduction.Average, Reduction.Sum):
        raise ArgumentError(f"sparse_allreduce: op {Reduction(op).name} is impossible; use Average or Sum")
    x = tensor.detach().coalesce()
    indices = allgather_async(x.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(x.values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        every = synchronize(values)
        every = every / process_set.size() if Reduction(op) == Reduction.Average else every
        return torch.sparse_coo_tensor(synchronize(indices).t(), every, x.shape)

    return result


# -- allgather


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = _WHOLE) -> Operation:
    """Begin to gather a tensor of all ranks, and return a handle. See `allgather`."""
    return _allgather([tensor], False, name, process_set)


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = _WHOLE) -> Operation:
    """Begin to gather several tensors of all ranks, and return a handle. See `allgather`."""
    return _allgather(tensors, True, name, process_set)


def _allgather(tensors: Tensors, is_group: bool, name: str | None, process_set: ProcessSet) -> Operation:
    if any(x.dim() == 0 for x in tensors):
        raise ArgumentError("allgather: a scalar has no dimension to join; pass tensor.reshape(1)")
    return _submit("allgather", tensors, name, process_set, is_group=is_group)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = _WHOLE) -> torch.Tensor:
    """Return the tensors of all ranks joined along the first dimension, in order of rank. Collective.

    Args:
        tensor: Tensor whose first dimension may differ between ranks.
        name: Name of the operation, the same on all ranks.
        process_set: Ranks that take part.

    Raises:
        HorovodInternalError: Dtypes or other dimensions differ between ranks.
    """
    return _differentiable_allgather([tensor], False, name, process_set)[0]


def grouped_allgather(tensors: Tensors, name: str | None = None, process_set: ProcessSet = _WHOLE) -> list[torch.Tensor]:
    """Return several tensors of all ranks, each joined along its first dimension. Collective. See `allgather`."""
    return list(_differentiable_allgather(tensors, True, name, process_set))


def _differentiable_allgather(
    tensors: Tensors, is_group: bool, name: str | None, process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    def gradient(grads: Tensors) -> Tensors:
        means = _results(_allreduce(grads, False, True, None, Reduction.Average, 1.0, 1.0, process_set))
        rows = torch.tensor([[x.shape[0] for x in tensors]])
        before = synchronize(allgather_async(rows, None, process_set))[: process_set.rank()].sum(0).tolist()
        return [g[b : b + x.shape[0]] for g, b, x in zip(means, before, tensors, strict=True)]

    return _differentiable(lambda xs: _results(_allgather(xs, is_group, name, process_set)), gradient, tensors)


# -- broadcast


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> Operation:
    """Begin to copy the root's tensor into a new tensor of each rank, and return a handle. See `broadcast`."""
    outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format)]
    return _submit("broadcast", [tensor], name, process_set, outputs=outputs, root=_root(root_rank, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> Operation:
    """Begin to copy the root's tensor into that of each rank, and return a handle. See `broadcast`."""
    return _submit("broadcast", [tensor], name, process_set, root=_root(root_rank, process_set))


def _root(root_rank: int, process_set: ProcessSet) -> int:
    """Return a global rank as a rank of the process set."""
    process_set.require()
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ArgumentError(f"root_rank {root_rank} does not belong to the process set; use one of its ranks {ranks}")
    return ranks.index(root_rank)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> torch.Tensor:
    """Return the root's tensor. Collective.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        root_rank: Global rank whose tensor is returned.
        name: Name of the operation, the same on all ranks.
        process_set: Ranks that take part.

    Raises:
        HorovodInternalError: Shapes, dtypes or roots differ between ranks.
    """

    def gradient(grads: Tensors) -> Tensors:
        means = _results(_allreduce(grads, False, False, None, Reduction.Average, 1.0, 1.0, process_set))
        return means if rank() == root_rank else [torch.zeros_like(g) for g in means]

    def run(inputs: Tensors) -> Tensors:
        return _results(broadcast_async(inputs[0], root_rank, name, process_set))

    return _differentiable(run, gradient, [tensor])[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> torch.Tensor:
    """Copy the root's tensor into that of each rank, and return it. Collective. See `broadcast`."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


# -- alltoall


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> Operation:
    """Begin to send each rank its rows, and return a handle. See `alltoall`."""
    process_set.require()
    size = process_set.size() or 1
    if tensor.dim() == 0:
        raise ArgumentError("alltoall: a scalar has no rows; pass a tensor with at least one dimension")
    if splits is None:
        if tensor.shape[0] % size:
            raise ArgumentError(f"alltoall: {tensor.shape[0]} rows cannot be divided equally by {size} ranks; pass splits")
        return _submit("alltoall", [tensor], name, process_set)
    splits = torch.as_tensor(splits)
    if splits.dtype not in (torch.int32, torch.int64) or splits.shape != (size,) or (splits < 0).any():
        raise ArgumentError(f"alltoall: splits must be {size} integers, one for each rank; got {splits.tolist()}")
    rows = splits.tolist()
    if sum(rows) > tensor.shape[0]:
        raise ArgumentError(f"alltoall: splits {rows} exceed the tensor's {tensor.shape[0]} rows; make them smaller")
    return _submit("alltoall", [tensor], name, process_set, splits=rows)


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send each rank its rows of a tensor, and return the rows that all ranks sent to this one. Collective.

    Args:
        tensor: Rows for all ranks, in order of rank.
        splits: Number of rows for each rank, int32 [size]; by default all get equally many.
        name: Name of the operation, the same on all ranks.
        process_set: Ranks that take part.

    Returns:
        The received rows; with `splits`, a pair of them and of the number of rows from each rank, int32 [size].
    """
    received: list[torch.Tensor] = []

    def run(inputs: Tensors) -> Tensors:
        handle = alltoall_async(inputs[0], splits, name, process_set)
        synchronize(handle)
        received.append(handle.value)
        return handle.outputs

    def gradient(grads: Tensors) -> Tensors:
        handle = alltoall_async(grads[0], received[0], None, process_set)
        synchronize(handle)
        sent = handle.outputs[0]
        rest = tensor.shape[0] - sent.shape[0]  # rows that were not sent
        return [torch.cat([sent, sent.new_zeros((rest, *sent.shape[1:]))]) if rest else sent]

    out = _differentiable(run, gradient, [tensor])[0]
    return out if splits is None else (out, received[0])


# -- reducescatter


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Reduction.Average,
    process_set: ProcessSet = _WHOLE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Begin to reduce a tensor and divide the result among the ranks; return a handle. See `reducescatter`."""
    return _reducescatter([tensor], False, name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Reduction.Average,
    process_set: ProcessSet = _WHOLE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Begin to reduce several tensors and divide the results; return a handle. See `reducescatter`."""
    return _reducescatter(tensors, True, name, op, process_set, prescale_factor, postscale_factor)


def _reducescatter(
    tensors: Tensors,
    is_group: bool,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Operation:
    if any(x.dim() == 0 for x in tensors):
        raise ArgumentError("reducescatter: a scalar has no rows to divide; use allreduce")
    if Reduction(op) == Reduction.Adasum:
        raise HorovodInternalError("reducescatter: Adasum is not possible; use allreduce", agreed=True)
    return _submit(
        "reducescatter",
        tensors,
        name,
        process_set,
        reduction=Reduction(op),
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        is_group=is_group,
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Reduction.Average,
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
    compression: type[Compressor] = Compression.none,
    op: int = Reduction.Average,
    process_set: ProcessSet = _WHOLE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, and return this rank's rows of each. Collective. See `reducescatter`."""
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
        return _results(_reducescatter(inputs, is_group, name, *options))

    def gradient(grads: Tensors) -> Tensors:
        factor = prescale_factor * postscale_factor * (process_set.size() or 1 if op == Reduction.Sum else 1)
        return _results(_allgather([g * factor if factor != 1 else g for g in grads], True, None, process_set))

    small, contexts = zip(*(compression.compress(x) for x in tensors), strict=True)
    outputs = _differentiable(run, gradient, small)
    return [compression.decompress(x, ctx) for x, ctx in zip(outputs, contexts, strict=True)]


# -- gradients of operations


def _results(handle: Operation) -> Tensors:
    """Wait for an operation, and return its outputs as a sequence."""
    synchronize(handle)
    return handle.outputs


def _differentiable(
    run: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors], tensors: Tensors
) -> Tensors:
    """Return the outputs of an operation; gradients flow through it if an input requires them.

    Args:
        run: Function that carries out the operation.
        gradient: Function that returns the gradients of the inputs from those of the outputs.
        tensors: Inputs.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return run(tensors)
    return _Communication.apply(run, gradient, *tensors)


class _Communication(torch.autograd.Function):
    """Autograd function of an operation."""

    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradient([g.contiguous() for g in grads])
