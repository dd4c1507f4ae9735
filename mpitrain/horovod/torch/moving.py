"""Operations that move tensors between ranks without changing them, and sums of sparse tensors, which are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.horovod.torch.handles import Tensors, differentiable, results, submit, synchronize
from mpitrain.horovod.torch.reducing import begin_allreduce
from mpitrain.horovod.torch.session import ProcessSet, global_process_set, rank
from mpitrain.horovod.torch.submission import HorovodArgumentError, ReduceOp, Submission

_WHOLE = global_process_set


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = _WHOLE) -> Submission:
    """Begin to gather a tensor of all ranks, and return a handle.

    Args:
        tensor, name, process_set: Arguments of `allgather`.
    """
    return begin_allgather([tensor], False, name, process_set)


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: ProcessSet = _WHOLE) -> Submission:
    """Begin to gather several tensors of all ranks, and return a handle.

    Args:
        tensors, name, process_set: Arguments of `allgather`.
    """
    return begin_allgather(tensors, True, name, process_set)


def begin_allgather(tensors: Tensors, is_group: bool, name: str | None, process_set: ProcessSet) -> Submission:
    if any(x.dim() == 0 for x in tensors):
        raise HorovodArgumentError("allgather: a scalar has no dimension to join; pass tensor.reshape(1)")
    return submit("allgather", tensors, name, process_set, is_group=is_group)


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


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> list[torch.Tensor]:
    """Return several tensors of all ranks, each joined along its first dimension. Collective.

    Args:
        tensors, name, process_set: Arguments of `allgather`.
    """
    return list(_differentiable_allgather(tensors, True, name, process_set))


def _differentiable_allgather(
    tensors: Tensors, is_group: bool, name: str | None, process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    def gradient(grads: Tensors) -> Tensors:
        means = results(begin_allreduce(grads, False, True, None, ReduceOp.Average, 1.0, 1.0, process_set))
        rows = torch.tensor([[x.shape[0] for x in tensors]])
        before = synchronize(allgather_async(rows, None, process_set))[: process_set.rank()].sum(0).tolist()
        return [g[b : b + x.shape[0]] for g, b, x in zip(means, before, tensors, strict=True)]

    return differentiable(lambda xs: results(begin_allgather(xs, is_group, name, process_set)), gradient, tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> Submission:
    """Begin to copy the root's tensor into a new tensor of each rank, and return a handle.

    Args:
        tensor, root_rank, name, process_set: Arguments of `broadcast`.
    """
    outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format)]
    return submit("broadcast", [tensor], name, process_set, outputs=outputs, root=_root(root_rank, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> Submission:
    """Begin to copy the root's tensor into that of each rank, and return a handle.

    Args:
        tensor, root_rank, name, process_set: Arguments of `broadcast`.
    """
    return submit("broadcast", [tensor], name, process_set, root=_root(root_rank, process_set))


def _root(root_rank: int, process_set: ProcessSet) -> int:
    """Return a global rank as a rank of the process set."""
    process_set.require()
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise HorovodArgumentError(
            f"root_rank {root_rank} does not belong to the process set; use one of its ranks {ranks}"
        )
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
        means = results(begin_allreduce(grads, False, False, None, ReduceOp.Average, 1.0, 1.0, process_set))
        return means if rank() == root_rank else [torch.zeros_like(g) for g in means]

    def run(inputs: Tensors) -> Tensors:
        return results(broadcast_async(inputs[0], root_rank, name, process_set))

    return differentiable(run, gradient, [tensor])[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> torch.Tensor:
    """Copy the root's tensor into that of each rank, and return it. Collective.

    Args:
        tensor, root_rank, name, process_set: Arguments of `broadcast`.
    """
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = _WHOLE
) -> Submission:
    """Begin to send each rank its rows, and return a handle.

    Args:
        tensor, splits, name, process_set: Arguments of `alltoall`.
    """
    process_set.require()
    size = process_set.size() or 1
    if tensor.dim() == 0:
        raise HorovodArgumentError("alltoall: a scalar has no rows; pass a tensor with at least one dimension")
    if splits is None:
        if tensor.shape[0] % size:
            raise HorovodArgumentError(
                f"alltoall: {tensor.shape[0]} rows cannot be divided equally by {size} ranks; pass splits"
            )
        return submit("alltoall", [tensor], name, process_set)
    splits = torch.as_tensor(splits)
    if splits.dtype not in (torch.int32, torch.int64) or splits.shape != (size,) or (splits < 0).any():
        raise HorovodArgumentError(
            f"alltoall: splits must be {size} integers, one for each rank; got {splits.tolist()}"
        )
    rows = splits.tolist()
    if sum(rows) > tensor.shape[0]:
        raise HorovodArgumentError(
            f"alltoall: splits {rows} exceed the tensor's {tensor.shape[0]} rows; make them smaller"
        )
    return submit("alltoall", [tensor], name, process_set, splits=rows)


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

    out = differentiable(run, gradient, [tensor])[0]
    return out if splits is None else (out, received[0])


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
    if ReduceOp(op) not in (ReduceOp.Average, ReduceOp.Sum):
        raise HorovodArgumentError(f"sparse_allreduce: op {ReduceOp(op).name} is impossible; use Average or Sum")
    x = tensor.detach().coalesce()
    indices = allgather_async(x.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(x.values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        every = synchronize(values)
        every = every / process_set.size() if ReduceOp(op) == ReduceOp.Average else every
        return torch.sparse_coo_tensor(synchronize(indices).t(), every, x.shape, check_invariants=False)

    return result
