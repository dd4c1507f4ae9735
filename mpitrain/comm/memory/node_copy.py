"""One copy of flat storage for all ranks of a node, in memory they share.

Unlike an arena, where each rank has storage of its own that the others can reach, all ranks of a node see the same
elements here. Who writes which of them is the caller's business; `publish` makes what was written visible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpitrain.comm.memory.arena import Arena, ArenaIndex, allocate
from mpitrain.comm.memory.buffers import tensor_at


class NodeCopy:
    """tensor: the node's elements, flat, zeros at first."""

    def __init__(self, arena: Arena, node: MPI.Intracomm, first: int, numel: int) -> None:
        """arena: all of whose memory is the segment of the node's first rank (its number in the world)."""
        assert arena.window is not None
        self._arena, self._node = arena, node
        self.tensor = tensor_at(arena.segments[first], numel, arena.tensor.dtype)

    def publish(self) -> None:
        """Return when all ranks of the node have come here; then each sees what the others wrote. Collective."""
        window = self._arena.window
        assert window is not None
        window.Sync()  # MPI-4.1 section 12.7: sync, meet, sync
        self._node.Barrier()
        window.Sync()

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
) -> NodeCopy | None:
    """numel zeros per node; None on all ranks when some node has no room for it. Collective over `comm`."""
    mine = numel if node.rank == 0 else 0
    # collectives on parts of it: to the first rank alone it would look like an arena
    arena = allocate(comm, node, world_ranks, mine, dtype, torch.device("cpu"), index, for_tensors=False)
    if arena.kind != "shared":
        return None
    return NodeCopy(arena, node, world_ranks[0], numel)
