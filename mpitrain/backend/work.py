"""Handles of operations under way, as torch.distributed requires them, and the queues that carry the operations out.

Asynchronous operations wait in the `Queue` of their group and run in the order in which they were issued. They run in
the group's thread if a core is free for it. Otherwise they run in the caller that waits for one of them, or in a
thread that serves a caller blocked in something else (see `mpitrain.comm.runtime.progress`). Therefore a program that
does not hang with another backend does not hang with this one.

A future may be waited for without this backend's knowledge, so `get_future` starts the thread. Inside a backward pass
without a free core it instead carries the operation out at once: every rank issues its gradients in the same order, and
a thread would only compete with the computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mpitrain.backend.base import GroupError, translate_error
from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import current_stream, is_accelerator, record_event
from mpitrain.comm.runtime.work import Messages, QueuedOperation, StreamOrder, Streams, Worker
from mpitrain.errors import MpitrainError

T = TypeVar("T")

_POLLS = 200  # polls before sleeping between them
_SLEEP = 5e-5  # seconds


class Queue(Worker):
    """Operations of one process group, carried out in the order in which they were issued.

    Attributes:
        limit: Seconds after which `wait` raises; None if only the watchdog ends operations that never complete.
        timed_out: Operations whose wait has timed out.
        streams: Side streams of devices on which operations run.
    """

    def __init__(self, comm: Communicator, limit: float | None = None) -> None:
        """Make an empty queue.

        Args:
            comm: Communicator of the group.
            limit: Seconds after which `wait` raises; None if only the watchdog ends operations that never complete.
        """
        super().__init__(comm.overlaps, comm.journal, comm.process.progress)
        self.limit = limit
        self.timed_out: list[QueuedOperation] = []
        self.streams: Streams = {}

    def perform(self, call: Callable[[], None]) -> None:
        """Carry out an operation now, after all that were issued before it."""
        self.drain()
        with self._running:
            try:
                call()
            except MpitrainError as error:
                raise translate_error(error) from error

    @property
    def stuck(self) -> str:
        """Names of operations that timed out and are still under way; a thread is inside MPI for them."""
        return ", ".join(operation.name for operation in self.timed_out if not operation.complete)

    def close(self) -> None:
        """Complete all operations. If one that timed out is still under way, leave all as they are."""
        if self.stuck:
            self.progress.deferred_workers.discard(self)
        else:
            super().close()


class GroupWork(dist.Work):
    """Base class of the handles of operations, with the methods that torch calls.

    Attributes:
        outputs: Tensors that the operation writes.
        error: Exception that the operation raised, or None.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        """Wait for the operation; see `wait`."""
        self.wait()

    def is_success(self) -> bool:
        """Return True if the operation is complete and raised nothing."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the exception that the operation raised, or None."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation writes."""
        return self.outputs

    def _outcome(self, _: torch.futures.Future) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs


class FinishedWork(GroupWork):
    """Handle of an operation that is complete."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future that is resolved with the outputs."""
        future = _make_future(self.outputs)
        future.set_result(self.outputs)
        return future


