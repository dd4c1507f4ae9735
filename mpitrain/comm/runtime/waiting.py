"""Waits of ranks that share their cores: a rank that waits leaves its core to the ranks it waits for.

MPI libraries wait by polling, at best with `sched_yield` between two polls. That is fastest for ranks with a core each.
With more ranks than cores it takes time from the ranks that still compute: a training step of 6 ranks on 2 cores, on
three hosts of one machine, took a quarter longer. A rank then polls for a few milliseconds and naps between later
polls. The naps are a twentieth of the time waited so far, so that they lengthen a wait by little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from mpitrain.comm.job.mpi import MPI

_POLLING = 4e-3  # seconds of polling before the first nap: 8 ranks in turn take that long for a short operation
_FRACTION = 0.05  # length of a nap relative to the time waited so far
_NAPS = 20e-6, 5e-4  # shortest and longest nap in seconds


def wait_with_naps(is_complete: Callable[[], bool]) -> None:
    """Wait until `is_complete` returns true; call it again and again, and nap between the calls.

    Args:
        is_complete: Function that makes progress and returns true at the end of the wait.
    """
    begin = time.perf_counter()
    while not is_complete():
        waited = time.perf_counter() - begin
        if waited > _POLLING:
            time.sleep(min(_NAPS[1], max(_NAPS[0], _FRACTION * waited)))


def wait_for_requests(requests: Sequence[MPI.Request], naps: bool, statuses: list[MPI.Status] | None = None) -> None:
    """Wait until all requests are complete.

    Args:
        requests: Requests to wait for.
        naps: If true, nap between polls; otherwise wait in MPI.
        statuses: One for each request, to be filled; None if the caller needs none.
    """
    if naps:
        wait_with_naps(partial(MPI.Request.Testall, requests, statuses))
    else:
        MPI.Request.Waitall(requests, statuses)


def make_barrier(comm: MPI.Intracomm, naps: bool) -> Callable[[], None]:
    """Return a function that returns when all ranks of a communicator have called it.

    Args:
        comm: The communicator; all of its ranks must pass the same `naps`.
        naps: If true, nap between polls; otherwise wait in MPI.
    """
    return (lambda: wait_with_naps(comm.Ibarrier().Test)) if naps else comm.Barrier
