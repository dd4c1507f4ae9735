"""Top-k sparsification with error feedback (Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with memory").

Each rank sends its k elements of largest magnitude with their places; every rank adds up what it gets:

    acc = x + error;  S = places of the k largest |acc|;  error = acc outside S, 0 in S;  x = sum over ranks of acc[S]
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from mpitrain.comm.compression.base import Collectives, Memory, Remembering, Shapes, all_finite, wide_type
from mpitrain.errors import InputError

_ALIGNMENT = 8  # bytes: messages lie end to end, and every number in them at a multiple of its size


class TopK(Remembering):
    """The k = ratio * numel largest elements of each rank (at least one).

    error_feedback: remember what was not sent and add it the next time. Worth it where ratio * ranks is well
    below 1: the messages of all ranks go to every rank.
    A buffer with an infinite or NaN element on any rank becomes NaN everywhere and leaves the memory alone, so that
    a step that is skipped for it can be repeated.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise InputError(f"compression topk: ratio {ratio} must be above 0 and at most 1")
        self.ratio, self.error_feedback = ratio, error_feedback

    def __repr__(self) -> str:
        return f"TopK(ratio={self.ratio}, error_feedback={self.error_feedback})"

    def kept(self, numel: int) -> int:
        """How many of numel elements are sent."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        each = self.kept(numel) * (_index_type(numel, dtype).itemsize + dtype.itemsize) if numel else 0
        return -(-each // _ALIGNMENT) * _ALIGNMENT

    def _remember(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        error = torch.zeros(x.numel(), dtype=wide_type(x.dtype), device=x.device)
        return Memory(name, x.numel(), x.dtype, shapes, {"error": error})

    def _reduce(
        self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, key: Hashable | None, shapes: Shapes | None
    ) -> None:
        numel, k, places = x.numel(), self.kept(x.numel()), _index_type(x.numel(), x.dtype)
        total = self._wide(x)
        error = self._memory(x, key, shapes).tensors["error"] if self.error_feedback else None
        if error is not None:
            total.add_(error)
        magnitude = self._buffer("magnitude", numel, total.dtype, x.device)
        torch.abs(total, out=magnitude)
        found = self._buffer("found", k, torch.int64, x.device)
        torch.topk(magnitude, k, sorted=False, out=(self._buffer("largest", k, total.dtype, x.device), found))

        nbytes = self.bytes_on_wire(numel, x.dtype)
        message = self._buffer("message", nbytes, torch.uint8, x.device)
        where, values = _parts(message, k, places, x.dtype)
        where.copy_(found)
        chosen = torch.index_select(total, 0, found, out=self._buffer("largest", k, total.dtype, x.device))
        values.copy_(chosen)  # rounded to x's type: what that changes stays in the memory
        messages = self._buffer("messages", nbytes * comm.size, torch.uint8, x.device)
        comm.all_gather(messages, message)

        received = [_parts(part, k, places, x.dtype) for part in torch.split(messages, nbytes)]
        if not all(all_finite(theirs) for _, theirs in received):
            x.fill_(math.nan)
            return
        if error is not None:
            error.copy_(total)
            error.index_add_(0, found, values.to(error.dtype), alpha=-1)
        total.zero_()
        for where, theirs in received:  # in order of rank: the same bits everywhere
            total.index_add_(0, where, theirs.to(total.dtype))
        if op == "avg":
            total.mul_(1.0 / comm.size)
        if total.data_ptr() != x.data_ptr():
            x.view(-1).copy_(total)


def _index_type(numel: int, dtype: torch.dtype) -> torch.dtype:
    """32 bits where they reach and the values behind them stay aligned."""
    return torch.int64 if numel > 2**31 - 1 or dtype.itemsize == 8 else torch.int32


def _parts(message: torch.Tensor, k: int, places: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The k places and the k values in a message of bytes."""
    middle = k * places.itemsize
    return message[:middle].view(places), message[middle : middle + k * dtype.itemsize].view(dtype)