class Operation(GroupWork):
    """Handle of a collective in a `Queue`."""

    def __init__(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Sequence[torch.Tensor],
        queue: Queue,
        arguments: Sequence[Any],
    ) -> None:
        """Make an operation that is ready to be queued.

        Args:
            name: Name of the operation in messages.
            call: Function that carries it out.
            outputs: Tensors that it writes.
            queue: Queue of its group.
            arguments: All of its arguments; tensors may be in nested lists.
        """
        super().__init__(outputs)
        tensors = _device_tensors(arguments)  # the operation is ordered among the caller's work on their devices
        self._queue, self._order = queue, StreamOrder(tensors, queue.streams) if tensors else None
        self._futures: list[torch.futures.Future] = []
        self._lock = threading.Lock()

        def carry_out() -> None:
            try:
                call()
            except BaseException as error:  # raised by wait() and by the futures
                self.error = translate_error(error)

        self._queued = QueuedOperation(name, carry_out, queue, self._order, self._resolve_futures)

    def _resolve_futures(self) -> None:
        """Resolve the requested futures after completion. Their callbacks run in this thread."""
        with self._lock:
            waiting, self._futures = self._futures, []
        for future in waiting:
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future) -> None:
        with self._order.side_streams() if self._order is not None else nullcontext():
            future.set_result(self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is complete; for tensors on a device, make the current stream wait for the rest.

        Args:
            timeout: Longest time to wait; None for the group's limit.

        Raises:
            GroupError: The operation is not complete in that time. An error of the operation itself is raised as well.
        """
        queued = self._queued
        if not queued.complete:
            limit = seconds_of(timeout, self._queue.limit)
            if limit is None or self._queue.is_worker_thread:
                self._queue.finish(queued)
            else:
                self._queue.start()
                try:
                    _poll(lambda: queued.complete, limit, queued.name, "check that every rank calls it")
                except GroupError:
                    self._queue.timed_out.append(queued)
                    raise
        if self.error is not None:
            raise self.error
        if self._order is not None:
            self._order.wait()
        return True

    def is_completed(self) -> bool:
        """Return True if the operation is complete. The call also lets it make progress."""
        self._queued.done()
        return self._queued.complete

    def get_future(self) -> torch.futures.Future:
        """Return a future that is resolved with the outputs. Its callbacks may run in any thread.

        An error is raised by a callback that this method adds, because an exception set on a future crashes DDP's
        reducer.
        """
        if not self._queued.complete:
            if self._queue.is_worker_thread or (not self._queue.threaded and torch._C._current_graph_task_id() != -1):
                self._queue.finish(self._queued)
            else:
                self._queue.start()
        future = _make_future(self.outputs)
        with self._lock:
            resolved = self._queued.complete
            if not resolved:
                self._futures.append(future)
        if resolved:
            self._resolve(future)
            if self.error is None:
                return future
        return future.then(self._outcome)


class MessageWork(GroupWork):
    """Handle of a send or receive."""

    def __init__(
        self,
        name: str,
        work: Messages,
        outputs: Sequence[torch.Tensor],
        timeout: float,
        in_flight: set[MessageWork],
        copy_back: Callable[[], None] | None = None,
    ) -> None:
        """Watch a message that is under way.

        Args:
            name: Name of the message in error messages.
            work: Handle of the communicator.
            outputs: Tensors that it writes.
            timeout: Seconds that a wait may last.
            in_flight: Set that keeps this handle alive until completion, because MPI uses its memory even if the caller
                drops the handle.
            copy_back: Function that copies the received data to their destination; None if there is nothing to copy.
        """
        super().__init__(outputs)
        self.name = name
        self._work, self._timeout, self._copy_back = work, timeout, copy_back
        self._complete = False
        self._lock = threading.Lock()
        self._copy_events: dict[torch.device, torch.Event] = {}
        self._in_flight = in_flight
        in_flight.add(self)

    def is_completed(self) -> bool:
        """Return True if the message is complete. The call also lets it make progress."""
        with self._lock:
            if self._complete:
                return True
            try:
                arrived = self._work.done()
            except MpitrainError as error:
                self._in_flight.discard(self)
                raise translate_error(error) from error
            if arrived:
                self._work.wait()  # returns at once, and orders this thread's stream, which copies the data, after it
                if self._copy_back is not None:
                    self._copy_back()
                self._copy_events = {device: record_event(device) for device in devices_of(self.outputs)}
                self._complete = True
                self._in_flight.discard(self)
        return self._complete

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is complete; for a tensor on a device, make the current stream wait for the rest.

        Args:
            timeout: Longest time to wait; None for the group's limit.

        Raises:
            GroupError: The message is not complete in that time.
        """
        if not self.is_completed():
            with self._work.limited_wait():
                _poll(
                    self.is_completed,
                    seconds_of(timeout, self._timeout),
                    self.name,
                    "check that the other rank calls its part",
                )
        for device, event in self._copy_events.items():
            current_stream(device).wait_event(event)
        return True

    def source_rank(self) -> int:
        """Return the rank in the group that sent the received message."""
        source = self._work.source
        if source is None:
            raise GroupError(f"{self.name} is not complete yet; call wait() first")
        return source

    _source_rank = source_rank


class CoalescedWork(GroupWork):
    """Handle of operations that were issued as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout is not None else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future:
        """Return a future that is resolved with the outputs of all operations."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda all_of_them: [part.value() for part in all_of_them.value()] and self.outputs
        )


def seconds_of(timeout: timedelta | None, default: T) -> float | T:
    """Return a timeout in seconds, or a default if it is None or not positive.

    Args:
        timeout: Timeout of one call.
        default: Default, usually the group's timeout.
    """
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else default


def poll_until(done: Callable[[], bool], deadline: float) -> bool:
    """Poll a condition; return True if it was true before the deadline.

    Args:
        done: Condition.
        deadline: Value of `time.monotonic()` at which to give up.
    """
    polls = 0
    while not done():
        polls += 1
        if polls > _POLLS and time.monotonic() > deadline:
            return False
        time.sleep(_SLEEP if polls > _POLLS else 0)
    return True


def _poll(done: Callable[[], bool], seconds: float, name: str, hint: str) -> None:
    if not poll_until(done, time.monotonic() + seconds):
        raise GroupError(f"{name}: timeout after {seconds:g} s; {hint}")


def _make_future(outputs: Sequence[Any]) -> torch.futures.Future:
    devices: list[int | str | torch.device] = [*devices_of(outputs)]
    return torch.futures.Future(devices=devices) if devices else torch.futures.Future()


def devices_of(tensors: Sequence[Any]) -> list[torch.device]:
    """Return the accelerators on which tensors lie."""
    return sorted({t.device for t in _device_tensors(tensors)}, key=str)


def _device_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among the values that are not in host memory."""
    return [tensor for tensor in tensors_in(values) if not tensor.is_cpu and is_accelerator(tensor.device)]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: the value itself, or those in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
