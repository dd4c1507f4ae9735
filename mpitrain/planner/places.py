"""What the ranks of a layout hold, as `shard` lays it out, and where they are: who communicates, on how many nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from mpitrain.layers.precision import DTYPES
from mpitrain.layout import Flat, lay_out
from mpitrain.planner.collectives import Group
from mpitrain.planner.layouts import ParallelLayout
from mpitrain.planner.model import BlockCost, Weight
from mpitrain.shard.flat import MULTIPLE, lay_in_buckets


@dataclass(frozen=True)
class LayoutPlaces:
    """The ranks of a layout on nodes with equally many ranks each, numbered node by node (see `mpitrain.mesh`).

    Attributes:
        nodes: How many.
        each: Ranks of a node.
        cores: Of a node; may be a part of one.
        layout: The layout.
        seen: Cores that the system tells ranks of; 0: as many as there are.
    """

    nodes: int
    each: int
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
        return self.each > self.known_cores

    @property
    def overlaps(self) -> bool:
        """Whether a core is left on each node for communication in the background."""
        return self.known_cores > self.each

    @property
    def turns(self) -> float:
        """How much longer than alone a rank computes while all of its node do."""
        return max(1.0, self.each / self.cores)

    @property
    def threads(self) -> int:
        """Threads of a rank that compute at the same time, whatever cores it believes to have."""
        return max(1, int(min(self.known_cores, self.cores) // self.each))

    @property
    def data(self) -> Group:
        """The data-parallel ranks of the first pipeline and tensor position."""
        apart = self.layout.pipeline * self.layout.tensor
        return self._group(range(0, self.layout.ranks, apart))

    @property
    def tensor(self) -> Group:
        """The first tensor-parallel group."""
        return self._group(range(self.layout.tensor))

    def axis(self, name: str) -> Group:
        """The first group of an axis, tensor or data."""
        return self.data if name == "data" else self.tensor

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The node of each rank of the first pipeline."""
        step = self.layout.tensor
        return tuple(rank // self.each for rank in range(0, self.layout.pipeline * step, step))

    @property
    def even(self) -> bool:
        """Whether each node has as many data-parallel ranks of a group as any other."""
        return len(set(Counter(self.data.nodes).values())) == 1

    def shards(self) -> tuple[Group, Group | None]:
        """The ranks that shares are divided over, and those that have the same share; None where there are none."""
        data = self.data
        if not self.layout.zero or self.layout.shard_within == "all":
            return data, None
        local = data.nodes.count(data.nodes[0])
        inside = Group((data.nodes[0],) * local, data.beside, data.oversubscribed)
        across = Group(tuple(sorted(set(data.nodes))), self.each, data.oversubscribed)
        return inside, across if across.size > 1 else None

    def carriers(self) -> Group:
        """The ranks, one a node, that carry updated parameters to each other, while all ranks of a node do so."""
        return Group(tuple(sorted(set(self.data.nodes))), self.each, self.oversubscribed)

    def _group(self, ranks: range) -> Group:
        return _group_of(ranks, self.each, self.layout.ranks, self.oversubscribed)


@lru_cache(maxsize=4096)
def _group_of(ranks: range, each: int, of: int, oversubscribed: bool) -> Group:
    """A group of some of the ranks, `each` of which are on a node."""
    nodes = tuple(rank // each for rank in ranks)
    here = max(1, nodes.count(nodes[0]))
    return Group(nodes, max(1, min(each, of) // here), oversubscribed)


ITEMSIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StageHoldings:
    """Blocks and parameters of the ranks at one pipeline position.

    Attributes:
        stages: The blocks of each of its stages.
        weights: The trained parameters, each once, in the order in which backward finishes their gradients.
        where: Of each of these, the number of the first block (through all stages in order) that has it.
        flat: Where they lie, in buckets and shares.
        frozen: Elements of other parameters.
        itemsize: Bytes of an element in the precision of the forward pass.
    """

    stages: tuple[tuple[BlockCost, ...], ...]
    weights: tuple[Weight, ...]
    where: tuple[int, ...]
    flat: Flat
    frozen: int
    itemsize: int

    @cached_property
    def numel(self) -> int:
        """Trained elements."""
        return sum(weight.numel for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of flat memory with all of them."""
        return self.flat.numel * self.itemsize

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of each bucket, in the order in which they are reduced."""
        return tuple((hi - lo) * self.itemsize for lo, hi in pairwise(self.flat.bounds))

    @cached_property
    def ready(self) -> tuple[int, ...]:
        """Of each bucket, the number of the block whose backward pass completes it: the earliest of its blocks."""
        found = [len(self.where)] * self.flat.buckets
        for place, block in zip(self.flat.places, self.where, strict=True):
            found[place.bucket] = min(found[place.bucket], block)
        return tuple(found)


def is_unit(block: BlockCost) -> bool:
    """Whether it is one of the blocks in a list of the model: gathered, and recomputed, by itself (`shard.units`)."""
    return block.name.rpartition(".")[2].isdigit()


def held(
    stages: Sequence[Sequence[BlockCost]],
    order: Sequence[str],
    parts: int,
    bucket_mb: float,
    precision: str,
    *,
    by_unit: bool = False,
) -> StageHoldings:
    """What is held of some stages.

    Args:
        stages: The blocks of each.
        order: The names of parameters in the order of registration; others follow in the order of the blocks.
        parts: Shares that each bucket is divided into.
        bucket_mb: MiB of a bucket.
        precision: fp32, bf16 or fp16.
        by_unit: Buckets are the units of sharded parameters, the root last, instead.
    """
    found: dict[str, tuple[Weight, int]] = {}
    for number, block in enumerate(block for stage in stages for block in stage):
        for weight in block.weights:
            name = weight.same_as or weight.name
            found.setdefault(name, (weight, number))
    places = {name: number for number, name in enumerate(order)}
    names = sorted(found, key=lambda name: places.get(name, len(places)))
    trained = [name for name in reversed(names) if found[name][0].trained]
    itemsize = ITEMSIZE[precision]
    every = [block for stage in stages for block in stage]
    sizes = [found[name][0].numel for name in trained]
    ordered = list(range(len(trained)))
    if by_unit:
        units = [n for n in range(len(every) - 1, -1, -1) if is_unit(every[n])]
        inside = [[i for i, name in enumerate(trained) if found[name][1] == n] for n in units]
        rest = [i for i, name in enumerate(trained) if not is_unit(every[found[name][1]])]
        ordered = [i for bucket in (*inside, rest) for i in bucket]
        flat = lay_out([[sizes[i] for i in bucket] for bucket in (*inside, rest)], itemsize, parts, MULTIPLE)
    else:
        flat = lay_in_buckets(sizes, itemsize, bucket_mb, parts)
    return StageHoldings(
        tuple(map(tuple, stages)),
        tuple(found[trained[i]][0] for i in ordered),
        tuple(found[trained[i]][1] for i in ordered),
        flat,
        sum(weight.numel for weight, _ in found.values() if not weight.trained),
        itemsize,
    )
