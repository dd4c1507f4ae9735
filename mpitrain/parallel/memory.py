"""Parameters that the ranks of a layout hold, and the bytes that a step needs on a rank, by category.

Parameters are laid out in flat memory as `shard` does it. The categories are those of `trainer.memory`, and further
ones for memory that a step needs temporarily.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

from mpitrain.layers.precision import DTYPES
from mpitrain.layout.boxes import Flat, lay_out
from mpitrain.parallel.costs import AxisExchange, BlockCost, Weight
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import LayoutPlaces
from mpitrain.parallel.recompute import segments
from mpitrain.pipe.schedule import BackwardInput, Schedule
from mpitrain.pipe.simulate import Flow
from mpitrain.shard.flat import MULTIPLE, lay_in_buckets
from mpitrain.shard.offload import HOST
from mpitrain.shard.placement import SCRATCH, STAGES, Account, formula

ITEMSIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


class Recomputed(NamedTuple):
    """Activations of a block from its forward pass until its backward pass, as train.recompute keeps them.

    Attributes:
        kept_bytes: Bytes kept from forward until backward.
        again: Bytes that recomputing a segment adds at once, at its first block; else 0.
        seconds: Seconds of recomputing the block.
        exchanges: Exchanges of recomputing the block.
    """

    kept_bytes: int
    again: int = 0
    seconds: float = 0.0
    exchanges: tuple[AxisExchange, ...] = ()


def recomputed(layout: ParallelLayout, blocks: Sequence[BlockCost], begins: Sequence[int] = (0,)) -> list[Recomputed]:
    """Return what is kept and what is computed again of each block (see `parallel.recompute`).

    Args:
        layout: The layout.
        blocks: Blocks of the whole model, in order.
        begins: Number of the first block of each pipeline stage. With train.recompute true, a stage is one segment, and
            runs its forward pass to the end.

    Raises:
        InputError: The layout names a block that the model does not have.
    """
    way, stage_begins = layout.recompute, {*begins} - {0}
    # a stage's first block keeps its input itself: the block that also keeps it is on another rank
    result = [Recomputed(b.saved_bytes + b.shared_bytes * (n in stage_begins)) for n, b in enumerate(blocks)]
    by_stage = layout.recomputes_stages
    units = [number for number, block in enumerate(blocks) if block.is_unit]
    groups = [range(len(blocks))] if by_stage else [[units[n] for n in each] for each in segments(way, len(units))]
    for segment in (list(inside) for group in groups for _, inside in groupby(group, lambda n: bisect(begins, n))):
        for number in segment:
            block = blocks[number]
            seconds, exchanges = block.forward + block.hooks * (not by_stage), block.forwards
            if number == segment[-1] and not by_stage:  # up to the last tensor that backward needs
                seconds, exchanges = seconds - block.tail, exchanges[:-1]
            kept_bytes = block.input_bytes if number == segment[0] else 0
            if number and number not in stage_begins and not result[number - 1].seconds:
                kept_bytes -= min(kept_bytes, block.shared_bytes)
            again = sum(blocks[n].saved_bytes for n in segment) if number == segment[0] else 0
            if layout.partition_activations and number == segment[0]:  # a part is kept, and gathered for backward
                kept_bytes, again = -(-block.input_bytes // layout.tensor), again + block.input_bytes
                exchanges = (AxisExchange("all_gather", block.input_bytes), *exchanges)
            if way == "selective":
                kept_bytes, again = kept_bytes + block.product_bytes, again - block.product_bytes
                seconds -= block.products
            result[number] = Recomputed(kept_bytes, again, seconds, exchanges)
        after = segment[-1] + 1
        if after < len(blocks):  # the block after a segment may have to keep its input itself
            result[after] = Recomputed(blocks[after].saved_bytes + blocks[after].shared_bytes)
    return result


@dataclass(frozen=True)
class StageHoldings:
    """Blocks and parameters of the ranks at one pipeline position.

    Attributes:
        stages: Blocks of each of its stages.
        recomputed: Activation bytes and recomputation of each of these blocks.
        weights: Trained parameters, each once, in the order in which backward finishes their gradients.
        where: Number of the first block that has each of these parameters, counted through all stages in order.
        flat: Layout of these parameters in flat memory, with buckets and shards.
        frozen: Elements of parameters that are not trained.
        itemsize: Bytes of an element in the precision of the forward pass.
    """

    stages: tuple[tuple[BlockCost, ...], ...]
    recomputed: tuple[tuple[Recomputed, ...], ...]
    weights: tuple[Weight, ...]
    where: tuple[int, ...]
    flat: Flat
    frozen: int
    itemsize: int

    @cached_property
    def numel(self) -> int:
        """Number of trained elements."""
        return sum(weight.numel for weight in self.weights)

    @property
    def kept_bytes(self) -> float:
        """Bytes that its blocks keep of one microbatch from forward until backward."""
        return float(sum(block.kept_bytes for stage in self.recomputed for block in stage))

    @property
    def nbytes(self) -> int:
        """Bytes of the flat memory that holds all trained parameters."""
        return self.flat.numel * self.itemsize

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of each bucket, in the order in which buckets are reduced."""
        return tuple((hi - lo) * self.itemsize for lo, hi in pairwise(self.flat.bounds))

    @cached_property
    def ready(self) -> tuple[int, ...]:
        """Number of the block whose backward pass completes each bucket: the earliest with a parameter in it."""
        earliest = [len(self.where)] * self.flat.buckets
        for place, block in zip(self.flat.places, self.where, strict=True):
            earliest[place.bucket] = min(earliest[place.bucket], block)
        return tuple(earliest)


