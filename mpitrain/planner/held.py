"""What the ranks of one pipeline position hold of a model, and how it lies in flat memory: as `shard` lays it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from mpitrain.layers.precision import DTYPES
from mpitrain.layout import Flat, lay_out
from mpitrain.planner.model import BlockCost, Weight
from mpitrain.shard.flat import MULTIPLE, lay_in_buckets

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
    """Whether it is one of the blocks in a list of the model: gathered, and recomputed, by itself (`shard.flat`)."""
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
