"""When processes of this node ended, to the millisecond: MPI itself says only that they have."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpitrain.comm.communicator import Communicator


class Witness:
    """A thread that sleeps until one of some processes ends.

    Attributes:
        silent: Processes that were ended because they had been at fault for some time.
    """

    def __init__(self, pidfds: Mapping[int, int]) -> None:
        """Begin to watch.

        Args:
            pidfds: A descriptor of each process, by whatever number the process has here.
        """
        self._watched = {os.dup(fd): process for process, fd in pidfds.items()}
        self._ended: dict[int, float] = {}  # time.monotonic()
        self.silent: set[int] = set()
        if self._watched:
            threading.Thread(target=self._watch, name="mpitrain-witness", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        for fd in self._watched:
            poll.register(fd, select.POLLIN)
        while self._watched:
            for fd, _ in poll.poll():
                self._ended[self._watched[fd]] = time.monotonic()
                poll.unregister(fd)
                del self._watched[fd]
                os.close(fd)

    def seconds_since(self, world: Communicator, lost: Sequence[int], otherwise: float) -> tuple[float, bool]:
        """How long ago the first of the lost processes failed, and whether that is the most it can be. Collective.

        Args:
            world: The world of the ranks that are left.
            lost: The processes, as far as this rank knows.
            otherwise: Seconds since it last knew all of them to be well, which counts where nobody saw one of them
                fail: its whole host was lost, or it had stopped before it was ended.
        """
        now = time.monotonic()
        mine = [[process, now - self._ended.get(process, now + 1)] for process in lost]  # negative: not seen
        told = world.all_gather_object([otherwise, mine, sorted(self.silent)])
        silent = {process for *_, of in told for process in of}
        ago: dict[int, float] = {}
        for process, seconds in (pair for _, of, _ in told for pair in of):
            ago[process] = max(seconds, ago.get(process, -1.0))
        if any(seconds < 0 or process in silent for process, seconds in ago.items()):
            return max(since for since, *_ in told), True
        return max(ago.values(), default=otherwise), False
