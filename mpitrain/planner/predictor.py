"""Predicted seconds and bytes of a training step, for a layout of one model on some nodes of a machine.

    forward | backward, each bucket of gradients reduced when complete | norm, update | parameters made visible

A step is simulated as its ranks would run it, with measured or estimated costs. The model profile gives the cost of
each block. A pipeline's schedule runs step by step (`pipe.simulate`). Each collective is the program that would run
(`collectives`), on the buckets that would be reduced (`memory`). If no core is free for communication, communication
does not overlap with computation, as in the job. Ranks beyond a node's cores take turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from typing import Any

from mpitrain.errors import refusal
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import MeshAxis
from mpitrain.parallel.costs import REPLICAS, AxisExchange, BlockCost, ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.memory import (
    ITEMSIZE,
    MemoryInputs,
    Recomputed,
    StageHoldings,
    account,
    host_account,
    in_flight,
    recomputed,
    stage_holdings,
)
from mpitrain.parallel.places import Group, LayoutPlaces, Nodes
from mpitrain.pipe.partition import stage_bounds
from mpitrain.pipe.schedule import BackwardInput, Schedule
from mpitrain.pipe.simulate import Costs, Flow
from mpitrain.planner.collectives import CollectiveTimes, DeviceLinks
from mpitrain.planner.machine import MachineProfile
from mpitrain.shard.offload import HOST
from mpitrain.shard.placement import STAGES, formula
from mpitrain.shard.virtual_workers import proportional

_STEP = 1.8e-4  # seconds of Python for a step of a pipeline's schedule with its message, measured on one core
_SPLIT = 4e-4  # seconds of Python for dividing the backward pass of a stage into halves
_SWITCH = 9e-5  # seconds by which each further rank of a core delays a collective, measured on one machine
_SLICE = 5e-3  # the same delay if waiting ranks keep their core busy until the operating system preempts them
_VALUE = 6e-6  # seconds of Python for each parameter that the optimizer updates
TIME_CATEGORIES = ("compute", "tensor", "pipeline", "gradients", "update", "parameters", "other")


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a layout.

    Attributes:
        layout: Layout that was predicted.
        seconds: Seconds of one step.
        times: Seconds of the step by category, in display order; they add up to `seconds`: compute, tensor,
            pipeline (idle and messages), gradients (communication not hidden), update, parameters (communication of
            updated or gathered parameters not hidden), other.
        memory: Bytes on the rank that needs most, by category, in display order: parameters, gradients, states,
            activations, buffers, working, allocator, process.
        samples: Samples of a global batch, so that samples / seconds is the throughput.
    """

    layout: ParallelLayout
    seconds: float
    times: Mapping[str, float]
    memory: Mapping[str, float]
    samples: int

    @property
    def total_memory(self) -> float:
        """Bytes of all categories together."""
        return sum(self.memory.values())


