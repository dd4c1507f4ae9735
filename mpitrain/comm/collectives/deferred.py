"""Reductions in the shared memory of a node that are begun, and waited for later, without a thread."""

from __future__ import annotations

from torch import Tensor

from mpitrain.comm.collectives import reduce_scatter
from mpitrain.comm.collectives.arguments import block_sizes
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.job.traffic import Moved, Note
from mpitrain.comm.runtime.events import Event
from mpitrain.comm.runtime.split_phase import SplitPhase


class Deferred:
    """The deferred operations of one communicator, and what carries their signals."""

    def __init__(self, comm: Dispatcher) -> None:
        self._watchdog = comm.process.watchdog
        self._record = self._watchdog.record(f"{comm.label} (deferred)", comm.world_ranks)
        self._events: dict[str, Event] = {}
        self._begun = 0  # operations, for the journal

    def reduce_scatter(self, comm: Dispatcher, out: Tensor, x: Tensor, op: str) -> SplitPhase | None:
        """Begin one; None, on all ranks, where they do not share x's memory. comm: the communicator."""
        blocks = block_sizes(comm, "reduce_scatter", out, x, None, "out", "x")
        if not reduce_scatter.can_defer(comm.binder, x):
            return None
        comm.compare("reduce_scatter", (x, out), (op, blocks, "deferred", False), placed=x)
        if not self._events:
            label = self._record.label
            self._events = {event: Event(comm.duplicate_of_node(), label) for event in reduce_scatter.DEFERRED_EVENTS}
        phases = reduce_scatter.deferred(comm.binder, x, out, op, self._events).parts
        note = None
        if comm.journal.on:
            self._begun += 1
            moved = Moved.sum(phase.moved for phase in phases)
            note = Note(comm.journal, "reduce_scatter", comm.label, moved, self._record.key, self._begun)
        return SplitPhase("deferred reduce_scatter", phases, (x, out), self._record, note)

    def free(self, *, together: bool) -> None:
        """Release what they use. together: whether the ranks can still act together; then collective."""
        for event in self._events.values() if together else ():
            event.free()
        self._watchdog.forget(self._record)
