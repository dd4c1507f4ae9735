"""Lower bounds and estimates of a layout, computed in microseconds so that only few layouts need a simulation.

An estimate (`Bounds.guess`) adds up in closed form the times that the simulation would find: the seconds of a
microbatch times the number of microbatches, the filling and draining of a pipeline (`estimate`) with stages as even as
the blocks allow, and the collective of each bucket, minus the part that backward hides.

The lower bound of a pipeline (`Bounds.lower_bound`) holds for every cut into stages. Let m be the number of
microbatches, p the number of stages, and t_j the seconds of one microbatch on stage j; a later stage can start after
the share r of t_j. Stage s then finishes no earlier than m t_s + sum of r t_j over j < s. Weight the stages so that
every t_j has the same coefficient; the weighted mean over the stages is

    C x sum of t_j          with        C = r / (1 - (1 - r / m)^p)

and at least one stage finishes no earlier than this mean. r is 1 where backward is not divided into halves, else the
forward pass's share of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mpitrain.parallel.costs import BlockCost, Divided
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.memory import ITEMSIZE, recomputed
from mpitrain.parallel.places import Group
from mpitrain.pipe.simulate import estimate
from mpitrain.planner.predictor import Predictor, StepSimulation
from mpitrain.planner.refine import peak_microbatches
from mpitrain.shard.flat import MIB
from mpitrain.shard.placement import STAGES


class _BlockSums:
    """Costs of one microbatch, summed over all blocks.

    Attributes:
        passes: Seconds of computing: forward, gradients of inputs, gradients of weights.
        seconds: Sum of `passes`.
        least_seconds: Lower bound of `seconds` if any layers may stay whole, which need no exchanges.
        recompute_seconds: Seconds of recomputing blocks, unless whole stages of a pipeline are recomputed.
        least_recompute_seconds: Lower bound of `recompute_seconds` if any layers may stay whole.
        exchange_seconds: Seconds of exchanges over the tensor axis: forward, backward.
        recompute_exchange_seconds: Seconds of the exchanges that recomputing repeats.
        forward: Smallest share of a block's seconds that its forward pass takes.
        block_seconds: Seconds of each block, exchanges included.
        block_forward_seconds: Seconds of each block's forward pass, exchanges included.
        block_recompute_seconds: Seconds of recomputing each block, exchanges included.
        message_bytes: Bytes of the longest message between blocks.
        units: Number of blocks that are gathered one by one.
        activation_bytes: Bytes that autograd keeps.
        kept_bytes: Bytes that autograd keeps with recompute, unless whole stages of a pipeline are recomputed.
        working_bytes: Largest number of temporary bytes of a block.
        numel: Elements of all parameters.
        largest: Elements of the largest block.
        values: Number of parameters.
    """

    def __init__(self, blocks: Sequence[BlockCost], undivided: Sequence[BlockCost], step: StepSimulation) -> None:
        exchanges = [
            (step.exchange_seconds(block.forwards), step.exchange_seconds(block.backwards)) for block in blocks
        ]
        once = replace(step.layout, data=1, pipeline=1)
        repeated = recomputed(once, blocks)
        # bounds hold for any cut into stages, each of which ends a segment
        least = [[b.seconds for b in recomputed(once, each, range(len(blocks)))] for each in (blocks, undivided)]
        sizes = [block.numel for block in blocks]
        self.passes = sum(b.forward for b in blocks), sum(b.input for b in blocks), sum(b.weight for b in blocks)
        self.seconds = sum(self.passes)
        self.least_seconds = sum(min(a.seconds, b.seconds) for a, b in zip(blocks, undivided, strict=True))
        self.recompute_seconds = sum(block.seconds for block in repeated)
        self.least_recompute_seconds: float = sum(map(min, *least))
        self.exchange_seconds = sum(f for f, _ in exchanges), sum(b for _, b in exchanges)
        self.forward = min((block.forward / block.seconds for block in blocks if block.seconds > 0), default=1.0)
        self.block_seconds = tuple(block.seconds + sum(both) for block, both in zip(blocks, exchanges, strict=True))
        self.block_forward_seconds = tuple(block.forward + f for block, (f, _) in zip(blocks, exchanges, strict=True))
        self.block_recompute_seconds = tuple(b.seconds + step.exchange_seconds(b.exchanges) for b in repeated)
        self.recompute_exchange_seconds = sum(self.block_recompute_seconds) - self.recompute_seconds
        self.message_bytes = max((block.output_bytes for block in blocks[:-1]), default=0)
        self.units = sum(block.is_unit for block in blocks)
        self.activation_bytes = sum(block.saved_bytes for block in blocks)
        self.kept_bytes = sum(min(r.kept_bytes, block.saved_bytes) for r, block in zip(repeated, blocks, strict=True))
        self.working_bytes = max((block.working for block in blocks), default=0)
        self.numel, self.largest = sum(sizes), max(sizes)
        self.values = sum(not weight.same_as for block in blocks for weight in block.weights)


@dataclass(frozen=True)
class _StepCosts:
    """Costs of a placement of ranks that do not depend on the microbatches.

    Attributes:
        step: Simulation of a step with this placement.
        reduce_seconds: Seconds of reducing all gradients.
        gather_seconds: Seconds of gathering all units.
        final_seconds: Seconds of the work after the gradients, done once a step.
    """

    step: StepSimulation
    reduce_seconds: float
    gather_seconds: float
    final_seconds: float


class Bounds:
    """The interface of a predictor that the search uses, with fast lower bounds and estimates.

    Args:
        predictor: Predictor that simulates a layout in full.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.predict, self.memory, self.room = predictor.predict, predictor.memory, predictor.room
        self.host_memory, self.host_room = predictor.host_memory, predictor.host_room
        self._block_sums = lru_cache(maxsize=None)(self._sum_blocks)
        self._step_costs = lru_cache(maxsize=None)(self._estimate_step_costs)
        self._slowest_stage = lru_cache(maxsize=None)(_slowest_stage)

    def lower_bound(self, layout: ParallelLayout) -> float:
        """Return a lower bound of the seconds of a step: computing, exchanging, filling and draining the pipeline.

        The bound holds for every variant of the layout (cuts into stages, layers left whole).
        """
        waited = 0.0  # r in the module's docstring, where a bound is known
        work, stages = self._block_sums_of(layout), layout.pipeline
        turns = self._predictor.turns(self._predictor.places(layout))
        # the fastest rank of a pipeline may do nearly all
        pace = turns * (min(self._predictor.slowness(layout)) if stages > 1 else self._data_pace(layout))
        each = (work.seconds + work.least_recompute_seconds) * pace + sum(work.exchange_seconds)
        if layout.tensor > 1 and not layout.sequence:
            each = (work.least_seconds + work.least_recompute_seconds) * pace
        if layout.chunks == layout.slices == 1 and turns == 1.0:
            waited = {"1f1b": 1.0, "gpipe": 1.0, "zero-bubble": work.forward}.get(layout.schedule, 0.0)
        count = self._predictor.model.batch / layout.readers / layout.microbatch
        each *= layout.slices
        if stages == 1 or waited == 0.0:
            return each * count / stages
        count = max(count, 1.0)
        return each * waited / (1.0 - (1.0 - waited / count) ** stages)

    def guess(self, layout: ParallelLayout) -> float:
        """Return an estimate of the seconds of a step with the best cut. The search visits layouts in this order."""
        work = self._block_sums_of(layout)
        costs = self._step_costs(layout.only("zero", "share_node", "shard_within", "offload"))
        share = -(-self._predictor.model.batch // layout.readers)
        count = self._predictor.microbatches(layout)
        if layout.pipeline > 1:
            return (
                self._pipeline(layout, work, costs, count * layout.slices) + costs.reduce_seconds + costs.final_seconds
            )
        turns = costs.step.turns * self._data_pace(layout)
        forward, input_, weight = (s * turns for s in work.passes)
        backward = input_ + weight + work.recompute_seconds * turns
        exchanges = sum(work.exchange_seconds) + work.recompute_exchange_seconds
        gathers = [costs.gather_seconds, costs.gather_seconds if layout.reshard else 0.0]
        reduce_seconds = costs.reduce_seconds
        if costs.step.places.overlaps:
            gathers = [max(0.0, way - meanwhile) for way, meanwhile in zip(gathers, (forward, backward), strict=True)]
            reduce_seconds = max(reduce_seconds - backward, reduce_seconds / (1 + work.units))
        seconds = (forward + backward) * share / layout.microbatch + (exchanges + sum(gathers)) * count
        return seconds + reduce_seconds * (count if layout.zero >= 2 else 1) + costs.final_seconds

    def _pipeline(self, layout: ParallelLayout, work: _BlockSums, costs: _StepCosts, count: int) -> float:
        """Return the seconds of `count` microbatches, or slices of them, through the stages."""
        ranks, stages = layout.pipeline, layout.pipeline * layout.chunks
        step = costs.step
        python, halving = step.python, step.halving * (layout.schedule == "zero-bubble")
        forward, input_, weight = work.passes
        forward += work.exchange_seconds[0]
        by_stage = layout.recomputes_stages
        input_ += work.exchange_seconds[1] + (forward if by_stage else sum(work.block_recompute_seconds))
        kinds = (forward, python), (input_, python), (weight, halving)  # seconds of all blocks, overhead of each stage
        spread = [(seconds + stages * each) / ranks for seconds, each in kinds]
        uneven = self._slowest_stage(work, by_stage, stages) - sum(spread) / layout.chunks
        slowest = sum(spread) + max(0.0, uneven + 2 * python + halving)  # one of the rank's stages is longer
        if step.spins:
            spread, slowest = [seconds * step.turns for seconds in spread], slowest * step.turns
        message = self._predictor.collectives.message(work.message_bytes, *step.message_routes())
        pace = ranks / sum(1 / each for each in step.slowness)  # with blocks in proportion to the speeds of the ranks
        spread, slowest = [seconds * pace for seconds in spread], slowest * pace
        seconds = estimate(layout.schedule, ranks, count, layout.chunks, spread, slowest, message)
        return seconds if step.spins else max(seconds, sum(spread) * count * step.turns)

    def _data_pace(self, layout: ParallelLayout) -> float:
        """Return the slowness of the data axis as a whole, with samples in proportion to the speeds of its ranks."""
        slowness = self._predictor.slowness(layout, "data")
        return len(slowness) / sum(1 / each for each in slowness)

    def least_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Return a lower bound of the bytes of the rank that needs most, by category."""
        work, places = self._block_sums_of(layout), self._predictor.places(layout)
        elements, itemsize = work.numel / layout.pipeline, ITEMSIZE[self._predictor.model.precision]
        stored = self._predictor.inputs(places).stored(elements, itemsize)
        separate_gradients = elements * itemsize if STAGES[layout.zero].gradients and layout.pipeline > 1 else 0.0
        return {
            "parameters": stored.parameters,
            "gradients": stored.gradients + separate_gradients,
            "states": 0.0 if layout.offload and places.on_device else stored.states,
            "activations": self._least_activations(layout, work),
            "process": float(self._predictor.machine.process),
        }

    def _least_activations(self, layout: ParallelLayout, work: _BlockSums) -> float:
        """Return a lower bound of the activation bytes of the pipeline rank that keeps most.

        If rank s keeps h_s microbatches at once and the model keeps K bytes for each, all ranks keep the same number of
        bytes when the blocks of rank s keep K / (h_s sum of 1 / h_j) for each microbatch. With any other cut, one rank
        keeps more.
        """
        if layout.offload_activations:
            return float(work.working_bytes) * (layout.pipeline == 1)
        if layout.pipeline == 1:
            return float(work.kept_bytes + work.working_bytes)
        if layout.recomputes_stages:
            return work.activation_bytes / layout.pipeline / layout.chunks
        count = self._predictor.microbatches(layout)
        stored_microbatches = peak_microbatches(
            layout.pipeline, 1, count, "gpipe" if layout.schedule == "gpipe" else "1f1b"
        )
        return work.kept_bytes / sum(1 / each for each in stored_microbatches)

    # -- sums that bounds and estimates are made of

    def _block_sums_of(self, layout: ParallelLayout) -> _BlockSums:
        """Return the costs of a layout, summed over blocks.

        Layouts that differ only in their number of replicas, if it is above 1, share one result: replicas matter only
        to batch norms, which are synchronized if there are several.
        """
        rest = layout.data * layout.pipeline
        data, pipeline = (1, rest) if layout.data == 1 else (rest, 1)
        passes = layout.only("microbatch", "slices", "sequence", "whole", "recompute", "partition_activations")
        return self._block_sums(replace(passes, data=data, pipeline=pipeline))

    def _sum_blocks(self, layout: ParallelLayout) -> _BlockSums:
        tensor, microbatch, places = layout.tensor, layout.microbatch, self._predictor.places(layout)
        # a pass through every division of the model would take too long, and few such layouts are good: the blocks
        # of tensor ranks on several nodes are scaled down from those of tensor ranks on one node
        near = max(n for n in range(1, min(tensor, places.nodes.each) + 1) if tensor % n == 0)
        divided = replace(layout.divided, tensor=near)
        if near in (1, tensor) or not self._predictor.model.takes(divided):
            blocks = self._predictor.blocks(layout, places)
        else:
            thick = self._predictor.model.blocks(microbatch, divided, places.threads)
            blocks = tuple(_scaled_block(block, near / tensor) for block in thick)
        undivided = blocks
        if tensor > 1 and not layout.sequence:
            undivided = self._predictor.model.blocks(microbatch, Divided(slices=layout.slices), places.threads)
        return _BlockSums(blocks, undivided, StepSimulation(self._predictor, places))

    def _estimate_step_costs(self, layout: ParallelLayout) -> _StepCosts:
        zero, pipeline, places = layout.zero, layout.pipeline, self._predictor.places(layout)
        step, (shard, replicas) = StepSimulation(self._predictor, places), places.shards()
        work = self._block_sums(ParallelLayout(1, layout.data * pipeline, layout.tensor, axes=layout.axes))
        numel = max(work.numel / pipeline, work.largest)
        nbytes = numel * ITEMSIZE[self._predictor.model.precision]
        units = sum(block.is_unit for block in self._predictor.model.blocks(1))
        bucket = places.bucket_size(self._predictor.bucket_mb) * MIB
        pieces = max(1, units if places.gathers else round(nbytes / bucket))

        def collective_seconds(operation: str, of: float, group: Group | None, many: int = pieces) -> float:
            if group is None or group.size == 1:
                return 0.0
            return many * (step.seconds(operation, of / many, group, "arena") + step.core_sharing_seconds(group))

        values = pieces if zero else math.ceil(work.values / pipeline)
        update = step.update_seconds(numel / (shard.size if zero else 1), numel / layout.replicas, values)
        replicated = collective_seconds("all_reduce", nbytes / shard.size, replicas)
        published = 0.0
        if zero and places.shared and replicas is None:
            published = collective_seconds("all_gather", nbytes / places.replicas.local, places.cross_node())
        elif zero and not places.shared and not places.gathers:
            published = collective_seconds("all_gather", nbytes, shard)
        whole = zero == 0 and not places.overlaps
        return _StepCosts(
            step=step,
            reduce_seconds=collective_seconds(
                "reduce_scatter" if zero else "all_reduce", nbytes, shard, 1 if whole else pieces
            ),
            gather_seconds=collective_seconds("all_gather", nbytes, shard) if places.gathers else 0.0,
            final_seconds=replicated
            + published
            + (update + self._predictor.machine.overhead * step.turns) * max(step.slowness),
        )


def _scaled_block(block: BlockCost, part: float) -> BlockCost:
    """Return a block with costs and divided weights scaled by `part`, and with unchanged exchanges."""
    return replace(
        block,
        **{name: getattr(block, name) * part for name in ("forward", "input", "weight", "later")},
        saved_bytes=int(block.saved_bytes * part),
        weights=tuple(w if w.replicated else replace(w, numel=int(w.numel * part)) for w in block.weights),
    )


def _slowest_stage(work: _BlockSums, by_stage: bool, stages: int) -> float:
    """Return the seconds of the slowest stage when blocks are cut into `stages` as evenly as possible."""
    again = work.block_forward_seconds if by_stage else work.block_recompute_seconds
    each = [sum(seconds) for seconds in zip(work.block_seconds, again, strict=True)]
    low, high = max(max(each), sum(each) / stages), sum(each)
    for _ in range(20):  # halvings of the interval
        middle = (low + high) / 2
        count, now = 1, 0.0  # stages needed if none may take longer than the middle
        for seconds in each:
            if now + seconds > middle:
                count, now = count + 1, 0.0
            now += seconds
        low, high = (low, middle) if count <= stages else (middle, high)
    return high
