"""The order in which the operations of process groups are carried out, and by whom.

Each process group has a `Queue`. Operations that torch calls asynchronous wait in it, and whoever comes first
carries them out, in the order they were issued: the group's thread, where a core is free for one; else the caller
that waits for one of them, or a thread beside a caller that is blocked in something else (see
`mpitrain.comm.runtime.progress`). So a program that runs with another backend cannot hang with this one.

A future is somebody else's to wait for, so asking for one starts the thread. Inside a backward pass the operation is
carried out there and then instead: every rank issues its gradients in the same order, and on full machines a thread
would only take turns with the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.backend.failures import translation
from mpitrain.backend.streams import Streams
from mpitrain.comm import Communicator
from mpitrain.comm.runtime.work import Worker
from mpitrain.errors import MpitrainError

if TYPE_CHECKING:
    from mpitrain.backend.work import Operation


class Queue(Worker["Operation"]):
    """The operations of one process group, carried out in the order they were issued.

    Attributes:
        limit: Seconds after which who waits for an operation is told so; without it the watchdog sees to that.
        given_up: Operations that somebody has waited for in vain.
        streams: The side streams of devices that they are carried out on.
    """

    def __init__(self, comm: Communicator, limit: float | None = None) -> None:
        """Begin with nothing in it.

        Args:
            comm: The group's communicator.
            limit: Seconds after which who waits for an operation is told so; without it the watchdog sees to that.
        """
        super().__init__(comm.overlaps, comm.journal, comm.process.progress)
        self.limit = limit
        self.given_up: list[Operation] = []
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
            self.progress.finished(self)
        else:
            super().close()
