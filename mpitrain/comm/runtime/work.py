"""Handles of operations under way, and the thread that carries them out in order.

A thread of its own makes progress while the caller computes, if a core is free for it. Where none is, the
operations run when the caller waits for one of them: nothing would overlap, and a thread would only take
turns with the computation.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial

import torch

from mpitrain.comm.process.journal import Journal, Note, clock
from mpitrain.comm.process.mpi import MPI
from mpitrain.comm.process.record import Record
from mpitrain.errors import CommunicationError

_EAGER_ROUNDS = 1000  # of asking without a pause


class Work:
    """An operation that has begun. Keeps the tensors of its call alive until it is complete."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation is complete.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            CommunicationError: It is not complete in time; the message names it. Else, whatever error the operation
                raised.
        """
        raise NotImplementedError

    def done(self) -> bool:
        """Whether the operation is complete. Calling this also lets it make progress."""
        raise NotImplementedError

    def release(self) -> None:
        """Block until what the operation reads may be written again; that is when it is complete, or later."""
        self.wait()


def seen(record: Record, name: str, tensor: torch.Tensor | None, act: Callable[[], object]) -> None:
    """Do something that may wait, so that the watchdog sees it.

    Args:
        record: Where the operation is to be seen.
        name: Of the operation.
        tensor: What it is on; None for no data.
        act: What to do.

    Raises:
        CommunicationError: MPI fails.
    """
    record.begin(name, tensor)
    try:
        act()
    except MPI.Exception as error:
        raise CommunicationError(f"{record.text()} failed in MPI: {error}") from error
    finally:
        record.end()


def poll(work: Work, name: str, timeout: float) -> None:
    """Return when the work is done.

    Args:
        work: What to wait for.
        name: Of it, for the message.
        timeout: Seconds to wait at most.

    Raises:
        CommunicationError: It is not done in time.
    """
    deadline = time.monotonic() + timeout
    while not work.done():
        if time.monotonic() > deadline:
            raise CommunicationError(f"{name} is not complete after {timeout:g} s; is the other rank there?")
        time.sleep(1e-4)


class Messages(Work):
    """Messages that MPI carries by itself.

    Attributes:
        source: The rank that sends, once it is known.
    """

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        requests: Sequence[MPI.Request],
        proceed: Callable[[list[MPI.Status]], Sequence[MPI.Request]],
        record: Record,
        awaited: Sequence[int],
        held_up: set[Messages],
        note: Note | None = None,
    ) -> None:
        """Take over messages that have begun.

        Args:
            name: Of the operation, for messages.
            tensor: What is sent or received.
            requests: Those of the messages.
            proceed: Called with their statuses when they are complete; returns those that are to be completed next, and
                raises if what has arrived is not what was expected.
            record: Where a wait is to be seen.
            awaited: The ranks of the world that the other end may be.
            held_up: Messages of this rank that make no progress by themselves: their `proceed` has to be called. They
                do so while this one is waited for, since the other end may wait for them first.
            note: Enters the message in the journal, while that is on.
        """
        self._held_up, self._note = held_up, note
        self._error: CommunicationError | None = None
        self._name, self._tensor, self._record, self._awaited = name, tensor, record, awaited
        self.source: int | None = None  # the rank that sends, once that is known
        self._requests = list(requests)
        self._proceed = proceed
        self._complete = False
        self._begin = 0.0  # of the wait, while it is waited for

    def _go_on(self, statuses: list[MPI.Status]) -> None:
        requests, self._requests, self._complete = self._requests, [], True
        if requests:
            if self.source is None:
                self.source = statuses[0].source
            self._requests = list(self._proceed(statuses))
            self._complete = not self._requests
        if self._complete and self._note is not None:
            note, self._note = self._note, None
            note.ended(self._begin or clock(), self.source)

    def wait(self, timeout: float | None = None) -> None:
        """Block until all messages have been carried; see `Work.wait`."""
        note = self._note
        if note is None or self._complete:
            self._wait(timeout)
            return
        self._begin = clock()
        try:
            self._wait(timeout)
        finally:
            note.waited(self._begin)
            self._begin = 0.0

    def _wait(self, timeout: float | None) -> None:
        self._raise_met()
        if timeout is None:
            while not self._complete:
                statuses = [MPI.Status() for _ in self._requests]
                self._record.awaited = self._awaited
                if self._held_up - {self}:
                    seen(self._record, self._name, self._tensor, self._wait_with_others)
                    continue
                seen(self._record, self._name, self._tensor, partial(MPI.Request.Waitall, self._requests, statuses))
                self._go_on(statuses)
        elif not self._complete:
            with self.limited_wait():
                poll(self, f"{self._record.label}: {self._name}", timeout)

    def _raise_met(self) -> None:
        """Raise the error that was met while something else was waited for."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_with_others(self) -> None:
        """Let the messages that are held up make progress until this one is complete, or none is held up."""
        rounds = 0
        while self._held_up - {self} and not self.done():
            for other in self._held_up - {self}:
                other.progress()
            rounds += 1
            if rounds > _EAGER_ROUNDS:
                time.sleep(1e-4)

    def progress(self) -> None:
        """As `done`, but an error is raised where this is waited for, not here."""
        try:
            self.done()
        except CommunicationError as error:
            self._error = error

    @contextmanager
    def limited_wait(self) -> Iterator[None]:
        """Inside, somebody waits who stops by itself; the watchdog is then concerned only with a rank that leaves."""
        record = self._record
        record.awaited, record.limited = self._awaited, True
        record.begin(self._name, self._tensor)
        try:
            yield
        finally:
            record.end()
            record.limited = False

    def done(self) -> bool:
        """Whether all messages have been carried. Calling this also lets them make progress."""
        self._raise_met()
        while not self._complete:
            statuses = [MPI.Status() for _ in self._requests]
            try:
                complete = MPI.Request.Testall(self._requests, statuses)
            except MPI.Exception as error:
                raise CommunicationError(f"{self._record.label}: {self._name} failed in MPI: {error}") from error
            if not complete:
                return False
            self._go_on(statuses)
        return True


