"""Compression to 8-bit or 4-bit integers, with one fp32 scale per block of elements.

A block of `block` elements x becomes integers q and a scale s (block-wise quantization, Dettmers et al. 2022, "8-bit
optimizers via block-wise quantization", here with a linear code):

    s = max|x| / most        most: 127 for 8 bits, 7 for 4 bits
    q = round(x / s)         to the nearest, halves to even; x - q s is at most s / 2

The all-reduce is that of ZeRO++ (Wang et al. 2023, section 3.3). Each node first sums in full precision, and each of
its L ranks takes one slice. The ranks with the same slice on the M nodes then exchange it in two hops:

    slice of rank a    [ a0 | a1 | a2 ]     hop 1: part p of every slice goes to rank p, which adds     a1 + b1 + c1
    slice of rank b    [ b0 | b1 | b2 ]            the parts in fp32
    slice of rank c    [ c0 | c1 | c2 ]     hop 2: the sum, quantized again, goes to all ranks

Each value is thus rounded twice, no matter how many ranks there are. If all ranks are on one node, or each is on its
own, or nodes differ in size, or the data is on a device, all ranks exchange parts in these two hops.

A message has the scales of its blocks, then their integers. Two 4-bit integers share a byte: those of the first half of
a block are the low bits, those of the second half the high bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch

from mpitrain.comm.compression.base import Bucket, Collectives, Memory, Shapes, StatefulCompression
from mpitrain.comm.memory.buffers import as_tensor
from mpitrain.errors import InputError

_CHUNK = 1 << 18  # elements that are quantized at a time, so that they stay in the cache between passes
_SCALE = 4  # bytes of a scale
_TINY = torch.finfo(torch.float32).tiny  # smallest normal number: 1.2e-38


class _Blocks(StatefulCompression):
    """Compression to integers of `bits` bits.

    A block with an infinite or NaN element on any rank is NaN on all ranks; the memory of a block that is not finite on
    this rank does not change. A block whose elements are all below 1.2e-38 times `most` becomes zero.

    Args:
        block: Number of elements with a common scale, a multiple of 8.
        error_feedback: If true, remember the rounding errors and add them in the next call.
    """

    bits: ClassVar[int]
    most: ClassVar[int]
    two_level = True

    def __init__(self, block: int = 256, error_feedback: bool = False) -> None:
        super().__init__()
        if block < 8 or block % 8:
            raise InputError(f"compression {self.name}: block {block} must be a positive multiple of 8")
        self.block, self.error_feedback = block, error_feedback

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        """Return the bytes of a message of `numel` elements; the other arguments do not matter."""
        return self._blocks(numel) * (_SCALE + self.block * self.bits // 8)

    def bytes_sent(
        self,
        nodes: Sequence[int],
        numel: int,
        dtype: torch.dtype,
        shapes: Shapes | None = None,
        *,
        whole: bool = True,
    ) -> float:
        ranks, count = len(nodes), len(set(nodes))
        local = ranks // count if count > 1 and len({nodes.count(node) for node in nodes}) == 1 else 1
        inside = (local - 1) / local * numel * dtype.itemsize
        message = self.bytes_on_wire(-(-numel // local // (ranks // local)), dtype)
        return (1 + whole) * (inside + (ranks // local - 1) * message)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _new_memory(self, x: torch.Tensor, shapes: Shapes | None, name: str, ranks: int) -> Memory:
        numel = ranks * self._blocks(-(-x.numel() // ranks)) * self.block
        error = torch.zeros(numel, dtype=torch.float32, device=x.device)
        return Memory(name, x.numel(), x.dtype, shapes, {"error": error})

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        flat, levels = x.view(-1), comm.levels
        nodes = len(set(comm.nodes))
        in_order = levels is None or comm.nodes == tuple(r % nodes for r in range(comm.size))
        whole = bucket.whole or not in_order or flat.numel() % comm.size > 0
        if levels is None:
            self._exchange(comm, flat, op, bucket, whole)
            return
        node, across = levels
        bounds = _bounds(flat.numel(), node.size)
        counts = [hi - lo for lo, hi in pairwise(bounds)]
        own_slice = flat[bounds[node.rank] : bounds[node.rank + 1]]
        node.reduce_scatter(own_slice, flat, op, counts)
        if own_slice.numel():
            self._exchange(across, own_slice, op, bucket, whole)
        if whole:
            node.all_gather(flat, own_slice, counts)

    def _exchange(self, comm: Collectives, x: torch.Tensor, op: str, bucket: Bucket, whole: bool) -> None:
        """Replace a flat x by the sum or average over all ranks, in two hops.

        Args:
            comm: The ranks.
            x: At least one element.
            op: sum or avg.
            bucket: Place of x in the memory.
            whole: If false, do only the first hop, which gives this rank its part of the result.
        """
        bounds, values = _bounds(x.numel(), comm.size), self._as_blocks(x, comm.size)
        blocks, own_part = len(values) // comm.size, x[bounds[comm.rank] : bounds[comm.rank + 1]]
        own_rows = slice(comm.rank * blocks, (comm.rank + 1) * blocks)
        error = self._memory(x, bucket, comm.size).tensors["error"].view_as(values) if self.error_feedback else None
        nbytes = self.bytes_on_wire(bounds[1], x.dtype)
        sent, received = (
            self._buffer(role, comm.size * nbytes, torch.uint8, x.device) for role in ("sent", "received")
        )
        for rank, message in enumerate(torch.split(sent, nbytes)):
            rows = slice(rank * blocks, (rank + 1) * blocks)
            self._quantize(message, values[rows], None if error is None else error[rows])
        comm.all_to_all(received, sent)
        total = self._buffer("total", blocks * self.block, torch.float32, x.device).view(blocks, self.block)
        factor = 1.0 / comm.size if op == "avg" else 1.0
        self._sum(total, torch.split(received, nbytes), factor)
        if not whole:
            own_part.copy_(total.view(-1)[: own_part.numel()])
            return
        own_message, missed = sent[:nbytes], None
        if error is not None:
            missed = self._buffer("missed", total.numel(), torch.float32, x.device).view_as(total).zero_()
        self._quantize(own_message, total, missed)
        if error is not None and missed is not None:  # this rank adds what the sum lost to its own part of the next sum
            error[own_rows].add_(missed, alpha=1.0 / factor)
        comm.all_gather(received, own_message)
        for (lo, hi), message in zip(pairwise(bounds), torch.split(received, nbytes), strict=True):
            self._read(x[lo:hi], message)

    def all_gather(self, comm: Collectives, out: Any, x: Any) -> None:
        out, x = as_tensor(out).view(-1), as_tensor(x).view(-1)
        self.check(x.dtype, "sum")
        if comm.size == 1:
            out.copy_(x)
            return
        if x.numel() == 0:
            return
        nbytes = self.bytes_on_wire(x.numel(), x.dtype)
        message = self._buffer("sent", nbytes, torch.uint8, x.device)
        messages = self._buffer("received", comm.size * nbytes, torch.uint8, x.device)
        with torch.no_grad():
            self._quantize(message, self._as_blocks(x, 1))
            comm.all_gather(messages, message)
            for block, theirs in zip(torch.split(out, x.numel()), torch.split(messages, nbytes), strict=True):
                self._read(block, theirs)

    def _as_blocks(self, x: torch.Tensor, parts: int) -> torch.Tensor:
        """Return x in fp32 with one row per block, each of its parts padded with zeros: a view or scratch memory."""
        bounds = _bounds(x.numel(), parts)
        width = self._blocks(bounds[1]) * self.block
        if x.dtype == torch.float32 and x.numel() == parts * width:
            return x.view(-1, self.block)
        values = self._buffer("values", parts * width, torch.float32, x.device).view(parts, width)
        for row, (lo, hi) in zip(values, pairwise(bounds), strict=True):
            row[: hi - lo].copy_(x[lo:hi])
            row[hi - lo :].zero_()
        return values.view(-1, self.block)

    # -- one message

    def _rows(self, blocks: int) -> Iterator[slice]:
        """Yield ranges of blocks that stay in the cache while they are processed."""
        step = max(1, _CHUNK // self.block)
        return (slice(lo, min(blocks, lo + step)) for lo in range(0, blocks, step))

    def _fields(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the scales (blocks x 1) and of the bytes of the integers (one row per block) in a message."""
        blocks = message.numel() // self.bytes_on_wire(1, torch.float32)
        scales, codes = message[: _SCALE * blocks], message[_SCALE * blocks :]
        return scales.view(torch.float32).view(blocks, 1), codes.view(torch.int8).view(blocks, -1)

    def _quantize(self, message: torch.Tensor, values: torch.Tensor, error: torch.Tensor | None = None) -> None:
        """Write fp32 values, one row per block, into a message.

        Args:
            message: Bytes of the message.
            values: The values.
            error: Added to the values, and overwritten with what the message then misses; None for no such memory.
        """
        scales, codes = self._fields(message)
        for rows in self._rows(len(values)):
            x, scale = values[rows], scales[rows]
            if error is not None:
                corrected = self._buffer("corrected", x.numel(), torch.float32, x.device).view_as(x)
                x = torch.add(x, error[rows], out=corrected)
            scaled = self._buffer("scaled", x.numel(), torch.float32, x.device).view_as(x)
            torch.amax(torch.abs(x, out=scaled), 1, keepdim=True, out=scale)
            scale.add_(scale * 0).div_(self.most)  # infinity becomes NaN
            negligible = scale < _TINY  # the reciprocal could overflow
            scale.masked_fill_(negligible, 0.0)
            torch.mul(x, scale.reciprocal().masked_fill_(negligible, 0.0), out=scaled).round_()
            self._write_integers(codes[rows], scaled)
            if error is not None:
                finite = scale.isfinite()
                left = torch.addcmul(x, scaled, scale, value=-1, out=scaled)
                error[rows].copy_(left if finite.all() else torch.where(finite, left, error[rows]))

    def _numbers(self, message: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the integers of some blocks of a message, as fp32 in scratch memory, and the scales."""
        scales, codes = self._fields(message)
        scale, code = scales[rows], codes[rows]
        numbers = self._buffer("numbers", len(scale) * self.block, torch.float32, message.device).view(-1, self.block)
        self._read_integers(numbers, code)
        return numbers, scale

    def _sum(self, total: torch.Tensor, messages: Sequence[torch.Tensor], factor: float) -> None:
        """Write the sum of messages, in order of rank and times a factor, into fp32 memory with one row per block."""
        for rows in self._rows(len(total)):
            part = total[rows].zero_()
            for message in messages:
                part.addcmul_(*self._numbers(message, rows))
            if factor != 1.0:
                part.mul_(factor)

    def _read(self, into: torch.Tensor, message: torch.Tensor) -> None:
        """Write the values of a message into flat memory of any floating-point type."""
        for rows in self._rows(self._blocks(into.numel())):
            numbers, scale = self._numbers(message, rows)
            piece = into[rows.start * self.block : rows.stop * self.block]
            piece.copy_(numbers.mul_(scale).view(-1)[: piece.numel()])

    @abstractmethod
    def _write_integers(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        """Write whole numbers of at most `most` as integers of this compression."""

    @abstractmethod
    def _read_integers(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Write integers of this compression as fp32."""


def _bounds(numel: int, parts: int) -> list[int]:
    """Return the offsets of equal parts of a vector; the last parts are shorter if it cannot be divided equally."""
    length = -(-numel // parts)
    return [min(numel, part * length) for part in range(parts + 1)]


class Int8(_Blocks):
    """Compression to 8-bit integers: an error of at most 1/254 of the largest magnitude in a block, at each rounding.

    Args:
        block: Number of elements with a common scale, a multiple of 8.
        error_feedback: If true, remember the rounding errors and add them in the next call, which takes 4 bytes per
            element.
    """

    name, bits, most = "int8", 8, 127

    def _write_integers(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        codes.copy_(values)

    def _read_integers(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        values.copy_(codes)


class Int4(_Blocks):
    """Compression to 4-bit integers: an error of at most 1/14 of the largest magnitude in a block, at each rounding.

    Args:
        block: Number of elements with a common scale, a multiple of 8.
        error_feedback: If true, remember the rounding errors and add them in the next call, which takes 4 bytes per
            element.
    """

    name, bits, most = "int4", 4, 7

    def __init__(self, block: int = 256, error_feedback: bool = True) -> None:
        super().__init__(block, error_feedback)

    def _write_integers(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        low, high = (
            self._buffer("integers", values.numel(), torch.int8, values.device)
            .view_as(values)
            .copy_(values)
            .chunk(2, 1)
        )
        torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=codes)

    def _read_integers(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        low, high = values.chunk(2, 1)
        high.copy_(codes >> 4)  # the shift keeps the sign
        low.copy_((codes << 4) >> 4)
