"""The arithmetic of reductions on tensors, and what each (operation, dtype) pair means.

fp16 and bf16 are accumulated in fp32 and rounded once. bool is logical: sum and max are OR, product and min
are AND. Averages exist for floating and complex numbers only, minima and maxima not for complex ones.

Host memory is worked on with NumPy, whose calls cost half as much as torch's and copy as fast as memcpy, unless
torch may use several threads and there is enough for them to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpitrain.comm.buffers import HALVES
from mpitrain.comm.program import tree_order
from mpitrain.comm.schedule import Call
from mpitrain.errors import InputError

_FOR_THREADS = 1 << 16  # elements from which torch divides an operation among threads usefully


@dataclass(frozen=True)
class _Operation:
    """One reduction: by torch, by NumPy, by MPI."""

    torch: Callable[..., Any]
    numpy: Any
    mpi: MPI.Op


_SUM = _Operation(torch.add, np.add, MPI.SUM)
_ARITHMETIC = {
    "sum": _SUM,
    "avg": _SUM,
    "product": _Operation(torch.mul, np.multiply, MPI.PROD),
    "min": _Operation(torch.minimum, np.minimum, MPI.MIN),
    "max": _Operation(torch.maximum, np.maximum, MPI.MAX),
}
_OR = _Operation(torch.logical_or, np.logical_or, MPI.LOR)
_AND = _Operation(torch.logical_and, np.logical_and, MPI.LAND)
_LOGICAL = {"sum": _OR, "max": _OR, "product": _AND, "min": _AND}
OPERATIONS = tuple(_ARITHMETIC)


@dataclass(frozen=True)
class Reduction:
    """One operation on one dtype. scale: what the result is multiplied with at the end."""

    op: str
    dtype: torch.dtype
    operation: _Operation
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
        operation = (_LOGICAL if dtype == torch.bool else _ARITHMETIC)[op]
        return Reduction(op, dtype, operation, 1.0 / size if op == "avg" and size > 1 else None)

    @property
    def mpi_op(self) -> MPI.Op:
        return self.operation.mpi

    @property
    def pairwise(self) -> bool:
        """Whether many parts may be joined two at a time: rounding after each pair would lose 16-bit sums."""
        return self.dtype not in HALVES

    def combine(
        self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, tree: bool, scale: float | None
    ) -> list[Call]:
        """Calls that set out = reduction of parts (times scale), in the order `Combine` says.

        parts: flat tensors of one length; with tree any of them may be out itself, else only the first.
        """
        if len(parts) == 1:
            return [copying(out, parts[0]), *scaling(out, scale)]
        if not self.pairwise and (len(parts) > 2 or scale is not None):
            return [self._wide(parts, out, tree, scale)]
        if tree and len(parts) > 2:
            return [self._tree(parts, out, scale)]
        join, (result, *arrays) = self._join(out, *parts)
        calls: list[Call] = [partial(join, arrays[0], arrays[1], out=result)]
        calls += [partial(join, result, array, out=result) for array in arrays[2:]]
        return [*calls, *scaling(out, scale)]

    def _join(self, *tensors: torch.Tensor) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The function that joins two parts, and the tensors in the form it takes."""
        arrays = _as_numpy(*tensors)
        return (self.operation.torch, tensors) if arrays is None else (self.operation.numpy, arrays)

    def _tree(self, parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float | None) -> Call:
        join, arrays = self._join(*parts)

        def run() -> None:
            out.copy_(torch.as_tensor(tree_order(arrays, join)))
            _scaled(out, scale)

        return run

    def _wide(self, parts: Sequence[torch.Tensor], out: torch.Tensor, tree: bool, scale: float | None) -> Call:
        """16-bit parts accumulated in fp32, rounded once."""
        join = self.operation.torch

        def run() -> None:
            if tree:
                total = tree_order([part.float() for part in parts], join)
            else:
                total = parts[0].float()
                for part in parts[1:]:
                    join(total, part, out=total)
            out.copy_(_scaled(total, scale))

        return run


def copying(into: torch.Tensor, of: torch.Tensor) -> Call:
    """A call that copies between flat tensors, converting the type where they differ."""
    arrays = _as_numpy(into, of) if into.dtype == of.dtype else None
    return partial(into.copy_, of) if arrays is None else partial(np.copyto, arrays[0], arrays[1])


def scaling(tensor: torch.Tensor, scale: float | None) -> list[Call]:
    """The multiplication that comes once at the end, if there is one."""
    return [] if scale is None else [partial(tensor.mul_, scale)]


def _as_numpy(*tensors: torch.Tensor) -> list[np.ndarray] | None:
    """The tensors as arrays over the same memory, where NumPy is the better one to work on them."""
    first = tensors[0]
    if first.device.type != "cpu" or first.dtype in HALVES:
        return None
    if torch.get_num_threads() > 1 and first.numel() >= _FOR_THREADS:
        return None
    return [tensor.numpy() for tensor in tensors]


def _scaled(tensor: torch.Tensor, scale: float | None) -> torch.Tensor:
    return tensor if scale is None else tensor.mul_(scale)
