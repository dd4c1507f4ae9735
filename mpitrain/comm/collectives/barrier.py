"""barrier: no rank goes on before all ranks have come."""

from __future__ import annotations

from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.collectives.operation import Invocation
from mpitrain.comm.job.traffic import Moved
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.work import Work

_KEY = "barrier"


def barrier(comm: Dispatcher, async_op: bool = False) -> Work | None:
    """Return when every rank has come here. Collective.

    Args:
        async_op: Return at once with a `Work` that is complete when every rank has come here.

    Raises:
        CommunicationError: MPI fails.
    """
    if not async_op:
        ready = comm.ready.get(_KEY)
        if ready is not None:
            ready(None)
            return None
    return comm.dispatch(Invocation("barrier", bound, key=_KEY), async_op)


def bound(binder: Binder) -> Compiled:
    """The operation of one rank."""
    return binder.bound(_KEY, lambda: Compiled([binder.comm.Barrier], moved=Moved("mpi")))
