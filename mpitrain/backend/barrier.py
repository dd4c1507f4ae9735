"""Barriers with a limit: over messages, because MPI's own cannot be left before everybody has come.

`wait` is the dissemination barrier of Hensgen, Finkel and Manber (1988): in round k rank r sends to rank r + 2^k and
receives from rank r - 2^k, ceil(log2(size)) rounds. `monitored`: everybody tells rank 0, rank 0 tells everybody.
"""

from __future__ import annotations

import time

import numpy as np

from mpitrain.backend.failures import GroupError
from mpitrain.backend.work import comes_true
from mpitrain.comm import Communicator
from mpitrain.comm.runtime.work import Messages

_TAGS = range(31000, 31700)  # of the barriers, one after the other; MPI promises tags up to 32767
_MONITORED_TAGS = range(32000, 32700)


class Barriers:
    """The barriers of one process group.

    Attributes:
        abandoned: Messages that somebody has waited for in vain. MPI may still write into their memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._count = 0
        self.abandoned: list[Messages] = []  # MPI may still write into their memory

    def _next_of(self, tags: range) -> int:
        self._count += 1
        return tags[self._count % len(tags)]

    def wait(self, seconds: float) -> None:
        """Return when every rank has come.

        Args:
            seconds: How long to wait.

        Raises:
            GroupError: Some rank has not come in that time.
        """
        comm, tag = self._comm, self._next_of(_TAGS)
        deadline = time.monotonic() + seconds
        distance = 1
        while distance < comm.size:
            before = (comm.rank - distance) % comm.size
            arriving = comm.irecv(np.empty(1, dtype=np.int64), before, tag)
            leaving = comm.isend(np.zeros(1, dtype=np.int64), (comm.rank + distance) % comm.size, tag)
            if not self._done(arriving, deadline):
                raise GroupError(
                    f"barrier of {comm.label}: Timed out waiting {1e3 * seconds:.0f}ms on rank {comm.rank} for word "
                    f"from rank {before}; that rank, or one that it waits for, did not come"
                )
            self._done(leaving, deadline)
            distance *= 2

    def monitored(self, seconds: float, wait_all_ranks: bool) -> None:
        """Return when every rank has come, and tell rank 0 of those that do not.

        Args:
            seconds: How long to wait.
            wait_all_ranks: Whether rank 0 is to name all that did not come, instead of the first.

        Raises:
            GroupError: Some rank has not come in that time; in gloo's words.
        """
        comm, tag = self._comm, self._next_of(_MONITORED_TAGS)
        deadline = time.monotonic() + seconds
        word = np.zeros(1, dtype=np.int64)
        if comm.rank:
            self._done(comm.isend(word, 0, tag), deadline)
            if not self._done(comm.irecv(word, 0, tag), deadline):
                raise GroupError(
                    f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: nothing came in {1e3 * seconds:.0f} ms ({comm.label}); rank 0 tells who "
                    "did not come"
                )
            return
        arriving = {rank: comm.irecv(np.empty(1, dtype=np.int64), rank, tag) for rank in range(1, comm.size)}
        missing = []
        for rank, work in arriving.items():
            if not self._done(work, deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            self.abandoned += arriving.values()
            if seconds <= 0:
                raise GroupError(
                    f"Rank 0 timed out in monitoredBarrier after {1e3 * seconds:.0f} ms; give it some time"
                )
            names = ", ".join(map(str, missing))
            raise GroupError(
                f"Rank{'s' if len(missing) > 1 else ''} {names} failed to pass monitoredBarrier in "
                f"{1e3 * seconds:.0f} ms ({comm.label}); look at what they do instead"
            )
        for rank in arriving:
            self._done(comm.isend(word, rank, tag), deadline)

    def _done(self, work: Messages, deadline: float) -> bool:
        if work.done():
            return True
        with work.limited_wait():
            done = comes_true(work.done, deadline)
        if not done:
            self.abandoned.append(work)
        return done
