"""One copy of flat storage for all ranks of a node, in memory they share.

Unlike an arena, where each rank has storage of its own that the others can reach, all ranks of a node see the same
elements here. Who writes which of them is the caller's business; `publish` makes what was written visible. Before
anything is written again, the caller has all ranks of the node meet (the program `node_copy`).
"""

from __future__ import annotations

import torch

from mpitrain.comm.algorithms.shared import node_copy
from mpitrain.comm.collectives.binding import syncs
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.job.traffic import Moved, clock
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Layout


class NodeCopy:
    """tensor: the node's elements, flat, zeros at first."""

    def __init__(self, arena: Arena, comm: Dispatcher, numel: int) -> None:
        """arena: all of whose memory is the segment of the node's first rank. comm: whose ranks they are."""
        binder, self._comm, self._published = comm.binder, comm, 0  # the last for the journal
        self._arena, node = arena, binder.node
        first = next(iter(arena.segments.values()))
        self.tensor = tensor_at(first, numel, arena.tensor.dtype)
        program = node_copy(node.size)
        if binder.proofs is not None:
            binder.proofs.require(program)
        nothing_moves = Layout(arena.tensor.dtype, [0] * (program.chunks + 1), 0, 0)  # the callers write and read
        plan = Plan(program, node, nothing_moves, None, node.Barrier, syncs(arena))
        self._publish = plan.bind(nothing_moves)

    def publish(self) -> None:
        """Return when all ranks of the node have come here; then each sees what the others wrote. Collective."""
        begin = clock() if self._comm.journal.on else 0.0
        self._publish()
        if begin:
            self._published += 1
            self._comm.entered("node copy", Moved("node"), begin, f"node copy {self._arena.name}", self._published)

    def free(self) -> None:
        """Release the memory. Collective; tensors over it must not be used afterwards."""
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)
        self._arena.free()


def allocate_node_copy(comm: Dispatcher, numel: int, dtype: torch.dtype) -> NodeCopy | None:
    """numel zeros per node; None on all ranks when some node has no room for it. Collective."""
    binder = comm.binder
    mine = numel if binder.node.rank == 0 else 0
    # collectives on parts of it: to the first rank alone it would look like an arena
    arena = binder.allocate(mine, dtype, for_tensors=False)
    return NodeCopy(arena, comm, numel) if arena.kind == "shared" else None
