"""Handles of operations under way, and the workers that carry them out in order.

A thread makes progress while the caller computes, if a core is free for it. Where none is, the operations are put off
until the caller waits for one of them, or for something else (see `mpitrain.comm.runtime.progress`).

An operation on device memory has a place among what its caller asks of the device, though another thread may carry it
out. The host waits only until all of the operation has been asked of the device:

    issued                    an event on the caller's current streams: the operation comes after it
    carried out               on a side stream, in whichever thread; at its end a second event
    waited for                the streams that are then current come after that; the host does not wait for the device
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Journal, Note, Record, clock
from mpitrain.comm.memory.device import current_stream, new_stream, on_stream, recorded, stream_of_cupy
from mpitrain.comm.runtime.agreement import seen
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.errors import CommunicationError

_EAGER_ROUNDS = 1000  # of asking without a pause
_LINGER = 1.0  # seconds for which a worker's thread stays when there is nothing to do


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


class MessageWait(NamedTuple):
    """Where a wait for messages is noted.

    Attributes:
        record: Record in which the watchdog sees it.
        awaited: Ranks of the world that the other end may be.
        progress: What else this process has to make progress on meanwhile.
        note: Entry of the message in the journal, while that is on.
    """

    record: Record
    awaited: Sequence[int]
    progress: ProgressEngine
    note: Note | None


class Messages(Work):
    """Messages that MPI carries by itself.

    Attributes:
        source: The rank that sends, for a receive whose header has come.
    """

    def __init__(self, name: str, tensor: torch.Tensor, requests: Sequence[MPI.Request], wait: MessageWait) -> None:
        """Take over messages that have begun.

        Args:
            name: Name of the operation, for messages to people.
            tensor: What is sent or received.
            requests: The requests of the messages.
            wait: Where a wait for them is noted.
        """
        self._name, self._tensor = name, tensor
        self._record, self._awaited, self._progress, self._note = wait
        self._requests = list(requests)
        self._lock = threading.Lock()  # held by whoever asks MPI about the requests
        self._complete = False
        self._failure = ""  # what is wrong, where it is complete without having been carried
        self._begin = 0.0  # of the wait, while it is waited for
        self.source: int | None = None
        self._progress.keep(self)

    def _proceed(self, statuses: list[MPI.Status]) -> Sequence[MPI.Request]:
        """Return the requests that are to be completed next, now that those with these statuses are complete."""
        return []

    def _go_on(self, statuses: list[MPI.Status]) -> None:
        self._requests = list(self._proceed(statuses))
        if not self._requests:
            self._end()

    def _end(self) -> None:
        self._complete = True
        self._progress.in_flight.discard(self)
        note, self._note = self._note, None
        if note is not None:
            note.ended(self._begin or clock(), self.source)

    def _test(self, until: Callable[[], bool]) -> None:
        """Complete what MPI has carried, unless another thread is about to, up to where `until` is true."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while not until():
                statuses = [MPI.Status() for _ in self._requests]
                if not MPI.Request.Testall(self._requests, statuses):
                    return
                self._go_on(statuses)
        except MPI.Exception as error:
            self._failure = f"{self._record.label}: {self._name} failed in MPI: {error}"
            self._end()
        finally:
            self._lock.release()

    def has_left(self) -> bool:
        """Return whether MPI has finished with the memory; never blocks, and completes nothing else."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception:
            return True
        finally:
            self._lock.release()

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
        if self._complete:
            pass
        elif timeout is None:
            self._record.awaited = self._awaited
            seen(self._record, self._name, self._tensor, self._block)
        else:
            with self.limited_wait():
                poll(self, f"{self._record.label}: {self._name}", timeout)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise CommunicationError(self._failure)

    def _block(self) -> None:
        """Return when this is complete, and make progress on receives meanwhile for as long as any are pending."""
        rounds = 0
        while not self._complete:
            self._test(lambda: self._complete)
            if self._complete:
                return
            if not self._progress.advance(self):
                self._block_in_mpi()
            elif (rounds := rounds + 1) > _EAGER_ROUNDS:
                time.sleep(1e-4)

    def _block_in_mpi(self) -> None:
        with self._lock:
            if self._complete:
                return
            statuses = [MPI.Status() for _ in self._requests]
            try:
                MPI.Request.Waitall(self._requests, statuses)
            except MPI.Exception:
                self._end()
                raise
            self._go_on(statuses)

    @contextmanager
    def limited_wait(self) -> Iterator[None]:
        """Tell the watchdog that somebody waits who stops by himself: only a rank that leaves concerns it then."""
        record = self._record
        record.awaited, record.limited = self._awaited, True
        record.begin(self._name, self._tensor)
        try:
            yield
        finally:
            record.end()
            record.limited = False

    def done(self) -> bool:
        """Return whether all messages have been carried; also makes progress on them and on all receives."""
        if not self._complete:
            self._test(lambda: self._complete)
        if not self._complete:
            self._progress.advance(self)
            self._progress.start_workers()
            return False
        self._raise_failure()
        return True


class Worker:
    """A queue of operations, carried out one after the other in the order in which they were submitted.

    A thread carries them out, or whoever waits for one of them. The thread ends when there has been nothing to do for a
    while.
    """

    def __init__(self, threaded: bool, journal: Journal, progress: ProgressEngine) -> None:
        """Begin with nothing in it.

        Args:
            threaded: Whether a thread makes progress whenever there is something to do.
            journal: Where waits for that thread are entered.
            progress: What looks after operations that were put off.
        """
        self.threaded = threaded
        self._journal, self.progress = journal, progress
        self.waiting: deque[Queued] = deque()  # an operation leaves it when it was carried out
        self._running = threading.Lock()  # held by whoever carries out an operation
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Queued) -> None:
        """Put an operation into the queue."""
        with self._changed:
            self.waiting.append(work)
            self._changed.notify_all()
        if self.threaded:
            self.start()
        elif self._thread is None:
            self.progress.defer(self)

    def start(self) -> None:
        """Let a thread carry out what is in the queue.

        Where MPI takes calls from one thread alone, it is carried out here instead.
        """
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            self.drain()
            return
        with self._changed:
            if self._thread is None and self.waiting and not self._closed:
                self._thread = threading.Thread(target=self._carry_out, name="mpitrain-comm", daemon=True)
                self._thread.start()
                self.progress.deferring.discard(self)

    def start_beside(self) -> None:
        """Let a thread carry out what is in the queue, unless somebody is carrying it out already, or none may."""
        if not self._running.locked() and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.start()

    @property
    def is_this_thread(self) -> bool:
        """Return whether the caller is the worker's thread, which must not wait for itself."""
        return self._thread is threading.current_thread()

    def finish(self, work: Queued) -> None:
        """Complete an operation and those before it: in the thread if there is one, else here."""
        if self._thread is not None and not self.is_this_thread:
            self.waits(work, None)
        while not work.complete:
            if not self._next():
                time.sleep(0)  # another thread has carried it out and is about to say so

    def waits(self, work: Queued, timeout: float | None) -> bool:
        """Wait for an operation that a thread carries out; returns whether it is complete in time."""
        begin = clock() if self._journal.on else 0.0
        with self._changed:
            complete = self._changed.wait_for(lambda: work.complete, timeout)
        if begin:
            self._journal.wait(begin)
        return complete

    def drain(self) -> None:
        """Complete everything that was submitted so far; errors stay with their handles."""
        with self._changed:
            last = self.waiting[-1] if self.waiting else None
        if last is not None:
            self.finish(last)

    def close(self) -> None:
        """Complete everything that was submitted, then end the thread."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _next(self) -> bool:
        """Carry out the first operation of the queue; returns whether there was one."""
        with self._running:
            with self._changed:
                work = self.waiting[0] if self.waiting else None
            if work is None:
                return False
            work.run()
            with self._changed:
                self.waiting.popleft()
                if not self.waiting:
                    self.progress.deferring.discard(self)
        if work.announce is not None:
            work.announce()
            work.announce = None  # the handle that it belongs to holds this: its memory would wait for the collector
        with self._changed:
            self._changed.notify_all()
        return True

    def _carry_out(self) -> None:
        """Carry out what is in the queue; the body of the thread."""
        while True:
            while self._next():
                pass
            with self._changed:
                if not self.waiting and not self._closed and self.threaded:
                    self._changed.wait(_LINGER)
                if not self.waiting:
                    self._thread = None
                    return


class Queued(Work):
    """An operation of a worker, which goes on while the caller computes.

    Attributes:
        name: Name of the operation, for messages to people.
        complete: Whether it was carried out, or was tried and failed.
        announce: Called when it is complete, and then dropped; the worker goes on with the next one afterwards.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        worker: Worker,
        order: Order | None = None,
        announce: Callable[[], None] | None = None,
    ) -> None:
        """Submit an operation.

        Args:
            name: Name of the operation, for messages to people.
            call: What carries it out, on the current stream where it is on a device.
            worker: The worker that carries it out.
            order: Its place among what the caller asks of devices; None for host memory.
            announce: What to call when it is complete.
        """
        self.name, self.announce = name, announce
        self.complete = False
        self._call: Callable[[], object] | None = call
        self._error: BaseException | None = None
        self._worker, self._order = worker, order
        worker.submit(self)

    def run(self) -> None:
        """Carry the operation out, once. Its error is raised by `wait`."""
        call, self._call = self._call, None
        assert call is not None
        try:
            with nullcontext() if self._order is None else self._order.after_caller():
                call()
        except BaseException as error:  # surfaces in wait()
            self._error = error
        self.complete = True

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation has been carried out; the caller's streams wait for the rest on a device."""
        if self.complete:
            pass
        elif timeout is None:
            self._worker.finish(self)
        else:
            self._worker.start()
            if not self._worker.waits(self, timeout):
                raise CommunicationError(
                    f"{self.name} is not complete after {timeout:g} s; does every rank of its communicator call it?"
                )
        if self._error is not None:
            raise self._error
        if self._order is not None:
            self._order.wait()

    def done(self) -> bool:
        """Return whether the operation is complete, on a device too; from now on a thread makes progress on it."""
        if not self.complete:
            self._worker.start()
            self._worker.progress.start_workers()
        return self.complete and (self._order is None or self._order.done())


