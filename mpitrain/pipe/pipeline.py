"""Pipeline of a model's stages over ranks, and the training step of one batch through it.

Every rank builds the same whole model (same seed) and keeps the blocks of its own stages. The other blocks are freed
once the caller drops the model, so a rank needs memory for the whole model while it is built. If the model does not
fit and shares no parameters, build it under `torch.device("meta")`, call `pipeline.module.to_empty(device="cpu")`, and
load a checkpoint.

A parameter that several stages share (tied), such as an embedding that is also the output layer, has a copy on every
rank with such a stage. The copies start equal and each gets the sum of all copies' gradients, so they stay equal bit by
bit. Norms and checkpoints count only the copy of the lowest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import is_accelerator, set_generator_state
from mpitrain.errors import InputError, refusal
from mpitrain.layers.loss_terms import Counts, shares_of, to_floats
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import Mesh
from mpitrain.pipe.deferral import Deferred, GraphSeconds, StageSeconds, StageTimes, choose_deferred
from mpitrain.pipe.executor import BegunBatch, Executor, KnownSpecs, Loss, PipelineBatch, Seen, Upcoming, Watched
from mpitrain.pipe.foreseen import ForeseenShapes
from mpitrain.pipe.partition import (
    Cut,
    costs_by_rank,
    listed_blocks,
    parameter_costs,
    require_look_back,
    slice_sequences,
    stage_bounds,
    time_costs,
)
from mpitrain.pipe.schedule import BackwardInput, Schedule, make_schedule, separate
from mpitrain.pipe.simulate import forward_only, with_messages
from mpitrain.pipe.stage import Stage
from mpitrain.pipe.versions import WeightVersions
from mpitrain.pipe.wire import StageMessages, signature_of

_MEASURED = 5  # training batches until backward passes have been measured: one to warm up, two in halves, two whole
_MOST_SHAPES = 1024  # distinct input shapes whose internal shapes are remembered


class Pipeline:
    """Stages of a model on the ranks of a pipeline. Construction and all methods are collective.

    Args:
        model: An `nn.Sequential`, a module with `pipeline_blocks()`, or its (name, module) list; the same on all ranks.
        loss: Function loss(output, y) that returns a scalar, the mean over the samples. If it is a method of the model,
            the whole model stays in memory on the last stage's rank.
        mesh: Mesh whose pipeline axis is used, or the communicator of the pipeline's ranks.
        schedule: Name of the schedule: gpipe, 1f1b, interleaved, zero-bubble, terapipe, package.module:function, or
            2bw, which is not exact (see `versions`).
        microbatches: Number of microbatches of an evaluation; a training step runs as many as it is given.
        chunks: Stages a rank.
        slices: Number of slices of each sequence. Every block that uses earlier positions needs a `forward_slice`
            (see `stage`).
        cut: Quantity that is balanced over the stages: uniform (blocks), parameters, or time, which needs a `sample`;
            or the cost of each block, or a list of these for each rank of the pipeline.
        blocks: Number of blocks of each stage, in order, which overrides `cut`; empty to use `cut`.
        sample: Input of a microbatch, for timing the blocks.
        recompute: If true, stages keep only their input, and run forward again before backward.
        device: Device of this rank, to which its blocks are moved; None to compute where the blocks are when a batch
            arrives.
        static_shapes: If true, inputs of equal shapes have equal shapes inside the model, so that headers are sent only
            once. If false, they are sent with every message.

    Attributes:
        microbatches: Largest number of parts that an evaluation divides its samples into.
        module: This rank's blocks under their names in the whole model.
        bounds: Bounds of the stages: stage s has blocks bounds[s] to bounds[s + 1] - 1.
        last_rank: Rank of the last stage, where outputs and losses are.
        foreseen: Shapes of the stages' outputs, if the other ranks do not exist; else None.
        peak_in_flight: Largest number of microbatches in flight on this rank in the last batch.
        watched: Function of (step, call) that returns the call to make instead; None for none. It takes effect for
            numbers of microbatches that have not been run before.
        counted: Function that counts the targets that the mean loss is over, to weight the parts of a batch; None to
            count samples and positions.
        versions: Two versions of the weights, with a schedule that uses weights one step old (see `versions`): call its
            `begin_update` before the optimizer's step. None with the other schedules.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[tuple[str, nn.Module]],
        loss: Loss,
        mesh: Mesh | Communicator,
        *,
        schedule: str = "1f1b",
        microbatches: int = 1,
        chunks: int = 1,
        slices: int = 1,
        cut: Cut = "uniform",
        blocks: Sequence[int] = (),
        sample: Any = None,
        recompute: bool = False,
        device: torch.device | None = None,
        static_shapes: bool = True,
    ) -> None:
        self.comm = mesh.stages if isinstance(mesh, Mesh) else mesh
        self._schedule_options = schedule, chunks, slices
        self.microbatches, self._static = microbatches, static_shapes
        plan = self._schedule(max(1, microbatches))
        listed = listed_blocks(model)
        require_look_back(model, listed, slices)
        costs = None if blocks else _costs(listed, cut, sample, mesh, plan.rank_of)
        bounds = stage_bounds(listed, plan.stages, blocks, costs)
        parts = [listed[lo:hi] for lo, hi in pairwise(bounds)]
        mine = plan.stages_of(self.comm.rank)
        self.bounds = tuple(bounds)
        self.foreseen = ForeseenShapes([block for _, block in listed], bounds) if self.comm.played else None
        self.module = named_tree([named for number in mine for named in parts[number]])
        halves = any(isinstance(step, BackwardInput) for step in plan.steps[self.comm.rank])
        self._stages = {
            number: Stage([block for _, block in parts[number]], first=number == 0, recompute=recompute, halves=halves)
            for number in mine
        }
        self._world = mesh.world if isinstance(mesh, Mesh) else mesh
        self._begun = 0  # training batches
        self._measures = any(isinstance(step, BackwardInput) for steps in plan.steps for step in steps)
        uses = Counter(p for stage in self._stages.values() for graph in stage.graph_parameters() for p in graph)
        for stage in self._stages.values():
            stage.choosable = [all(uses[p] == 1 for p in graph) for graph in stage.graph_parameters()]
        self._tied: list[Tied] = find_tied(parts, plan.rank_of, self.comm)
        self.last_rank = plan.rank_of[-1]
        self._loss = loss if self.comm.rank == self.last_rank else None  # a bound method would keep its model alive
        if device is not None:
            self.module.to(device)
        self._messages = StageMessages(self.comm)
        self._device = device
        self._executors: dict[tuple[int, bool, bool, bool], Executor] = {}
        self._known: dict[Any, KnownSpecs] = {}
        self.peak_in_flight = 0.0
        self.watched: Watched | None = None
        self.versions = WeightVersions(self.module) if plan.before else None
        self._begun_batch: BegunBatch | None = None
        self.counted: Counts | None = None

    def forward_backward(
        self,
        microbatches: Sequence[tuple[Any, Any]],
        weights: Sequence[float],
        shares: Sequence[float] | None = None,
        upcoming: Upcoming | None = None,
    ) -> float:
        """Add the gradients of the sum of weights[i] * loss_i to the parameters' `.grad`. Collective.

        Args:
            microbatches: Pairs (x, y), the same on all ranks; the first stage uses x, the last uses y.
            weights: Weight of each microbatch's loss; with weight 0 the loss is not computed.
            shares: Share of each microbatch in the terms that a `LossTerm` adds; None to use the weights.
            upcoming: Batch of the next call, which a schedule with two versions of the weights may begin; None to let
                the pipeline drain.

        Returns:
            The weighted sum of the losses, on every rank.

        Raises:
            InputError: There is not one weight for each microbatch.
        """
        if len(weights) != len(microbatches):
            raise InputError(
                f"got {len(microbatches)} microbatches and {len(weights)} weights; give one weight for each microbatch"
            )
        if self._measures:
            self._measure_halves(len(microbatches))
        if not microbatches:
            return 0.0
        with torch.enable_grad():
            return self._run(microbatches, weights, shares or weights, training=True, upcoming=upcoming)

    def evaluate(self, x: Any, y: Any, seen: Seen | None = None) -> float:
        """Return the mean loss of the samples on every rank, in evaluation mode and without gradients. Collective.

        Args:
            x: Input of the samples; the same on all ranks. Tensors are divided along their first dimension into
                `microbatches` parts, or fewer if there are fewer samples.
            y: Targets of the samples, divided like x.
            seen: Function called with the output of each part (and slice) and its targets, on the last stage's rank.
        """
        parts, shares = [(x, y)], [1.0]
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            bounds = split(len(x), max(1, min(self.microbatches, len(x))))
            parts = [(x[lo:hi], y[lo:hi]) for lo, hi in pairwise(bounds)]
            shares = [len(part) / len(x) for part, _ in parts] if len(x) else [1.0]
            if self.counted is not None:
                shares = shares_of(to_floats(self.counted(targets) for _, targets in parts))
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad():
                return self._run(parts, shares, shares, training=False, seen=seen)
        finally:
            for module, training in modes:
                module.training = training

    def synchronize_tied(self, used: set[nn.Parameter] | None = None) -> None:
        """Sum the gradients of parameters that stages on several ranks share, after the last backward. Collective.

        Args:
            used: Set of parameters that got a gradient on this rank; shared parameters that got one on another rank are
                added to it. None to skip this.
        """
        for tied in self._tied:
            if tied.parameter.requires_grad:
                if used is not None:
                    anywhere = torch.tensor([tied.parameter in used], dtype=torch.uint8)
                    tied.group.all_reduce(anywhere, "max")
                    used |= {tied.parameter} if anywhere else set()
                if tied.parameter.grad is None:
                    tied.parameter.grad = torch.zeros_like(tied.parameter)
                tied.group.all_reduce(tied.parameter.grad)

    def counted_elsewhere(self) -> set[str]:
        """Return the names of this rank's parameters that a lower pipeline rank has a copy of. Norms leave them out."""
        return {t.name for t in self._tied if t.group.rank > 0}

    @property
    def blocks(self) -> list[int]:
        """Numbers of this rank's blocks."""
        return [block for stage in self._stages for block in range(*self.bounds[stage : stage + 2])]

    @property
    def crossings(self) -> list[int]:
        """Numbers of the blocks whose output, or output's gradient, this rank sends for each microbatch."""
        rank_of, blocks = self._schedule(max(1, self.microbatches)).rank_of, list[int]()
        for stage in self._stages:
            if stage + 1 < len(rank_of) and rank_of[stage + 1] != self.comm.rank:
                blocks.append(self.bounds[stage + 1] - 1)
            if stage > 0 and rank_of[stage - 1] != self.comm.rank:
                blocks.append(self.bounds[stage] - 1)
        return blocks

    @property
    def tied_bytes(self) -> list[tuple[int, int]]:
        """Pairs (bytes, ranks) for each trained parameter of this rank that several ranks share."""
        return [(t.parameter.nbytes, t.group.size) for t in self._tied if t.parameter.requires_grad]

    # -- internals

    def _run(
        self,
        microbatches: Sequence[tuple[Any, Any]],
        weights: Sequence[float],
        shares: Sequence[float],
        training: bool,
        seen: Seen | None = None,
        upcoming: Upcoming | None = None,
    ) -> float:
        """Run all microbatches, and return their weighted loss on every rank."""
        slices = self._schedule_options[2]
        if slices > 1:
            _, shares = slice_sequences(microbatches, shares, slices)
            microbatches, weights = slice_sequences(microbatches, weights, slices, self.counted)
        self._messages.device = self._device or next(
            (p.device for p in self.module.parameters()), self._messages.device
        )
        known, headers = self._shapes(microbatches, training)
        if self.versions is None or not training:
            executor = self._executor(len(microbatches) // slices, training, begins=True, ends=True)
            losses = executor.run(_batch_of(microbatches, weights, shares, known, seen), headers)
        else:
            executor, losses = self._run_one_of_many(microbatches, weights, known, headers, upcoming)
        self.peak_in_flight = executor.peak_in_flight / executor.schedule.chunks / slices
        numbers = torch.stack(losses).tolist() if losses else []  # the only wait for the device in a batch
        return self._messages.share_loss(sum(numbers), self.last_rank)

    def _executor(self, count: int, training: bool, *, begins: bool, ends: bool) -> Executor:
        """Return the executor for batches of this number of microbatches, made at its first use.

        Args:
            count: Number of microbatches.
            training: True for forward and backward steps, False for an evaluation.
            begins: If true, no steps of the batch have been taken before.
            ends: If true, no steps of the next batch are taken.
        """
        key = count, training, begins, ends
        if key not in self._executors:
            schedule = separate(self._schedule(count), begins=begins, ends=ends)
            program = with_messages(schedule if training else forward_only(schedule))
            self._executors[key] = Executor(
                program,
                self.comm.rank,
                self._stages,
                self._loss,
                self._messages,
                self.watched,
                self.versions if training else None,
            )
        return self._executors[key]

    def _run_one_of_many(
        self,
        microbatches: Sequence[tuple[Any, Any]],
        weights: Sequence[float],
        known: Sequence[KnownSpecs],
        headers: bool,
        upcoming: Upcoming | None,
    ) -> tuple[Executor, list[torch.Tensor]]:
        """Run a batch that may have begun before, and begin the next one if it has as many microbatches.

        The shapes inside the model must be known for the next batch, because not every rank computes all of its
        microbatches that begin.
        """
        count, begun, self._begun_batch = len(microbatches), self._begun_batch, None
        assert self.versions is not None
        if upcoming is not None:
            kinds = self._kinds(upcoming.microbatches, training=True)
            if not self._static or len(kinds) != count or not all(kind in self._known for kind in kinds):
                upcoming = None
        executor = self._executor(count, True, begins=begun is None, ends=upcoming is None)
        ahead = executor.schedule.most_ahead
        if upcoming is not None:
            microbatches = [*microbatches, *upcoming.microbatches[:ahead]]
            weights, known = [*weights, *upcoming.weights[:ahead]], [*known, *(self._known[k] for k in kinds[:ahead])]
        if begun is not None:
            known = [*begun.known, *known[len(begun.known) :]]
            for device, state in begun.random:
                set_generator_state(device, state)
        batch = _batch_of(microbatches, weights, weights, known)
        batch.begun, batch.seed_next = begun, upcoming.seed if upcoming is not None else batch.seed_next
        self.versions.begin_batch(begun=begun is not None)
        try:
            losses = executor.run(batch, headers)
        finally:
            self.versions.end_batch()
        self._begun_batch = executor.next_begun
        return executor, losses

    def _measure_halves(self, microbatches: int) -> None:
        """Begin a measured batch, or choose the graphs whose weight halves are deferred, after all measured ones.

        Collective over all ranks of the mesh: replicas must choose alike, because layers may communicate in a backward
        pass. On accelerators nothing is measured, and all weight halves are deferred.

        Args:
            microbatches: Number of microbatches of the next batch on this rank.
        """
        number, self._begun = self._begun, self._begun + 1
        if is_accelerator(self._messages.device):
            self._measures = False
        elif number == _MEASURED:
            self._measures = False
            everyone = self._world.gather_objects(
                (microbatches, [(s, stage.shortest_times()) for s, stage in self._stages.items()])
            )

            def choose() -> Deferred | None:
                schedule = self._schedule(max(1, *(count for count, _ in everyone)))
                return choose_deferred(schedule, [_decoded(times) for _, times in everyone], shared)

            shared = self._world.process.spare_cores < 0
            chosen = self._world.on_root(choose)
            for s, stage in self._stages.items():
                stage.defer(tuple(chosen[s]) if chosen else stage.deferred)
        elif number > 0:
            for stage in self._stages.values():
                stage.times = stage.times or StageTimes()
                stage.times.halves = number % 2 == 1

    def _schedule(self, microbatches: int) -> Schedule:
        """Return the configured schedule for this number of microbatches."""
        name, chunks, slices = self._schedule_options
        return make_schedule(name, self.comm.size, microbatches, chunks, slices)

    def _shapes(self, microbatches: Sequence[tuple[Any, Any]], training: bool) -> tuple[list[KnownSpecs], bool]:
        """Return the known shapes of each microbatch, and whether headers are needed; the same on all ranks."""
        if not self._static:
            return [{} for _ in microbatches], True
        kinds = self._kinds(microbatches, training)
        if self.foreseen is not None:
            for kind, (x, _) in zip(kinds, microbatches, strict=True):
                self._known[kind] = self._known.get(kind) or self.foreseen.of(x)
        if all(kind in self._known for kind in kinds):
            return [self._known[kind] for kind in kinds], False
        if len(self._known) > _MOST_SHAPES:
            self._known.clear()
        return [self._known.setdefault(kind, {}) for kind in kinds], True

    def _kinds(self, microbatches: Sequence[tuple[Any, Any]], training: bool) -> list[Any]:
        """Return a key of each microbatch; those with equal keys have equal shapes inside the model."""
        device = self._messages.device.type
        mode = training, self.module.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled(device)
        return [(mode, signature_of(x), signature_of(y)) for x, y in microbatches]


def _batch_of(
    microbatches: Sequence[tuple[Any, Any]],
    weights: Sequence[float],
    shares: Sequence[float],
    known: Sequence[KnownSpecs],
    seen: Seen | None = None,
) -> PipelineBatch:
    """Return the data that a program runs on, from pairs (x, y)."""
    return PipelineBatch([x for x, _ in microbatches], [y for _, y in microbatches], weights, shares, known, seen)


def _decoded(times: list[Any]) -> dict[int, StageSeconds | None]:
    """Return one rank's times by stage, from the pairs that JSON made of them."""
    return {
        s: None if seconds is None else StageSeconds(seconds[0], tuple(GraphSeconds(*graph) for graph in seconds[1]))
        for s, seconds in times
    }


def _costs(
    blocks: Sequence[tuple[str, nn.Module]],
    cut: Cut,
    sample: Any,
    mesh: Mesh | Communicator,
    rank_of: Sequence[int],
) -> Sequence[Sequence[float]] | None:
    """Return the cost of each block on each stage, the same on all ranks; None if all blocks cost the same.

    rank_of: Rank of each stage.
    """
    if not isinstance(cut, str):
        return [cast(Sequence[float], cut[rank] if isinstance(cut[rank], Sequence) else cut) for rank in rank_of]
    if cut == "uniform":
        return None
    if cut == "parameters":
        return [parameter_costs(blocks)] * len(rank_of)
    if cut != "time":
        raise refusal(f"unknown cut {cut!r}; choose uniform, parameters or time")
    if sample is None:
        raise refusal('cut="time" measures the blocks: give the input of a microbatch as sample')
    if isinstance(mesh, Mesh) and mesh.layers.size > 1:
        raise refusal(
            'cut="time" cannot measure layers that are divided over several ranks; compute time_costs of the '
            "whole model before it is divided, and pass them as cut"
        )
    world, stages = (mesh.world, mesh.stages) if isinstance(mesh, Mesh) else (mesh, mesh)
    costs = costs_by_rank(world, stages, lambda: time_costs(blocks, sample))
    return [costs[rank] for rank in rank_of]


def named_tree(blocks: Sequence[tuple[str, nn.Module]]) -> nn.Module:
    """Return a module that contains the blocks under their names in the whole model; it is never called."""
    root = nn.Module()
    for name, block in blocks:
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, block)
    return root


