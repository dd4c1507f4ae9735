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

Telling is a short message to each of the others: on one communicator for "complete", on another for "read", so that
both kinds match in order however a rank mixes them. It says which operation on what memory (a row as on the `board`):
a rank touches the others' memory only where theirs is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpitrain.comm.memory.board import ROW, difference, row_of
from mpitrain.comm.runtime.ordering import Call
from mpitrain.comm.runtime.watchdog import Record
from mpitrain.comm.runtime.work import Work, poll, seen
from mpitrain.errors import CommunicationError


class Told:
    """One telling: the row this rank tells, those of all ranks of the node, and the messages that carry them."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self.rows = [bytearray(ROW) for _ in range(node.size)]
        self.own = self.rows[node.rank]
        others = [rank for rank in range(node.size) if rank != node.rank]
        self.requests = [node.Recv_init([self.rows[rank], ROW, MPI.BYTE], rank) for rank in others]
        self.requests += [node.Send_init([self.own, ROW, MPI.BYTE], rank) for rank in others]


class Meeting:
    """Where the ranks of a node tell each other one thing, again and again. node: a communicator for this alone."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self._node = node
        self._idle: list[Told] = []

    def tell(self, row: bytes) -> Told:
        """Tell all others; to be awaited."""
        told = self._idle.pop() if self._idle else Told(self._node)
        told.own[:] = row
        MPI.Prequest.Startall(told.requests)
        return told

    def wait(self, told: Told) -> str:
        """Return when all others have told as often as this rank had then: what is wrong where they told otherwise."""
        MPI.Request.Waitall(told.requests)
        self._idle.append(told)
        same = all(row == told.own for row in told.rows)
        return "" if same else difference([bytes(row) for row in told.rows], range(self._node.size))

    def free(self) -> None:
        """Release the requests; the communicator is whose it was."""
        for told in self._idle:
            for request in told.requests:
                request.Free()
        self._idle.clear()


class DeferredReduceScatter(Work):
    """Begun when it is made: x is complete on this rank. `wait` in the order of beginning."""

    def __init__(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        body: Call,
        said: str,
        complete: Meeting,
        read: Meeting,
        sync: Sequence[Call],
        record: Record,
    ) -> None:
        """body: sums the share, once all have told. said: the arguments, which must be the same on all ranks.
        sync: makes x's memory seen, before telling and after waiting. record: where a wait is to be seen.
        """
        self._name = "deferred reduce_scatter"
        self._x, self._body, self._sync, self._record = x, body, sync, record
        self._out = out  # written by the body, which knows its address alone
        self._meetings, self._row = (complete, read), row_of(0, said)
        self._synchronize()
        self._complete: Told | None = complete.tell(self._row)
        self._read: Told | None = None

    def wait(self, timeout: float | None = None) -> None:
        if self._complete is None:
            return
        if timeout is not None:
            poll(self, f"{self._record.label}: {self._name}", timeout)
        else:
            seen(self._record, self._name, self._x, self._sum)

    def done(self) -> bool:
        if self._complete is not None and MPI.Request.Testall(self._complete.requests):
            self.wait()
        return self._complete is None

    def release(self) -> None:
        """Block until x may be written again."""
        self.wait()
        if self._read is not None:
            seen(self._record, self._name, self._x, self._let_go)

    def _sum(self) -> None:
        assert self._complete is not None
        wrong = self._meetings[0].wait(self._complete)
        self._complete = None
        if wrong:
            raise CommunicationError(f"{self._record.label}: {wrong}")
        self._synchronize()
        self._body()
        self._synchronize()
        self._read = self._meetings[1].tell(self._row)

    def _let_go(self) -> None:
        assert self._read is not None
        self._meetings[1].wait(self._read)
        self._read = None
        self._synchronize()

    def _synchronize(self) -> None:
        for call in self._sync:
            call()