Streams = dict[torch.device, torch.Stream]  # side streams


def streams_of_caller(device: torch.device) -> list[torch.Stream]:
    """The streams that the calling thread uses: PyTorch's current one, and CuPy's where that is another."""
    other = stream_of_cupy(device)
    return [current_stream(device)] if other is None else [current_stream(device), other]


@contextmanager
def between(device: torch.device) -> Iterator[None]:
    """What is done inside comes after what was asked of the caller's streams, and before what is asked of them later.

    Inside, PyTorch's current stream is that of which all is asked.
    """
    own, *others = streams_of_caller(device)
    for stream in others:
        own.wait_event(recorded(device, stream))
    yield
    for stream in others:
        stream.wait_event(recorded(device, own))


class Order:
    """The place of one operation on device memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        """Record what the calling thread has asked of the devices so far.

        Args:
            tensors: The operation's, on devices.
            streams: Side streams that operations are carried out on; lacking ones are made.
        """
        self._tensors = list(tensors)
        devices = {tensor.device for tensor in tensors}
        self._issued = {device: [recorded(device, s) for s in streams_of_caller(device)] for device in devices}
        self._streams = streams
        self._complete: dict[torch.device, torch.Event] = {}
        for device in devices - streams.keys():
            streams[device] = new_stream(device)

    @contextmanager
    def after_caller(self) -> Iterator[None]:
        """Make the side streams current, after all that the caller has asked for so far."""
        with self.beside():
            for device, events in self._issued.items():
                for event in events:
                    self._streams[device].wait_event(event)
            try:
                yield
            finally:
                for tensor in self._tensors:  # whose memory is not given out again before the side stream is through
                    tensor.record_stream(self._streams[tensor.device])
                self._tensors = []
                self._complete = {device: recorded(device, self._streams[device]) for device in self._issued}

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Make the side streams current: a future resolved inside completes when their work is done."""
        with ExitStack() as stack:
            for device in self._issued:
                stack.enter_context(on_stream(self._streams[device]))
            yield

    def wait(self) -> None:
        """Let the calling thread's current streams come after the operation, which has been carried out."""
        for device, event in self._complete.items():
            for stream in streams_of_caller(device):
                stream.wait_event(event)

    def done(self) -> bool:
        """Return whether the devices have done the operation, which has been carried out."""
        return all(event.query() for event in self._complete.values())
