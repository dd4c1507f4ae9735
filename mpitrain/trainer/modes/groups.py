"""parallel.mode sync and local, in which the ranks of a group take each step together.

In mode sync, one group has all ranks. In mode local, groups take steps independently and periodically average their
parameters:

    steps 1 ... warm              all groups together: synchronous training
    then rounds of local_steps    each group alone, on its part of each global batch; then all groups average

The last round has the steps that remain. With local_steps 1 and a plain average, the groups average gradients instead
of parameters and take all steps together. (The two are equal only for plain SGD.)

A checkpoint has the tensors that every engine writes, which are those of group 0 or shared by all groups, and

    replica/<group>/optimizer/<state>/<parameter>    states of other groups' optimizers, which saw other samples
    replica/<group>/master/<parameter>               a group's own parameters, with parallel.overlap
    outer/momentum/<parameter>                       momentum of the outer optimizer
    local_compression/<rank>/<buffer>                error that compression of differences has not yet sent
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import Manifest, Part
from mpitrain.comm import Communicator
from mpitrain.comm.compression import Bucket, from_name
from mpitrain.config.batch_sizes import require_multiples
from mpitrain.config.settings import Config
from mpitrain.data import Batch
from mpitrain.data.on_device import on_device
from mpitrain.errors import refusal
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import BLOCKS, LAYERS, Mesh, axes_of
from mpitrain.layout.ownership import Division
from mpitrain.loose.averaging import Averaging, FlatSlice, Grouping
from mpitrain.parallel.rules import Combination, require_compatible
from mpitrain.shard.ddp import broadcast_state
from mpitrain.shard.flat import by_dtype
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.data import GroupPlaces, batches, microbatch_size
from mpitrain.trainer.elastic import Survivors
from mpitrain.trainer.engine import Engine, StepResult
from mpitrain.trainer.held_out.measuring import LOSS
from mpitrain.trainer.memory import MemoryAccount
from mpitrain.trainer.run import Run, Step, Strategy
from mpitrain.trainer.state import MASTER, OPTIMIZER, CompressionErrors, Holding


class Synchronous(Strategy):
    """Strategy in which all ranks take each step together, with data, ZeRO, pipeline and tensor parallelism."""

    survivors = Survivors

    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        mesh, section = Mesh.of(world, axes_of(config.parallel)), config.run
        workers = VirtualWorkers.of(mesh.readers.size, section.reproducible, section.workers, mesh.readers.rank)
        return GroupPlaces(mesh, workers, mesh.replicas, workers)

    def steps(self, trainer: Run) -> Iterator[Step]:
        config, workers = trainer.config, trainer.places.workers
        require_samples(config, trainer.engine, trainer.places, trainer.batch_sizes.after(trainer.step))
        if trainer.engine.note:
            trainer.say(trainer.engine.note)
        start = trainer.position
        with batches(config, workers.share, trainer.data, start, trainer.device, step=trainer.step) as loader:
            coming, trainer.upcoming = on_device(loader, trainer.device), None
            while True:
                began = time.perf_counter()
                step = _take_step(trainer, coming, trainer.batch_sizes.size(trainer.step))
                step.began = began
                yield step


def _take_step(trainer: Run, coming: Iterator[Batch], samples: int) -> Step:
    """Take the next step, with `samples` samples of its batch in this group. Collective over the group."""
    clock, trainer.samples = trainer.engine.clock, samples
    clock.step(trainer.step + 1)
    with clock.data:
        batch = trainer.upcoming if trainer.upcoming is not None else next(coming)
        trainer.upcoming = next(coming) if trainer.begins_next_step else None
    return trainer.train_step(batch)


def require_samples(config: Config, engine: Engine, places: GroupPlaces, sizes: Iterable[int]) -> None:
    """Raise InputError on all ranks if, in a batch to come, some rank gets too few samples.

    Args:
        config: Settings, which define the size of microbatches.
        engine: Engine of this rank.
        places: Place of this rank, with the division of its group's part of a batch.
        sizes: Samples of the parts of all groups.
    """
    gathers = engine.sharding.parameters.gathers and engine.pipeline is None
    combination = Combination(config.parallel, synchronous=engine.synchronous, gathers=gathers, workers=places.workers)
    for size in sizes:
        microbatch = microbatch_size(config, places.mesh, size)
        require_compatible(replace(combination, batches=[size], microbatch=microbatch))


REPLICA, MOMENTUM, LEFT_OUT = "replica/", "outer/momentum/", "local_compression/"


class LocalEngine(Engine):
    """Engine of one group out of several. Its construction is collective over all groups.

    In steps that all groups take together, gradients are summed over the groups before norm, clipping and update. In
    other steps groups exchange nothing, and parameters are averaged at the end of a round.

    Args:
        module: Module as for `Engine`; all groups get the values of the first one.
        *rest: Arguments of `Engine`, for this group.
        world: Ranks of all groups.
        everyone: Ranks of all groups that have the same part of the model as this rank.
        grouping: Division of the ranks into groups.
        division: Division of the model, as for `Engine`.
        **more: Keyword arguments of `Engine`.

    Attributes:
        grouping: Division of the ranks into groups.
        is_joint: True if all groups take the next steps together.
        averaging: Average of the parameters over the groups.
        meeting: Ranks with this rank's place in all groups, in the order of the groups.
    """

    def __init__(
        self,
        module: nn.Module,
        *rest: Any,
        world: Communicator,
        everyone: Communicator,
        grouping: Grouping,
        division: Division,
        **more: Any,
    ) -> None:
        broadcast_state(module, everyone)
        super().__init__(module, *rest, division=division, **more)
        self._world, self.grouping, self.is_joint = world, grouping, False
        self._prefix = f"{REPLICA}{grouping.number}/"
        self.cut = any(other.size > 1 for other in division.model_axes.values())
        place = self._require_equal_division(division)
        self.meeting, self._peers = (world.split(place, grouping.number, label=n) for n in ("meeting", "peers"))
        self._holders = self.sharding.replicas if self.sharding.stage.states else self.comm
        flat_of = {flat.value: flat for flat in self.sharding.flat_parameters}
        kinds = by_dtype(flat_of)
        self._flats = [[flat_of[value] for value in values] for values in kinds]
        slices = [FlatSlice(values, self._holders) for values in kinds]
        parallel, buckets = self.config.parallel, list[Bucket]()
        compression = None if parallel.local_compression == "none" else from_name(parallel.local_compression)
        self._left_out = CompressionErrors(f"{LEFT_OUT}{world.rank}/", compression)
        for n, part in enumerate(slices):
            whole = [(at, p) for p, first, last, at in self._contents(n, part) if last - first == p.numel()]
            if compression is not None:
                buckets.append(compression.bucket(str(n), [(at, tuple(p.shape)) for at, p in whole]))
        # copies of a parameter on several stages or tensor ranks must stay equal
        exact, weight, peers = self.cut, grouping.weight, self._peers
        self.averaging = Averaging(
            slices, peers, weight, parallel, buckets, reproducible=exact, on_write=self._publish_averages
        )

    def _require_equal_division(self, division: Division) -> int:
        """Check that all groups divide the model equally, and return this rank's place in its group. Collective.

        Raises:
            InputError: On all ranks, if groups divide their parts differently.
        """
        sharding = self.sharding
        names = {p: name for name, p in self.module.named_parameters()}
        contents = [(names[p], lo, hi, at) for f in sharding.flat_parameters for p, lo, hi, at in f.contents]
        replica = sharding.replicas.rank if sharding.replicas is not None else 0
        place = [*(other.rank for other in division.model_axes.values()), sharding.shard.rank, replica]
        mine = [self.grouping.number, place, sharding.shard.size, zlib.crc32(repr(contents).encode())]
        everyone = self._world.all_gather_object(mine)
        groups = [
            sorted(member for group_number, *member in everyone if group_number == number)
            for number in range(self.grouping.count)
        ]
        if any(group != groups[0] for group in groups):
            raise refusal(
                f"parallel.zero {self.sharding.zero} divides parameters differently in some groups, "
                "because the groups are placed differently on the nodes; set parallel.local_group to a "
                "divisor of the ranks of each node"
            )
        return [member[0] for member in groups[0]].index(place)

    def _contents(self, number: int, part: FlatSlice) -> Iterator[tuple[nn.Parameter, int, int, int]]:
        """Yield (parameter, first, last, place in the slice) of the parameters in a slice."""
        for flat, lo, hi, place in part.intervals:
            for p, first, last, at in self._flats[number][flat].contents:
                begin, end = max(lo, at), min(hi, at + last - first)
                if begin < end:
                    yield p, first + begin - at, first + end - at, place + begin - lo

    def _publish_averages(self) -> None:
        """Round the averaged values into the parameters, and make them visible in the group."""
        with torch.no_grad():
            for flat_parameter in self.sharding.flat_parameters:
                flat_parameter.store()
        self.sharding.parameters.publish()

    # -- steps

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average the module's floating-point buffers, such as the statistics of BatchNorm. Collective."""
        saved = self.module.state_dict()
        buffers = [b for n, b in self.module.named_buffers() if n in saved and b.is_floating_point() and b.numel()]
        if not buffers:
            return
        joined = torch.cat([b.reshape(-1).double() for b in buffers])  # so that equal buffers stay bitwise equal
        self.meeting.all_reduce(joined.mul_(self.grouping.weight), reproducible=self.cut)
        for buffer, values in zip(buffers, joined.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(values.view(buffer.shape))

    def step(self, lr: float | None = None) -> StepResult:
        if self.is_joint:
            self._sum_gradients()
        return super().step(lr)

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Replace the group's gradients by those of the global batch."""
        sharding, weight = self.sharding, self.grouping.weight
        if sharding.host is not None:
            raise refusal(
                "parallel.offload moves gradients to the host before groups have summed them; set "
                "parallel.warm to 0 and parallel.local_steps to more than 1"
            )
        holders = self._holders
        ranks, rank = (holders.size, holders.rank) if holders is not None else (1, 0)
        self._restore_used()
        for bucket in sharding.reduced_gradients():
            each = bucket.numel() // ranks
            mine, rest = bucket[rank * each : (rank + 1) * each], bucket[ranks * each :]
            for part in (mine, rest):
                if part.numel():
                    self._peers.all_reduce(part.mul_(weight), reproducible=self.cut)
            if holders is not None and ranks > 1 and each:
                holders.all_gather(bucket[: ranks * each], mine)

    def _restore_used(self) -> None:
        """Restore the gradients of parameters that only other groups used (see `Reducer`, stage 0)."""
        sharding = self.sharding
        if sharding.stage.states or sharding.reduce_dtype is not None:
            return
        views = sharding.gradient_views()
        used = torch.tensor([p.grad is not None for p in views], dtype=torch.uint8)
        self.meeting.all_reduce(used, "max")
        for (p, view), anywhere in zip(views.items(), used.tolist(), strict=True):
            if anywhere and p.grad is None:
                p.grad = view

    def memory(self) -> MemoryAccount:
        account = super().memory()
        return replace(account, buffers=account.buffers + self.averaging.nbytes())

    def bytes_sent(self) -> float:
        """Return the bytes that this rank sends to other groups in one round, by formula."""
        if not self.is_joint:
            return self.averaging.bytes_sent()
        ranks = self._peers.size
        parts = self._holders.size if self._holders is not None else 1
        return sum(2 * (ranks - 1) / ranks * g.nbytes / parts for g in self.sharding.reduced_gradients())

    # -- checkpoints

    def parts(self, *, alone: bool = False) -> tuple[list[Part], dict[str, Any]]:
        parts, values = super().parts(alone=alone)
        number = self.grouping.number
        if number:
            compression = [p for p in parts if p.spec.name.startswith("compression/")]
            parts = [_renamed(p, self._prefix) for p in parts if p.spec.name.startswith(OPTIMIZER)] + compression
        holdings = [h for h in self._outer() if not number] + self._ahead()
        parts += [part for h in holdings if h.written for part in h.parts(h.data, 0, h.last - h.first)]
        parts += self._left_out.parts()
        of_groups = self.meeting.all_gather_object({key: values[key] for key in ("optimizer", "loss_scale")})
        local = {"groups": self.grouping.count, "ahead": self.averaging.ahead is not None}
        return parts, values | of_groups[0] | {"replicas": of_groups, "local": local}

    def _outer(self) -> list[Holding]:
        return self._holdings(MOMENTUM, self.averaging.outer.momenta)

    def _ahead(self) -> list[Holding]:
        return self._holdings(self._prefix + MASTER, self.averaging.ahead or [])

    def _holdings(self, prefix: str, tensors: Sequence[torch.Tensor]) -> list[Holding]:
        """Return the parts of logical tensors in tensors that have the layout of the slices."""
        return [
            self._state.holding(prefix, p, first, last, tensor[place : place + last - first])
            for number, (part, tensor) in enumerate(zip(self.averaging.slices, tensors, strict=False))
            for p, first, last, place in self._contents(number, part)
        ]

    def checkpoint_bytes(self) -> int:
        more = [h for h in self._outer() if not self.grouping.number]
        if self.config.parallel.overlap:
            more += self._holdings("", [s.empty() for s in self.averaging.slices])
        return super().checkpoint_bytes() + sum(h.data.nbytes for h in more)

    def parts_to_load(self, manifest: Manifest) -> list[Part]:
        averaging, grouping = self.averaging, self.grouping
        averaging.reset()
        saved = manifest.values.get("local") or {}
        same_groups = self._is_same_grouping(manifest)
        prefix = self._prefix if same_groups and grouping.number else ""
        parts = super().parts_to_load(self._of_group(manifest, same_groups))
        parts = [_renamed(p, prefix) if p.spec.name.startswith(OPTIMIZER) else p for p in parts]
        for momentum in averaging.outer.momenta:
            momentum.zero_()
        ahead = same_groups and saved.get("ahead") and self.config.parallel.overlap
        averaging.ahead = [s.empty() for s in averaging.slices] if ahead else None
        for h in self._outer() + self._ahead():
            if h.name in manifest.tensors:
                parts += h.parts(h.data, 0, h.last - h.first)
        return parts + self._left_out.parts_to_load(manifest, self.device, same_ranks=same_groups)

    def _is_same_grouping(self, manifest: Manifest) -> bool:
        """Return whether the same number of groups wrote the checkpoint."""
        return (manifest.values.get("local") or {}).get("groups") == self.grouping.count

    def _of_group(self, manifest: Manifest, same_groups: bool) -> Manifest:
        """Return the manifest with the states of this group's optimizer under their plain names."""
        if not same_groups:
            return manifest
        number, prefix, tensors = self.grouping.number, self._prefix, dict(manifest.tensors)
        if number:
            states = {n.removeprefix(prefix): s for n, s in tensors.items() if n.startswith(prefix + OPTIMIZER)}
            tensors = {n: s for n, s in tensors.items() if not n.startswith(OPTIMIZER)}
            tensors |= {name: replace(spec, name=name) for name, spec in states.items()}
        return replace(manifest, tensors=tensors, values=manifest.values | manifest.value("replicas")[number])

    def finish_load(self, manifest: Manifest) -> None:
        same_groups = self._is_same_grouping(manifest)
        super().finish_load(self._of_group(manifest, same_groups))
        self.note = "" if same_groups else self.note
        if not same_groups and not self.note and any(name.startswith(OPTIMIZER) for name in manifest.tensors):
            self.note = f"{self.grouping.count} groups start from the one optimizer state in the checkpoint"
        self._left_out.finish_load()

    def close(self) -> None:
        super().close()
        for comm in (self._peers, self.meeting):
            comm.free()


def _renamed(part: Part, prefix: str) -> Part:
    """Return a part whose name has a prefix, as in a group's optimizer states in a checkpoint."""
    name = prefix + part.spec.name
    return Part(replace(part.spec, name=name), replace(part.piece, name=name), part.data)


class Local(Strategy):
    """Strategy of local SGD, DiLoCo, post-local SGD and hierarchical averaging, depending on the settings.

    Attributes:
        grouping: Division of the ranks into groups.
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        refuse_incompatible_settings(config)
        self.grouping = Grouping.of(world, config.parallel, config.train.batch)
        require_multiples(config.train.batch_sizes, self.grouping.count)

    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        grouping = self.grouping
        group = world.split(grouping.number, world.rank, label=f"group {grouping.number}")
        mesh = Mesh.of(group, axes_of(config.parallel.model_copy(update={"data": grouping.each})))
        part = mesh.number(*mesh.dividing(BLOCKS, LAYERS))
        everyone = world.split(part, grouping.number * group.size + mesh.replicas.rank, label="everyone")
        self.engine = partial(LocalEngine, world=world, everyone=everyone, grouping=grouping)
        workers = VirtualWorkers(mesh.readers.rank, mesh.readers.size, mesh.readers.size)
        evaluating = VirtualWorkers(everyone.rank, everyone.size, everyone.size)
        return GroupPlaces(mesh, workers, everyone, evaluating, grouping.number * grouping.each)

    def steps(self, trainer: Run) -> Iterator[Step]:
        config, engine = trainer.config, trainer.engine
        assert isinstance(engine, LocalEngine)
        workers = trainer.places.workers
        bounds = (split(size, self.grouping.count) for size in trainer.batch_sizes.after(trainer.step))
        require_samples(config, engine, trainer.places, {hi - lo for each in bounds for lo, hi in pairwise(each)})
        for notice in [engine.note, *notices(config, overlaps=engine.meeting.overlaps)]:
            if notice:
                trainer.say(notice)

        def share(size: int) -> tuple[int, int]:
            first, last = self.grouping.part(size)
            lo, hi = workers.share(last - first)
            return first + lo, first + hi

        with batches(config, share, trainer.data, trainer.position, trainer.device, step=trainer.step) as loader:
            coming = on_device(loader, trainer.device)
            while True:
                yield from self._averaging_round(trainer, engine, coming)

    def _averaging_round(self, trainer: Run, engine: LocalEngine, coming: Iterator[Batch]) -> list[Step]:
        """Take and return the steps up to the next one after which all groups synchronize."""
        first, last = trainer.step, end_of_round(trainer.config, trainer.step)
        began = time.perf_counter()
        done: list[Step] = []
        engine.is_joint = is_joint_step(trainer.config, first)
        if not engine.is_joint:
            engine.averaging.begin()
        for trainer.step in range(first, last):
            lo, hi = self.grouping.part(trainer.batch_sizes.size(trainer.step))
            step = _take_step(trainer, coming, hi - lo)
            if last > first + 1:  # a long round would keep many samples
                x, y = (t.new_empty((0, *t.shape[1:])) for t in (step.batch.x, step.batch.y))
                step.batch = replace(step.batch, x=x, y=y)
            step.began, step.together = began, step.number == last
            done.append(step)
        trainer.step = first
        with engine.clock.optimizer:
            engine.average_buffers()
            if not engine.is_joint:
                engine.averaging.end(final=last >= trainer.config.train.steps)
        _combine_groups(engine, done)
        for step in done:
            step.seconds = (time.perf_counter() - began) / len(done)
        done[-1].extras["between_groups_bytes"] = round(engine.bytes_sent() / len(done))
        return done

    def next_meeting(self, trainer: Run) -> int:
        return end_of_round(trainer.config, trainer.step)

    def describe(self) -> str:
        parallel, grouping = self.config.parallel, self.grouping
        groups = f"{grouping.count} groups of {grouping.each}" if grouping.each > 1 else f"{grouping.count} replicas"
        if parallel.local_steps == 1 and is_joint_step(self.config, 0):
            return f"local, {groups}, which average gradients in each step"
        words = [f"local, {groups}, averaged every {parallel.local_steps} steps"]
        if parallel.warm:
            words.append(f"from step {parallel.warm} on")
        if parallel.outer == "nesterov":
            words.append(f"nesterov (lr {parallel.outer_lr:g}, momentum {parallel.outer_momentum:g})")
        if parallel.overlap:
            words.append("one round late")
        if parallel.local_compression != "none":
            words.append(f"differences by {parallel.local_compression}")
        return ", ".join(words)


def is_joint_step(config: Config, step: int) -> bool:
    """Return True if all groups take the next step together, as ordinary data-parallel training.

    Args:
        config: The settings.
        step: Steps done.
    """
    parallel = config.parallel
    plain = parallel.outer == "average" and parallel.local_compression == "none"
    return step < parallel.warm or (parallel.local_steps == 1 and plain)


def end_of_round(config: Config, step: int) -> int:
    """Return the next step after which all groups synchronize.

    Args:
        config: The settings.
        step: Steps done.
    """
    if is_joint_step(config, step):
        return step + 1
    warm, each = config.parallel.warm, config.parallel.local_steps
    return min(warm + ((step - warm) // each + 1) * each, config.train.steps)


def notices(config: Config, *, overlaps: bool) -> list[str]:
    """Return remarks for the start of training, one line each.

    Args:
        config: The settings.
        overlaps: If true, communication makes progress in the background.
    """
    parallel, steps = config.parallel, config.train.steps
    if is_joint_step(config, steps):
        return []
    remarks = []
    if left := max(0, steps - parallel.warm) % parallel.local_steps:
        remarks.append(f"the last round has only {left} of the {parallel.local_steps} steps of parallel.local_steps")
    keys = {"checkpoint.every": config.checkpoint.every, "train.evaluate_every": config.train.evaluate_every}
    for key, every in keys.items():
        if every and every != "auto" and (every % parallel.local_steps or parallel.warm % parallel.local_steps):
            remarks.append(
                f"{key} {every}: what becomes due within a round of {parallel.local_steps} steps is done at "
                "the end of the round"
            )
    if parallel.overlap and not overlaps:
        remarks.append(
            "parallel.overlap: no core is free to average in the background, so averages are computed between rounds"
        )
    return remarks


def refuse_incompatible_settings(config: Config) -> None:
    """Raise InputError for settings that parallel.mode local does not support."""
    parallel = config.parallel
    if config.elastic.mode != "off":
        raise refusal(
            f"elastic.mode {config.elastic.mode} needs parallel.mode sync, in which all ranks are at the same "
            "step; set elastic.mode to off, and after a failure restart from the newest checkpoint"
        )
    if config.run.reproducible:
        raise refusal(
            "run.reproducible makes results the same on any number of ranks, but in parallel.mode local they "
            "depend on the number of groups; set one of the two to its default"
        )
    if parallel.overlap and parallel.local_steps == 1:
        raise refusal(
            "parallel.overlap averages during the steps of a round; set parallel.local_steps to more than 1, "
            "or set parallel.overlap to false"
        )
    if parallel.warm >= config.train.steps and parallel.warm:
        raise refusal(
            f"parallel.warm {parallel.warm} leaves none of train.steps {config.train.steps} for parallel.mode "
            "local; reduce parallel.warm, or use parallel.mode sync"
        )
    if parallel.local_compression in ("int8", "int4", "topk", "powersgd") and parallel.ranks_per_data > 1:
        raise refusal(
            f"parallel.local_compression {parallel.local_compression} rounds or drops different elements on each rank "
            "that has a copy of a parameter, and a divided model has copies; use fp16 or bf16"
        )


def _combine_groups(engine: LocalEngine, steps: Sequence[Step]) -> None:
    """Combine all groups' figures into those of the global batches, in one exchange. Collective over all groups.

    Losses and loss terms become means over the global batch. The norm becomes the mean over the groups with the same
    weights. A step counts as skipped if some group skipped it.
    """
    weight, terms = engine.grouping.weight, [f"{LOSS} of {name}" for name in engine.terms.names]
    mine: list[Any] = [
        [s.loss * weight, s.norm * weight, float(s.skipped), *(s.extras[term] * weight for term in terms)]
        for s in steps
    ]
    totals = torch.tensor(mine, dtype=torch.float64)
    engine.meeting.all_reduce(totals)
    for step, (loss, norm, skipped, *means) in zip(steps, totals.tolist(), strict=True):
        step.loss = loss if math.isfinite(loss) else math.nan
        step.norm, step.skipped = norm, skipped > 0
        step.extras |= zip(terms, means, strict=True)