def stage_holdings(
    stages: Sequence[Sequence[BlockCost]],
    order: Sequence[str],
    parts: int,
    bucket_mb: float,
    precision: str,
    *,
    by_unit: bool = False,
) -> StageHoldings:
    """Return the parameters of some stages and their layout in flat memory.

    Args:
        stages: Blocks of each stage.
        order: Names of parameters in the order of registration; parameters that are not listed follow in the order of
            the blocks.
        parts: Number of shards of each bucket.
        bucket_mb: MiB of a bucket.
        precision: fp32, bf16 or fp16.
        by_unit: If true, each unit of sharded parameters is one bucket, the root last, and `bucket_mb` is ignored.
    """
    named_weights: dict[str, tuple[Weight, int]] = {}
    blocks = [block for stage in stages for block in stage]
    for number, block in enumerate(blocks):
        for weight in block.weights:
            named_weights.setdefault(weight.same_as or weight.name, (weight, number))
    places = {name: number for number, name in enumerate(order)}
    names = sorted(named_weights, key=lambda name: places.get(name, len(places)))
    trained = [named_weights[name] for name in reversed(names) if named_weights[name][0].trained]
    itemsize = ITEMSIZE[precision]
    if by_unit:
        units = [n for n in range(len(blocks) - 1, -1, -1) if blocks[n].is_unit]
        buckets = [[each for each in trained if each[1] == n] for n in units]
        buckets.append([each for each in trained if not blocks[each[1]].is_unit])
        trained = [each for bucket in buckets for each in bucket]
        flat = lay_out([[weight.numel for weight, _ in bucket] for bucket in buckets], itemsize, parts, MULTIPLE)
    else:
        flat = lay_in_buckets([weight.numel for weight, _ in trained], itemsize, bucket_mb, parts)
    return StageHoldings(
        tuple(map(tuple, stages)),
        (),
        tuple(weight for weight, _ in trained),
        tuple(block for _, block in trained),
        flat,
        sum(weight.numel for weight, _ in named_weights.values() if not weight.trained),
        itemsize,
    )


CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "working", "allocator", "process")
_HOLES = 2.0  # measured upper bound of the free memory that glibc keeps between pieces in use, in working memories


@dataclass(frozen=True)
class MemoryInputs:
    """Inputs to the memory estimate that do not depend on the pipeline position.

    Attributes:
        places: Ranks of the layout on nodes.
        moments: fp32 numbers that the optimizer keeps per parameter element.
        process: Bytes of a rank before it has a model.
        whole: Elements of the whole model, which every rank builds before it keeps its part.
    """

    places: LayoutPlaces
    moments: int
    process: int
    whole: int

    def stored(self, numel: float, itemsize: int) -> Account:
        """Return the bytes of the parameters, gradients and states that a rank stores.

        Args:
            numel: Elements before sharding.
            itemsize: Bytes of an element.
        """
        places, layout = self.places, self.places.layout
        copied, sharing = bool(layout.offload) and places.on_device, places.replicas.local * places.shared
        shards = places.shards()[0].size
        return formula(STAGES[layout.zero], shards, numel, itemsize, self.moments, copied=copied, sharing=sharing)


