"""Handles of operations under way, as torch.distributed wants them, and the queues in which they are carried out.

Operations that torch calls asynchronous wait in their group's `Queue`, and whoever comes first carries them out, in the
order they were issued: the group's thread, where a core is free for one; else the caller that waits for one of them, or
a thread beside a caller that is blocked in something else (see `mpitrain.comm.runtime.progress`). So a program that
runs with another backend cannot hang with this one.

A future is somebody else's to wait for, so asking for one starts the thread. Inside a backward pass the operation is
carried out there and then instead: every rank issues its gradients in the same order, and on full machines a thread
would only take turns with the computation.
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

from mpitrain.backend.base import GroupError, translation
from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import current_stream, is_accelerator, recorded
from mpitrain.comm.runtime.work import Messages, Order, Queued, Streams, Worker
from mpitrain.errors import MpitrainError

T = TypeVar("T")

_POLLS = 200  # before sleeping between them
_NAP = 5e-5  # seconds


class Queue(Worker):
    """The operations of one process group, carried out in the order they were issued.

    Attributes:
        limit: Seconds after which `wait` raises; None leaves operations that never end to the watchdog.
        given_up: Operations that somebody has waited for in vain.
        streams: The side streams of devices that they are carried out on.
    """

    def __init__(self, comm: Communicator, limit: float | None = None) -> None:
        """Begin with nothing in it.

        Args:
            comm: The group's communicator.
            limit: Seconds after which `wait` raises; None leaves operations that never end to the watchdog.
        """
        super().__init__(comm.overlaps, comm.journal, comm.process.progress)
        self.limit = limit
        self.given_up: list[Queued] = []
        self.streams: Streams = {}

    def perform(self, call: Callable[[], None]) -> None:
        """Carry out an operation now, after all that were issued before it."""
        self.drain()
        with self._running:
            try:
                call()
            except MpitrainError as error:
                raise translation(error) from error

    @property
    def stuck(self) -> str:
        """The operations that were given up and are still under way; a thread is inside MPI for them."""
        return ", ".join(operation.name for operation in self.given_up if not operation.complete)

    def close(self) -> None:
        """Complete everything, unless something was given up, and the rest stays as it is."""
        if self.stuck:
            self.progress.deferring.discard(self)
        else:
            super().close()


class GroupWork(dist.Work):
    """What the handles of all operations have in common. Their methods are those that torch asks for.

    Attributes:
        outputs: The tensors that the operation writes.
        error: What the operation raised, if it did.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        """See `wait`."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether it is complete and raised nothing."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """What the operation raised, if it did."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes."""
        return self.outputs

    def _outcome(self, _: torch.futures.Future) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs


