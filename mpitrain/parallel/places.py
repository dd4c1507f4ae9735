"""Where the ranks of a layout are, and which of them communicate with each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from mpitrain.layout.mesh import BLOCKS, LAYERS, PARTS, SAMPLES, MeshAxis
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.shard.placement import STAGES, bucket_size, node_has_one_copy, slot_count


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other, while groups like it do the same.

    Attributes:
        nodes: The node of each rank; equal numbers are neighbours in the list.
        beside: Groups that have ranks on one node and are active at the same time, this one included.
        oversubscribed: Whether nodes have more ranks than cores.
    """

    nodes: tuple[int, ...]
    beside: int = 1
    oversubscribed: bool = False

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.nodes)

    @property
    def spans(self) -> int:
        """Nodes that it lies on."""
        return len(set(self.nodes))

    @property
    def local(self) -> int:
        """Ranks on its first node, which has as many as any other or more."""
        return self.nodes.count(self.nodes[0])


@dataclass(frozen=True)
class Nodes:
    """Nodes with equally many ranks each.

    Attributes:
        count: How many.
        each: Ranks of a node.
        on_device: Whether ranks compute on devices.
    """

    count: int = 1
    each: int = 1
    on_device: bool = False

    def evenly(self, layout: ParallelLayout) -> bool:
        """Whether all nodes have as many ranks of a group with the same part of the model (`shard_order`)."""
        parts = layout.ranks // layout.replicas
        return self.each % parts == 0 or parts > self.each  # then at most one on each node

    def share(self, layout: ParallelLayout) -> bool:
        """Whether the ranks of a node have one copy of the parameters between them."""
        return node_has_one_copy(STAGES[layout.zero], layout.share_node, self.on_device, self.evenly(layout))


@dataclass(frozen=True)
class LayoutPlaces:
    """The ranks of a layout on nodes, numbered node by node (see `mpitrain.layout.mesh`).

    Attributes:
        nodes: The nodes.
        cores: Of a node; may be a part of one.
        layout: The layout.
        seen: Cores that the system tells ranks of; 0: as many as there are.
    """

    nodes: Nodes
    cores: float
    layout: ParallelLayout
    seen: float = 0.0

    @property
    def known_cores(self) -> float:
        """Cores of a node that ranks know of."""
        return self.seen or self.cores

    @property
    def oversubscribed(self) -> bool:
        """Whether a node has more ranks than cores, as far as they know: those that do sleep while they wait."""
        return self.nodes.each > self.known_cores

    @property
    def overlaps(self) -> bool:
        """Whether a core is left on each node for communication in the background."""
        return self.known_cores > self.nodes.each

    @property
    def turns(self) -> float:
        """How much longer than alone a rank computes while all of its node do."""
        return max(1.0, self.nodes.each / self.cores)

    @property
    def threads(self) -> int:
        """Threads of a rank that compute at the same time, whatever cores it believes to have."""
        return max(1, int(min(self.known_cores, self.cores) // self.nodes.each))

    @property
    def on_device(self) -> bool:
        """Whether ranks compute on devices."""
        return self.nodes.on_device

    @property
    def shared(self) -> bool:
        """Whether the ranks of a node have one copy of the parameters between them."""
        return self.nodes.share(self.layout)

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered unit by unit while they are needed."""
        return STAGES[self.layout.zero].parameters and not self.shared and self.shards()[0].size > 1

    def bucket_size(self, bucket_mb: float) -> float:
        """MiB of a bucket, where `bucket_mb` are asked for."""
        sharded, spans = STAGES[self.layout.zero].gradients, self.shards()[0].spans
        return bucket_size(bucket_mb, sharded, self.overlaps, spans, self.on_device)

    def slots(self) -> int:
        """Slots that gradients pass through where each rank keeps its share of them."""
        shard, staged = self.shards()[0], self.layout.pipeline > 1  # stages add in a fixed order
        return slot_count(self.overlaps, staged, shard.size > 1 and not self.on_device, shard.spans)

    @property
    def replicas(self) -> Group:
        """The ranks that have the first part of the model."""
        return self._dividing(SAMPLES, PARTS)

    @property
    def stages(self) -> Group:
        """The ranks that have the blocks of the first replica; messages between them are not at the same time."""
        return replace(self._dividing(BLOCKS), beside=1)

    @property
    def layers(self) -> Group:
        """The ranks that have parts of the first layers."""
        return self._dividing(LAYERS)

    def over(self, *names: str) -> Group:
        """The first ranks that differ along these axes alone."""
        return _group_of(self.layout.sizes, names, self.nodes.each, self.oversubscribed)

    def _dividing(self, *kinds: str) -> Group:
        return self.over(*(axis.name for axis, _ in self.layout.sizes if axis.divides in kinds))

    def shards(self) -> tuple[Group, Group | None]:
        """The ranks that shares are divided over, and those that have the same share; None where there are none."""
        data = self.replicas
        if not self.layout.zero or self.layout.shard_within == "all":
            return data, None
        across = self.carriers()
        return replace(data, nodes=data.nodes[:1] * data.local), across if across.size > 1 else None

    def carriers(self) -> Group:
        """The ranks, one a node, that carry updated parameters to each other, while all ranks of a node do so."""
        return Group(tuple(sorted(set(self.replicas.nodes))), self.nodes.each, self.oversubscribed)


@lru_cache(maxsize=4096)
def _group_of(
    sizes: tuple[tuple[MeshAxis, int], ...], names: tuple[str, ...], each: int, oversubscribed: bool
) -> Group:
    """The first group along some of the axes, where `each` ranks are on a node."""
    ranks, stride = [0], prod(size for _, size in sizes)
    of = stride
    for axis, size in sizes:
        stride //= size
        if axis.name in names:
            ranks = [rank + number * stride for rank in ranks for number in range(size)]
    nodes = tuple(rank // each for rank in ranks)
    here = max(1, nodes.count(nodes[0]))
    return Group(nodes, max(1, min(each, of) // here), oversubscribed)
