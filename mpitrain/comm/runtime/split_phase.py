"""Operations in phases: begun, and completed later, without a thread.

A program with `Await` steps is cut before each of them. The first phase runs when the operation begins, the others
when the caller asks for what they do:

    begin      my vector is complete            Signal        -> the others
    wait       all vectors are complete         Await         <- theirs;  sum my share;  Signal: I have read theirs
    release    my vector may be written again   Await         <- they have read mine

With three vectors in turn, each begun before the one before it is waited for, and released when it is needed again, a
rank that is late keeps the others waiting only when it is late by more than the time between two of them:

    fill 0, begin 0 | fill 1, begin 1, wait 0 | fill 2, begin 2, wait 1 | release 0, fill 0, begin 3, wait 2 | ...

A signal is a short message to each of the other ranks of the node, on a communicator of the event's own, so that those
of several events match in order however a rank mixes them. It carries a row as on the `board`: which operation on what
memory. A rank goes on to touch the others' memory only where theirs is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Note, Record, clock
from mpitrain.comm.runtime.agreement import ROW, difference, seen
from mpitrain.comm.runtime.work import Work, poll
from mpitrain.errors import CommunicationError, InputError


class _Sent:
    """One signal: the row this rank sends, those of all ranks of the node, and the messages that carry them."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self.rows = [bytearray(ROW) for _ in range(node.size)]
        self.own = self.rows[node.rank]
        others = [rank for rank in range(node.size) if rank != node.rank]
        self.requests = [node.Recv_init([self.rows[rank], ROW, MPI.BYTE], rank) for rank in others]
        self.requests += [node.Send_init([self.own, ROW, MPI.BYTE], rank) for rank in others]


class Event:
    """Carries the signals of one event, for as many runs at a time as are under way.

    All ranks of the node must give the signals in the same order of runs.
    """

    def __init__(self, node: MPI.Intracomm, label: str) -> None:
        """Prepare an event, without sending anything.

        Args:
            node: A communicator of the node's ranks, for this event alone.
            label: The communicator that the event belongs to, for messages.
        """
        self.node, self.label = node, label
        self.idle: list[_Sent] = []

    def free(self) -> None:
        """Release the requests that are idle. The communicator is released by whoever made it."""
        for sent in self.idle:
            for request in sent.requests:
                request.Free()
        self.idle.clear()


class Telling:
    """The part of a bound program in one event. One run of the program takes part in it at a time."""

    __slots__ = ("_event", "_row", "_sent")

    def __init__(self, event: Event, row: bytes) -> None:
        """row: what this rank does, as on the board."""
        self._event, self._row = event, row
        self._sent: _Sent | None = None

    @property
    def pending(self) -> bool:
        """Whether the signal was given and is not waited for yet."""
        return self._sent is not None

    def signal(self) -> None:
        """Tell the other ranks of the node that this one has come here."""
        idle = self._event.idle
        sent = self._sent = idle.pop() if idle else _Sent(self._event.node)
        sent.own[:] = self._row
        MPI.Prequest.Startall(sent.requests)

    def wait(self) -> None:
        """Wait until all other ranks of the node have given the signal.

        Raises:
            CommunicationError: They gave it for different operations; raised on all ranks of the node.
        """
        sent, self._sent = self._sent, None
        assert sent is not None
        MPI.Request.Waitall(sent.requests)
        self._event.idle.append(sent)
        if any(row != sent.own for row in sent.rows):
            wrong = difference([bytes(row) for row in sent.rows], range(self._event.node.size))
            raise CommunicationError(f"{self._event.label}: {wrong}")

    def arrived(self) -> bool:
        """Whether waiting would return at once; lets the messages make progress."""
        return self._sent is None or bool(MPI.Request.Testall(self._sent.requests))


class _Phase(Protocol):
    """A part of a bound program, and the signals that it waits for before it begins."""

    awaits: Telling | None

    def __call__(self) -> None: ...


class SplitPhase(Work):
    """A bound program that has begun: `wait` runs its second phase, `release` the rest.

    Several of them are waited for and released in the order in which they began.
    """

    def __init__(
        self, name: str, phases: Sequence[_Phase], tensors: Sequence[torch.Tensor], record: Record, note: Note | None
    ) -> None:
        """Run the first phase.

        Args:
            name: Of the operation, for messages.
            phases: Of the program, bound to memory; no other run of them may be under way.
            tensors: What the program reads and writes, kept alive. The first is the operation's.
            record: Where a wait is to be seen.
            note: Enters the operation in the journal, while that is on.

        Raises:
            InputError: A run of these phases is not complete.
        """
        self._name, self._phases, self._tensors, self._record, self._note = name, phases, tensors, record, note
        if any(phase.awaits is not None and phase.awaits.pending for phase in phases):
            raise InputError(f"{record.label}: {name} on this memory is under way; release it before it begins again")
        phases[0]()
        self._next = 1

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the signals of the second phase, then run it; see `Work.wait`."""
        if self._next > 1:
            return
        if timeout is not None:
            poll(self, f"{self._record.label}: {self._name}", timeout)
        else:
            self._proceed()

    def done(self) -> bool:
        """Whether the second phase has run; it runs here when the signals for it have come."""
        awaits = self._phases[1].awaits
        if self._next == 1 and awaits is not None and awaits.arrived():
            self._proceed()
        return self._next > 1

    def release(self) -> None:
        """Block until what the operation reads may be written again."""
        while self._next < len(self._phases):
            self._proceed()

    def _proceed(self) -> None:
        """Run the next phase; after an error there is none."""
        phase, following = self._phases[self._next], self._next + 1
        self._next = len(self._phases)
        begin = clock() if self._note is not None else 0.0
        seen(self._record, self._name, self._tensors[0], phase)
        if self._note is not None:
            enter = self._note.performed if following == 2 else self._note.waited
            enter(begin)
        self._next = following
