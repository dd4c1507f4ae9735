"""Compressions to 16-bit numbers."""

from __future__ import annotations

from typing import ClassVar

import torch

from mpitrain.comm.compression.base import Bucket, Collectives, Compression, Shapes


class _Rounded(Compression):
    """Compression that sends values rounded to 16 bits and sums them in fp32.

    Each rank rounds its values. They are then added in fp32, in the order of the fixed binary tree over the ranks, and
    the sum is rounded once. Partial sums are never sent, so all messages are 16-bit, whatever the algorithm. avg
    divides the fp32 sum before it is rounded, so it overflows only if a value does.
    """

    wire: ClassVar[torch.dtype]

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        if x.dtype == self.wire:
            comm.all_reduce(x, op, algorithm, reproducible=True)
            return
        flat = x.view(-1)
        rounded = self._buffer("wire", flat.numel(), self.wire, x.device).copy_(flat)
        comm.all_reduce(rounded, op, algorithm, reproducible=True)
        flat.copy_(rounded)

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        return numel * self.wire.itemsize


class FP16(_Rounded):
    """Compression to fp16: 11 significant bits; values (and, with op sum, sums) above 65504 become infinite."""

    name = "fp16"
    wire = torch.float16


class BF16(_Rounded):
    """Compression to bf16: 8 significant bits, and the range of fp32."""

    name = "bf16"
    wire = torch.bfloat16