def account(
    inputs: MemoryInputs, holdings: StageHoldings, flow: Flow | None = None, rank: int = 0, flying: float = 0.0
) -> dict[str, float]:
    """Return the bytes of a rank at one pipeline position, by category.

    Args:
        inputs: Inputs that do not depend on the position.
        holdings: Blocks and parameters of the rank.
        flow: Flow of microbatches through the pipeline; None without a pipeline.
        rank: Pipeline position.
        flying: Bytes of activations between forward and backward (`in_flight`), for a pipeline.
    """
    layout, places = inputs.places.layout, inputs.places
    stage = STAGES[layout.zero]
    elements = holdings.flat.numel if stage.states else holdings.numel  # gradients lie flat at every stage
    stored, flat = inputs.stored(elements, holdings.itemsize), inputs.stored(holdings.flat.numel, holdings.itemsize)
    slots = places.slots() * max(holdings.buckets, default=0) if stage.gradients else 0
    gathered = 0.0
    if places.gathers:  # the root, and two units (the next one is gathered early), or all if they are kept
        *units, root = holdings.buckets
        gathered = root + (2.0 * max(units, default=0) if layout.reshard else float(sum(units)))
    exchanged = [e for s in holdings.stages for b in s for e in (*b.forwards, *b.backwards)]
    passing = sum(axis.buffers(e.nbytes for e in exchanged if e.axis == axis.name) for axis, _ in layout.sizes)
    activations, peak = _activations(places, holdings, flying)
    if flow is not None:
        peak += _gradients_outside_flat(layout, holdings, flow.shape, rank)
    shards = places.shards()[0].size if stage.states else 1
    scratch = min(SCRATCH, elements // shards) * 4.0 if holdings.itemsize < 4 else 0.0
    categories = {
        "parameters": stored.parameters + holdings.frozen * holdings.itemsize,
        "gradients": flat.gradients,
        "states": stored.states if not (layout.offload and places.on_device) else 0.0,
        "activations": activations,
        "buffers": slots + gathered + passing,
        "working": max(peak, scratch - activations),
        "allocator": 0.0
        if places.on_device
        else _HOLES * max((b.working for s in holdings.stages for b in s), default=0),
        "process": float(inputs.process),
    }
    # a rank builds the whole model in fp32 in the host's memory, and then moves or copies its part of it
    building = 4.0 * (
        holdings.numel if places.on_device else inputs.whole + holdings.numel * (inputs.whole > holdings.numel)
    )
    categories["working"] += max(0.0, building - sum(categories.values()) + inputs.process)
    return categories


def host_account(
    inputs: MemoryInputs, holdings: StageHoldings, data: float, flying: float | None = None
) -> dict[str, float]:
    """Return the peak bytes in the host's memory of a rank with a device, by category.

    The rank builds the whole model in fp32 there, and moves or copies its part to the device. Offloaded memory is
    allocated after that, so that the peak is the larger of both.

    Args:
        inputs: Inputs that do not depend on the position.
        holdings: Blocks and parameters of the rank.
        data: Bytes of batches that are read ahead.
        flying: Bytes of activations between forward and backward (`in_flight`); None without a pipeline.
    """
    layout, sharded = inputs.places.layout, STAGES[inputs.places.layout.zero].states
    elements = holdings.flat.numel if sharded else holdings.numel
    stored, part = (
        inputs.stored(elements, holdings.itemsize),
        elements / (inputs.places.shards()[0].size if sharded else 1),
    )
    building, training = {"model": 4.0 * inputs.whole}, {"data": data}
    if layout.offload:  # gradients and, where they are rounded, parameters pass through pinned memory
        training["pinned"] = part * holdings.itemsize * (2 if holdings.itemsize < 4 else 1)
        training["states"] = stored.states if layout.offload == HOST else 0.0
    if layout.offload_activations == HOST:
        training["activations"] = holdings.kept_bytes if flying is None else flying
    return {"process": float(inputs.process)} | max(training, building, key=lambda each: sum(each.values()))


def _gradients_outside_flat(layout: ParallelLayout, holdings: StageHoldings, schedule: Schedule, rank: int) -> float:
    """Return the bytes of gradients of a pipeline stage that are not in flat memory.

    Autograd allocates new memory for the gradient of a weight. At stages 2 and 3 of ZeRO it stays there until the last
    microbatch. So does the gradient of a backward pass in halves, which runs no hooks; the first stage's backward pass
    is not divided into halves (`pipe.stage`).
    """
    if layout.zero >= 2:
        return float(holdings.nbytes)
    halves = any(isinstance(step, BackwardInput) for step in schedule.steps[rank])
    sizes = {
        number: [weight.numel for block in stage for weight in block.weights if weight.trained]
        for number, stage in zip(schedule.stages_of(rank), holdings.stages, strict=True)
    }
    stay = sum(sum(each) for number, each in sizes.items() if halves and number > 0)
    return float(stay + max((n for each in sizes.values() for n in each), default=0)) * holdings.itemsize


def in_flight(flow: Flow, holds: Sequence[StageHoldings]) -> list[float]:
    """Return the peak bytes of activations between forward and backward, at each position of a pipeline.

    Args:
        flow: Flow of microbatches through the pipeline.
        holds: Blocks and parameters at each position.
    """
    keeps = [0.0] * flow.shape.stages
    for rank, holdings in enumerate(holds):
        for number, stage in zip(flow.shape.stages_of(rank), holdings.recomputed, strict=True):
            keeps[number] = float(sum(block.kept_bytes for block in stage))
    return flow.peak_bytes(tuple(keeps))


def _activations(places: LayoutPlaces, holdings: StageHoldings, flying: float) -> tuple[float, float]:
    """Return the peak bytes kept between forward and backward, and the further bytes needed while a block computes."""
    layout, moved = places.layout, places.layout.offload_activations
    working = float(max((block.working for stage in holdings.stages for block in stage), default=0))
    working += max((block.again for stage in holdings.recomputed for block in stage), default=0)
    if moved and (places.on_device or moved != HOST):  # a device has those of two blocks (`parallel.activations`)
        of_blocks = [0, *(block.kept_bytes for stage in holdings.recomputed for block in stage)]
        flying = max(map(sum, pairwise(of_blocks))) * float(places.on_device)
    elif layout.pipeline == 1:
        flying = holdings.kept_bytes
    if layout.pipeline == 1:
        return flying, working
    ends = max((stage[-1].output_bytes for stage in holdings.stages if stage), default=0)
    return flying + 2.0 * ends, working
