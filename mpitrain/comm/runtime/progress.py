"""Progress on pending receives and deferred operations, which MPI does not advance by itself.

Two kinds of operations advance only when this process calls MPI again:

- A receive whose header has not arrived, because its data cannot be received before the header.
- Operations that a `Worker` without a thread defers until somebody waits for them.

Another rank may need either of them while this rank waits for something else, in another communicator or in another
order. MPI and PyTorch allow that:

    rank 0   send 4 MB ------------------>  all_reduce       irecv posts the header alone, all_reduce sees no messages,
    rank 1   irecv, all_reduce                               so a thread posts the data

A wait for a message makes progress on all receives meanwhile. For all other waits, each process has one thread. While
anything is pending, the thread looks at intervals, posts the data of receives whose header has arrived, and starts the
workers when this rank has been in one operation for `_STUCK_SECONDS`. It does not disturb a rank that computes:
nothing would overlap, and the thread would only take time from the computation. If MPI accepts calls from one thread
alone, there is no such thread, and progress is made only in waits for messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Record

_PAUSES = (0.001, 0.008)  # seconds between looks: shortest, and longest; doubled while nothing new begins
_STUCK_SECONDS = 0.02  # seconds in one operation after which a thread starts to carry out deferred operations
_IDLE_SECONDS = 1.0  # seconds for which the thread stays when nothing is pending


class PendingReceive(Protocol):
    """A receive whose header has not arrived."""

    def advance(self) -> None:
        """Post the data if the header has arrived. Never blocks; errors are kept for the wait for the message."""


class DeferredWorker(Protocol):
    """A worker whose operations are deferred until somebody waits for them."""

    def start_thread(self) -> None:
        """Start a thread that carries out the deferred operations."""


class MessageInFlight(Protocol):
    """A message that MPI carries without help."""

    def is_buffer_free(self) -> bool:
        """Return True if MPI has finished with the memory of the message."""


class ProgressEngine:
    """The pending receives and operations of one process, and the thread that makes progress on them.

    Attributes:
        receives: Receives whose header has not arrived. A receive is removed when its data are posted or it has failed.
        deferred_workers: Workers with deferred operations. A worker is removed when it has none left or has a thread.
        in_flight: Messages whose memory MPI still uses. A message is removed when it is complete.
        naps: True if waits for messages nap, because ranks share cores (see `waiting`).
    """

    def __init__(self, records: Callable[[], Iterable[Record]], naps: bool = False) -> None:
        """Start with nothing pending.

        Args:
            records: Returns the records of the operations that this rank may be in.
            naps: True if waits for messages nap.
        """
        self._records, self.naps = records, naps
        self.receives: set[PendingReceive] = set()
        self.deferred_workers: set[DeferredWorker] = set()
        self.in_flight: set[MessageInFlight] = set()
        self._sweep_at = 64  # number of messages in flight at which completed ones are next removed
        self._additions = 0  # number of receives and workers that were ever added
        self._change = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def expect(self, receive: PendingReceive) -> None:
        """Make progress on a receive until it is removed from `receives`."""
        self.receives.add(receive)
        self._ensure_thread()

    def defer(self, worker: DeferredWorker) -> None:
        """Carry out the deferred operations of a worker if this rank waits for something else."""
        if worker not in self.deferred_workers:
            self.deferred_workers.add(worker)
            self._ensure_thread()

    def keep_alive(self, message: MessageInFlight) -> None:
        """Keep a message and its memory alive while it is `in_flight`, even if nothing else refers to it."""
        if len(self.in_flight) >= self._sweep_at:
            self.in_flight -= {other for other in list(self.in_flight) if other.is_buffer_free()}
            self._sweep_at = 64 + 2 * len(self.in_flight)
        self.in_flight.add(message)

    def advance(self, excluded: object = None) -> bool:
        """Make progress on all receives but `excluded`, which the caller waits for; return True if there are others."""
        if not self.receives:
            return False
        others = [receive for receive in list(self.receives) if receive is not excluded]
        for receive in others:
            receive.advance()
        return bool(others)

    def stop(self) -> None:
        """End the thread, before MPI is finalized; after that, only waits for messages make progress."""
        with self._change:
            self._stopping, thread = True, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def start_workers(self) -> None:
        """Start threads that carry out the deferred operations, because this rank waits for something else."""
        for worker in list(self.deferred_workers):
            worker.start_thread()

    def _ensure_thread(self) -> None:
        """Start the thread, unless it runs already or MPI accepts calls from one thread alone."""
        self._additions += 1
        if self._thread is None and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            with self._change:
                if self._thread is None and not self._stopping:
                    self._thread = threading.Thread(target=self._run, name="mpitrain-progress", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        """Look at intervals for possible progress; the body of the thread."""
        nap, begun, idle_since = _PAUSES[0], self._additions, 0.0
        while not (self._stopping or MPI.Is_finalized()):
            time.sleep(nap)
            nap, begun = (_PAUSES[0] if self._additions != begun else min(2 * nap, _PAUSES[1])), self._additions
            if self.receives or self.deferred_workers:
                idle_since = 0.0
                self.advance()
                before = time.monotonic() - _STUCK_SECONDS
                if self.deferred_workers and any(record.since and record.since < before for record in self._records()):
                    self.start_workers()
                continue
            now = time.monotonic()
            idle_since = idle_since or now
            if now - idle_since > _IDLE_SECONDS:
                with self._change:
                    if self._additions == begun:
                        self._thread = None
                        return
