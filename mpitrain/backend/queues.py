"""The order in which the operations of process groups are carried out, and by whom.

Each process group has a `Queue`. Operations that torch calls asynchronous wait in it, and whoever comes first
carries them out, in the order they were issued: the group's thread, where a core is free for one; else the caller
that waits for one of them. So a program that runs with another backend cannot hang with this one:

- before a caller blocks (in an operation of another group, in a message), threads are started for the groups whose
  operations still wait;
- a future is somebody else's to wait for, so asking for one starts the thread. Inside a backward pass the operation
  is carried out there and then instead: every rank issues its gradients in the same order, and on full machines a
  thread would only take turns with the computation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.backend.failures import translation
from mpitrain.backend.streams import Streams
from mpitrain.errors import MpitrainError

if TYPE_CHECKING:
    from mpitrain.backend.work import Operation


class Waiting:
    """The queues of a process that hold operations and have no thread to carry them out.

    Attributes:
        queues: These.
    """

    def __init__(self) -> None:
        self.queues: set[Queue] = set()

    def start_all(self, but: Queue | None = None) -> None:
        """Let the operations of all groups make progress: somebody is about to block.

        Args:
            but: A queue that need not.
        """
        for queue in list(self.queues):
            if queue is not but:
                queue.start()


class Queue:
    """The operations of one process group, carried out in the order they were issued.

    Attributes:
        threaded: Whether to make progress in a thread whenever there is something to do.
        limit: Seconds after which who waits for an operation is told so; without it the watchdog sees to that.
        given_up: Operations that somebody has waited for in vain.
        streams: The side streams of devices that they are carried out on.
    """

    def __init__(self, threaded: bool, waiting: Waiting, limit: float | None = None) -> None:
        """Begin with nothing in it.

        Args:
            threaded: Whether to make progress in a thread whenever there is something to do.
            waiting: The queues that have no thread.
            limit: Seconds after which who waits for an operation is told so; without it the watchdog sees to that.
        """
        self.threaded, self.limit = threaded, limit
        self.given_up: list[Operation] = []  # that somebody has waited for in vain
        self.streams: Streams = {}
        self._waiting = waiting
        self._pending: deque[Operation] = deque()
        self._running = threading.Lock()  # held by whoever carries out an operation
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def perform(self, call: Callable[[], None]) -> None:
        """Carry out an operation now, after all that were issued before it."""
        self._waiting.start_all(but=self)
        self.drain()
        with self._running:
            try:
                call()
            except MpitrainError as error:
                raise translation(error) from error

    def submit(self, operation: Operation) -> Operation:
        """Put an operation into the queue, and give it back."""
        with self._changed:
            self._pending.append(operation)
            self._changed.notify()
        if self.threaded:
            self.start()
        elif self._thread is None:
            self._waiting.queues.add(self)
        return operation

    def start(self) -> None:
        """Make progress in a thread from now on."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._waiting.queues.discard(self)
                self._thread = threading.Thread(target=self._work, name="mpitrain-backend", daemon=True)
                self._thread.start()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is the queue's thread, in a callback, where waiting for itself would never end."""
        return self._thread is threading.current_thread()

    def finish(self, operation: Operation) -> None:
        """Complete an operation, and those before it."""
        self._waiting.start_all(but=self)
        while not operation.complete:
            self._next(operation)

    def drain(self) -> None:
        """Complete everything issued so far; errors stay with their handles."""
        while self._pending:
            self._next(None)

    @property
    def stuck(self) -> str:
        """The operations that were given up and are still under way; a thread is inside MPI for them."""
        return ", ".join(operation.name for operation in self.given_up if not operation.complete)

    def close(self) -> None:
        """Complete everything, unless something was given up, and the rest stays as it is."""
        if self.stuck:
            self._waiting.queues.discard(self)
            return
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._waiting.queues.discard(self)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _next(self, wanted: Operation | None) -> None:
        with self._running:
            operation = self._pending.popleft() if self._pending else None
            if operation is not None:
                operation.run()
        if operation is not None:
            operation.announce()
            if not self._pending:
                self._waiting.queues.discard(self)
        elif wanted is not None and not wanted.complete:
            time.sleep(0)  # another thread has carried it out and is about to say so

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if not self._pending:
                    return
            self._next(None)
