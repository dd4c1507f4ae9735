"""Predicts layouts: seconds and bytes of a step, of one model on so many nodes of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from mpitrain.errors import refusal
from mpitrain.pipe.partition import stage_bounds
from mpitrain.planner.collectives import CollectiveTimes, DeviceLinks
from mpitrain.planner.flow import Flow
from mpitrain.planner.layouts import ParallelLayout, Prediction
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.memory import Means, account, host_account, in_flight, total
from mpitrain.planner.model import BlockCost, ModelProfile
from mpitrain.planner.places import LayoutPlaces, StageHoldings, held
from mpitrain.planner.step import StepSimulation

_READ_AHEAD = 3  # batches that a rank has read and not yet used, with the one on its way to the device


class Predictor:
    """Predicts layouts of one model on so many nodes of a machine.

    Args:
        model: What its blocks cost.
        machine: The machine.
        nodes: How many nodes.
        ranks_per_node: Ranks of each.
        memory: Bytes that a rank may take; None: its part of the node's (or the device's) memory.
        bucket_mb: MiB of a bucket of gradients.

    Attributes:
        collectives: Seconds of operations.
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
        self.model, self.machine = model, machine
        self.nodes, self.ranks_per_node, self._room, self.bucket_mb = nodes, ranks_per_node, memory, bucket_mb
        devices = DeviceLinks(machine.links, machine.device, self._sharing()) if machine.device is not None else None
        self.collectives = CollectiveTimes(machine.links, machine.collectives, devices)
        self._numel: int | None = None
        self._held = lru_cache(maxsize=4096)(self._find_held)
        self._flow = lru_cache(maxsize=256)(Flow)
        self._flat: dict[Any, StageHoldings] = {}

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    def room(self) -> float:
        """Bytes that a rank may take."""
        if self._room is not None:
            return self._room
        if self.machine.device is not None:
            return self.machine.device.memory / self._sharing()
        return self.machine.memory / self.ranks_per_node

    def predict(self, layout: ParallelLayout) -> Prediction:
        """Simulate a step.

        Raises:
            InputError: The layout is impossible for this model, or on so many ranks.
        """
        places = self.places(layout)
        parts = StepSimulation(self, places).run()
        return Prediction(layout, sum(parts.values()), parts, self.memory(layout), self.model.batch)

    def memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Bytes by category of the rank that takes most."""
        places = self.places(layout)
        means, flow = self.means(places), self.flow(layout)
        holds = [self.held(layout, places, rank) for rank in range(layout.pipeline)]
        flying = in_flight(layout, flow, holds) if flow is not None else [0.0]
        accounts = [account(means, holds[rank], flow, rank, flying[rank]) for rank in range(layout.pipeline)]
        return max(accounts, key=total)

    def host_memory(self, layout: ParallelLayout) -> Mapping[str, float]:
        """Bytes by category in the host's memory, of the rank that takes most there; empty without devices."""
        if self.machine.device is None:
            return {}
        places = self.places(layout)
        data = _READ_AHEAD * -(-self.model.batch // layout.data) * float(self.model.sample_bytes)
        holds = (self.held(layout, places, rank) for rank in range(layout.pipeline))
        return max((host_account(self.means(places), held, data) for held in holds), key=total)

    def host_room(self) -> float:
        """Bytes of its node's memory that a rank may take."""
        return self.machine.memory / self.ranks_per_node

    def means(self, places: LayoutPlaces) -> Means:
        """Return the settings that memory depends on."""
        model, machine = self.model, self.machine
        return Means(places, machine.device is not None, model.moments, machine.process, self._elements())

    def _elements(self) -> int:
        """Of the whole model."""
        if self._numel is None:
            blocks = self.model.blocks(1)
            self._numel = sum(weight.numel for block in blocks for weight in block.weights if not weight.same_as)
        return self._numel

    # -- for the simulation

    def turns(self, places: LayoutPlaces) -> float:
        """How much longer than alone a rank computes while all others of its node, or of its device, do."""
        return float(self._sharing()) if self.machine.device is not None else places.turns

    def _sharing(self) -> int:
        """Ranks that share a device."""
        assert self.machine.device is not None
        return -(-self.ranks_per_node // self.machine.device.count)

    def places(self, layout: ParallelLayout) -> LayoutPlaces:
        """Where the layout's ranks are.

        Raises:
            InputError: It is one of another number of ranks.
        """
        if layout.ranks != self.ranks:
            raise refusal(
                f"data {layout.data} x pipeline {layout.pipeline} x tensor {layout.tensor} are not the {self.ranks} "
                f"ranks of {self.nodes} x {self.ranks_per_node}"
            )
        return LayoutPlaces(self.nodes, self.ranks_per_node, self.machine.cores, layout, self.machine.seen_cores)

    def blocks(self, layout: ParallelLayout, places: LayoutPlaces) -> tuple[BlockCost, ...]:
        """What each block costs for a microbatch (or a slice of one)."""
        return self.model.blocks(layout.microbatch, layout.divided, places.threads)

    def microbatches(self, layout: ParallelLayout) -> int:
        """Of the rank that has most."""
        share = -(-self.model.batch // layout.data)
        return -(-share // layout.microbatch)

    def flow(self, layout: ParallelLayout) -> Flow | None:
        """Through the pipeline; None without one."""
        if layout.pipeline == 1:
            return None
        return self._flow(layout.schedule, layout.pipeline, self.microbatches(layout), layout.chunks, layout.slices)

    def held(self, layout: ParallelLayout, places: LayoutPlaces, rank: int) -> StageHoldings:
        """What the ranks at a pipeline position hold."""
        return self._held(layout, places, rank)

    def _find_held(self, layout: ParallelLayout, places: LayoutPlaces, rank: int) -> StageHoldings:
        blocks = self.blocks(layout, places)
        spans: tuple[tuple[int, int], ...] = ((0, len(blocks)),)
        flow = self.flow(layout)
        if flow is not None:
            cuts = list(pairwise(stage_bounds(blocks, flow.shape.stages, layout.cut)))
            spans = tuple(cuts[number] for number in flow.shape.stages_of(rank))
        means = self.means(places)
        parts = places.shards()[0].size if layout.zero else 1
        bucket_mb = means.bucket_size(self.bucket_mb)
        stages = tuple(blocks[lo:hi] for lo, hi in spans)
        key = layout.divided, spans, parts, bucket_mb, means.gathers
        if key not in self._flat:  # where parameters lie is the same for every microbatch
            order, precision = self.model.order, self.model.precision
            self._flat[key] = held(stages, order, parts, bucket_mb, precision, by_unit=means.gathers)
        if not self._flat[key].weights:
            raise refusal(f"rank {rank} of the pipeline would have no parameter to train")
        return replace(self._flat[key], stages=stages)
