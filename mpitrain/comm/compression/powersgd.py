"""Compression of matrices to products of two thin matrices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpitrain.comm.compression.base import Bucket, Collectives, Memory, Shapes, StatefulCompression, wide_type
from mpitrain.errors import InputError


@dataclass(frozen=True)
class Matrix:
    """A compressed matrix in a flat bucket: offset of its first element, shape, and rank of its approximation."""

    offset: int
    rows: int
    columns: int
    rank: int

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of this matrix in the bucket `flat`."""
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True)
class MatrixPlan:
    """Division of a bucket into compressed matrices and the rest, which are [lo, hi) ranges of elements."""

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def left(self) -> int:
        """Number of elements of all P."""
        return sum(m.rows * m.rank for m in self.matrices)

    @property
    def right(self) -> int:
        """Number of elements of all Q."""
        return sum(m.columns * m.rank for m in self.matrices)

    @property
    def uncompressed(self) -> int:
        """Number of elements that are not compressed."""
        return sum(hi - lo for lo, hi in self.rest)


def plan(numel: int, shapes: Shapes, rank: int, min_compression: float) -> MatrixPlan:
    """Choose the parameters of a bucket that are compressed.

    A parameter of shape (a, b, c, ...) is treated as a matrix of a rows.

    Args:
        numel: Number of elements of the bucket; those outside all parameters are not compressed.
        shapes: (offset, shape) of each parameter.
        rank: Largest rank of an approximation.
        min_compression: Compress a parameter only if it becomes at least this many times smaller.

    Raises:
        InputError: Parameters overlap or lie outside the bucket.
    """
    matrices: list[Matrix] = []
    rest: list[tuple[int, int]] = []

    def uncompressed(lo: int, hi: int) -> None:
        if lo < hi:
            before = rest.pop()[0] if rest and rest[-1][1] == lo else lo
            rest.append((before, hi))

    end = 0
    for offset, shape in sorted((lo, tuple(shape)) for lo, shape in shapes):
        size = math.prod(shape)
        if offset < end or offset + size > numel:
            raise InputError(
                f"compression powersgd: the parameter of shape {shape} at offset {offset} lies outside the bucket of "
                f"{numel} elements or overlaps another parameter; pass the (offset, shape) of each"
            )
        uncompressed(end, offset)
        rows = shape[0] if shape else 1
        columns = size // rows if rows else 0
        limited = min(rank, rows, columns)
        if min(rows, columns) > 1 and (rows + columns) * limited * min_compression <= size:
            matrices.append(Matrix(offset, rows, columns, limited))
        else:
            uncompressed(offset, offset + size)
        end = offset + size
    uncompressed(end, numel)
    return MatrixPlan(tuple(matrices), tuple(rest))


@dataclass
class _Factors(Memory):
    """Memory of PowerSGD for one bucket.

    Attributes:
        sent: All P, then the elements that are not compressed.
        right: All Q.
        ps, qs, errors: Views of the P, Q and error of each matrix.
    """

    plan: MatrixPlan
    sent: torch.Tensor
    right: torch.Tensor
    ps: Sequence[torch.Tensor]
    qs: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor]


