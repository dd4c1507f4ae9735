"""Operations in phases: started now and completed later, without a thread.

A program with `Await` steps is cut before each of them. The first phase runs when the operation starts. The others run
when the caller calls `wait` or `release`:

    start      my vector is complete            Signal        -> to the others
    wait       all vectors are complete         Await         <- from the others; sum my share; Signal: I have read
    release    my vector may be written again   Await         <- the others have read mine

The caller uses three vectors in turn. It starts each operation before it waits for the previous one, and releases a
vector when it needs it again. A late rank then delays the others only if it is late by more than the time between two
operations:

    fill 0, start 0 | fill 1, start 1, wait 0 | fill 2, start 2, wait 1 | release 0, fill 0, start 3, wait 2 | ...

A signal is a short message to each of the other ranks of the node. Each event has its own communicator, so the signals
of one event match in order even if ranks mix several events differently. A signal carries a row, as on the `board`,
which describes the operation and its memory. A rank accesses the memory of the others only if all rows are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Note, Record, clock
from mpitrain.comm.runtime.agreement import ROW, describe_difference, run_watched
from mpitrain.comm.runtime.waiting import wait_for_requests
from mpitrain.comm.runtime.work import Work, poll
from mpitrain.errors import CommunicationError, InputError


class _SignalMessages:
    """Messages of one signal: the rows of all ranks of the node, and the requests that send and receive them."""

    def __init__(self, node: MPI.Intracomm) -> None:
        self.rows = [bytearray(ROW) for _ in range(node.size)]
        self.own_row = self.rows[node.rank]
        others = [rank for rank in range(node.size) if rank != node.rank]
        self.requests = [node.Recv_init([self.rows[rank], ROW, MPI.BYTE], rank) for rank in others]
        self.requests += [node.Send_init([self.own_row, ROW, MPI.BYTE], rank) for rank in others]


class Event:
    """Carrier of the signals of one event, for all runs that are in progress.

    All ranks of the node must give the signals in the same order of runs.
    """

    def __init__(self, node: MPI.Intracomm, label: str, naps: bool) -> None:
        """Prepare an event; nothing is sent.

        Args:
            node: MPI communicator of the node's ranks, for this event alone.
            label: Name of the communicator that the event belongs to, for error messages.
            naps: True if waits for the signals nap (see `waiting`).
        """
        self.node, self.label, self.naps = node, label, naps
        self.idle: list[_SignalMessages] = []

    def free(self) -> None:
        """Release the idle requests. The communicator is freed by its creator."""
        for sent in self.idle:
            for request in sent.requests:
                request.Free()
        self.idle.clear()


class EventSignal:
    """Part of one bound program in one event. Only one run of the program takes part at a time."""

    __slots__ = ("_event", "_messages", "_row")

    def __init__(self, event: Event, row: bytes) -> None:
        """Prepare the part of a program.

        Args:
            event: The event.
            row: Description of the operation, as on the board.
        """
        self._event, self._row = event, row
        self._messages: _SignalMessages | None = None

    @property
    def is_pending(self) -> bool:
        """True if the signal was given and nobody has waited for it yet."""
        return self._messages is not None

    def signal(self) -> None:
        """Tell the other ranks of the node that this rank has reached the event."""
        idle = self._event.idle
        sent = self._messages = idle.pop() if idle else _SignalMessages(self._event.node)
        sent.own_row[:] = self._row
        MPI.Prequest.Startall(sent.requests)

    def wait(self) -> None:
        """Wait until all other ranks of the node have given the signal.

        Raises:
            CommunicationError: They gave it for different operations; raised on all ranks of the node.
        """
        sent, self._messages = self._messages, None
        assert sent is not None
        wait_for_requests(sent.requests, self._event.naps)
        self._event.idle.append(sent)
        if any(row != sent.own_row for row in sent.rows):
            wrong = describe_difference([bytes(row) for row in sent.rows], range(self._event.node.size))
            raise CommunicationError(f"{self._event.label}: {wrong}")

    def has_arrived(self) -> bool:
        """Return True if `wait` would return at once. The call also makes progress on the messages."""
        return self._messages is None or bool(MPI.Request.Testall(self._messages.requests))


class _Phase(Protocol):
    """Part of a bound program, with the signals to wait for before it begins."""

    awaited_signal: EventSignal | None

    def __call__(self) -> None: ...


class SplitPhase(Work):
    """A bound program in progress: `wait` runs its second phase, `release` runs the rest.

    If there are several, wait for and release them in the order in which they were started.
    """

    def __init__(
        self, name: str, phases: Sequence[_Phase], tensors: Sequence[torch.Tensor], record: Record, note: Note | None
    ) -> None:
        """Run the first phase.

        Args:
            name: Name of the operation, for error messages.
            phases: Phases of the program, bound to memory; no other run of them may be in progress.
            tensors: Tensors that the program reads and writes, kept alive; the first has the operation's size.
            record: Record in which the watchdog sees a wait.
            note: Entry of the operation in the traffic counters; None while they are off.

        Raises:
            InputError: An earlier run of these phases is not complete.
        """
        self._name, self._phases, self._tensors, self._record, self._note = name, phases, tensors, record, note
        if any(phase.awaited_signal is not None and phase.awaited_signal.is_pending for phase in phases):
            raise InputError(
                f"{record.label}: {name} on this memory is still in progress; release it before starting again"
            )
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
        """Return True if the second phase has run; it runs in this call if its signals have arrived."""
        awaited_signal = self._phases[1].awaited_signal
        if self._next == 1 and awaited_signal is not None and awaited_signal.has_arrived():
            self._proceed()
        return self._next > 1

    def release(self) -> None:
        """Block until the memory that the operation reads can be written again."""
        while self._next < len(self._phases):
            self._proceed()

    def _proceed(self) -> None:
        """Run the next phase; after an error, no further phase runs."""
        phase, following = self._phases[self._next], self._next + 1
        self._next = len(self._phases)
        begin = clock() if self._note is not None else 0.0
        run_watched(self._record, self._name, self._tensors[0], phase)
        if self._note is not None:
            enter = self._note.count_operation if following == 2 else self._note.count_wait
            enter(begin)
        self._next = following
