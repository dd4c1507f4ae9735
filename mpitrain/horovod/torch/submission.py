"""One submitted operation, and the text by which ranks compare what they have submitted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpitrain.errors import InputError, MpitrainError

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_UNEVEN = ("allgather", "alltoall")  # kinds whose first dimension may differ between ranks


class HorovodInternalError(MpitrainError, RuntimeError):
    """Error of an operation on which the ranks disagree, or during which a rank died. Elastic training catches it."""


class HorovodArgumentError(InputError, ValueError):
    """Argument that no operation of Horovod's interface takes; also a ValueError, which scripts may catch."""


class UnsupportedError(InputError, NotImplementedError):
    """Part of Horovod's interface that is not provided; also a NotImplementedError."""


class ReduceOp(IntEnum):
    """Reductions, with the numbers that Horovod gives them."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


# names of mpitrain's communicators; Adasum is computed from messages
REDUCTIONS = {
    ReduceOp.Average: "avg",
    ReduceOp.Sum: "sum",
    ReduceOp.Min: "min",
    ReduceOp.Max: "max",
    ReduceOp.Product: "product",
}


class Negotiator(Protocol):
    """Agreement of the ranks on operations, as `mpitrain.horovod.torch.negotiation` provides it."""

    def wait(self, operation: Submission) -> None:
        """Wait until an operation is complete; raise its error, if any."""

    def poll(self, operation: Submission) -> bool:
        """Return whether an operation is complete, after a meeting with the other ranks."""


@dataclass(eq=False)
class Submission:
    """An operation that this rank has submitted. It serves as the handle of asynchronous calls.

    Attributes:
        kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or call.
        name: Name by which ranks find the same operation; unique among those that are pending.
        tensors: Inputs; several if operations were grouped.
        outputs: Results; the inputs themselves if the operation works in place.
        reduction: ReduceOp of allreduce and reducescatter.
        prescale, postscale: Factors before and after the reduction.
        root: Rank in the process set that broadcasts.
        splits: Rows for each rank, for alltoall.
        is_group: True if `result` is a list of tensors even if there is only one.
        function: Function of the communicator that a call runs once all ranks have submitted it.
        value: Return value of the function, or the received splits.
        is_complete: True if the results are there, or an error.
        error: Reason why the operation was not carried out.
        negotiator: Meets the other ranks for this operation.
        first_poll: Time of the first `poll`, seconds; None before it.
    """

    kind: str
    name: str
    tensors: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    reduction: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: Sequence[int] | None = None
    is_group: bool = False
    function: Callable[[Communicator], Any] | None = None
    value: Any = None
    is_complete: bool = False
    error: Exception | None = None
    negotiator: Negotiator | None = None
    first_poll: float | None = None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        skipped = int(self.kind in _UNEVEN)
        described = [[str(t.dtype)[6:], t.device.type, t.dim(), *t.shape[skipped:]] for t in self.tensors]
        options = [int(self.reduction), self.prescale, self.postscale, self.root]
        self.key = json.dumps([self.name, self.kind, options, described])

    @property
    def result(self) -> Any:
        """Return the outputs as the caller of the operation gets them."""
        if self.kind in ("call", "barrier"):
            return self.value
        if self.kind == "alltoall" and self.splits is not None and self.value is not None:
            return self.outputs[0], self.value
        return list(self.outputs) if self.is_group else self.outputs[0]

    def fail(self, error: Exception) -> None:
        """Complete the operation with an error, which `synchronize` raises."""
        self.error, self.is_complete = error, True


def zeros_for(key: str) -> Submission:
    """Return an all-reduce of zeros that matches another rank's, for a rank that has joined.

    Args:
        key: Key of the other rank's operation.
    """
    name, kind, (reduction, prescale, postscale, root), described = json.loads(key)
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, device, _, *shape in described]
    return Submission(kind, name, tensors, tensors, ReduceOp(reduction), prescale, postscale, root)


def kind_of(key: str) -> str:
    """Return the kind of the operation with this key."""
    return str(json.loads(key)[1])


def describe(key: str) -> str:
    """Return a key as text for people: kind, name, dtypes and shapes."""
    name, kind, (reduction, prescale, postscale, root), described = json.loads(key)
    skipped = ["*"] if kind in _UNEVEN else []
    shapes = ", ".join(f"{dtype} {[*skipped, *shape]} on {device}" for dtype, device, _, *shape in described[:3])
    shapes += f" and {len(described) - 3} more" if len(described) > 3 else ""
    reduces = kind in ("allreduce", "reducescatter")
    how = f", op {ReduceOp(reduction).name}" if reduces else f", root {root}" if kind == "broadcast" else ""
    how += f", prescale {prescale}, postscale {postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    return f"{kind} '{name}'" + (f" of {shapes}{how}" if shapes else "")
