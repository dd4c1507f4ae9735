"""What all ways of carrying device memory have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mpitrain.comm.collectives.operation import CollectiveOperation
from mpitrain.comm.runtime.kernels import Reduction


class DeviceCall(NamedTuple):
    """One call of an operation on device memory.

    Attributes:
        operation: The operation.
        tensors: Tensors that it is given: contiguous, on the rank's device; None where this rank has none.
        written: For each of them, whether the operation changes it.
        given: Arguments besides the tensors.
    """

    operation: CollectiveOperation
    tensors: Sequence[Tensor | None]
    written: Sequence[bool]
    given: Sequence[Any]

    @property
    def present(self) -> list[Tensor]:
        """The tensors that this rank has."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the largest tensor."""
        return max(tensor.nbytes for tensor in self.present)

    def value(self, name: str, otherwise: Any = None) -> Any:
        """Return the argument of a name; `otherwise` if the operation has no such parameter."""
        return self.operation.value(self.given, name, otherwise)

    def reduction(self, size: int) -> Reduction | None:
        """Return the reduction over `size` ranks; None for an operation that only moves."""
        op = self.value("op")
        return None if op is None else Reduction.of(op, self.present[0].dtype, size)


class Transport(Protocol):
    """One way of carrying device memory, for one thread of one communicator."""

    @property
    def name(self) -> str:
        """As `comm.device` names it."""
        ...

    def carries(self, call: DeviceCall) -> bool:
        """Whether it can perform the operation; the answer is the same on all ranks."""
        ...

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation, between what was asked of the current stream before and what is asked of it later."""
        ...

    def free(self) -> None:
        """Release its memory. Collective."""
        ...


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements in one row, without its history."""
    return tensor.detach().view(-1)
