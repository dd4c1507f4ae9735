"""What all ways of carrying device memory have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from mpitrain.comm.collectives.operation import CollectiveOperation


class Transport(Protocol):
    """One way of carrying device memory, for one thread of one communicator."""

    @property
    def name(self) -> str:
        """As `comm.device` names it."""
        ...

    def carries(self, operation: CollectiveOperation, tensors: Sequence[Tensor | None], given: Sequence[Any]) -> bool:
        """Whether it can perform the operation; the answer is the same on all ranks."""
        ...

    def perform(
        self,
        operation: CollectiveOperation,
        tensors: Sequence[Tensor | None],
        written: Sequence[bool],
        given: Sequence[Any],
    ) -> None:
        """Perform the operation, between what was asked of the current stream before and what is asked of it later.

        Args:
            operation: Which one.
            tensors: What it is on: contiguous, on the rank's device; None where this rank has none.
            written: Which of them it changes.
            given: What else it is given.
        """
        ...

    def free(self) -> None:
        """Release its memory. Collective."""
        ...


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements in one row, without its history."""
    return tensor.detach().view(-1)
