"""A reduce_scatter in shared memory that waits for nobody as long as nobody is late by more than the caller's patience.

The program of `shared_reduce_scatter` meets the other ranks of the node twice: before, since all vectors must be
complete, and after, since nobody may write into a vector that another still reads. Here each meeting is in two parts,
between which the caller does something else:

    begin      my vector is complete            -> tell the others
    wait       all vectors are complete         <- they have told;  sum my share;  tell them that I have read theirs
    release    my vector may be written again   <- they have told

With three slots in turn, each begun before the one before it is waited for, and released when it is needed again, a
rank that is late keeps the others waiting only when it is late by more than the time between two slots:

    fill 0, begin 0 | fill 1, begin 1, wait 0 | fill 2, begin 2, wait 1 | release 0, fill 0, begin 3, wait 2 | ...

Telling is a message of no bytes to each of the others: on one communicator for "complete", on another for "read", so
that both kinds match in order however a rank mixes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpitrain.comm.schedule import Call
from mpitrain.comm.watchdog import Record
from mpitrain.comm.work import Work, poll, seen

Told = list[MPI.Prequest]

_NOTHING = [None, 0, MPI.BYTE]


class Meeting:
    """Where the ranks of a node tell each other one thing, again and again. node: a communicator for this alone."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self._node = node
        self._idle: list[Told] = []

    def tell(self) -> Told:
        """Tell all others; to be awaited."""
        told = self._idle.pop() if self._idle else self._requests()
        MPI.Prequest.Startall(told)
        return told

    def wait(self, told: Told) -> None:
        """Return when all others have told as often as this rank had then."""
        MPI.Request.Waitall(told)
        self._idle.append(told)

    def _requests(self) -> Told:
        others = [rank for rank in range(self._node.size) if rank != self._node.rank]
        return [make(_NOTHING, rank) for make in (self._node.Recv_init, self._node.Send_init) for rank in others]

    def free(self) -> None:
        """Release the requests; the communicator is whose it was."""
        for told in self._idle:
            for request in told:
                request.Free()
        self._idle.clear()


class Lagging(Work):
    """Begun when it is made: x is complete on this rank. `wait` in the order of beginning."""

    def __init__(
        self,
        name: str,
        out: torch.Tensor,
        x: torch.Tensor,
        body: Call,
        complete: Meeting,
        read: Meeting,
        sync: Sequence[Call],
        record: Record,
    ) -> None:
        """body: sums the share, once all have told. sync: makes x's memory seen, before telling and after waiting.
        record: where a wait is to be seen.
        """
        self._name, self._x, self._body, self._sync, self._record = name, x, body, sync, record
        self._out = out  # written by the body, which knows its address alone
        self._meetings = complete, read
        self._synchronize()
        self._complete: Told | None = complete.tell()
        self._read: Told | None = None

    def wait(self, timeout: float | None = None) -> None:
        if self._complete is None:
            return
        if timeout is not None:
            poll(self, f"{self._record.label}: {self._name}", timeout)
        else:
            seen(self._record, self._name, self._x, self._sum)

    def done(self) -> bool:
        if self._complete is not None and MPI.Request.Testall(self._complete):
            self.wait()
        return self._complete is None

    def release(self) -> None:
        """Block until x may be written again."""
        self.wait()
        if self._read is not None:
            seen(self._record, self._name, self._x, self._let_go)

    def _sum(self) -> None:
        assert self._complete is not None
        self._meetings[0].wait(self._complete)
        self._complete = None
        self._synchronize()
        self._body()
        self._synchronize()
        self._read = self._meetings[1].tell()

    def _let_go(self) -> None:
        assert self._read is not None
        self._meetings[1].wait(self._read)
        self._read = None
        self._synchronize()

    def _synchronize(self) -> None:
        for call in self._sync:
            call()