@dataclass(frozen=True)
class Tied:
    """Parameter of this rank that stages on other ranks share.

    Attributes:
        name: Name of this rank's copy in the whole model; other ranks may use other names.
        parameter: This rank's copy.
        group: Communicator of the ranks with a copy.
    """

    name: str
    parameter: nn.Parameter
    group: Communicator


def find_tied(
    stages: Sequence[Sequence[tuple[str, nn.Module]]], rank_of: Sequence[int], comm: Communicator
) -> list[Tied]:
    """Find this rank's parameters that stages on other ranks share, and make all copies equal. Collective.

    Args:
        stages: Named blocks of every stage.
        rank_of: Rank of every stage.
        comm: Communicator of the pipeline's ranks.

    Returns:
        The shared parameters of this rank, each with the communicator of its copies.

    Raises:
        InputError: A shared parameter is on the meta device.
    """
    holders: dict[nn.Parameter, dict[int, str]] = {}  # the parameter's first name on each rank
    uses: Counter[nn.Parameter] = Counter()
    for rank, blocks in zip(rank_of, stages, strict=True):
        for prefix, block in blocks:
            for name, parameter in block.named_parameters(prefix=prefix, remove_duplicate=False):
                uses[parameter] += 1
                holders.setdefault(parameter, {}).setdefault(rank, name)
    tied: list[Tied] = []
    groups: dict[tuple[int, ...], Communicator | None] = {}
    for parameter, names in holders.items():
        if parameter.is_meta and uses[parameter] > 1:
            raise InputError(
                f"parameter {next(iter(names.values()))} is shared but has no memory yet, so each use would "
                "get its own copy; build a model with shared parameters on the CPU"
            )
        ranks = tuple(sorted(names))
        if len(ranks) == 1 or comm.rank not in names:
            continue
        if ranks not in groups:
            groups[ranks] = comm.subgroup(ranks, label=f"{comm.label} tied {list(ranks)}")
        group = groups[ranks]
        assert group is not None
        group.broadcast(parameter.detach(), root=0)
        tied.append(Tied(names[comm.rank], parameter, group))
    return tied
