"""Progress on what a process has begun and MPI does not carry on by itself.

Two things wait until this process calls MPI again: a receive whose header has not come, because its data cannot be
received before, and the operations that a `Worker` without a thread has put off until somebody waits for them. Another
rank may need either while this one waits for something else, in another communicator or in another order, which MPI and
PyTorch allow:

    rank 0   send 4 MB ------------------>  all_reduce       irecv posts the header alone, all_reduce sees no messages,
    rank 1   irecv, all_reduce                               so a thread posts the data

Whoever waits for a message makes progress on all receives meanwhile. For every other wait there is one thread per
process. It looks now and then for as long as anything is pending, posts the data of receives whose header has come, and
starts the workers once this rank has been in some operation for `_STUCK` seconds. It leaves a rank alone that computes:
nothing would overlap, and a thread would only take turns with the computation. Where MPI takes calls from one thread
alone there is no such thread, and progress is made in waits for messages only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Record

_NAPS = (0.001, 0.008)  # seconds between looks: the first, doubled up to the last while nothing new begins
_STUCK = 0.02  # seconds in one operation after which operations that were put off are carried out beside it
_LINGER = 1.0  # seconds for which the thread stays when nothing is pending


class Receiving(Protocol):
    """A receive whose header has not come."""

    def advance(self) -> None:
        """Post the data if the header has come; never blocks, and keeps errors for whoever waits for the message."""


class Deferring(Protocol):
    """A worker whose operations are put off until somebody waits for them."""

    def start_beside(self) -> None:
        """Have a thread carry them out."""


class InFlight(Protocol):
    """A message that MPI carries by itself."""

    def has_left(self) -> bool:
        """Whether MPI has finished with its memory."""


class ProgressEngine:
    """The pending receives and operations of one process, and the thread that looks after them.

    Attributes:
        receives: Receives whose header has not come. One that has failed, or whose data are posted, is taken out.
        deferring: Workers that have put operations off. One that has none left, or a thread, is taken out.
        in_flight: Messages with whose memory MPI has not finished. One that is complete is taken out.
    """

    def __init__(self, records: Callable[[], Iterable[Record]]) -> None:
        """Begin with nothing pending.

        Args:
            records: Returns the records of the operations that this rank may be in.
        """
        self._records = records
        self.receives: set[Receiving] = set()
        self.deferring: set[Deferring] = set()
        self.in_flight: set[InFlight] = set()
        self._swept = 64  # messages in flight at which the next sweep is due
        self._begun = 0  # things that were ever pending
        self._change = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def expect(self, receive: Receiving) -> None:
        """Make progress on a receive for as long as it is among `receives`."""
        self.receives.add(receive)
        self._look_after()

    def defer(self, worker: Deferring) -> None:
        """Have the operations of a worker that is `deferring` carried out if this rank waits for something else."""
        if worker not in self.deferring:
            self.deferring.add(worker)
            self._look_after()

    def keep(self, message: InFlight) -> None:
        """Keep a message, and with it its memory, while it is `in_flight`, even if nobody else refers to it."""
        if len(self.in_flight) >= self._swept:
            self.in_flight -= {kept for kept in list(self.in_flight) if kept.has_left()}
            self._swept = 64 + 2 * len(self.in_flight)
        self.in_flight.add(message)

    def advance(self, besides: object = None) -> bool:
        """Make progress on all receives but one, which the caller waits for; returns whether any others are pending."""
        if not self.receives:
            return False
        others = [receive for receive in list(self.receives) if receive is not besides]
        for receive in others:
            receive.advance()
        return bool(others)

    def stop(self) -> None:
        """End the thread, before MPI is finalized: nothing makes progress beside a wait any more."""
        with self._change:
            self._stopping, thread = True, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def start_workers(self) -> None:
        """Have threads carry out the operations that were put off: this rank waits for something else."""
        for worker in list(self.deferring):
            worker.start_beside()

    def _look_after(self) -> None:
        self._begun += 1
        if self._thread is None and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            with self._change:
                if self._thread is None and not self._stopping:
                    self._thread = threading.Thread(target=self._look, name="mpitrain-progress", daemon=True)
                    self._thread.start()

    def _look(self) -> None:
        """Look for what can be done; the body of the thread."""
        nap, begun, idle_since = _NAPS[0], self._begun, 0.0
        while not (self._stopping or MPI.Is_finalized()):
            time.sleep(nap)
            nap, begun = (_NAPS[0] if self._begun != begun else min(2 * nap, _NAPS[1])), self._begun
            if self.receives or self.deferring:
                idle_since = 0.0
                self.advance()
                before = time.monotonic() - _STUCK
                if self.deferring and any(record.since and record.since < before for record in self._records()):
                    self.start_workers()
                continue
            now = time.monotonic()
            idle_since = idle_since or now
            if now - idle_since > _LINGER:
                with self._change:
                    if self._begun == begun:
                        self._thread = None
                        return
