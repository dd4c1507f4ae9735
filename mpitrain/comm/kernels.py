"""The arithmetic of reductions on tensors, and what each (operation, dtype) pair means.

fp16 and bf16 are accumulated in fp32 and rounded once. bool is logical: sum and max are OR, product and min
are AND. Averages exist for floating and complex numbers only, minima and maxima not for complex ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from mpitrain.comm.buffers import HALVES
from mpitrain.comm.program import tree_order
from mpitrain.errors import InputError

Join = Callable[..., Any]  # join(a, b, out=c)

_ARITHMETIC: dict[str, tuple[Join, MPI.Op]] = {
    "sum": (torch.add, MPI.SUM),
    "avg": (torch.add, MPI.SUM),
    "product": (torch.mul, MPI.PROD),
    "min": (torch.minimum, MPI.MIN),
    "max": (torch.maximum, MPI.MAX),
}
_LOGICAL: dict[str, tuple[Join, MPI.Op]] = {
    "sum": (torch.logical_or, MPI.LOR),
    "max": (torch.logical_or, MPI.LOR),
    "product": (torch.logical_and, MPI.LAND),
    "min": (torch.logical_and, MPI.LAND),
}
OPERATIONS = tuple(_ARITHMETIC)


@dataclass(frozen=True)
class Reduction:
    """One operation on one dtype: how we compute it, how MPI is asked to, what it is divided by at the end."""

    op: str
    dtype: torch.dtype
    join: Join
    mpi_op: MPI.Op
    scale: float | None = None

    @staticmethod
    def of(op: str, dtype: torch.dtype, size: int) -> Reduction:
        """Raises InputError for an operation that does not exist or has no meaning for the dtype."""
        if op not in OPERATIONS:
            raise InputError(f"there is no reduction {op!r}; use one of {', '.join(OPERATIONS)}")
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.bool and op == "avg":
            raise InputError("op avg has no meaning for bool; convert to float32 first")
        if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            raise InputError(f"op avg of {name} would be rounded; convert to float32 or use op sum")
        if op in ("min", "max") and dtype.is_complex:
            raise InputError(f"op {op} has no meaning for {name}; complex numbers have no order")
        join, mpi_op = (_LOGICAL if dtype == torch.bool else _ARITHMETIC)[op]
        return Reduction(op, dtype, join, mpi_op, 1.0 / size if op == "avg" and size > 1 else None)

    def combine(
        self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, tree: bool, scale: float | None
    ) -> Callable[[], object]:
        """A call that sets out = reduction of parts (times scale), in the order `Combine` says.

        parts: flat tensors of one length; with tree any of them may be out itself, else only the first.
        """
        if self.dtype in HALVES and (len(parts) > 2 or scale is not None):
            return self._wide(parts, out, tree, scale)
        if tree and len(parts) > 2:
            return self._tree(parts, out, scale)
        join, first = self.join, parts[0]

        if len(parts) == 1:
            if first.data_ptr() == out.data_ptr() and scale is None:
                return _nothing
            return lambda: _scaled(out.copy_(first), scale)
        second, rest = parts[1], tuple(parts[2:])
        if not rest and scale is None:
            return lambda: join(first, second, out=out)

        def run() -> None:
            join(first, second, out=out)
            for part in rest:
                join(out, part, out=out)
            _scaled(out, scale)

        return run

    def _tree(self, parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float | None) -> Callable[[], object]:
        join = self.join

        def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return join(a, b)

        return lambda: _scaled(out.copy_(tree_order(parts, joined)), scale)

    def _wide(
        self, parts: Sequence[torch.Tensor], out: torch.Tensor, tree: bool, scale: float | None
    ) -> Callable[[], object]:
        """16-bit parts accumulated in fp32, rounded once."""
        join = self.join

        def run() -> None:
            if tree:
                total = tree_order([part.float() for part in parts], lambda a, b: join(a, b))
            else:
                total = parts[0].float()
                for part in parts[1:]:
                    join(total, part, out=total)
            out.copy_(_scaled(total, scale))

        return run


def _scaled(tensor: torch.Tensor, scale: float | None) -> torch.Tensor:
    return tensor if scale is None else tensor.mul_(scale)


def _nothing() -> None:
    pass