class StepSimulation:
    """Simulation of one step of one layout.

    Args:
        predictor: Predictor with the model and the machine.
        places: Ranks of the layout on the machine's nodes.
    """

    def __init__(self, predictor: Predictor, places: LayoutPlaces) -> None:
        self.predictor, self.places, self.layout = predictor, places, places.layout
        self.model, self.machine = predictor.model, predictor.machine
        self.turns = predictor.turns(places)
        # ranks that do not know that they share a core keep it busy while they wait
        self.spins = self.turns > 1.0 and not places.oversubscribed and not self.places.on_device
        self.times = dict.fromkeys(TIME_CATEGORIES, 0.0)
        self.shard, self.replicas = places.shards()
        self.seconds = predictor.collectives.seconds
        self.groups = {axis.name: (axis, places.over(axis.name)) for axis, _ in self.layout.sizes}
        self.groups[REPLICAS] = (MeshAxis(), places.replicas)
        self.slowness = predictor.slowness(self.layout)
        self.python, self.halving = (0.0, 0.0) if self.places.on_device else (_STEP, _SPLIT)

    @cached_property
    def blocks(self) -> tuple[BlockCost, ...]:
        """Costs of the blocks for a microbatch, or a slice of one."""
        return self.predictor.blocks(self.layout, self.places)

    def run(self) -> dict[str, float]:
        """Simulate the step, and return its seconds by category, see `TIME_CATEGORIES`."""
        flow = self.predictor.flow(self.layout)
        if flow is None:
            self._add_passes()
        else:
            self._add_pipeline(flow)
        # all ranks meet for the norm of the gradients, and then wait for the one that updates most
        positions = (self.predictor.holdings(self.layout, self.places, rank) for rank in range(self.layout.pipeline))
        holds = max(zip(positions, self.slowness, strict=True), key=lambda each: each[0].numel * each[1])
        self._add_update(*holds)
        self.times["other"] += self.machine.overhead * self.turns * max(self.slowness)
        return self.times

    # -- without a pipeline

    def _add_passes(self) -> None:
        """Add the passes of all microbatches of the rank that has most, and the reduction of gradients."""
        layout = self.layout
        share, slowness = self.predictor.busiest(layout)
        full, rest = divmod(share, layout.microbatch)
        sizes = [layout.microbatch] * full + [rest] * (rest > 0)
        if layout.shares == "time":  # see `VirtualWorkers.microbatches`
            bounds = split(share, min(share, self.predictor.microbatches(layout)))
            sizes = [hi - lo for lo, hi in pairwise(bounds)]
        holds = self.predictor.holdings(layout, self.places, 0)
        # slowdown of this rank's computation: others of its node may have fewer samples, but ranks that wait
        # keep their cores busy, so that three ranks on two cores take two turns
        even = min(1.0, self.model.batch / layout.readers / share)
        pace = 1.0 if self.turns == 1.0 else max(1.0, math.ceil(self.turns - 1e-3) * even)
        pace *= slowness
        for number, samples in enumerate(sizes):
            blocks = self.model.blocks(samples, layout.divided, self.places.threads)
            self._add_pass(blocks, holds, pace, first=number == 0, last=number == len(sizes) - 1)
        if self.layout.zero < 2 and not self.places.overlaps:  # no reduction overlapped with backward
            self.times["gradients"] += self._reduction_seconds(holds)
        self._reduce_among_replicas(holds)

    def core_sharing_seconds(self, group: Group) -> float:
        """Return the extra seconds that a collective takes because ranks of the group share cores."""
        if group.size == 1 or self.places.on_device:
            return 0.0
        return (_SLICE if self.spins else _SWITCH) * (self.turns - 1.0)

    def _add_pass(
        self, blocks: Sequence[BlockCost], holds: StageHoldings, pace: float, *, first: bool, last: bool
    ) -> None:
        """Add the passes of one microbatch. Communication overlaps with computation if a core is free for it."""
        overlaps = self.places.overlaps
        each_pass = self.layout.zero >= 2
        reduces = each_pass or (last and overlaps)
        clock = free = 0.0  # end so far of the computation, and of the communication in the background
        compute = tensor = waits = gathers = 0.0
        units = self._unit_gather_seconds(holds) if self.places.gathers else {}
        for block in blocks:
            compute += block.forward * pace
            tensor += self.exchange_seconds(block.forwards)
            gathers += self._visible_gather_seconds(units.get(block.name, 0.0), block.forward * pace)
        clock = compute + tensor + gathers
        costs = self._bucket_seconds(holds) if reduces else []
        repeated, at = self._repeated(blocks), 0
        for number in range(len(blocks) - 1, -1, -1):
            block = blocks[number]
            again = repeated[number]
            added = 0.0 if first or each_pass else block.later
            here = (block.input + block.weight + added + again.seconds) * pace
            talk = self.exchange_seconds((*block.backwards, *again.exchanges))
            wait = self._visible_gather_seconds(units.get(block.name, 0.0), here) if self.layout.reshard else 0.0
            compute, tensor, gathers, clock = compute + here, tensor + talk, gathers + wait, clock + here + talk + wait
            while at < len(costs) and holds.ready[at] >= number:
                if overlaps:
                    free = max(free, clock) + costs[at]
                else:
                    clock, waits = clock + costs[at], waits + costs[at]
                at += 1
        waits += max(0.0, free - clock)
        self.times["compute"] += compute
        self.times["tensor"] += tensor
        self.times["gradients"] += waits
        self.times["parameters"] += gathers

    def _repeated(self, blocks: Sequence[BlockCost], begins: Sequence[int] = (0,)) -> list[Recomputed]:
        """Return the recomputation of each block, with the seconds of moving activations that its passes do not hide.

        On a CPU, activations are written to files when they are saved, and the operating system reads them ahead.
        """
        result, machine, target = recomputed(self.layout, blocks, begins), self.machine, self.layout.offload_activations
        if not target or (target == HOST and machine.device is None):
            return result
        rate = machine.device.host_rate / self.turns if machine.device is not None else math.inf
        rate = rate if target == HOST else min(rate, self._file_rate)
        moved = []
        for block, again in zip(blocks, result, strict=True):
            passes = block.forward, block.input + block.weight + again.seconds
            hiding = passes if machine.device is not None else (0.0, math.inf)
            more = sum(max(0.0, again.kept_bytes / rate - each) for each in hiding)
            moved.append(again._replace(seconds=again.seconds + more))
        return moved

    def _bucket_seconds(self, holds: StageHoldings) -> list[float]:
        """Return the seconds of each bucket's reduction."""
        operation = "reduce_scatter" if self.layout.zero else "all_reduce"
        return [self.seconds(operation, n, self.shard) + self.core_sharing_seconds(self.shard) for n in holds.buckets]

    def _reduction_seconds(self, holds: StageHoldings) -> float:
        """Return the seconds of reducing all gradients: in one call at zero 0 without overlap, else in buckets."""
        if self.layout.zero == 0 and not self.places.overlaps:
            return self.seconds("all_reduce", holds.nbytes, self.shard)
        return sum(self._bucket_seconds(holds))

    def _reduce_among_replicas(self, holds: StageHoldings) -> None:
        if self.replicas is not None:
            share = [nbytes / self.shard.size for nbytes in holds.buckets]
            self.times["gradients"] += sum(self.seconds("all_reduce", nbytes, self.replicas) for nbytes in share)

    def _unit_gather_seconds(self, holds: StageHoldings) -> dict[str, float]:
        """Return the seconds of gathering each unit, by block name; those of the root are added to the first block."""
        core_sharing_seconds = self.core_sharing_seconds(self.shard)
        *units, root = [
            self.seconds("all_gather", n, self.shard, "private") + core_sharing_seconds for n in holds.buckets
        ]
        seconds = dict(zip((b.name for b in reversed(holds.stages[0]) if b.is_unit), units, strict=True))
        first = holds.stages[0][0].name
        seconds[first] = seconds.get(first, 0.0) + root / 2  # gathered once, for forward and backward
        return seconds

    def _visible_gather_seconds(self, seconds: float, meanwhile: float) -> float:
        """Return the seconds of gathering a unit that are not hidden by the computation of the unit before it."""
        return max(0.0, seconds - meanwhile) if self.places.overlaps else seconds

    def exchange_seconds(self, exchanges: Sequence[AxisExchange]) -> float:
        """Return the seconds of the exchanges in a block's pass."""
        with_groups = ((each, *self.groups[each.axis]) for each in exchanges)
        return sum(axis.exchange_seconds(each, group, self) for each, axis, group in with_groups)

    # -- with a pipeline

    def _add_pipeline(self, flow: Flow) -> None:
        """Add the passes of all microbatches through all stages, and the reduction of gradients."""
        schedule = flow.shape
        bounds = stage_bounds(self.blocks, schedule.stages, self.layout.cut)
        stages = [self.blocks[lo:hi] for lo, hi in pairwise(bounds)]
        paces = [self.slowness[rank] for rank in schedule.rank_of]
        repeated = self._repeated(self.blocks, bounds[:-1])
        tensor = [
            (
                sum(self.exchange_seconds(b.forwards) for b in stage),
                sum(self.exchange_seconds(b.backwards) for b in stage),
            )
            for stage in stages
        ]
        halves = any(isinstance(step, BackwardInput) for steps in schedule.steps for step in steps)
        python, splitting = self.python, self.halving * halves
        of_stage = [*zip(stages, tensor, paces, strict=True)]
        forward = [(sum(b.forward for b in stage) + python) * pace + t[0] for stage, t, pace in of_stage]
        back = [sum(b.input for b in stage) * pace + t[1] for stage, t, pace in of_stage]
        early = [0.0, *back[1:]]  # nobody waits for the first stage's input gradient: it is computed with the weights'
        input_ = [
            seconds
            + python * pace
            + sum(b.seconds * pace + self.exchange_seconds(b.exchanges) for b in repeated[lo:hi])
            for seconds, (lo, hi), pace in zip(early, pairwise(bounds), paces, strict=True)
        ]
        # gradients are added to or copied into flat memory, for the first microbatch too (no in_place)
        weight = [
            (sum(b.weight + b.later for b in stage) + splitting) * pace + late - soon
            for stage, late, soon, pace in zip(stages, back, early, paces, strict=True)
        ]
        each = [sum(seconds) for seconds in zip(forward, input_, weight, strict=True)]
        alone = [sum(each[n] for n in schedule.stages_of(rank)) * flow.microbatches for rank in range(schedule.ranks)]
        ends = self._stage_ends(flow, (forward, input_, weight), stages)
        here = max(range(len(ends)), key=lambda rank: ends[rank])
        talk = sum((t[0] + t[1]) * flow.microbatches for n, t in enumerate(tensor) if schedule.rank_of[n] == here)
        compute = min((alone[here] - talk) * self.turns, ends[here] - talk)
        self.times["compute"] += compute
        self.times["tensor"] += talk
        self.times["pipeline"] += ends[here] - compute - talk
        self._add_stage_reductions(schedule, ends)

    def _stage_ends(
        self, flow: Flow, passes: Sequence[Sequence[float]], stages: Sequence[Sequence[BlockCost]]
    ) -> Sequence[float]:
        """Return the time at which each rank of a pipeline finishes its last step.

        passes: Seconds of forward, of input gradients and of weight gradients, each by stage.
        """
        nodes, schedule = self.places.stages.nodes, flow.shape
        local, (_, beside) = nodes.count(nodes[0]), self.message_routes()

        def message(stage: int, to: int) -> float:
            nbytes = stages[min(stage, to)][-1].output_bytes
            inside = nodes[schedule.rank_of[stage]] == nodes[schedule.rank_of[to]]
            return self.predictor.collectives.message(nbytes, inside, beside)

        forward, input_, weight = [[s * self.turns for s in p] for p in passes] if self.spins else passes
        if self.turns > 1.0 and not self.spins:
            return flow.ends_on_shared_cores(Costs(forward, input_, weight), nodes, local / self.turns, message)
        longest = max((message(s, s + 1) for s in range(schedule.stages - 1)), default=0.0)
        return flow.ends(Costs(forward, input_, weight, longest))

    def message_routes(self) -> tuple[bool, int]:
        """Return whether the pipeline lies on one node, and how many pipelines send messages out of a node at once."""
        nodes = self.places.stages.nodes
        local = nodes.count(nodes[0])
        return local == len(nodes), self.places.nodes.each // max(1, local)

    def _add_stage_reductions(self, schedule: Schedule, ends: Sequence[float]) -> None:
        """Add the reduction of each pipeline rank's gradients, which starts at the end of its last step."""
        holds = [self.predictor.holdings(self.layout, self.places, rank) for rank in range(len(ends))]
        reduced = [
            end + self._reduction_seconds(holds[rank]) + self._tied_seconds(schedule, rank)
            for rank, end in enumerate(ends)
        ]
        self.times["gradients"] += max(reduced) - max(ends)
        self._reduce_among_replicas(holds[reduced.index(max(reduced))])

    def _tied_seconds(self, schedule: Schedule, rank: int) -> float:
        """Return the seconds of summing the gradients of parameters that the first and the last stage share."""
        ties = sum(w.numel for block in self.blocks for w in block.weights if w.same_as and w.trained)
        ranks = {schedule.rank_of[0], schedule.rank_of[-1]}
        if not ties or rank not in ranks or len(ranks) == 1:
            return 0.0
        nodes = tuple(sorted(self.places.stages.nodes[r] for r in ranks))
        group = Group(nodes, max(1, self.places.nodes.each // 2), self.places.oversubscribed)
        return self.seconds("all_reduce", ties * 4, group, "private")

    # -- after the gradients

    def _add_update(self, holds: StageHoldings, pace: float) -> None:
        """Add the gradient norm, the update of this rank's elements, and the communication of updated parameters.

        Args:
            holds: Blocks and parameters of this rank.
            pace: Factor by which it computes slower than the machine's profile says.
        """
        layout, places = self.layout, self.places
        shards = self.shard.size if layout.zero else 1
        elements = (holds.flat.numel if layout.zero else holds.numel) / shards
        values = holds.flat.buckets if layout.zero else len(holds.weights)
        squared = holds.numel / max(shards, layout.replicas)
        self.times["update"] += self.update_seconds(elements, squared, values) * pace
        norms = [places.replicas, places.replicas, places.layers, places.stages]
        self.times["other"] += sum(self.seconds("all_reduce", 8, group, "private") for group in norms)
        if not layout.zero or layout.replicas == 1:
            return
        gather = 0.0
        if self.places.shared:
            gather += self.predictor.collectives.barrier(places.replicas)
            cross_node = places.cross_node()
            if cross_node.size > 1 and self.replicas is None:
                local = places.replicas.local
                gather += sum(self.seconds("all_gather", b / local, cross_node, "private") for b in holds.buckets)
        elif not self.places.gathers:
            gather += sum(self.seconds("all_gather", nbytes, self.shard) for nbytes in holds.buckets)
        self.times["parameters"] += gather

    def update_seconds(self, elements: float, squared: float, values: int) -> float:
        """Return the seconds of the gradients' norm and of the update.

        Args:
            elements: Elements that this rank updates.
            squared: Elements whose squares this rank adds up for the norm.
            values: Number of tensors that the optimizer updates.
        """
        machine, device = self.machine, self.machine.device
        rate = machine.update_rate * (1 + (self.places.threads - 1) * machine.threads)  # elements per second
        if device is not None and not self.layout.offload:
            rate = device.memory_rate / 28  # AdamW reads value, gradient and two moments, and writes three
        seconds = values * _VALUE + elements / rate
        if device is None:  # gradients are clipped by a pass over them
            seconds += (squared + elements) * 4 / machine.links.copy_rate
        else:
            seconds += squared * 4 / device.memory_rate
        return seconds * self.turns + self._offload_seconds(elements)

    def _offload_seconds(self, elements: float) -> float:
        """Return the seconds of moving gradients and parameters between device and host, and states to files."""
        layout, machine, seconds = self.layout, self.machine, 0.0
        if layout.offload and machine.device is not None:
            moved = 2.0 * elements * ITEMSIZE[self.model.precision]
            seconds += moved * self.turns / machine.device.host_rate  # ranks that share a device share its bus
        if layout.offload and layout.offload != HOST:
            itemsize, moments = ITEMSIZE[self.model.precision], self.model.moments
            states = formula(STAGES[0], 1, elements, itemsize, moments, copied=machine.device is not None).states
            seconds += states / self._file_rate
        return seconds

    @property
    def _file_rate(self) -> float:
        """Bytes per second that a rank writes to files while all ranks do."""
        machine = self.machine
        node, every = machine.write_rate / self.places.nodes.each, machine.write_limit / self.layout.ranks
        return min(machine.rank_write_rate, node, every)


class Predictor:
    """Predicted seconds and bytes of any layout of one model on some nodes of a machine.

    Args:
        model: Profile of the model, with the costs of its blocks.
        machine: Profile of the machine.
        nodes: Number of nodes.
        ranks_per_node: Ranks of each node.
        memory: Bytes that a rank may use. Default: its share of the node's (or the device's) memory.
        bucket_mb: MiB of a bucket of gradients.

    Attributes:
        at: Nodes that the ranks run on.
        collectives: Seconds of messages and collectives on this machine.
        holdings: Function holdings(layout, places, rank) that returns the blocks and parameters at a pipeline position.
    """

    def __init__(
        self,
        model: ModelProfile,
        machine: MachineProfile,
        nodes: int,
        ranks_per_node: int,
        memory: float | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        self.model, self.machine, self._room, self.bucket_mb = model, machine, memory, bucket_mb
        self.at = Nodes(nodes, ranks_per_node, machine.device is not None)
        self._ranks_per_device = 0  # ranks that share a device
        devices = None
        if machine.device is not None:
            self._ranks_per_device = -(-ranks_per_node // machine.device.count)
            devices = DeviceLinks(machine.links, machine.device, self._ranks_per_device)
        self.collectives = CollectiveTimes(machine.links, machine.collectives, devices)
        self.holdings = lru_cache(maxsize=4096)(self._find_holdings)
        self._flow = lru_cache(maxsize=256)(Flow)
        self._slowness = lru_cache(maxsize=1024)(self._find_slowness)
        self._flat: dict[Any, StageHoldings] = {}

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.at.count * self.at.each

    def room(self) -> float:
        """Return the bytes that a rank may use."""
        if self._room is not None:
            return self._room
        if self.machine.device is not None:
            return self.machine.device.memory / self._ranks_per_device
        return self.machine.memory / self.at.each

    def predict(self, layout: ParallelLayout) -> Prediction:
        """Simulate a step of a layout.

        Raises:
            InputError: The layout is impossible for this model, or has another number of ranks.
        """
        parts = StepSimulation(self, self.places(layout)).run()
        return Prediction(layout, sum(parts.values()), parts, self.memory(layout), self.model.batch)

    def memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Return the bytes of the rank that needs most, by category."""
        places = self.places(layout)
        inputs, flow = self.inputs(places), self.flow(layout)
        holds = [self.holdings(layout, places, rank) for rank in range(layout.pipeline)]
        in_flight_bytes = in_flight(flow, holds) if flow is not None else [0.0]
        accounts = [account(inputs, holds[rank], flow, rank, in_flight_bytes[rank]) for rank in range(layout.pipeline)]
        return max(accounts, key=lambda each: sum(each.values()))

    def host_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Return the bytes in the host's memory of the rank that needs most, by category; empty without devices."""
        if self.machine.device is None:
            return {}
        places = self.places(layout)
        # three batches have been read and are not yet used, with the one on its way to the device
        data = 3 * max(self.shares(layout)) * float(self.model.sample_bytes)
        holds, flow = [self.holdings(layout, places, rank) for rank in range(layout.pipeline)], self.flow(layout)
        flying = in_flight(flow, holds) if flow is not None else [None]
        accounts = [host_account(self.inputs(places), *each) for each in zip(holds, repeat(data), flying)]
        return max(accounts, key=lambda each: sum(each.values()))

    def host_room(self) -> float:
        """Return the bytes of its node's memory that a rank may use."""
        return self.machine.memory / self.at.each

    def inputs(self, places: LayoutPlaces) -> MemoryInputs:
        """Return the inputs to the memory estimate."""
        return MemoryInputs(places, self.model.moments, self.machine.process, self._elements)

    @cached_property
    def _elements(self) -> int:
        """Number of elements of the whole model."""
        return sum(block.numel for block in self.model.blocks(1))

    # -- for the simulation

    def turns(self, places: LayoutPlaces) -> float:
        """Return the factor by which a rank computes slower while all ranks of its node, or of its device, compute."""
        return float(self._ranks_per_device) or places.turns

    def slowness(self, layout: ParallelLayout, axis: str = "pipeline") -> tuple[float, ...]:
        """Return the factor by which each rank of an axis computes slower than the machine's profile says.

        Of the ranks with the same number along the axis, which wait for each other, the slowest counts.
        """
        place = [each.name for each, _ in layout.sizes].index(axis)
        size, *inner = [ranks for _, ranks in layout.sizes[place:]]
        return self._slowness(size, math.prod(inner))

    def _find_slowness(self, size: int, stride: int) -> tuple[float, ...]:
        speeds = [*self.machine.speeds[: self.at.count], *[1.0] * (self.at.count - len(self.machine.speeds))]
        slowest = [0.0] * size
        for rank in range(self.ranks):
            position = rank // stride % size
            slowest[position] = max(slowest[position], 1 / speeds[rank // self.at.each])
        return tuple(slowest)

    def places(self, layout: ParallelLayout) -> LayoutPlaces:
        """Return the layout's ranks on the nodes.

        Raises:
            InputError: The layout has another number of ranks.
        """
        if layout.ranks != self.ranks:
            shape = " x ".join(f"{axis.name} {ranks}" for axis, ranks in layout.sizes)
            raise refusal(
                f"the layout {shape} does not have the {self.ranks} ranks of {self.at.count} nodes with {self.at.each} "
                "ranks each; use a layout with this number of ranks"
            )
        return LayoutPlaces(self.at, self.machine.cores, layout, self.machine.seen_cores)

    def blocks(self, layout: ParallelLayout, places: LayoutPlaces) -> tuple[BlockCost, ...]:
        """Return the cost of each block for a microbatch (or a slice of one).

        Args:
            layout: Layout, which divides the model.
            places: Ranks of the layout, which give the threads of a rank.
        """
        return self.model.blocks(layout.microbatch, layout.divided, places.threads)

    def microbatches(self, layout: ParallelLayout) -> int:
        """Return the number of microbatches of the rank that has most."""
        return -(-max(self.shares(layout)) // layout.microbatch)

    def shares(self, layout: ParallelLayout) -> list[int]:
        """Return the samples of a batch on the ranks that read different samples.

        One number for each rank of the data axis if they differ (`parallel.shares time`), else that of the first rank.
        """
        if layout.shares == "equal":
            return [-(-self.model.batch // layout.readers)]
        others = layout.readers // layout.data  # along further axes, inside the data axis
        speeds = tuple(1 / slow for slow in self.slowness(layout, "data") for _ in range(others))
        return [hi - lo for lo, hi in pairwise(proportional(self.model.batch, speeds))][::others]

    def busiest(self, layout: ParallelLayout) -> tuple[int, float]:
        """Return the samples and the slowness of the data-parallel rank that computes longest."""
        slowness = self.slowness(layout, "data")
        shares = self.shares(layout)
        pairs = zip(shares if len(shares) > 1 else shares * len(slowness), slowness, strict=True)
        return max(pairs, key=lambda each: each[0] * each[1])

    def flow(self, layout: ParallelLayout) -> Flow | None:
        """Return the flow of microbatches through the pipeline; None without a pipeline."""
        if layout.pipeline == 1:
            return None
        return self._flow(layout.schedule, layout.pipeline, self.microbatches(layout), layout.chunks, layout.slices)

    def _find_holdings(self, layout: ParallelLayout, places: LayoutPlaces, rank: int) -> StageHoldings:
        blocks = self.blocks(layout, places)
        spans: tuple[tuple[int, int], ...] = ((0, len(blocks)),)
        begins = [0]
        flow = self.flow(layout)
        if flow is not None:
            cuts = list(pairwise(stage_bounds(blocks, flow.shape.stages, layout.cut)))
            spans, begins = tuple(cuts[number] for number in flow.shape.stages_of(rank)), [lo for lo, _ in cuts]
        parts = places.shards()[0].size if layout.zero else 1
        bucket_mb = places.bucket_size(self.bucket_mb)
        stages = tuple(blocks[lo:hi] for lo, hi in spans)
        key = layout.divided, spans, parts, bucket_mb, places.gathers
        if key not in self._flat:  # the flat layout does not depend on the microbatch
            order, precision = self.model.order, self.model.precision
            self._flat[key] = stage_holdings(stages, order, parts, bucket_mb, precision, by_unit=places.gathers)
        if not self._flat[key].weights:
            raise refusal(f"rank {rank} of the pipeline would have no parameter to train; use fewer stages")
        repeated = recomputed(layout, blocks, begins)
        return replace(self._flat[key], stages=stages, recomputed=tuple(tuple(repeated[lo:hi]) for lo, hi in spans))
