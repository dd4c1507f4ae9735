"""Parameters in flat memory, where each rank updates its shares and every rank sees the result.

Two placements hold parameters whole at all times:

    PrivateParameters   each rank has a copy; after an update the shares are gathered
    NodeParameters      the ranks of a node have one copy between them, in shared memory: an update is made in place,
                        and within the node one barrier publishes it

The third, which gathers parameters when they are needed, is `mpitrain.shard.units`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.comm import Communicator
from mpitrain.comm.memory.node_copy import NodeCopy
from mpitrain.shard.flat import FlatGroup


class PrivateParameters:
    """shard: the ranks that hold the shares, in their order. Collective to make."""

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


class NodeParameters:
    """comm: all ranks. carriers: the ranks of all nodes that have this one's place in theirs; None on one node.

    Shares are numbered so that those of one group of carriers lie side by side: see `shard_order`.
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
        self._meet()

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
        self._meet()

    def _meet(self) -> None:
        for copy in self._copies:
            copy.publish()

    def nbytes(self) -> float:
        return sum(c.tensor.numel() * c.tensor.element_size() for c in self._copies) / self._comm.local_size

    def free(self) -> None:
        for group in self._groups:
            move_out(group)
        self._meet()
        for copy in self._copies:
            copy.free()


def shard_order(comm: Communicator) -> int | None:
    """This rank's number when ranks are counted place by place over the nodes, instead of node by node.

        node A: 0 2 4      node B: 1 3 5

    None where the nodes have unequal numbers of ranks.
    """
    counts = {node: comm.nodes.count(node) for node in comm.nodes}
    if len(set(counts.values())) > 1:
        return None
    return comm.local_rank * comm.num_nodes + comm.node


def move_into(group: FlatGroup, flat: torch.Tensor, *, fill: bool) -> None:
    """Make the parameters views of a flat tensor. fill: with the values they have."""
    for parameter, view in zip(group.parameters, group.views(flat), strict=True):
        if fill:
            view.copy_(parameter.data)
        parameter.data = view


def move_out(group: FlatGroup) -> None:
    for parameter in group.parameters:
        parameter.data = parameter.data.clone()
