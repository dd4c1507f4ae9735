"""One copy of flat storage for all ranks of a node, in memory they share.

Unlike an arena, where each rank has storage of its own that the others can reach, all ranks of a node see the same
elements here. Who writes which of them is the caller's business; `publish` makes what was written visible. Before
anything is written again, the caller has all ranks of the node meet (the program `node_copy`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpitrain.comm.algorithms.shared import node_copy
from mpitrain.comm.collectives.binding import syncs
from mpitrain.comm.memory.arena import Arena, ArenaIndex, allocate
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.programs.proofs import Proofs
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Layout


class NodeCopy:
    """tensor: the node's elements, flat, zeros at first."""

    def __init__(self, arena: Arena, node: MPI.Intracomm, first: int, numel: int, proofs: Proofs | None) -> None:
        """arena: all of whose memory is the segment of the node's first rank (its number in the world)."""
        self._arena = arena
        self.tensor = tensor_at(arena.segments[first], numel, arena.tensor.dtype)
        program = node_copy(node.size)
        if proofs is not None:
            proofs.require(program)
        nothing_moves = Layout(arena.tensor.dtype, [0] * (program.chunks + 1), 0, 0)  # the callers write and read
        plan = Plan(program, node, nothing_moves, None, node.Barrier, syncs(arena))
        self._publish = plan.bind(nothing_moves)

    def publish(self) -> None:
        """Return when all ranks of the node have come here; then each sees what the others wrote. Collective."""
        self._publish()

    def free(self) -> None:
        """Release the memory. Collective; tensors over it must not be used afterwards."""
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)
        self._arena.free()


def allocate_node_copy(
    comm: MPI.Intracomm,
    node: MPI.Intracomm,
    world_ranks: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    index: ArenaIndex,
    proofs: Proofs | None,
) -> NodeCopy | None:
    """numel zeros per node; None on all ranks when some node has no room for it. Collective over `comm`.

    proofs: has the program proved first; for the debug mode.
    """
    mine = numel if node.rank == 0 else 0
    # collectives on parts of it: to the first rank alone it would look like an arena
    arena = allocate(comm, node, world_ranks, mine, dtype, torch.device("cpu"), index, for_tensors=False)
    if arena.kind != "shared":
        return None
    return NodeCopy(arena, node, world_ranks[0], numel, proofs)
