"""Orders a rank's calls, or whatever stands for them, so that messages are under way while other chunks are added.

They are put down in program order with the memory they read and write. The posting of an exchange then
moves ahead of everything it does not depend on, never past another posting (messages between two ranks
match in order) or a barrier, and never more than one exchange beyond the one being waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Call = Callable[[], object]
Region = tuple[str, int, int]  # memory, first cell, last cell + 1

T = TypeVar("T")

IN_FLIGHT = 2  # exchanges posted and not yet waited for


@dataclass(frozen=True)
class _Entry(Generic[T]):
    kind: str  # "post", "wait", "local" or "barrier"
    call: T
    reads: Sequence[Region] = ()
    writes: Sequence[Region] = ()

    def conflicts(self, other: _Entry[T]) -> bool:
        return _overlap(self.writes, [*other.reads, *other.writes]) or _overlap(self.reads, other.writes)


def _overlap(a: Sequence[Region], b: Sequence[Region]) -> bool:
    return any(m == n and lo < end and start < hi for m, lo, hi in a for n, start, end in b)


class CallOrder(Generic[T]):
    """Entries in the order in which they are to be called, with the posting of each exchange moved ahead.

    A posting never passes another posting, a barrier or an entry it conflicts with, and at most `IN_FLIGHT` exchanges
    are posted and not yet waited for.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []

    def local(self, call: T, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        """Add a call of this rank alone, with the memory that it reads and writes."""
        self._entries.append(_Entry("local", call, reads, writes))

    def barrier(self, call: T) -> None:
        """Add a call that nothing may be moved past."""
        self._entries.append(_Entry("barrier", call))

    def exchange(self, post: T, wait: T, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        """Add an exchange of messages, whose posting may move ahead.

        Args:
            post: Begins to send and receive.
            wait: Completes it.
            reads, writes: The memory that is sent and received.
        """
        self._insert_early(_Entry("post", post, reads, writes))
        self._entries.append(_Entry("wait", wait, reads, writes))

    def _insert_early(self, post: _Entry[T]) -> None:
        at, waiting = len(self._entries), 1
        while at > 0:
            earlier = self._entries[at - 1]
            if earlier.kind in ("post", "barrier") or earlier.conflicts(post):
                break
            waiting += earlier.kind == "wait"
            if waiting > IN_FLIGHT:
                break
            at -= 1
        self._entries.insert(at, post)

    def entries(self) -> list[T]:
        """What was added, in the order in which it is to be called."""
        return [entry.call for entry in self._entries]
