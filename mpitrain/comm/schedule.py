"""Orders a rank's calls so that messages are under way while other chunks are being added.

Calls are put down in program order with the memory they read and write. The posting of an exchange then
moves ahead of everything it does not depend on, never past another posting (messages between two ranks
match in order) or a barrier, and never more than one exchange beyond the one being waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mpi4py import MPI

Call = Callable[[], object]
Region = tuple[str, int, int]  # memory, first cell, last cell + 1

IN_FLIGHT = 2  # exchanges posted and not yet waited for


@dataclass(frozen=True)
class _Entry:
    kind: str  # "post", "wait", "local" or "barrier"
    call: Call
    reads: Sequence[Region] = ()
    writes: Sequence[Region] = ()

    def conflicts(self, other: _Entry) -> bool:
        return (
            _overlap(self.writes, other.writes)
            or _overlap(self.writes, other.reads)
            or _overlap(self.reads, other.writes)
        )


def _overlap(a: Sequence[Region], b: Sequence[Region]) -> bool:
    return any(m == n and lo < end and start < hi for m, lo, hi in a for n, start, end in b)


class Schedule:
    def __init__(self, before_post: Call | None = None) -> None:
        """before_post: called before messages are posted (a device must have finished writing them)."""
        self._entries: list[_Entry] = []
        self._before_post = before_post

    def local(self, call: Call, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        self._entries.append(_Entry("local", call, reads, writes))

    def barrier(self, call: Call) -> None:
        self._entries.append(_Entry("barrier", call))

    def exchange(self, requests: list[MPI.Prequest], reads: Sequence[Region], writes: Sequence[Region]) -> None:
        start: Call = requests[0].Start if len(requests) == 1 else partial(MPI.Prequest.Startall, requests)
        wait: Call = requests[0].Wait if len(requests) == 1 else partial(MPI.Request.Waitall, requests)
        self._insert_early(_Entry("post", start, reads, writes))
        self._entries.append(_Entry("wait", wait, reads, writes))

    def _insert_early(self, post: _Entry) -> None:
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

    def calls(self) -> list[Call]:
        calls: list[Call] = []
        for entry in self._entries:
            if entry.kind == "post" and self._before_post is not None:
                calls.append(self._before_post)
            calls.append(entry.call)
        return calls
