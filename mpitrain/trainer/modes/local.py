"""parallel.mode local: groups of ranks take steps by themselves, and average their parameters now and then.

    steps 1 ... warm              taken by all groups as one: synchronous training
    then periods of local_steps   each group takes them by itself, on its part of each global batch; then they average

The last period is as long as the steps that are left. With local_steps 1 and a plain average all steps are taken as
one, since an average of updates is the update with the average of gradients for plain SGD alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mpitrain.comm import Communicator
from mpitrain.config.batch_sizes import require_multiples
from mpitrain.config.settings import Config
from mpitrain.data import Batch
from mpitrain.data.on_device import on_device
from mpitrain.errors import refusal
from mpitrain.layout import split
from mpitrain.loose.averaging import Grouping
from mpitrain.mesh import Mesh
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.callback import Step
from mpitrain.trainer.data import GroupPlaces, batches
from mpitrain.trainer.modes.local_engine import Among, LocalEngine
from mpitrain.trainer.modes.synchronous import require_samples
from mpitrain.trainer.run import Run, Strategy


class Local(Strategy):
    """Local SGD, DiLoCo, post-local SGD and hierarchical averaging, as the settings say.

    Attributes:
        grouping: The groups; that of this rank.
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        refuse_what_does_not_go_together(config)
        self.grouping = Grouping.of(world, config.parallel, config.train.batch)
        require_multiples(config.train.batch_sizes, self.grouping.count)

    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        parallel, grouping = config.parallel, self.grouping
        group = world.split(grouping.number, world.rank, label=f"group {grouping.number}")
        assert group is not None
        mesh = Mesh.make(group, grouping.each, parallel.pipeline, parallel.tensor)
        number, p, t = grouping.number * grouping.each + mesh.data.rank, mesh.pipeline.rank, mesh.tensor.rank
        everyone = world.split(p * parallel.tensor + t, number, label="everyone")
        assert everyone is not None
        self.engine = partial(LocalEngine, among=Among(world, everyone, grouping, parallel))
        workers = VirtualWorkers.of(mesh.data, False, 0)
        evaluating = VirtualWorkers.of(everyone, False, 0)
        return GroupPlaces(mesh, workers, everyone, evaluating, grouping.number * grouping.each)

    def steps(self, trainer: Run) -> Iterator[Step]:
        config, engine = trainer.config, trainer.engine
        assert isinstance(engine, LocalEngine)
        workers = trainer.places.workers
        bounds = (split(size, self.grouping.count) for size in trainer.batch_sizes.after(trainer.step))
        require_samples(config, engine, workers, {hi - lo for each in bounds for lo, hi in pairwise(each)})
        for notice in [engine.note, *notices(config, trainer.step, overlaps=engine.meeting.overlaps)]:
            if notice:
                trainer.say(notice)

        def share(size: int) -> tuple[int, int]:
            first, last = self.grouping.part(size)
            lo, hi = workers.share(last - first)
            return first + lo, first + hi

        start = trainer.position
        with batches(config, share, trainer.data, start, trainer.device, step=trainer.step) as loader:
            coming = on_device(loader, trainer.device)
            while True:
                yield from self._period(trainer, engine, coming)

    def _period(self, trainer: Run, engine: LocalEngine, coming: Iterator[Batch]) -> list[Step]:
        """Take the steps up to the next that ends with all groups together."""
        first, last = trainer.step, end_of_period(trainer.config, trainer.step)
        began = time.perf_counter()
        done: list[Step] = []
        engine.begin_period(together=as_one(trainer.config, first))
        for trainer.step in range(first, last):
            engine.clock.step(trainer.step + 1)
            lo, hi = self.grouping.part(trainer.batch_sizes.size(trainer.step))
            trainer.samples = hi - lo
            with engine.clock.data:
                batch = next(coming)
            step = trainer.train_step(batch)
            step.batch = step.batch if last == first + 1 else _numbers_of(step.batch)
            step.began, step.together = began, step.number == last
            done.append(step)
        trainer.step = first
        with engine.clock.optimizer:
            engine.end_period(final=last >= trainer.config.train.steps)
        _total(engine, done)
        for step in done:
            step.seconds = (time.perf_counter() - began) / len(done)
        done[-1].extras["between_groups_bytes"] = round(engine.bytes_sent() / len(done))
        return done

    def next_meeting(self, trainer: Run) -> int:
        return end_of_period(trainer.config, trainer.step)

    def describe(self) -> str:
        parallel, grouping = self.config.parallel, self.grouping
        groups = f"{grouping.count} groups of {grouping.each}" if grouping.each > 1 else f"{grouping.count} replicas"
        if parallel.local_steps == 1 and as_one(self.config, 0):
            return f"local, {groups}, which average gradients in each step"
        words = [f"local, {groups}, averaged every {parallel.local_steps} steps"]
        if parallel.warm:
            words.append(f"from step {parallel.warm} on")
        if parallel.outer == "nesterov":
            words.append(f"nesterov (lr {parallel.outer_lr:g}, momentum {parallel.outer_momentum:g})")
        if parallel.overlap:
            words.append("one period late")
        if parallel.local_compression != "none":
            words.append(f"differences by {parallel.local_compression}")
        return ", ".join(words)


