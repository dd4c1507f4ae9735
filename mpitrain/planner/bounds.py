"""Bounds and guesses of a layout that take microseconds, so that few of many thousands need be simulated.

A guess adds up what the simulation would, in closed form: a microbatch's seconds times their number, a pipeline's
filling and draining (`estimate`) with stages cut as evenly as blocks allow, and each bucket's collective, of which
what fits lies under backward.

The bound of a pipeline holds however its blocks are cut. With m microbatches and a microbatch's seconds t_j on stage j,
of which it waits for r t_j before a later stage can work, stage s is done after m t_s + sum of r t_j over j < s at the
earliest. Weighted so that all t_j count alike, the mean of these over the stages is

    C x sum of t_j          with        C = r / (1 - (1 - r / m)^p)

so one stage is not done before. r is 1 where backward is whole, else the forward pass's share of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mpitrain.parallel.costs import BlockCost, Divided
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.memory import ITEMSIZE
from mpitrain.parallel.places import Group
from mpitrain.pipe.simulate import estimate
from mpitrain.planner.predictor import Predictor, StepSimulation
from mpitrain.planner.refine import held_at_most
from mpitrain.shard.flat import MIB
from mpitrain.shard.placement import STAGES


class _Work:
    """Sums over all blocks, for a microbatch.

    Attributes:
        passes: Seconds of computing: forward, gradients of inputs, gradients of weights.
        seconds: Seconds of these together.
        least: Seconds of computing, where any of the layers may stay whole, which saves their exchanges.
        again: Seconds of recomputing the blocks that are recomputed without a pipeline.
        least_again: The same, where any of the layers may stay whole.
        exchanged: Seconds of exchanges over the tensor axis, forward and backward.
        exchanged_again: Seconds of the exchanges that recomputing repeats.
        forward: The least share of a block's seconds that its forward pass takes.
        each: Seconds of each block, with its exchanges.
        each_forward: Seconds of each block's forward pass, with its exchanges.
        given: Bytes of the longest message between blocks.
        units: Blocks that are gathered by themselves.
        kept: Bytes that autograd keeps.
        taken: The same with recompute, without a pipeline.
        working: Bytes that a block needs meanwhile, at most.
        numel: Elements of parameters.
        largest: Elements of the block that has most.
        values: Parameters.
    """

    def __init__(self, blocks: Sequence[BlockCost], undivided: Sequence[BlockCost], step: StepSimulation) -> None:
        talk = [(step.exchanges(block.forwards), step.exchanges(block.backwards)) for block in blocks]
        again = [(b, other, f) for b, other, (f, _) in zip(blocks, undivided, talk, strict=True) if b.is_unit]
        own = [block.numel for block in blocks]
        self.passes = sum(b.forward for b in blocks), sum(b.input for b in blocks), sum(b.weight for b in blocks)
        self.seconds = sum(self.passes)
        self.least = sum(min(a.seconds, b.seconds) for a, b in zip(blocks, undivided, strict=True))
        self.again = sum(block.forward for block, _, _ in again)
        self.least_again = sum(min(block.forward, other.forward) for block, other, _ in again)
        self.exchanged = sum(f for f, _ in talk), sum(b for _, b in talk)
        self.exchanged_again = sum(f for _, _, f in again)
        self.forward = min((block.forward / block.seconds for block in blocks if block.seconds > 0), default=1.0)
        self.each = tuple(block.seconds + sum(both) for block, both in zip(blocks, talk, strict=True))
        self.each_forward = tuple(block.forward + f for block, (f, _) in zip(blocks, talk, strict=True))
        self.given = max((block.given for block in blocks[:-1]), default=0)
        self.units = len(again)
        self.kept = sum(block.kept for block in blocks)
        self.taken = sum(min(block.taken, block.kept) if block.is_unit else block.kept for block in blocks)
        self.working = max((block.working for block in blocks), default=0)
        self.numel, self.largest = sum(own), max(own)
        self.values = sum(not weight.same_as for block in blocks for weight in block.weights)


@dataclass(frozen=True)
class _Around:
    """What a placement of ranks costs, whatever their microbatches are.

    Attributes:
        step: A step of such a placement.
        reduced: Seconds of reducing all gradients.
        gathered: Seconds of gathering all units.
        once: Seconds of what comes once a step after the gradients.
    """

    step: StepSimulation
    reduced: float
    gathered: float
    once: float


class Bounds:
    """What the search asks of a predictor, with bounds and guesses of its own.

    Args:
        predictor: That predicts in full.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._of = predictor
        self.predict, self.memory, self.room = predictor.predict, predictor.memory, predictor.room
        self.host_memory, self.host_room = predictor.host_memory, predictor.host_room
        self._work = lru_cache(maxsize=None)(self._sums)
        self._around = lru_cache(maxsize=None)(self._beside)
        self._slowest = lru_cache(maxsize=None)(_slowest)

    def at_least(self, layout: ParallelLayout) -> float:
        """Seconds that a step takes at least: computing, exchanging, and the pipeline's filling and draining.

        They are those of the variant of the layout that takes least.
        """
        waited = 0.0  # the share of a stage's seconds that later stages wait for, where a bound is known
        work, stages = self._work_of(layout), layout.pipeline
        turns = self._of.turns(self._of.places(layout))
        each = (work.seconds + work.least_again * layout.recompute) * turns + sum(work.exchanged)
        if layout.tensor > 1 and not layout.sequence:
            each = (work.least + work.least_again * layout.recompute) * turns
        if layout.chunks == layout.slices == 1 and turns == 1.0:
            waited = {"1f1b": 1.0, "gpipe": 1.0, "zero-bubble": work.forward}.get(layout.schedule, 0.0)
        count = self._of.model.batch / layout.readers / layout.microbatch
        each *= layout.slices
        if stages == 1 or waited == 0.0:
            return each * count / stages
        count = max(count, 1.0)
        return each * waited / (1.0 - (1.0 - waited / count) ** stages)

    def guess(self, layout: ParallelLayout) -> float:
        """About the seconds of a step, with the best cut: the order in which layouts are looked at."""
        work = self._work_of(layout)
        around = self._around(layout.only("zero", "share_node", "shard_within", "offload"))
        share = -(-self._of.model.batch // layout.readers)
        count = self._of.microbatches(layout)
        if layout.pipeline > 1:
            return self._pipeline(layout, work, around, count * layout.slices) + around.reduced + around.once
        turns = around.step.turns
        forward, input_, weight = (s * turns for s in work.passes)
        backward = input_ + weight + work.again * turns * layout.recompute
        talk = sum(work.exchanged) + work.exchanged_again * layout.recompute
        ways = [around.gathered, around.gathered if layout.reshard else 0.0]
        reduced = around.reduced
        if around.step.places.overlaps:
            ways = [max(0.0, way - meanwhile) for way, meanwhile in zip(ways, (forward, backward), strict=True)]
            reduced = max(reduced - backward, reduced / (1 + work.units))
        seconds = (forward + backward) * share / layout.microbatch + (talk + sum(ways)) * count
        return seconds + reduced * (count if layout.zero >= 2 else 1) + around.once

    def _pipeline(self, layout: ParallelLayout, work: _Work, around: _Around, count: int) -> float:
        """Seconds of so many microbatches, or slices of them, through the stages."""
        ranks, stages = layout.pipeline, layout.pipeline * layout.chunks
        step = around.step
        python, halving = step.python, step.halving * (layout.schedule == "zero-bubble")
        forward, input_, weight = work.passes
        forward += work.exchanged[0]
        input_ += work.exchanged[1] + forward * layout.recompute
        kinds = (forward, python), (input_, python), (weight, halving)  # seconds of all blocks, and more of each stage
        spread = [(seconds + stages * each) / ranks for seconds, each in kinds]
        uneven = self._slowest(work, layout.recompute, stages) - sum(spread) / layout.chunks
        slowest = sum(spread) + max(0.0, uneven + 2 * python + halving)  # one of the rank's stages is longer
        if step.spins:
            spread, slowest = [seconds * step.turns for seconds in spread], slowest * step.turns
        message = self._of.collectives.message(work.given, *step.on_the_way())
        seconds = estimate(layout.schedule, ranks, count, layout.chunks, spread, slowest, message)
        return seconds if step.spins else max(seconds, sum(spread) * count * step.turns)

    def least_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Bytes that the rank that needs most takes at least, by category."""
        work, places = self._work_of(layout), self._of.places(layout)
        elements, itemsize = work.numel / layout.pipeline, ITEMSIZE[self._of.model.precision]
        stored = self._of.inputs(places).stored(elements, itemsize)
        apart = elements * itemsize if STAGES[layout.zero].gradients and layout.pipeline > 1 else 0.0
        return {
            "parameters": stored.parameters,
            "gradients": stored.gradients + apart,
            "states": 0.0 if layout.offload and places.on_device else stored.states,
            "activations": self._kept(layout, work),
            "process": float(self._of.machine.process),
        }

    def _kept(self, layout: ParallelLayout, work: _Work) -> float:
        """Bytes of activations of the rank of a pipeline that holds most, at least.

        Ranks that hold h_1, h_2, ... microbatches hold equally much if their blocks keep K / (h_s sum of 1 / h_j) each
        of the model's K; with any other cut one of them holds more.
        """
        if layout.pipeline == 1:
            return float(work.taken + work.working if layout.recompute else work.kept + work.working)
        if layout.recompute:
            return work.kept / layout.pipeline / layout.chunks
        count = self._of.microbatches(layout)
        held = held_at_most(layout.pipeline, 1, count, "gpipe" if layout.schedule == "gpipe" else "1f1b")
        return work.kept / sum(1 / each for each in held)

    # -- what they are made of

    def _work_of(self, layout: ParallelLayout) -> _Work:
        """Return the sums of blocks; of other replicas only whether there are any matters, for batch norms."""
        rest = layout.data * layout.pipeline
        data, pipeline = (1, rest) if layout.data == 1 else (rest, 1)
        passes = layout.only("microbatch", "slices", "sequence", "whole")
        return self._work(replace(passes, data=data, pipeline=pipeline))

    def _sums(self, layout: ParallelLayout) -> _Work:
        tensor, microbatch, places = layout.tensor, layout.microbatch, self._of.places(layout)
        # a pass through each division of the model would take long, and few of these layouts are worth it: the blocks
        # of tensor ranks on several nodes are those of one node's ranks made thinner
        near = max(n for n in range(1, min(tensor, places.nodes.each) + 1) if tensor % n == 0)
        divided = replace(layout.divided, tensor=near)
        if near in (1, tensor) or not self._of.model.takes(divided):
            blocks = self._of.blocks(layout, places)
        else:
            thick = self._of.model.blocks(microbatch, divided, places.threads)
            blocks = tuple(_thinner(block, near / tensor) for block in thick)
        undivided = blocks
        if tensor > 1 and not layout.sequence:
            undivided = self._of.model.blocks(microbatch, Divided(slices=layout.slices), places.threads)
        return _Work(blocks, undivided, StepSimulation(self._of, places))

    def _beside(self, layout: ParallelLayout) -> _Around:
        zero, pipeline, places = layout.zero, layout.pipeline, self._of.places(layout)
        step, (shard, replicas) = StepSimulation(self._of, places), places.shards()
        work = self._work(ParallelLayout(1, layout.data * pipeline, layout.tensor, axes=layout.axes))
        numel = max(work.numel / pipeline, work.largest)
        nbytes = numel * ITEMSIZE[self._of.model.precision]
        units = sum(block.is_unit for block in self._of.model.blocks(1))
        bucket = places.bucket_size(self._of.bucket_mb) * MIB
        pieces = max(1, units if places.gathers else round(nbytes / bucket))

        def took(operation: str, of: float, group: Group | None, many: int = pieces) -> float:
            if group is None or group.size == 1:
                return 0.0
            return many * (step.seconds(operation, of / many, group, "arena") + step.meeting(group))

        values = pieces if zero else math.ceil(work.values / pipeline)
        update = step.updating(numel / (shard.size if zero else 1), numel / layout.replicas, values)
        replicated = took("all_reduce", nbytes / shard.size, replicas)
        shown = 0.0
        if zero and places.shared and replicas is None:
            shown = took("all_gather", nbytes / places.replicas.local, places.carriers())
        elif zero and not places.shared and not places.gathers:
            shown = took("all_gather", nbytes, shard)
        whole = zero == 0 and not places.overlaps
        return _Around(
            step=step,
            reduced=took("reduce_scatter" if zero else "all_reduce", nbytes, shard, 1 if whole else pieces),
            gathered=took("all_gather", nbytes, shard) if places.gathers else 0.0,
            once=replicated + shown + update + self._of.machine.overhead * step.turns,
        )


def _thinner(block: BlockCost, part: float) -> BlockCost:
    """Return a block with the same exchanges of which a rank has only this part."""
    return replace(
        block,
        **{name: getattr(block, name) * part for name in ("forward", "input", "weight", "later")},
        kept=int(block.kept * part),
        weights=tuple(w if w.replicated else replace(w, numel=int(w.numel * part)) for w in block.weights),
    )


def _slowest(work: _Work, recompute: bool, stages: int) -> float:
    """Seconds of the slowest of so many stages, cut as evenly as blocks allow."""
    each = [s + f * recompute for s, f in zip(work.each, work.each_forward, strict=True)]
    low, high = max(max(each), sum(each) / stages), sum(each)
    for _ in range(20):  # halvings of the interval
        middle = (low + high) / 2
        count, now = 1, 0.0  # stages, if none may take longer than the middle
        for seconds in each:
            if now + seconds > middle:
                count, now = count + 1, 0.0
            now += seconds
        low, high = (low, middle) if count <= stages else (middle, high)
    return high
