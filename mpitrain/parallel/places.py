"""Nodes of the ranks of a layout, and the groups of ranks that communicate with each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from mpitrain.layout.mesh import BLOCKS, LAYERS, PARTS, SAMPLES, MeshAxis
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.shard.placement import STAGES, bucket_size, node_has_one_copy, slot_count


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other, while equal groups do the same.

    Attributes:
        nodes: Node of each rank, in the order of the ranks; ranks of one node are neighbours.
        beside: Number of groups that have ranks on one node and communicate at the same time, this group included.
        oversubscribed: True if nodes have more ranks than cores.
    """

    nodes: tuple[int, ...]
    beside: int = 1
    oversubscribed: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def spans(self) -> int:
        """Number of nodes with ranks of the group."""
        return len(set(self.nodes))

    @property
    def local(self) -> int:
        """Number of ranks on the first node; no node has more."""
        return self.nodes.count(self.nodes[0])


@dataclass(frozen=True)
class Nodes:
    """Nodes with equal numbers of ranks.

    Attributes:
        count: Number of nodes.
        each: Ranks of a node.
        on_device: True if ranks compute on devices.
    """

    count: int = 1
    each: int = 1
    on_device: bool = False

    def evenly(self, layout: ParallelLayout) -> bool:
        """Return True if ranks with the same part of the model are spread evenly over the nodes (`shard_order`)."""
        parts = layout.ranks // layout.replicas
        return self.each % parts == 0 or parts > self.each  # then at most one on each node

    def share(self, layout: ParallelLayout) -> bool:
        """Return True if the ranks of a node share one copy of the parameters."""
        return node_has_one_copy(STAGES[layout.zero], layout.share_node, self.on_device, self.evenly(layout))


@dataclass(frozen=True)
class LayoutPlaces:
    """The ranks of a layout on nodes, numbered node by node (see `mpitrain.layout.mesh`).

    Attributes:
        nodes: Nodes that the ranks run on.
        cores: Cores of a node; may be a fraction.
        layout: The layout.
        seen: Cores that the operating system reports to ranks; 0: same as `cores`.
    """

    nodes: Nodes
    cores: float
    layout: ParallelLayout
    seen: float = 0.0

    @property
    def known_cores(self) -> float:
        """Cores of a node that the operating system reports to ranks."""
        return self.seen or self.cores

    @property
    def oversubscribed(self) -> bool:
        """True if a node has more ranks than known cores. Ranks that know this sleep while they wait."""
        return self.nodes.each > self.known_cores

    @property
    def overlaps(self) -> bool:
        """True if each node has a free core for communication in the background."""
        return self.known_cores > self.nodes.each

    @property
    def turns(self) -> float:
        """Factor by which a rank computes slower while all ranks of its node compute; 1 if each has a core."""
        return max(1.0, self.nodes.each / self.cores)

    @property
    def threads(self) -> int:
        """Number of threads of a rank that run at the same time, limited by the real cores."""
        return max(1, int(min(self.known_cores, self.cores) // self.nodes.each))

    @property
    def on_device(self) -> bool:
        """True if ranks compute on devices."""
        return self.nodes.on_device

    @property
    def shared(self) -> bool:
        """True if the ranks of a node share one copy of the parameters."""
        return self.nodes.share(self.layout)

    @property
    def gathers(self) -> bool:
        """True if parameters are gathered unit by unit when they are needed."""
        return STAGES[self.layout.zero].parameters and not self.shared and self.shards()[0].size > 1

    def bucket_size(self, bucket_mb: float) -> float:
        """Return the MiB of a bucket when the configuration requests `bucket_mb`."""
        sharded, spans = STAGES[self.layout.zero].gradients, self.shards()[0].spans
        return bucket_size(bucket_mb, sharded, self.overlaps, spans, self.on_device)

    def slots(self) -> int:
        """Return the number of buffer slots that gradients pass through if each rank keeps its shard of them."""
        shard, staged = self.shards()[0], self.layout.pipeline > 1  # stages add in a fixed order
        return slot_count(self.overlaps, staged, shard.size > 1 and not self.on_device, shard.spans)

    @property
    def replicas(self) -> Group:
        """Ranks that have the first part of the model."""
        return self._dividing(SAMPLES, PARTS)

    @property
    def stages(self) -> Group:
        """Ranks of the first pipeline. Pipelines communicate at different times, so `beside` is 1."""
        return replace(self._dividing(BLOCKS), beside=1)

    @property
    def layers(self) -> Group:
        """Ranks that have parts of the first layers."""
        return self._dividing(LAYERS)

    def over(self, *names: str) -> Group:
        """Return the first group of ranks that differ only along the named axes."""
        return _group_of(self.layout.sizes, names, self.nodes.each, self.oversubscribed)

    def _dividing(self, *kinds: str) -> Group:
        return self.over(*(axis.name for axis, _ in self.layout.sizes if axis.divides in kinds))

    def shards(self) -> tuple[Group, Group | None]:
        """Return the ranks that shards are divided over, and the ranks with the same shard (None if there are none)."""
        data = self.replicas
        if not self.layout.zero or self.layout.shard_within == "all":
            return data, None
        across = self.cross_node()
        return replace(data, nodes=data.nodes[:1] * data.local), across if across.size > 1 else None

    def cross_node(self) -> Group:
        """Return a group of one rank per node that exchanges updated parameters.

        Every rank of a node belongs to such a group, and all groups communicate at the same time.
        """
        return Group(tuple(sorted(set(self.replicas.nodes))), self.nodes.each, self.oversubscribed)


@lru_cache(maxsize=4096)
def _group_of(
    sizes: tuple[tuple[MeshAxis, int], ...], names: tuple[str, ...], each: int, oversubscribed: bool
) -> Group:
    """Return the first group along some of the axes if each node has `each` ranks."""
    ranks, stride = [0], prod(size for _, size in sizes)
    of = stride
    for axis, size in sizes:
        stride //= size
        if axis.name in names:
            ranks = [rank + number * stride for rank in ranks for number in range(size)]
    nodes = tuple(rank // each for rank in ranks)
    here = max(1, nodes.count(nodes[0]))
    return Group(nodes, max(1, min(each, of) // here), oversubscribed)
