"""The placements in which parameters are whole at all times.

    ReplicatedParameters   each rank has the module's own tensors, and updates all of them
    PrivateParameters      each rank has a flat copy; after an update of its shares, they are gathered
    NodeParameters         the ranks of a node have one flat copy between them, in shared memory: an update is made in
                           place, and one barrier within the node publishes it

The placement that gathers parameters when they are needed is in `mpitrain.shard.units`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.comm import Communicator
from mpitrain.comm.collectives.node_memory import NodeCopy
from mpitrain.shard.flat import FlatGroup
from mpitrain.shard.protocols import Gathered, Parameters


class ReplicatedParameters(Parameters):
    """The module's own tensors, left as they are: every rank updates all of them, and nothing moves.

    Args:
        groups: The parameters; their layouts are those of the gradients alone.
    """

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a group's layout, which lie in one parameter; that parameter must be contiguous."""
        ((number, first, last, _),) = self._groups[group].layout.within(lo, hi)
        return self._groups[group].parameters[number].data.view(-1)[first:last]

    def publish(self) -> None:
        """Nothing is to be done: every rank has updated all of them."""

    def nbytes(self) -> float:
        return sum(p.numel() * p.element_size() for group in self._groups for p in group.parameters)

    def free(self) -> None:
        """Nothing is to be done."""


class PrivateParameters(Parameters):
    """A flat copy on each rank, of which the parameters are views. Collective to make.

    Args:
        groups: The parameters and where each lies.
        shard: The ranks that the shares are divided over, in the order of the shares.
    """

    def __init__(self, groups: Sequence[FlatGroup], shard: Communicator) -> None:
        self._groups, self._shard = groups, shard
        self._arenas = [shard.arena(g.layout.numel, g.dtype, g.device) for g in groups]
        for group, arena in zip(groups, self._arenas, strict=True):
            move_into(group, arena.tensor, fill=True)

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._arenas[group].tensor[lo:hi]

    def publish(self) -> None:
        for group, arena in zip(self._groups, self._arenas, strict=True):
            for b, bucket in enumerate(group.buckets(arena.tensor)):
                lo, hi = group.layout.share(b, self._shard.rank)
                self._shard.all_gather(bucket, arena.tensor[lo:hi])

    def nbytes(self) -> float:
        return sum(a.tensor.numel() * a.tensor.element_size() for a in self._arenas)

    def free(self) -> None:
        for group, arena in zip(self._groups, self._arenas, strict=True):
            move_out(group)
            arena.free()

    def gathered(self, microbatches: int) -> list[Gathered]:
        return [Gathered(self.nbytes(), self._shard.size, 1)]


class NodeParameters(Parameters):
    """One flat copy for all ranks of a node, of which their parameters are views. Collective to make.

    Args:
        groups: The parameters and where each lies.
        copies: The node's memory, one for each group.
        comm: All ranks.
        carriers: The ranks that have this rank's local number on the other nodes, which carry their shares to each
            other; their shares lie side by side (see `shard_order`). None on one node.
        share: The number of this rank's share.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        copies: Sequence[NodeCopy],
        comm: Communicator,
        carriers: Communicator | None,
        share: int,
    ) -> None:
        self._groups, self._copies, self._comm, self._carriers, self._share = groups, copies, comm, carriers, share
        for group, copy in zip(groups, copies, strict=True):
            move_into(group, copy.tensor, fill=comm.local_rank == 0)
        self._node_barrier()

    def own(self, group: int, lo: int, hi: int) -> torch.Tensor:
        return self._copies[group].tensor[lo:hi]

    def publish(self) -> None:
        if self._carriers is not None:
            nodes = self._carriers.size
            first = self._share - self._carriers.rank
            for group, copy in zip(self._groups, self._copies, strict=True):
                for b in range(group.layout.buckets):
                    lo, hi = group.layout.share(b, self._share)
                    begin, _ = group.layout.share(b, first)
                    self._carriers.all_gather(copy.tensor[begin : begin + nodes * (hi - lo)], copy.tensor[lo:hi])
        self._node_barrier()

    def _node_barrier(self) -> None:
        """After it every rank of the node sees what the others wrote before."""
        for copy in self._copies:
            copy.publish()

    def nbytes(self) -> float:
        return sum(c.tensor.numel() * c.tensor.element_size() for c in self._copies) / self._comm.local_size

    def gathered(self, microbatches: int) -> list[Gathered]:
        return [] if self._carriers is None else [Gathered(self.nbytes(), self._carriers.size, 1)]

    def free(self) -> None:
        for group in self._groups:
            move_out(group)
        self._node_barrier()
        for copy in self._copies:
            copy.free()


def shard_order(comm: Communicator) -> int | None:
    """This rank's number when ranks are counted across the nodes, local rank by local rank.

        node A: 0 2 4      node B: 1 3 5

    So the shares of ranks that have the same local rank on different nodes lie side by side, and one all-gather
    among those ranks moves one stretch of memory. None where the nodes have unequal numbers of ranks.
    """
    counts = {node: comm.nodes.count(node) for node in comm.nodes}
    if len(set(counts.values())) > 1:
        return None
    return comm.local_rank * comm.num_nodes + comm.node


def move_into(group: FlatGroup, flat: torch.Tensor, *, fill: bool) -> None:
    """Make the parameters views of a flat tensor laid out like the group; fill: copy their values there first."""
    for parameter, view in zip(group.parameters, group.views(flat), strict=True):
        if fill:
            view.copy_(parameter.data)
        parameter.data = view


def move_out(group: FlatGroup) -> None:
    """Give each parameter memory of its own, with the value it has."""
    for parameter in group.parameters:
        parameter.data = parameter.data.clone()