class FinishedWork(GroupWork):
    """An operation that is complete."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        """A future that is resolved with the outputs."""
        future = _future_for(self.outputs)
        future.set_result(self.outputs)
        return future


class Operation(GroupWork):
    """A collective in a `Queue`."""

    def __init__(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Sequence[torch.Tensor],
        queue: Queue,
        arguments: Sequence[Any],
    ) -> None:
        """Describe it.

        Args:
            name: Its name in messages to people.
            call: What carries it out.
            outputs: The tensors that it writes.
            queue: Where it waits.
            arguments: Its arguments, its tensors among them, in lists of any depth.
        """
        super().__init__(outputs)
        tensors = _on_devices(arguments)  # which give it a place among what the caller asks of their devices
        self._queue, self._order = queue, Order(tensors, queue.streams) if tensors else None
        self._futures: list[torch.futures.Future] = []
        self._change = threading.Lock()

        def carry_out() -> None:
            try:
                call()
            except BaseException as error:  # surfaces in wait() and in the futures
                self.error = translation(error)

        self._queued = Queued(name, carry_out, queue, self._order, self._announce)

    def _announce(self) -> None:
        """Resolve the futures that were asked for: it is complete. Their callbacks run in this thread."""
        with self._change:
            waiting, self._futures = self._futures, []
        for future in waiting:
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future) -> None:
        with self._order.beside() if self._order is not None else nullcontext():
            future.set_result(self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is complete; where its tensors are on a device, the current stream waits for the rest.

        Args:
            timeout: How long at most; without it, the group's limit.

        Raises:
            GroupError: It is not complete in that time, or what the operation raised.
        """
        queued = self._queued
        if not queued.complete:
            limit = seconds_of(timeout, self._queue.limit)
            if limit is None or self._queue.is_this_thread:
                self._queue.finish(queued)
            else:
                self._queue.start()
                try:
                    _poll(lambda: queued.complete, limit, queued.name, "does every rank call it?")
                except GroupError:
                    self._queue.given_up.append(queued)
                    raise
        if self.error is not None:
            raise self.error
        if self._order is not None:
            self._order.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is complete; lets it make progress."""
        self._queued.done()
        return self._queued.complete

    def get_future(self) -> torch.futures.Future:
        """A future that is resolved with the outputs. Its callbacks may run in any thread.

        An error is raised by a callback of our own: an exception set on a future crashes DDP's reducer.
        """
        if not self._queued.complete:
            if self._queue.is_this_thread or (not self._queue.threaded and torch._C._current_graph_task_id() != -1):
                self._queue.finish(self._queued)
            else:
                self._queue.start()
        future = _future_for(self.outputs)
        with self._change:
            resolved = self._queued.complete
            if not resolved:
                self._futures.append(future)
        if resolved:
            self._resolve(future)
            if self.error is None:
                return future
        return future.then(self._outcome)


class MessageWork(GroupWork):
    """A send or a receive that MPI carries by itself."""

    def __init__(
        self,
        name: str,
        work: Messages,
        outputs: Sequence[torch.Tensor],
        timeout: float,
        in_flight: set[MessageWork],
        land: Callable[[], None] | None = None,
    ) -> None:
        """Watch a message that is under way.

        Args:
            name: Its name in messages to people.
            work: The message.
            outputs: The tensors that it writes.
            timeout: Seconds that a wait lasts at most.
            in_flight: Keeps it until it is complete, because MPI uses its memory, whether or not the caller does.
            land: Puts what arrived in its place.
        """
        super().__init__(outputs)
        self.name = name
        self._work, self._timeout, self._land = work, timeout, land
        self._complete = False
        self._change = threading.Lock()
        self._landed: dict[torch.device, torch.Event] = {}
        self._in_flight = in_flight
        in_flight.add(self)

    def is_completed(self) -> bool:
        """Return whether it is complete; lets it make progress."""
        with self._change:
            if self._complete:
                return True
            try:
                arrived = self._work.done()
            except MpitrainError as error:
                self._in_flight.discard(self)
                raise translation(error) from error
            if arrived:
                self._work.wait()  # at once, and this thread's stream, on which it lands, comes after it
                if self._land is not None:
                    self._land()
                self._landed = {device: recorded(device) for device in devices_of(self.outputs)}
                self._complete = True
                self._in_flight.discard(self)
        return self._complete

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is complete; where its tensor is on a device, the current stream waits for the rest.

        Args:
            timeout: How long at most; without it, the group's limit.

        Raises:
            GroupError: It is not complete in that time.
        """
        if not self.is_completed():
            with self._work.limited_wait():
                _poll(self.is_completed, seconds_of(timeout, self._timeout), self.name, "is the other rank there?")
        for device, event in self._landed.items():
            current_stream(device).wait_event(event)
        return True

    def source_rank(self) -> int:
        """The rank in the group that sent what arrived."""
        source = self._work.source
        if source is None:
            raise GroupError(f"{self.name} is not complete yet; wait() first")
        return source

    _source_rank = source_rank


class Several(GroupWork):
    """Operations that were issued as one."""

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
        """A future that is resolved with the outputs of all of them."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda all_of_them: [part.value() for part in all_of_them.value()] and self.outputs
        )


def seconds_of(timeout: timedelta | None, otherwise: T) -> float | T:
    """The limit of a call, which is only one if it is more than nothing, or else the group's."""
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else otherwise


def comes_true(done: Callable[[], bool], deadline: float) -> bool:
    """Ask again and again; returns whether it was so by the deadline, a time of `time.monotonic`."""
    polls = 0
    while not done():
        polls += 1
        if polls > _POLLS and time.monotonic() > deadline:
            return False
        time.sleep(_NAP if polls > _POLLS else 0)
    return True


def _poll(done: Callable[[], bool], seconds: float, name: str, hint: str) -> None:
    if not comes_true(done, time.monotonic() + seconds):
        raise GroupError(f"{name}: timeout after {seconds:g} s; {hint}")


def _future_for(outputs: Sequence[Any]) -> torch.futures.Future:
    devices: list[int | str | torch.device] = [*devices_of(outputs)]
    return torch.futures.Future(devices=devices) if devices else torch.futures.Future()


def devices_of(tensors: Sequence[Any]) -> list[torch.device]:
    """The accelerators that tensors lie on."""
    return sorted({t.device for t in _on_devices(tensors)}, key=str)


def _on_devices(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among values that are not in host memory."""
    return [tensor for tensor in tensors_in(values) if not tensor.is_cpu and is_accelerator(tensor.device)]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Give the tensors of a value: itself, or those in lists of any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