def as_one(config: Config, step: int) -> bool:
    """Return whether all groups take the step after `step` steps as one."""
    parallel = config.parallel
    plain = parallel.outer == "average" and parallel.local_compression == "none"
    return step < parallel.warm or (parallel.local_steps == 1 and plain)


def end_of_period(config: Config, step: int) -> int:
    """The step after which all groups come together next, when `step` steps are done."""
    if as_one(config, step):
        return step + 1
    warm, each = config.parallel.warm, config.parallel.local_steps
    return min(warm + ((step - warm) // each + 1) * each, config.train.steps)


def notices(config: Config, step: int, *, overlaps: bool) -> list[str]:
    """Return remarks for the start of training after `step` steps, a line each.

    overlaps: Whether what is begun in the background makes progress.
    """
    parallel, steps = config.parallel, config.train.steps
    if as_one(config, steps):
        return []
    found = []
    if left := max(0, steps - parallel.warm) % parallel.local_steps:
        found.append(f"the last period has {left} of parallel.local_steps {parallel.local_steps} steps")
    keys = {"checkpoint.every": config.checkpoint.every, "train.evaluate_every": config.train.evaluate_every}
    for key, every in keys.items():
        if every and every != "auto" and (every % parallel.local_steps or parallel.warm % parallel.local_steps):
            found.append(
                f"{key} {every}: what is due within a period of {parallel.local_steps} steps is done at its end"
            )
    if parallel.overlap and not overlaps:
        found.append("parallel.overlap: no core is free to average in the background, so it is done between periods")
    return found


def refuse_what_does_not_go_together(config: Config) -> None:
    """Raise InputError for settings that parallel.mode local does not go with."""
    parallel = config.parallel
    if config.elastic.mode != "off":
        raise refusal(
            f"elastic.mode {config.elastic.mode} is for parallel.mode sync, where all ranks are at the same step; set "
            "it to off, and restart from the newest checkpoint"
        )
    if config.run.reproducible:
        raise refusal(
            "run.reproducible makes results the same on any number of ranks, and in parallel.mode local they depend "
            "on the number of groups; set one of them to its default"
        )
    if parallel.overlap and parallel.local_steps == 1:
        raise refusal(
            "parallel.overlap averages while the steps of a period are taken; make parallel.local_steps more than 1, "
            "or set parallel.overlap to false"
        )
    if parallel.warm >= config.train.steps and parallel.warm:
        raise refusal(
            f"parallel.warm {parallel.warm} leaves none of train.steps {config.train.steps} for parallel.mode local; "
            "make it smaller, or use parallel.mode sync"
        )
    if parallel.local_compression in ("topk", "powersgd") and parallel.pipeline * parallel.tensor > 1:
        raise refusal(
            f"parallel.local_compression {parallel.local_compression} leaves out other things of a parameter on each "
            "rank that has a copy of it, and a model that is cut has copies; use fp16 or bf16"
        )


def _numbers_of(batch: Batch) -> Batch:
    """The batch without its samples, of which a long period would keep many."""
    return replace(batch, x=batch.x.new_empty((0, *batch.x.shape[1:])), y=batch.y.new_empty((0, *batch.y.shape[1:])))


def _total(engine: LocalEngine, steps: Sequence[Step]) -> None:
    """Make each group's figures those of the global batches, by one exchange. Collective over all groups.

    The loss becomes the mean over the global batch, the norm the groups' mean with the same weights, and a step counts
    as skipped where some group skipped it.
    """
    weight = engine.among.grouping.weight
    mine: list[Any] = [[s.loss * weight, s.norm * weight, float(s.skipped)] for s in steps]
    totals = torch.tensor(mine, dtype=torch.float64)
    engine.meeting.all_reduce(totals)
    for step, (loss, norm, skipped) in zip(steps, totals.tolist(), strict=True):
        step.loss = loss if math.isfinite(loss) else math.nan
        step.norm, step.skipped = norm, skipped > 0