class PowerSGD(StatefulCompression):
    """Compression of gradient matrices to products of two thin matrices (Vogels, Karimireddy and Jaggi 2019).

    For each matrix M (rows x columns) of a bucket, with R = rank, one step of subspace iteration (algorithm 1):

        P = M Q                rows x R         summed over ranks
        P = orthonormal basis of P's columns    (QR, the same on every rank)
        Q = M' P               columns x R      summed over ranks
        result = P Q'

    The rest (vectors, small matrices) is summed exactly, in the same message as P. With error feedback (algorithm 2), M
    is the gradient plus what this rank's own P Q' missed of M in the last call. Each call starts from the last Q (warm
    start), so P and Q approach the leading singular vectors over the steps.

    Pass the shapes of the parameters in a flat buffer (`bucket`); otherwise x counts as one matrix, or as a vector,
    which is not compressed. All ranks need the same kind of processor, because each computes the basis itself. If a
    buffer has an infinite or NaN element on any rank, the result is NaN everywhere and the memory does not change, so
    that a skipped step can be repeated.

    Args:
        rank: Rank R of the approximations.
        warm_start: If true, start each call with the last Q; otherwise with a random Q.
        error_feedback: If true, remember what the approximation missed and add it in the next call.
        min_compression: Compress a matrix only if it becomes at least this many times smaller.
        seed: Seed of the random matrices, which are equal on all ranks.
    """

    name = "powersgd"

    def __init__(
        self,
        rank: int = 4,
        warm_start: bool = True,
        error_feedback: bool = True,
        min_compression: float = 2.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise InputError(f"compression powersgd: rank {rank} must be at least 1")
        if min_compression < 0:
            raise InputError(f"compression powersgd: min_compression {min_compression} must not be negative")
        self.rank, self.warm_start, self.error_feedback = rank, warm_start, error_feedback
        self.min_compression, self.seed = min_compression, seed

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        """Return the bytes as `Compression.bytes_on_wire` does; without shapes, the buffer is a vector."""
        matrix_plan = plan(numel, [(0, (numel,))] if shapes is None else shapes, self.rank, self.min_compression)
        if not matrix_plan.matrices:
            return numel * dtype.itemsize
        return (matrix_plan.left + matrix_plan.right + matrix_plan.uncompressed) * wide_type(dtype).itemsize

    def _new_memory(self, x: torch.Tensor, shapes: Shapes | None, name: str, ranks: int) -> Memory:
        matrix_plan = plan(x.numel(), [(0, x.shape)] if shapes is None else shapes, self.rank, self.min_compression)
        dtype = wide_type(x.dtype)
        sent = torch.empty(matrix_plan.left + matrix_plan.uncompressed, dtype=dtype, device=x.device)
        right = torch.empty(matrix_plan.right, dtype=dtype, device=x.device)
        error = torch.zeros(x.numel() if matrix_plan.matrices else 0, dtype=dtype, device=x.device)
        steps = torch.zeros(1, dtype=torch.int64)
        tensors = {"right": right, "steps": steps} if matrix_plan.matrices else {}
        if self.error_feedback and matrix_plan.matrices:
            tensors["error"] = error
        ps = _pieces(sent, [(m.rows, m.rank) for m in matrix_plan.matrices])
        qs = _pieces(right, [(m.columns, m.rank) for m in matrix_plan.matrices])
        errors = [m.view_in(error) for m in matrix_plan.matrices]
        return _Factors(name, x.numel(), x.dtype, shapes, tensors, matrix_plan, sent, right, ps, qs, errors)

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        memory = self._memory(x, bucket, comm.size)
        assert isinstance(memory, _Factors)
        if not memory.plan.matrices:
            comm.all_reduce(x, op, algorithm)
            return
        self._init_factors(memory)
        total = self._as_wide(x)
        rest = [total[lo:hi] for lo, hi in memory.plan.rest]
        sent_rest = memory.sent[memory.plan.left :]
        if rest:
            torch.cat(rest, out=sent_rest)
        matrices = [m.view_in(total) for m in memory.plan.matrices]
        if self.error_feedback:
            for matrix, error in zip(matrices, memory.errors, strict=True):
                matrix.add_(error)
        for matrix, p, q in zip(matrices, memory.ps, memory.qs, strict=True):
            torch.mm(matrix, q, out=p)
        comm.all_reduce(memory.sent, op, algorithm)
        if not torch.isfinite(memory.sent).all():
            x.fill_(math.nan)
            return
        memory.tensors["steps"] += 1
        for matrix, p, q, error in zip(matrices, memory.ps, memory.qs, memory.errors, strict=True):
            p.copy_(torch.linalg.qr(p).Q)
            torch.mm(matrix.t(), p, out=q)
            if self.error_feedback:
                torch.addmm(matrix, p, q.t(), alpha=-1, out=error)
        comm.all_reduce(memory.right, op, algorithm)
        for matrix, p, q in zip(matrices, memory.ps, memory.qs, strict=True):
            torch.mm(p, q.t(), out=matrix)
        for piece, reduced in zip(rest, torch.split(sent_rest, [hi - lo for lo, hi in memory.plan.rest]), strict=True):
            piece.copy_(reduced)
        if total.data_ptr() != x.data_ptr():
            x.view(-1).copy_(total)

    def _init_factors(self, memory: _Factors) -> None:
        """Set random Q, equal on all ranks, in the first call, and without warm start in each call."""
        step = int(memory.tensors["steps"])
        if step and self.warm_start:
            return
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {memory.name} {step}".encode()))
        memory.right.copy_(torch.randn(memory.right.numel(), generator=generator))


def _pieces(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return consecutive views of the given shapes, from the start of a flat tensor."""
    sizes = [rows * columns for rows, columns in shapes]
    return [piece.view(shape) for piece, shape in zip(torch.split(flat[: sum(sizes)], sizes), shapes, strict=True)]
