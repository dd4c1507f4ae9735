"""Execution of operations on which the ranks have agreed: tensors of a kind are fused in shared memory.

All ranks get the same operations in the same order, and so decide alike which tensors are fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from mpitrain.comm import Arena, Communicator
from mpitrain.errors import CommunicationError, InputError
from mpitrain.horovod.torch.adasum import adasum
from mpitrain.horovod.torch.submission import REDUCTIONS, HorovodInternalError, ReduceOp, Submission
from mpitrain.shard.ddp import broadcast_tensors, pack

_FUSED = 64 << 20  # most bytes that are reduced together; a larger tensor is reduced where it lies
_SMALLEST = 1 << 20  # bytes of the first buffer


class FusedExecutor:
    """Carries out operations of one process set. Every method is collective.

    Args:
        comm: Communicator of the process set.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._buffers: dict[torch.device, Arena] = {}

    @torch.no_grad()
    def run(self, operations: Sequence[Submission]) -> None:
        """Carry out operations, fused where possible. An operation that is impossible on all ranks gets an error."""
        try:
            for batch in _batches(operations):
                self._run_batch(batch)
        finally:
            for operation in operations:
                if not operation.is_complete:
                    operation.fail(HorovodInternalError(f"{operation.name} was not carried out after an error"))

    def _run_batch(self, batch: Sequence[Submission]) -> None:
        try:
            getattr(self, f"_{batch[0].kind}")(batch)
        except InputError as error:
            for operation in batch:
                operation.fail(HorovodInternalError(f"{operation.kind} '{operation.name}': {error}"))
        for operation in batch:
            operation.is_complete = True

    def free(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers.values():
            with suppress(CommunicationError):
                buffer.free()
        self._buffers.clear()

    def _barrier(self, batch: Sequence[Submission]) -> None:
        """Do nothing: the ranks have just met."""

    def _call(self, batch: Sequence[Submission]) -> None:
        for operation in batch:
            assert operation.function is not None
            try:
                operation.value = operation.function(self._comm)
            except InputError as error:  # agreed by all ranks, as the function has to
                operation.fail(error)

    def _allreduce(self, batch: Sequence[Submission]) -> None:
        all_inputs = [x for operation in batch for x in operation.tensors]
        all_outputs = [out for operation in batch for out in operation.outputs]
        for positions in pack(all_inputs, _FUSED):
            inputs, outputs = [all_inputs[i] for i in positions], [all_outputs[i] for i in positions]
            if len(inputs) == 1:
                flat = outputs[0].contiguous().view(-1)
                if flat.data_ptr() != inputs[0].data_ptr() or not inputs[0].is_contiguous():
                    flat.copy_(inputs[0].reshape(-1))
            else:
                flat = torch.cat([x.reshape(-1) for x in inputs], out=self._buffer(inputs))
            divisor = self._reduce(flat, batch[0], [x.numel() for x in inputs])
            for out, piece in zip(outputs, flat.split([x.numel() for x in inputs]), strict=True):
                if divisor != 1:
                    torch.div(piece.view(out.shape), divisor, out=out)
                elif out.data_ptr() != piece.data_ptr() or not out.is_contiguous():
                    out.copy_(piece.view(out.shape))

    def _reduce(self, flat: torch.Tensor, like: Submission, sizes: Sequence[int]) -> int:
        """Reduce a vector in place, and return the number by which the caller must divide it while copying it out."""
        _scale(flat, like.prescale)
        divisor = 1
        if like.reduction == ReduceOp.Adasum:
            adasum(self._comm, flat, sizes)
        elif like.reduction == ReduceOp.Average and flat.is_floating_point() and flat.itemsize > 2:
            self._comm.all_reduce(flat)
            divisor = self._comm.size
        else:  # the sum of 16-bit numbers could overflow; averages of integers are rounded toward zero
            self._comm.all_reduce(flat, REDUCTIONS[like.reduction])
        _scale(flat, like.postscale)
        return divisor

    def _buffer(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return shared memory for the elements of some tensors, flat. It is used again by the next call."""
        first, nbytes = tensors[0], sum(x.nbytes for x in tensors)
        buffer = self._buffers.get(first.device)
        if buffer is None or buffer.tensor.numel() < nbytes:
            if buffer is not None:
                buffer.free()
            capacity = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
            buffer = self._buffers[first.device] = self._comm.arena(capacity, torch.uint8, first.device)
        return buffer.tensor[:nbytes].view(first.dtype)

    def _broadcast(self, batch: Sequence[Submission]) -> None:
        for operation in batch:
            for x, out in zip(operation.tensors, operation.outputs, strict=True):
                if out is not x and self._comm.rank == operation.root:
                    out.copy_(x)
        broadcast_tensors([out for each in batch for out in each.outputs], self._comm, batch[0].root)

    def _allgather(self, batch: Sequence[Submission]) -> None:
        tensors = [x for operation in batch for x in operation.tensors]
        rows = np.empty((self._comm.size, len(tensors)), dtype=np.int64)
        self._comm.all_gather(rows.reshape(-1), np.array([x.shape[0] for x in tensors], dtype=np.int64))
        outputs: list[torch.Tensor] = []
        for x, of_ranks in zip(tensors, rows.T.tolist(), strict=True):
            row = x[:1].numel() if x.shape[0] else torch.Size(x.shape[1:]).numel()
            out = x.new_empty((sum(of_ranks), *x.shape[1:]))
            self._comm.all_gather(out, x.contiguous(), counts=tuple(n * row for n in of_ranks))
            outputs.append(out)
        for operation in batch:
            operation.outputs, outputs = outputs[: len(operation.tensors)], outputs[len(operation.tensors) :]

    def _alltoall(self, batch: Sequence[Submission]) -> None:
        size = self._comm.size
        for operation in batch:
            x = operation.tensors[0]
            leaving = list(operation.splits) if operation.splits is not None else [x.shape[0] // size] * size
            arriving = np.empty(size, dtype=np.int64)
            self._comm.all_to_all(arriving, np.array(leaving, dtype=np.int64))
            row = torch.Size(x.shape[1:]).numel()
            out = x.new_empty((int(arriving.sum()), *x.shape[1:]))
            self._comm.all_to_all(
                out,
                x[: sum(leaving)].contiguous(),
                out_counts=[int(n) * row for n in arriving],
                in_counts=[n * row for n in leaving],
            )
            operation.outputs = [out]
            operation.value = torch.from_numpy(arriving).to(torch.int32)

    def _reducescatter(self, batch: Sequence[Submission]) -> None:
        for operation in batch:
            operation.outputs = [self._reduce_scatter(x, operation) for x in operation.tensors]

    def _reduce_scatter(self, x: torch.Tensor, like: Submission) -> torch.Tensor:
        rows = rows_of_ranks(x.shape[0], self._comm.size)
        row = torch.Size(x.shape[1:]).numel()
        out = x.new_empty((rows[self._comm.rank], *x.shape[1:]))
        source = x.contiguous()
        if like.prescale != 1.0:
            source = _scale(source.clone(), like.prescale)
        counts = tuple(n * row for n in rows)
        self._comm.reduce_scatter(out, source, REDUCTIONS[like.reduction], counts=counts)
        return _scale(out, like.postscale)


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """Return how many rows each rank gets; the first ranks get one more if they cannot be equal.

    Args:
        rows: Number of rows.
        size: Number of ranks.
    """
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _batches(operations: Sequence[Submission]) -> Iterator[list[Submission]]:
    """Yield the operations in lists that can be carried out together."""
    batches: dict[tuple[object, ...], list[Submission]] = {}
    for operation in operations:
        options = operation.reduction, operation.prescale, operation.postscale, operation.root
        batches.setdefault((operation.kind, *options), []).append(operation)
    yield from batches.values()


def _scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor in place: integers in float64, rounded toward zero, and 16-bit numbers in float32."""
    if factor == 1.0:
        return x
    if x.is_floating_point() and x.itemsize > 2:
        return x.mul_(factor)
    return x.copy_(x.to(torch.float32 if x.is_floating_point() else torch.float64).mul_(factor))