class Queued(Work):
    """An operation of a `Worker`."""

    def __init__(self, name: str, call: Callable[[], None], worker: Worker) -> None:
        self.name = name
        self.call: Callable[[], None] | None = call
        self.error: BaseException | None = None
        self.complete = threading.Event()
        self._worker = worker

    def run(self) -> None:
        """Carry the operation out. Its error is raised by `wait`."""
        call, self.call = self.call, None
        assert call is not None
        try:
            call()
        except BaseException as error:  # surfaces in wait()
            self.error = error
        self.complete.set()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation has been carried out; see `Work.wait`."""
        if timeout is None:
            self._worker.finish(self)
        else:
            self._worker.start()
            if not self._worker.waits(self, timeout):
                raise CommunicationError(
                    f"{self.name} is not complete after {timeout:g} s; does every rank of its communicator call it?"
                )
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Whether the operation has been carried out; it makes progress in the worker's thread from then on."""
        self._worker.start()
        return self.complete.is_set()


class Worker:
    """Carries out operations one after the other, in the order in which they were submitted.

    Its thread ends with it: what waits in the queue refers to the worker, so once it is gone nothing waits any more.
    """

    def __init__(self, threaded: bool, journal: Journal) -> None:
        """Make a worker.

        Args:
            threaded: Whether a thread makes progress from the first operation on.
            journal: Where waits for that thread are entered.
        """
        self._threaded, self._journal = threaded, journal
        self._queue: deque[Queued] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, name: str, call: Callable[[], None]) -> Queued:
        """Put an operation into the queue, and return a handle of it.

        Args:
            name: Of the operation, for messages.
            call: What carries it out.
        """
        work = Queued(name, call, self)
        with self._changed:
            self._queue.append(work)
            self._changed.notify()
        if self._threaded:
            self.start()
        return work

    def start(self) -> None:
        """Let a thread make progress from now on.

        Where MPI takes calls from one thread alone, what is in the queue is completed here instead.
        """
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            self.drain()
        elif self._thread is None:
            arguments = self._queue, self._changed, self._stopping
            self._thread = threading.Thread(target=_carry_out, args=arguments, name="mpitrain-comm", daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop, self._changed, self._stopping).atexit = False

    def finish(self, work: Queued) -> None:
        """Complete an operation and those before it: in the thread if there is one, else here."""
        if self._thread is not None:
            self.waits(work, None)
            return
        while not work.complete.is_set():
            self._queue.popleft().run()

    def waits(self, work: Queued, timeout: float | None) -> bool:
        """Whether an operation is complete in time, of which the thread makes progress."""
        if not self._journal.on:
            return work.complete.wait(timeout)
        begin = clock()
        complete = work.complete.wait(timeout)
        self._journal.wait(begin)
        return complete

    def drain(self) -> None:
        """Complete everything that was submitted so far; errors stay with their handles."""
        with self._changed:
            last = self._queue[-1] if self._queue else None
        if last is not None:
            self.finish(last)

    @property
    def waiting(self) -> Sized:
        """The operations that are not complete; it is the same object at all times."""
        return self._queue

    def close(self) -> None:
        """Complete everything that was submitted, then end the thread."""
        self.drain()
        _stop(self._changed, self._stopping)
        if self._thread is not None:
            self._thread.join()


def _stop(changed: threading.Condition, stopping: threading.Event) -> None:
    with changed:
        stopping.set()
        changed.notify()


def _carry_out(queue: deque[Queued], changed: threading.Condition, stopping: threading.Event) -> None:
    """The thread of a worker."""
    while True:
        with changed:
            while not queue and not stopping.is_set():
                changed.wait()
            if not queue:
                return
        queue[0].run()
        with changed:
            queue.popleft()
