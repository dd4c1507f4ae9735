"""Reductions in the shared memory of a node that are begun, and waited for later, without a thread."""

from __future__ import annotations

from torch import Tensor

from mpitrain.comm.collectives import reduce_scatter
from mpitrain.comm.collectives.arguments import block_sizes
from mpitrain.comm.collectives.binding import syncs
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.runtime.split_phase import DeferredReduceScatter, Meeting


class Deferred:
    """The deferred operations of one communicator, and where its ranks meet for them."""

    def __init__(self, comm: Dispatcher) -> None:
        self._watchdog = comm.process.watchdog
        self._record = self._watchdog.record(f"{comm.label} (deferred)", comm.world_ranks)
        self._meetings: tuple[Meeting, Meeting] | None = None

    def reduce_scatter(self, comm: Dispatcher, out: Tensor, x: Tensor, op: str) -> DeferredReduceScatter | None:
        """Begin one; None, on all ranks, where they do not share x's memory. comm: the communicator."""
        blocks = block_sizes(comm, "reduce_scatter", out, x, None, "out x")
        body = reduce_scatter.body_in_arena(comm.binder, out, x, op)
        if body is None:
            return None
        comm.compare("reduce_scatter", (x, out), (op, blocks, "deferred", False), placed=x)
        if self._meetings is None:
            self._meetings = Meeting(comm.duplicate_of_node()), Meeting(comm.duplicate_of_node())
        said = reduce_scatter.in_words(comm.binder, x, blocks, op)
        sync = syncs(comm.binder.arena_of(x))
        return DeferredReduceScatter(out, x, body, said, *self._meetings, sync, self._record)

    def free(self, *, together: bool) -> None:
        """Release what they use. together: whether the ranks can still act together; then collective."""
        for meeting in self._meetings or () if together else ():
            meeting.free()
        self._watchdog.forget(self._record)
