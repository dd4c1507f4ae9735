"""Handles of asynchronous operations, and the workers that carry the operations out in order.

If a core is free for it, a thread makes progress while the caller computes. Otherwise the operations are deferred
until the caller waits for one of them, or for something else (see `mpitrain.comm.runtime.progress`).

An operation on device memory keeps its place in the caller's stream order, even if another thread carries it out. The
host waits only until all of the operation's work has been queued on the device:

    issued         record an event on the caller's current streams; the operation runs after it
    carried out    on a side stream, in any thread; at the end, record a second event
    waited for     the streams that are then current wait for the second event; the host does not wait for the device
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
from mpitrain.comm.job.traffic import Note, Record, TrafficCounters, clock
from mpitrain.comm.memory.device import current_stream, new_stream, on_stream, record_event, stream_of_cupy
from mpitrain.comm.runtime.agreement import run_watched
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.waiting import wait_for_requests
from mpitrain.errors import CommunicationError

_EAGER_ROUNDS = 1000  # number of tests without a pause
_IDLE_SECONDS = 1.0  # seconds for which a worker's thread stays when there is nothing to do


class Work:
    """Handle of an operation in progress. It keeps the operation's tensors alive until the operation is complete."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation is complete.

        Args:
            timeout: Longest time to wait in seconds; None for no limit.

        Raises:
            CommunicationError: The operation, named in the message, is not complete in time. An error of the operation
                itself is also raised here.
        """
        raise NotImplementedError

    def done(self) -> bool:
        """Return True if the operation is complete. The call also makes progress on it."""
        raise NotImplementedError

    def release(self) -> None:
        """Block until the caller may overwrite the memory that the operation reads: at its completion, or later."""
        self.wait()


def poll(work: Work, name: str, timeout: float) -> None:
    """Wait until a `Work` is done.

    Args:
        work: The operation to wait for.
        name: Its name, for the error message.
        timeout: Longest time to wait in seconds.

    Raises:
        CommunicationError: The operation is not done in time.
    """
    deadline = time.monotonic() + timeout
    while not work.done():
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"{name} is not complete after {timeout:g} s; check that the other rank makes the matching call"
            )
        time.sleep(1e-4)


class MessageWait(NamedTuple):
    """Objects that take note of a wait for messages.

    Attributes:
        record: Record in which the watchdog sees the wait.
        awaited: World ranks of the possible other ends.
        progress: Progress engine, which advances other operations of this process during the wait.
        note: Entry of the message in the traffic counters; None while they are off.
    """

    record: Record
    awaited: Sequence[int]
    progress: ProgressEngine
    note: Note | None


class Messages(Work):
    """Messages in progress that MPI carries without help.

    Attributes:
        source: Rank of the sender, for a receive whose header has arrived.
    """

    def __init__(self, name: str, tensor: torch.Tensor, requests: Sequence[MPI.Request], wait: MessageWait) -> None:
        """Take over requests that have been started.

        Args:
            name: Name of the operation, for error messages.
            tensor: Tensor that is sent or received.
            requests: MPI requests of the messages.
            wait: Objects that take note of a wait for them.
        """
        self._name, self._tensor = name, tensor
        self._record, self._awaited, self._progress, self._note = wait
        self._requests = list(requests)
        self._lock = threading.Lock()  # taken by the thread that calls MPI on the requests
        self._complete = False
        self._failure = ""  # error message, if the messages failed
        self._begin = 0.0  # start of the current wait
        self.source: int | None = None
        self._progress.keep_alive(self)

    def _proceed(self) -> list[MPI.Request]:
        """Return the requests to complete next; the earlier ones are complete."""
        return []

    def _continue(self) -> None:
        self._requests = self._proceed()
        if not self._requests:
            self._end()

    def _end(self) -> None:
        self._complete = True
        self._progress.in_flight.discard(self)
        note, self._note = self._note, None
        if note is not None:
            note.record_end(self._begin or clock(), self.source)

    def _test(self, until: Callable[[], bool]) -> None:
        """Complete what MPI has finished, until `until` is true; do nothing if another thread is about to do so."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while not until():
                if not MPI.Request.Testall(self._requests):
                    return
                self._continue()
        except MPI.Exception as error:
            self._failure = f"{self._record.label}: {self._name} failed in MPI: {error}"
            self._end()
        finally:
            self._lock.release()

    def is_buffer_free(self) -> bool:
        """Return True if MPI has finished with the memory. Never blocks, and does not complete the operation."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception:
            return True
        finally:
            self._lock.release()

    def wait(self, timeout: float | None = None) -> None:
        """Block until all messages are complete; see `Work.wait`."""
        note = self._note
        if note is None or self._complete:
            self._wait(timeout)
            return
        self._begin = clock()
        try:
            self._wait(timeout)
        finally:
            note.count_wait(self._begin)
            self._begin = 0.0

    def _wait(self, timeout: float | None) -> None:
        if self._complete:
            pass
        elif timeout is None:
            self._record.awaited = self._awaited
            run_watched(self._record, self._name, self._tensor, self._block)
        else:
            with self.limited_wait():
                poll(self, f"{self._record.label}: {self._name}", timeout)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise CommunicationError(self._failure)

    def _block(self) -> None:
        """Block until the messages are complete; make progress on pending receives meanwhile."""
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
        """Block in MPI until the current requests are complete."""
        with self._lock:
            if self._complete:
                return
            try:
                wait_for_requests(self._requests, self._progress.naps)
            except MPI.Exception:
                self._end()
                raise
            self._continue()

    @contextmanager
    def limited_wait(self) -> Iterator[None]:
        """Mark the wait in this context as limited in time: the watchdog acts only if an awaited rank has left."""
        record = self._record
        record.awaited, record.has_deadline = self._awaited, True
        record.begin(self._name, self._tensor)
        try:
            yield
        finally:
            record.end()
            record.has_deadline = False

    def done(self) -> bool:
        """Return True if all messages are complete. The call also makes progress on them and on all receives."""
        if not self._complete:
            self._test(lambda: self._complete)
        if not self._complete:
            self._progress.advance(self)
            self._progress.start_workers()
            return False
        self._raise_failure()
        return True


class Worker:
    """Queue of operations, carried out one at a time in the order in which they were submitted.

    They are carried out by a thread, or by the caller that waits for one of them. The thread ends after it has had
    nothing to do for a while.
    """

    def __init__(self, threaded: bool, counters: TrafficCounters, progress: ProgressEngine) -> None:
        """Start with an empty queue.

        Args:
            threaded: If true, a thread carries out operations whenever there are any; otherwise they are deferred.
            counters: Traffic counters, which also count the waits for that thread.
            progress: Progress engine, which starts deferred operations when this rank waits for something else.
        """
        self.threaded = threaded
        self._counters, self.progress = counters, progress
        self.queue: deque[QueuedOperation] = deque()  # operations that are not complete yet
        self._running = threading.Lock()  # taken by the thread that carries out an operation
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: QueuedOperation) -> None:
        """Add an operation to the queue."""
        with self._changed:
            self.queue.append(work)
            self._changed.notify_all()
        if self.threaded:
            self.start()
        elif self._thread is None:
            self.progress.defer(self)

    def start(self) -> None:
        """Start a thread that carries out the queue; if MPI accepts calls from one thread alone, carry it out here."""
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            self.drain()
            return
        with self._changed:
            if self._thread is None and self.queue and not self._closed:
                self._thread = threading.Thread(target=self._run, name="mpitrain-comm", daemon=True)
                self._thread.start()
                self.progress.deferred_workers.discard(self)

    def start_thread(self) -> None:
        """Start a thread that carries out the queue, unless a thread does so already or MPI allows only one thread."""
        if not self._running.locked() and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.start()

    @property
    def is_worker_thread(self) -> bool:
        """True if the caller is the worker's thread, which must not wait for itself."""
        return self._thread is threading.current_thread()

    def finish(self, work: QueuedOperation) -> None:
        """Complete an operation and those before it, in the worker's thread if there is one, otherwise here."""
        if self._thread is not None and not self.is_worker_thread:
            self.wait_for(work, None)
        while not work.complete:
            if not self._run_next():
                time.sleep(0)  # another thread has carried it out and is about to mark it complete

    def wait_for(self, work: QueuedOperation, timeout: float | None) -> bool:
        """Wait for an operation that a thread carries out; return True if it is complete in time.

        Args:
            work: The operation.
            timeout: Longest time to wait in seconds; None for no limit.
        """
        begin = clock() if self._counters.on else 0.0
        with self._changed:
            complete = self._changed.wait_for(lambda: work.complete, timeout)
        if begin:
            self._counters.add_wait(begin)
        return complete

    def drain(self) -> None:
        """Complete all operations submitted so far; their errors are raised by their handles."""
        with self._changed:
            last = self.queue[-1] if self.queue else None
        if last is not None:
            self.finish(last)

    def close(self) -> None:
        """Complete all operations, then end the thread."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run_next(self) -> bool:
        """Carry out the first operation of the queue; return False if the queue is empty."""
        with self._running:
            with self._changed:
                work = self.queue[0] if self.queue else None
            if work is None:
                return False
            work.run()
            with self._changed:
                self.queue.popleft()
                if not self.queue:
                    self.progress.deferred_workers.discard(self)
        if work.on_complete is not None:
            work.on_complete()
            work.on_complete = None  # breaks a reference cycle with its handle, so that memory is freed at once
        with self._changed:
            self._changed.notify_all()
        return True

    def _run(self) -> None:
        """Carry out the queue; the body of the thread."""
        while True:
            while self._run_next():
                pass
            with self._changed:
                if not self.queue and not self._closed and self.threaded:
                    self._changed.wait(_IDLE_SECONDS)
                if not self.queue:
                    self._thread = None
                    return


class QueuedOperation(Work):
    """An operation of a worker, carried out while the caller computes.

    Attributes:
        name: Name of the operation, for error messages.
        complete: True if the operation was carried out or has failed.
        on_complete: Called once when the operation is complete, before the worker starts the next one.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        worker: Worker,
        order: StreamOrder | None = None,
        on_complete: Callable[[], None] | None = None,
    ) -> None:
        """Submit an operation.

        Args:
            name: Name of the operation, for error messages.
            call: Carries out the operation, on the current stream if it is on a device.
            worker: Worker that carries it out.
            order: Its place in the caller's stream order; None for host memory.
            on_complete: Called when it is complete.
        """
        self.name, self.on_complete = name, on_complete
        self.complete = False
        self._call: Callable[[], object] | None = call
        self._error: BaseException | None = None
        self._worker, self._order = worker, order
        worker.submit(self)

    def run(self) -> None:
        """Carry out the operation once. Its error is raised by `wait`."""
        call, self._call = self._call, None
        assert call is not None
        try:
            with nullcontext() if self._order is None else self._order.after_caller_streams():
                call()
        except BaseException as error:  # raised by wait()
            self._error = error
        self.complete = True

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation is carried out; the caller's streams wait for its work on a device."""
        if self.complete:
            pass
        elif timeout is None:
            self._worker.finish(self)
        else:
            self._worker.start()
            if not self._worker.wait_for(self, timeout):
                raise CommunicationError(
                    f"{self.name} is not complete after {timeout:g} s; check that every rank of the group calls it"
                )
        if self._error is not None:
            raise self._error
        if self._order is not None:
            self._order.wait()

    def done(self) -> bool:
        """Return True if the operation is complete, also on a device; otherwise a thread now makes progress on it."""
        if not self.complete:
            self._worker.start()
            self._worker.progress.start_workers()
        return self.complete and (self._order is None or self._order.done())


