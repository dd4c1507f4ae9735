"""The arithmetic of reductions on tensors, and what each (operation, dtype) pair means.

fp16 and bf16 are accumulated in fp32 and rounded once. Integers wrap where they overflow, as torch's do; their average
is the sum divided toward zero. bool is logical: sum and max are OR, product and min are AND, and there is no average.
Complex numbers have no minimum and no maximum.

Host memory is worked on with NumPy, whose calls cost half as much as torch's and copy as fast as memcpy, unless
torch may use several threads and there is enough for them to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.elements import HALVES, SMALL_INTEGERS
from mpitrain.comm.programs.program import tree_order
from mpitrain.errors import InputError

Array: TypeAlias = "torch.Tensor | np.ndarray"
Call = Callable[[], object]

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
    """One operation on one dtype.

    Attributes:
        op: Name of the operation, one of `OPERATIONS`.
        dtype: Of the elements.
        operation: The functions that perform it.
        scale: Factor of the result, applied at the end; None for none. An integer is a divisor (see `scaling`).
    """

    op: str
    dtype: torch.dtype
    operation: _Operation
    scale: float | None = None

    @staticmethod
    def of(op: str, dtype: torch.dtype, size: int) -> Reduction:
        """The reduction that a name stands for.

        Args:
            op: One of `OPERATIONS`.
            dtype: Of the elements.
            size: Number of ranks, which averages are divided by.

        Raises:
            InputError: There is no such operation, or it has no meaning for the dtype.
        """
        if op not in OPERATIONS:
            raise InputError(f"there is no reduction {op!r}; use one of {', '.join(OPERATIONS)}")
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.bool and op == "avg":
            raise InputError("op avg has no meaning for bool; convert to float32 first")
        if op in ("min", "max") and dtype.is_complex:
            raise InputError(f"op {op} has no meaning for {name}; complex numbers have no order")
        operation = (_LOGICAL if dtype == torch.bool else _ARITHMETIC)[op]
        if op != "avg" or size == 1:
            return Reduction(op, dtype, operation)
        return Reduction(op, dtype, operation, 1.0 / size if dtype.is_floating_point or dtype.is_complex else size)

    @property
    def mpi_op(self) -> MPI.Op:
        """The operation of MPI that does the same."""
        return self.operation.mpi

    @property
    def library_saturates(self) -> bool:
        """Return whether an MPI library may saturate where torch wraps around, as Open MPI does."""
        return self.operation is _SUM and self.dtype in SMALL_INTEGERS

    @property
    def pairwise(self) -> bool:
        """Whether many parts may be joined two at a time; 16-bit sums would lose digits by rounding after each pair."""
        return self.dtype not in HALVES

    def combine(self, parts: Sequence[Array], out: Array, *, tree: bool, scale: float | None) -> list[Call]:
        """Calls that set `out` to the reduction of the parts, times `scale`.

        Args:
            parts: Flat tensors or arrays of one length, all in the form that `for_numpy` says. Where `tree` is set any
                of them may be `out` itself, else only the first.
            out: Where the result goes.
            tree: Reduce as a fixed binary tree over the order of the parts, else from left to right.
            scale: A factor; None for none.
        """
        if len(parts) == 1:
            return [copying(out, parts[0]), *scaling(out, scale)]
        if not self.pairwise and (len(parts) > 2 or scale is not None):
            return [self._wide(parts, out, tree, scale)]
        if tree and len(parts) > 2:
            return [self._tree(parts, out, scale)]
        join = self._join(out)
        calls: list[Call] = [partial(join, parts[0], parts[1], out=out)]
        calls += [partial(join, out, part, out=out) for part in parts[2:]]
        return [*calls, *scaling(out, scale)]

    def _join(self, out: Array) -> Callable[..., Any]:
        """The function that joins two parts of out's form."""
        return self.operation.numpy if isinstance(out, np.ndarray) else self.operation.torch

    def _tree(self, parts: Sequence[Array], out: Array, scale: float | None) -> Call:
        join = self._join(out)

        def run() -> None:
            copying(out, tree_order(parts, join))()
            for call in scaling(out, scale):
                call()

        return run

    def _wide(self, parts: Sequence[Any], out: Any, tree: bool, scale: float | None) -> Call:
        """16-bit parts accumulated in fp32, rounded once."""
        join = self.operation.torch

        def run() -> None:
            if tree:
                total = tree_order([part.float() for part in parts], join)
            else:
                total = parts[0].float()
                for part in parts[1:]:
                    join(total, part, out=total)
            out.copy_(total if scale is None else total.mul_(scale))

        return run


def copying(into: Array, of: Array) -> Call:
    """A call that copies between flat tensors or arrays, and converts the type where they differ."""
    if isinstance(into, np.ndarray):
        return partial(np.copyto, into, of)
    assert isinstance(of, torch.Tensor)
    if into.dtype == of.dtype and for_numpy(into.dtype, into.device, into.numel()):
        return partial(np.copyto, into.numpy(), of.numpy())
    return partial(into.copy_, of)


def scaling(x: Array, scale: float | None) -> list[Call]:
    """Return the calls that apply the scale of a reduction in place.

    Args:
        x: Flat tensor or array.
        scale: Factor; an integer is a divisor of integers, and the quotient is rounded toward zero. None for no call.
    """
    if scale is None:
        return []
    if isinstance(scale, int):
        return [partial(_divide, torch.from_numpy(x) if isinstance(x, np.ndarray) else x, scale)]
    return [partial(np.multiply, x, scale, out=x) if isinstance(x, np.ndarray) else partial(x.mul_, scale)]


def _divide(x: torch.Tensor, divisor: int) -> None:
    """Divide integers in place, toward zero. In 64 bits, because a number of ranks need not fit into the type of x."""
    x.copy_(torch.div(x.long(), divisor, rounding_mode="trunc"))


def for_numpy(dtype: torch.dtype, device: torch.device | None, numel: int) -> bool:
    """Whether so many elements are worked on with NumPy rather than with torch.

    NumPy's calls cost less. Torch serves for 16-bit numbers, on devices, and where several threads have enough to do.
    """
    if dtype in HALVES or (device is not None and device.type != "cpu"):
        return False
    return numel < _FOR_THREADS or torch.get_num_threads() == 1
