"""Operations on tensors that wrap others: one operation for each inner tensor, in the order of their class."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.comm.memory.wrapped import inner_tensors, is_wrapper
from mpitrain.comm.runtime.work import Work
from mpitrain.errors import InputError


class SeveralWorks(Work):
    """Operations that were begun as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        """Block until all are complete; see `Work.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def done(self) -> bool:
        """Return whether all are complete."""
        return all(work.done() for work in self._works)

    def release(self) -> None:
        """Block until what they read may be written again."""
        for work in self._works:
            work.release()


def wraps(*tensors: Any) -> bool:
    """Return whether any argument of an operation is made of other tensors."""
    return any(map(is_wrapper, tensors))


def for_each_inner(operation: Callable[..., Work | None], *tensors: Any) -> Work | None:
    """Perform an operation once for each inner tensor.

    Args:
        operation: Called with one inner tensor of each tensor.
        tensors: The operation's tensors; None for those that this rank need not give.

    Returns:
        A handle of all of them, if they run in the background.

    Raises:
        InputError: The tensors are not made of equally many.
    """
    parts = [None if x is None else inner_tensors(x) if is_wrapper(x) else [x] for x in tensors]
    numbers = {len(inner) for inner in parts if inner is not None}
    if len(numbers) > 1:
        made = ", ".join(f"a {type(x).__name__} of {len(inner)}" for x, inner in zip(tensors, parts) if inner)  # noqa: B905
        raise InputError(f"the tensors of one operation must be made of equally many tensors, not {made}")
    calls = [[None if inner is None else inner[i] for inner in parts] for i in range(numbers.pop())]
    works = [operation(*inner) for inner in calls]
    begun = [work for work in works if work is not None]
    return SeveralWorks(begun) if begun else None
