"""Bounds and guesses of a layout that take microseconds, so that few of many thousands need be simulated.

The bound of a pipeline holds however its blocks are cut. With m microbatches and a microbatch's seconds t_j on stage j,
of which it waits for r t_j before a later stage can work, stage s is done after m t_s + sum of r t_j over j < s at the
earliest. Weighted so that all t_j count alike, the mean of these over the stages is

    C x sum of t_j          with        C = r / (1 - (1 - r / m)^p)

so one stage is not done before. r is 1 where backward is whole, else the forward pass's share of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from mpitrain.planner.held import ITEMSIZE, is_unit
from mpitrain.planner.layouts import ParallelLayout
from mpitrain.planner.model import BlockCost, Divided
from mpitrain.planner.prediction import Prediction
from mpitrain.planner.predictor import Predictor
from mpitrain.shard.placement import STAGES

_HIDDEN = 0.5  # of the computation, under which a guess takes communication to lie


@dataclass(frozen=True)
class _Work:
    """Sums over all blocks, for a microbatch.

    Attributes:
        seconds: Of computing, forward and backward.
        again: Of recomputing.
        least: Of computing, where any of the layers may stay whole, which saves their exchanges.
        exchanged: Of exchanges over the tensor axis, forward and backward.
        forward: The least share of a block's seconds that its forward pass takes.
        kept: Bytes that autograd keeps.
        taken: The same with recompute.
        numel: Elements of parameters.
    """

    seconds: float
    least: float
    again: float
    exchanged: float
    forward: float
    kept: int
    taken: int
    numel: int


class Bounds:
    """What the search asks of a predictor, with bounds and guesses of its own.

    Args:
        predictor: That predicts in full.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._of = predictor
        self._work = lru_cache(maxsize=None)(self._sums)
        self._comm = lru_cache(maxsize=None)(self._communication)

    def predict(self, layout: ParallelLayout) -> Prediction:
        """Everything of a layout; InputError where it is impossible."""
        return self._of.predict(layout)

    def memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Bytes of the rank that needs most, by category."""
        return self._of.memory(layout)

    def room(self) -> float:
        """Bytes that a rank may take."""
        return self._of.room()

    def at_least(self, layout: ParallelLayout) -> float:
        """Seconds that a step takes at least: computing, exchanging, and the pipeline's filling and draining."""
        return self._seconds(layout, self._waited(layout), bound=True)

    def guess(self, layout: ParallelLayout) -> float:
        """About the seconds of a step: the order in which layouts are looked at."""
        count, stages = self._count(layout), layout.pipeline
        known = replace(layout, slices=1, sequence=False)  # a pass through each division of the model would take long
        idle = 1.0
        if stages > 1:
            pieces = {"zero-bubble": 3.0}.get(layout.schedule, 1.0) * layout.chunks * layout.slices
            idle += (stages - 1) / (count * pieces)
        compute = self._seconds(known, 0.0) * idle
        each_pass, once = self._comm(
            layout.data, stages, layout.tensor, layout.zero, layout.share_node, layout.shard_within, layout.reshard
        )
        talk = each_pass * count + once
        if self._of.places(layout).overlaps:
            talk = max(talk - _HIDDEN * compute, 0.1 * talk)
        work = self._work_of(known)
        shards = layout.data if layout.zero else 1
        return compute + talk + work.numel / stages / shards / self._of.machine.update_rate

    def least_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Bytes that the rank that needs most takes at least, by category."""
        work, places, stage = self._work_of(layout), self._of.places(layout), STAGES[layout.zero]
        device = self._of.machine.device is not None
        elements, itemsize = work.numel / layout.pipeline, ITEMSIZE[self._of.model.precision]
        shards = places.shards()[0].size
        shared = bool(layout.zero) and layout.share_node and not device
        copies = places.data.nodes.count(places.data.nodes[0]) if shared else shards if stage.parameters else 1
        states = elements * (4 * self._of.model.moments + (4 if itemsize < 4 else 0))
        kept = work.taken if layout.recompute else work.kept
        return {
            "parameters": elements * itemsize / copies,
            "gradients": elements * itemsize / (shards if stage.gradients else 1),
            "states": 0.0 if layout.offload and device else states / (shards if stage.states else 1),
            "activations": kept / layout.pipeline,
            "process": float(self._of.machine.process),
        }

    # -- what they are made of

    def _count(self, layout: ParallelLayout) -> float:
        """Microbatches of a rank, on average."""
        return max(1.0, self._of.model.batch / layout.data / layout.microbatch)

    def _waited(self, layout: ParallelLayout) -> float:
        """The share of a stage's seconds that later stages wait for; 0 where no bound is known."""
        if layout.chunks > 1 or layout.slices > 1 or self._of.turns(self._of.places(layout)) > 1.0:
            return 0.0
        if layout.schedule in ("1f1b", "gpipe"):
            return 1.0
        return self._work_of(layout).forward if layout.schedule == "zero-bubble" else 0.0

    def _seconds(self, layout: ParallelLayout, waited: float, *, bound: bool = False) -> float:
        """Of all passes through a stage. bound: of the variant of the layout that takes least."""
        work, stages = self._work_of(layout), layout.pipeline
        turns = self._of.turns(self._of.places(layout))
        each = (work.seconds + work.again * layout.recompute) * turns + work.exchanged
        if bound and layout.tensor > 1 and not layout.sequence:
            each = (work.least + work.again * layout.recompute) * turns
        count = self._of.model.batch / layout.data / layout.microbatch
        each *= layout.slices
        if stages == 1 or waited == 0.0:
            return each * count / stages
        count = max(count, 1.0)
        return each * waited / (1.0 - (1.0 - waited / count) ** stages)

    def _work_of(self, layout: ParallelLayout) -> _Work:
        alone = layout.data == 1
        return self._work(layout.microbatch, layout.tensor, layout.sequence, layout.slices, layout.whole, alone)

    def _sums(
        self, microbatch: int, tensor: int, sequence: bool, slices: int, whole: tuple[str, ...], alone: bool
    ) -> _Work:
        """alone: without other data-parallel ranks, over which batch norms would be those of all."""
        rest = self._of.ranks // tensor
        shape = (1, rest, tensor) if alone else (rest, 1, tensor)
        layout = ParallelLayout(*shape, microbatch=microbatch, sequence=sequence, slices=slices, whole=whole)
        places = self._of.places(layout)
        blocks = self._of.blocks(layout, places)
        undivided = blocks
        if tensor > 1 and not sequence:
            undivided = self._of.model.blocks(microbatch, Divided(slices=slices), places.threads)
        totals = [(block.forward, block.forward + block.input + block.weight) for block in blocks]
        return _Work(
            seconds=sum(total for _, total in totals),
            least=sum(min(_seconds(a), _seconds(b)) for a, b in zip(blocks, undivided, strict=True)),
            again=sum(min(a.forward, b.forward) for a, b in zip(blocks, undivided, strict=True) if is_unit(a)),
            exchanged=sum(
                self._of.collectives.seconds(each.operation, each.nbytes, places.tensor)
                for block in blocks
                for each in (*block.forwards, *block.backwards)
                if each.axis == "tensor"
            ),
            forward=min((forward / total for forward, total in totals if total > 0), default=1.0),
            kept=sum(block.kept for block in blocks),
            taken=sum(min(block.taken, block.kept) for block in blocks),
            numel=sum(weight.numel for block in blocks for weight in block.weights if not weight.same_as),
        )

    def _communication(
        self, data: int, pipeline: int, tensor: int, zero: int, share_node: bool, within: str, reshard: bool
    ) -> tuple[float, float]:
        """About the seconds of communication of gradients and parameters: of each pass, and once a step."""
        layout = ParallelLayout(data, pipeline, tensor, zero, share_node, within, reshard)
        if data == 1:
            return 0.0, 0.0
        places, links = self._of.places(layout), self._of.machine.links
        nbytes = self._work(1, tensor, False, 1, (), True).numel / pipeline * ITEMSIZE[self._of.model.precision]
        local = places.data.nodes.count(places.data.nodes[0])
        inside = nbytes / min(links.local_bandwidth, links.memory_rate / places.each) if local > 1 else 0.0
        across = nbytes * places.each / local / links.bandwidth if data > local else 0.0
        steps = links.latency * places.nodes.bit_length()
        way = inside + across + steps  # to reduce and scatter, or to gather
        if zero == 3 and (not share_node or self._of.machine.device is not None):
            return way * (3 if reshard else 2), 0.0
        if within == "node":
            return (inside, across * 2 + inside + steps) if zero > 1 else (0.0, 2 * way)
        return (way, way) if zero > 1 else (0.0, 2 * way)


def _seconds(block: BlockCost) -> float:
    """Of a block, forward and backward."""
    return block.forward + block.input + block.weight