Streams = dict[torch.device, torch.Stream]  # side streams


def streams_of_caller(device: torch.device) -> list[torch.Stream]:
    """Return the streams that the calling thread uses: PyTorch's current stream, and CuPy's if that is another."""
    other = stream_of_cupy(device)
    return [current_stream(device)] if other is None else [current_stream(device), other]


@contextmanager
def in_stream_order(device: torch.device) -> Iterator[None]:
    """Run the context's work in order: after work already on the caller's streams, and before work queued there later.

    Inside the context, queue all work on PyTorch's current stream.
    """
    current, *others = streams_of_caller(device)
    for stream in others:
        current.wait_event(record_event(device, stream))
    yield
    for stream in others:
        stream.wait_event(record_event(device, current))


class StreamOrder:
    """Place of one operation on device memory in the stream order of its caller."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        """Record the work that the calling thread has queued on the devices so far.

        Args:
            tensors: Tensors of the operation, on devices.
            streams: Side streams on which operations are carried out; missing ones are created.
        """
        self._tensors = list(tensors)
        devices = {tensor.device for tensor in tensors}
        self._issue_events = {
            device: [record_event(device, s) for s in streams_of_caller(device)] for device in devices
        }
        self._streams = streams
        self._complete: dict[torch.device, torch.Event] = {}
        for device in devices - streams.keys():
            streams[device] = new_stream(device)

    @contextmanager
    def after_caller_streams(self) -> Iterator[None]:
        """Make the side streams current, after the work that the caller had queued when the operation was issued."""
        with self.side_streams():
            for device, events in self._issue_events.items():
                for event in events:
                    self._streams[device].wait_event(event)
            try:
                yield
            finally:
                for tensor in self._tensors:  # their memory must not be reused before the side stream is done
                    tensor.record_stream(self._streams[tensor.device])
                self._tensors = []
                self._complete = {device: record_event(device, self._streams[device]) for device in self._issue_events}

    @contextmanager
    def side_streams(self) -> Iterator[None]:
        """Make the side streams current: a future resolved in this context completes when their work is done."""
        with ExitStack() as stack:
            for device in self._issue_events:
                stack.enter_context(on_stream(self._streams[device]))
            yield

    def wait(self) -> None:
        """Make the calling thread's current streams wait for the operation, which has been carried out."""
        for device, event in self._complete.items():
            for stream in streams_of_caller(device):
                stream.wait_event(event)

    def done(self) -> bool:
        """Return True if the devices have completed the operation, which has been carried out."""
        return all(event.query() for event in self._complete.values())
