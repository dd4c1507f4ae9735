"""Compression to the largest elements."""

from __future__ import annotations

import math

import torch

from mpitrain.comm.compression.base import Bucket, Collectives, Memory, Shapes, StatefulCompression, wide_type
from mpitrain.errors import InputError

_ALIGNMENT = 8  # bytes: messages are contiguous, and each number in them is aligned to its size


class TopK(StatefulCompression):
    """Compression that sends the k = ratio * numel largest elements of each rank (at least one), with error feedback.

    Each rank sends its k elements of largest magnitude with their indices, and every rank adds up what it receives
    (Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with memory"):

        acc = x + error;  S = indices of the k largest abs(acc);  error = acc outside S, 0 in S
            x = sum over ranks of acc[S]

    It pays if ratio * ranks is well below 1, because the messages of all ranks go to every rank. If a buffer has an
    infinite or NaN element on any rank, the result is NaN everywhere and the memory does not change, so that a skipped
    step can be repeated.

    Args:
        ratio: Fraction of the elements to send, above 0 and at most 1.
        error_feedback: If true, remember what was not sent and add it in the next call.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise InputError(f"compression topk: ratio {ratio} must be above 0 and at most 1")
        self.ratio, self.error_feedback = ratio, error_feedback

    def kept(self, numel: int) -> int:
        """Return how many of `numel` elements are sent."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        each = self.kept(numel) * (_index_type(numel, dtype).itemsize + dtype.itemsize) if numel else 0
        return -(-each // _ALIGNMENT) * _ALIGNMENT

    def messages_sent(self, ranks: int) -> float:
        return ranks - 1

    def _new_memory(self, x: torch.Tensor, shapes: Shapes | None, name: str, ranks: int) -> Memory:
        error = torch.zeros(x.numel(), dtype=wide_type(x.dtype), device=x.device)
        return Memory(name, x.numel(), x.dtype, shapes, {"error": error})

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        numel, k, places = x.numel(), self.kept(x.numel()), _index_type(x.numel(), x.dtype)
        total = self._as_wide(x)
        error = self._memory(x, bucket, comm.size).tensors["error"] if self.error_feedback else None
        if error is not None:
            total.add_(error)
        magnitude = self._buffer("magnitude", numel, total.dtype, x.device)
        torch.abs(total, out=magnitude)
        indices = self._buffer("indices", k, torch.int64, x.device)
        torch.topk(magnitude, k, sorted=False, out=(self._buffer("largest", k, total.dtype, x.device), indices))

        nbytes = self.bytes_on_wire(numel, x.dtype)
        message = self._buffer("message", nbytes, torch.uint8, x.device)
        where, values = _parts(message, k, places, x.dtype)
        where.copy_(indices)
        chosen = torch.index_select(total, 0, indices, out=self._buffer("largest", k, total.dtype, x.device))
        values.copy_(chosen)  # rounded to x's type; the rounding error stays in the memory
        messages = self._buffer("messages", nbytes * comm.size, torch.uint8, x.device)
        comm.all_gather(messages, message)

        received = [_parts(part, k, places, x.dtype) for part in torch.split(messages, nbytes)]
        if not all(torch.isfinite(theirs).all() for _, theirs in received):
            x.fill_(math.nan)
            return
        if error is not None:
            error.copy_(total)
            error.index_add_(0, indices, values.to(error.dtype), alpha=-1)
        total.zero_()
        for where, theirs in received:  # in order of rank, so that all ranks get the same bits
            total.index_add_(0, where, theirs.to(total.dtype))
        if op == "avg":
            total.mul_(1.0 / comm.size)
        if total.data_ptr() != x.data_ptr():
            x.view(-1).copy_(total)


def _index_type(numel: int, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the indices: 32 bits if they suffice and keep 64-bit values aligned."""
    return torch.int64 if numel > 2**31 - 1 or dtype.itemsize == 8 else torch.int32


def _parts(message: torch.Tensor, k: int, places: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the k indices and the k values in a message of bytes."""
    middle = k * places.itemsize
    return message[:middle].view(places), message[middle : middle + k * dtype.itemsize].view(dtype)
