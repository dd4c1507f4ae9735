"""Half the bytes of fp32: values rounded to 16 bits on the wire, sums in fp32.

Each rank rounds its values; where they meet they are added in fp32, in the order of the fixed binary tree over
the ranks, and the sum is rounded once. Partial sums never travel, so 16 bits are all that any message carries,
whatever the algorithm. avg divides the fp32 sum before it is rounded: it overflows only where a value does.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch

from mpitrain.comm.compression.base import Collectives, Compression, Shapes


class _Rounded(Compression):
    wire: ClassVar[torch.dtype]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _reduce(
        self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, key: Hashable | None, shapes: Shapes | None
    ) -> None:
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
    """11 significant bits, up to 65504 in size: values (and with op sum, sums) beyond become infinite."""

    name = "fp16"
    wire = torch.float16


class BF16(_Rounded):
    """8 significant bits, fp32's range."""

    name = "bf16"
    wire = torch.bfloat16
