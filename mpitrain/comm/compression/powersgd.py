"""PowerSGD (Vogels, Karimireddy and Jaggi 2019): gradient matrices as products of two thin ones.

Of each matrix M (rows x columns) of a bucket, with R = rank, one step of subspace iteration (algorithm 1):

    P = M Q                rows x R         summed over ranks
    P = orthonormal basis of P's columns    (QR, the same on every rank)
    Q = M' P               columns x R      summed over ranks
    result = P Q'

and of the rest (vectors, small matrices) the plain sum, in the same message as P. With error feedback (algorithm 2)
M is the gradient plus what this rank's own P Q' missed of M the last time. Q is the start of the next step's
iteration (warm start), so that P and Q approach the leading singular vectors over the steps.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from mpitrain.comm.compression.base import Collectives, Memory, Remembering, Shapes, all_finite, wide_type
from mpitrain.errors import InputError


@dataclass(frozen=True)
class Matrix:
    """A matrix in a flat bucket that is worth compressing. offset: elements. rank: of its approximation."""

    offset: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True)
class MatrixPlan:
    """How a bucket is compressed. rest: [lo, hi) of the elements outside the matrices."""

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def left(self) -> int:
        """Elements of all P."""
        return sum(m.rows * m.rank for m in self.matrices)

    @property
    def right(self) -> int:
        """Elements of all Q."""
        return sum(m.columns * m.rank for m in self.matrices)

    @property
    def uncompressed(self) -> int:
        return sum(hi - lo for lo, hi in self.rest)


def plan(numel: int, shapes: Shapes, rank: int, min_compression: float) -> MatrixPlan:
    """Which parameters of a bucket of numel elements are compressed.

    A parameter of shape (a, b, c, ...) counts as a matrix of a rows; it is compressed where that makes it at least
    min_compression times smaller. What no parameter covers belongs to the rest.
    Raises InputError for parameters that overlap or lie outside.
    """
    matrices: list[Matrix] = []
    rest: list[tuple[int, int]] = []

    def uncompressed(lo: int, hi: int) -> None:
        if lo < hi:
            before = rest.pop()[0] if rest and rest[-1][1] == lo else lo
            rest.append((before, hi))

    end = 0
    for offset, shape in sorted((lo, tuple(shape)) for lo, shape in shapes):
        size = prod(shape)
        if offset < end or offset + size > numel:
            raise InputError(
                f"compression powersgd: the parameter of shape {shape} at offset {offset} lies outside the bucket of "
                f"{numel} elements or on another one; give each parameter's own (offset, shape)"
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
    """A bucket's memory. sent: all P, then the rest. ps, qs, errors: views of the matrices' parts."""

    plan: MatrixPlan
    sent: torch.Tensor
    right: torch.Tensor
    ps: Sequence[torch.Tensor]
    qs: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor]


class PowerSGD(Remembering):
    """Approximations of the given rank.

    warm_start: begin each step with the last step's Q, else with a random one. error_feedback: remember what the
    approximation missed. min_compression: how many times smaller a matrix must become; others travel as they are.
    seed: of the random start matrices, which are alike on all ranks.
    Of a flat buffer the parameters' shapes must be given (`bucket`); else x is one matrix, or a vector that is not
    compressed. All ranks' processors must be of one kind: each computes the basis for itself.
    A buffer with an infinite or NaN element on any rank becomes NaN everywhere and leaves the memory alone, so that
    a step that is skipped for it can be repeated.
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

    def __repr__(self) -> str:
        return (
            f"PowerSGD(rank={self.rank}, warm_start={self.warm_start}, error_feedback={self.error_feedback}, "
            f"min_compression={self.min_compression}, seed={self.seed})"
        )

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        """Without shapes a vector, which is not compressed."""
        made = plan(numel, [(0, (numel,))] if shapes is None else shapes, self.rank, self.min_compression)
        if not made.matrices:
            return numel * dtype.itemsize
        return (made.left + made.right + made.uncompressed) * wide_type(dtype).itemsize

    def _remember(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        made = plan(x.numel(), [(0, x.shape)] if shapes is None else shapes, self.rank, self.min_compression)
        dtype = wide_type(x.dtype)
        sent = torch.empty(made.left + made.uncompressed, dtype=dtype, device=x.device)
        right = torch.empty(made.right, dtype=dtype, device=x.device)
        error = torch.zeros(x.numel() if made.matrices else 0, dtype=dtype, device=x.device)
        steps = torch.zeros(1, dtype=torch.int64)
        tensors = {"right": right, "steps": steps} if made.matrices else {}
        if self.error_feedback and made.matrices:
            tensors["error"] = error
        ps = _pieces(sent, [(m.rows, m.rank) for m in made.matrices])
        qs = _pieces(right, [(m.columns, m.rank) for m in made.matrices])
        errors = [m.of(error) for m in made.matrices]
        return _Factors(name, x.numel(), x.dtype, shapes, tensors, made, sent, right, ps, qs, errors)

    def _reduce(
        self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, key: Hashable | None, shapes: Shapes | None
    ) -> None:
        memory = self._memory(x, key, shapes)
        assert isinstance(memory, _Factors)
        if not memory.plan.matrices:
            comm.all_reduce(x, op, algorithm)
            return
        self._start(memory)
        total = self._wide(x)
        rest = [total[lo:hi] for lo, hi in memory.plan.rest]
        sent_rest = memory.sent[memory.plan.left :]
        if rest:
            torch.cat(rest, out=sent_rest)
        matrices = [m.of(total) for m in memory.plan.matrices]
        if self.error_feedback:
            for matrix, error in zip(matrices, memory.errors, strict=True):
                matrix.add_(error)
        for matrix, p, q in zip(matrices, memory.ps, memory.qs, strict=True):
            torch.mm(matrix, q, out=p)
        comm.all_reduce(memory.sent, op, algorithm)
        if not all_finite(memory.sent):
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

    def _start(self, memory: _Factors) -> None:
        """Random start matrices, alike on all ranks: the first time, and without warm start each time."""
        step = int(memory.tensors["steps"])
        if step and self.warm_start:
            return
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {memory.name} {step}".encode()))
        memory.right.copy_(torch.randn(memory.right.numel(), generator=generator))


def _pieces(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Views of the given shapes one after the other from the start of a flat tensor."""
    views: list[torch.Tensor] = []
    lo = 0
    for rows, columns in shapes:
        views.append(flat[lo : lo + rows * columns].view(rows, columns))
        lo += rows * columns
    return views
