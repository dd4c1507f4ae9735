"""Memory that a node shares and that callers fill and read by themselves: slots used in turns, and one copy for all."""

from __future__ import annotations

import torch

from mpitrain.comm.algorithms.shared import alternating_all_gather, node_copy
from mpitrain.comm.collectives.binding import Binder, Invocation, syncs
from mpitrain.comm.collectives.dispatch import Dispatcher
from mpitrain.comm.job.traffic import Moved, clock
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.selection import Algorithm

_ALTERNATING = Algorithm(lambda setting: alternating_all_gather(setting.size), one_node=True, reach=True)


class Alternating:
    """Two slots a rank in memory that a node shares, used in turns: each rank fills its own, they meet, all read all.

        slot 0  | rank 0's bytes | rank 1's | ...        fill the own one, meet, read them where they are
        slot 1  | rank 0's bytes | rank 1's | ...        the next time

    For data that come at ever new addresses, or that several ranks need a part of each: nothing is sent, and there is
    one fence a turn (`alternating_all_gather`). The communicator lies on one node.

    Attributes:
        slots: By turn and rank: flat uint8 tensors of the capacity's bytes.
        turn: Which slot, 0 or 1, is to be filled now.
    """

    def __init__(self, comm: Dispatcher, arena: Arena, capacity: int) -> None:
        """arena: a shared one of 2 * capacity bytes."""
        memories = [arena.peer(world_rank) for world_rank in comm.world_ranks]
        self.slots = [[m[turn * capacity : (turn + 1) * capacity] for m in memories] for turn in (0, 1)]
        self.turn = 0
        self._comm, self._arena, self._key = comm, arena, ("alternating", arena.name)
        self._meeting = Invocation("alternating all_gather", self._bound, key=self._key, alike=capacity, counts=False)

    def meet(self, taken: int = 0) -> None:
        """Return when every rank has filled its slot of this turn; the next turn begins. Collective.

        All ranks' slots of the turn that ends may be read until this rank's next meeting. Its own slot of the other
        turn may be filled meanwhile.

        Args:
            taken: Bytes that this rank takes out of the other ranks' slots afterwards, for the journal.
        """
        begin = clock() if self._comm.journal.on else 0.0
        ready = self._comm.ready.get(self._key)
        if ready is not None:
            ready(None)
        else:
            self._comm.dispatch(self._meeting)
        self.turn ^= 1
        if begin:
            self._comm.entered(self._meeting.name, Moved("alternating", taken), begin)

    def free(self) -> None:
        """Release the memory. Collective; tensors over it must not be used afterwards."""
        self.slots = []
        self._arena.free()

    def _bound(self, binder: Binder) -> Compiled:
        return binder.bound(self._key, lambda: self._bind(binder), self._arena.tensor)

    def _bind(self, binder: Binder) -> Compiled:
        program = binder.program(_ALTERNATING, binder.setting(self._arena.tensor))
        nothing_moves = [0] * (program.chunks + 1)  # the callers fill and read
        start = self._arena.start
        return binder.compile(program, Layout(torch.uint8, nothing_moves, start, start), arena=self._arena)


class NodeCopy:
    """One copy of flat storage for all ranks of a node, in memory they share.

    Unlike an arena, where each rank has storage of its own that the others can reach, all ranks of a node see the same
    elements here. Who writes which of them is the caller's business; `publish` makes what was written visible. Before
    anything is written again, the caller has all ranks of the node meet (the program `node_copy`).

    Attributes:
        tensor: The node's elements, flat, zeros at first.
    """

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
