"""The trainer, which turns a configuration into a trained model on all ranks of a world.

    trainer = mt.Trainer("train.toml", callbacks=[MyCallback()])
    trainer.fit()

`fit` locks the run folder and calls `train`, which opens the data, makes the model, restores the state and takes the
steps. To train differently, override `train_step`, `evaluate`, `save`, `resume`, or the methods that they call. To
observe training without changing it, write a `Callback`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import Store
from mpitrain.choices import Mode
from mpitrain.comm import Communicator, carry_device_memory, init, set_timeout
from mpitrain.comm.memory import device as devices
from mpitrain.config.settings import Config, ConfigSource
from mpitrain.data import Batch, Dataset
from mpitrain.data.folders import agree_on_errors
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE
from mpitrain.layout.mesh import BLOCKS, PARTS
from mpitrain.loading import TASK, build_task, task_values
from mpitrain.models.task import Task
from mpitrain.monitor.memory import node_memory_bytes
from mpitrain.planner.out_of_memory import ADVICE, MemoryAdvice
from mpitrain.trainer import elastic
from mpitrain.trainer.assemble import assemble, with_shares
from mpitrain.trainer.data import (
    class_weights,
    counts_of,
    microbatch_size,
    open_data,
    seed_worker,
    weigh_step,
    with_microbatch,
)
from mpitrain.trainer.device import choose_device, explain_out_of_memory, set_threads
from mpitrain.trainer.engine import Microbatch
from mpitrain.trainer.folder import RunFolder
from mpitrain.trainer.held_out.measuring import LOSS, evaluate_samples, meter_of
from mpitrain.trainer.modes.groups import Local, Synchronous
from mpitrain.trainer.modes.served import Served
from mpitrain.trainer.optimizing import ParameterRoles, make_optimizer, next_rate, schedule_of
from mpitrain.trainer.recording.arithmetic import UsefulArithmetic
from mpitrain.trainer.recording.console import Console, EventRecords
from mpitrain.trainer.recording.energy import EnergyRecords
from mpitrain.trainer.recording.records import RankRecords, Records, SampleIds
from mpitrain.trainer.recording.starting import StartTimes
from mpitrain.trainer.recording.timeline import TimelineRecorder
from mpitrain.trainer.run import Callback, Restored, Run, Step, Strategy
from mpitrain.trainer.saving import SaveSchedule, is_due, load_newest, require_resume_checkpoint, saves_after
from mpitrain.trainer.settings import with_planned_layout
from mpitrain.trainer.stopping import BestCheckpoint, EarlyStopping, LearningCheck, LowerRate, StopInTime
from mpitrain.trainer.threads import CompareThreads

STRATEGIES: dict[Mode, type[Strategy]] = {"sync": Synchronous, "server": Served, "local": Local}


class Trainer(Run):
    """Trains a model as a configuration says. Its construction and `fit` are collective over the ranks of `world`.

    `Run` documents the attributes and methods that callbacks and strategies use.

    Args:
        config: Settings, nested values, the path of a TOML file, or a function that returns one of these. Rank 0 reads
            the file or calls the function for all ranks.
        callbacks: Callbacks of the user. At each event, some of the built-in callbacks are called before and some after
            them.
        world: Ranks that train; None for all ranks of the job.

    Attributes:
        roles: Roles of the parameters; set by `train`.
        met: Last step after which all ranks synchronized.
        saving: Schedule of the checkpoints.
        best: Callback that requests a checkpoint when its figure is the best so far.

    Raises:
        InputError: On all ranks, if a setting is invalid.
    """

    roles: ParameterRoles
    met = 0

    def __init__(
        self, config: ConfigSource, callbacks: Sequence[Callback] = (), *, world: Communicator | None = None
    ) -> None:
        start = StartTimes()
        self.world = world if world is not None else init()
        # rank 0 reads them; the other ranks learn which settings were set explicitly
        requested = Config.from_dict(self.world.on_root(lambda: Config.of(config).model_dump(exclude_unset=True)))
        self.device, self.devices = choose_device(requested.run.device, self.world)
        self.config = with_microbatch(with_planned_layout(requested, self.world, self.device), self.world.size)
        self.strategy = STRATEGIES[self.config.parallel.mode](self.config, self.world)
        self.folder = RunFolder(self.config, self.world)
        self.print = partial(print, flush=True)
        learning, self.saving, self.best = LearningCheck(), SaveSchedule(self.config), BestCheckpoint()
        records = Records()
        last = [records, self.saving, EventRecords(start, records), RankRecords(), TimelineRecorder(self.config)]
        if type(self).train_step is Trainer.train_step:
            last.append(CompareThreads())
        first = [
            start,
            StopInTime(),
            learning,
            EarlyStopping(),
            LowerRate(),
            self.best,
            SampleIds(),
            UsefulArithmetic(),
            EnergyRecords(),
        ]
        self.callbacks = [*first, *callbacks, Console(learning), *last]
        self.batch_sizes = self.config.train.batch_sizes
        self.samples = self.batch_sizes.size(0)
        self.figures = {}
        self.own_model = type(self).make_model is not Trainer.make_model

    # -- the recipe

    def fit(self) -> int:
        """Train until all steps are done, or until something stops the run earlier. Collective.

        With elastic.mode shrink, training continues without ranks that die.

        Returns:
            Exit code of the run: 0 if all steps are done, 75 if it stopped earlier, was saved and can be resumed.

        Raises:
            MpitrainError: With one line that says what is wrong and how to fix it.
        """
        set_timeout(self.config.comm.timeout)
        carry_device_memory(self.config.comm.device)
        set_threads(self.world, self.config.run.reproducible)
        if self.config.elastic.mode == "shrink":
            return elastic.fit(self)
        with self.working():
            return self.train()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Lock the run folder and set the callbacks up; release both at the end of the block. Collective."""
        with self.folder:
            self.config, self.began = self.folder.config, time.monotonic()
            self.call(lambda callback: callback.setup(self))
            try:
                yield
            finally:
                self.call(lambda callback: callback.teardown(self), reverse=True)

    def train(self) -> int:
        """Train while the run folder is locked. Collective.

        Returns:
            Exit code of `fit`.
        """
        self.stop_reason, self._ending, self._ended = "", False, False
        try:
            with self._explaining():
                self.prepare()
            if not self.folder.is_locked:
                require_resume_checkpoint(self)
                self.folder.make()
                self.config = self.strategy.config = self.folder.config
            with self._explaining(), self.open_store() as self.store:
                self.resume()
                self.make_room()
                self.call(lambda callback: callback.on_fit_start(self))
                self.start = self.step if self.start is None else self.start
                with closing(self.strategy.steps(self)) as steps:  # type: ignore[type-var]
                    while self.step < self.config.train.steps and not self._ending:
                        self.do_step(steps)
                self.call(lambda callback: callback.on_fit_end(self), reverse=True)
        except BaseException as caught:
            error = caught
            self.call(lambda callback: callback.on_exception(self, error), reverse=True)
            raise
        return EXIT_DONE if self.done else EXIT_REQUEUE

    def do_step(self, steps: Iterator[Step]) -> None:
        """Take the next step, then evaluate, save and call the callbacks as they are due. Collective."""
        step = next(steps)
        self.step, self.position = step.number, self.position + self.batch_sizes.size(step.number - 1)
        self.folder.step, self.skipped = self.step, self.skipped + step.skipped
        self.call(lambda callback: callback.on_update(self, step))
        if step.together:
            self._agree_to_stop()
        step.met = time.monotonic()
        step.seconds = step.seconds or time.perf_counter() - step.began
        if step.together and (self.last_step or is_due(self.met, self.step, self.config.train.evaluate_every)):
            with self.engine.clock.evaluation:
                self.figures = {}
                step.held_out_loss = loss = self.evaluate()
            if loss is not None:
                self.figures[LOSS] = loss
                self.call(lambda callback: callback.on_evaluate(self, loss))
        self.call(lambda callback: callback.on_step_end(self, step))
        if step.together and (self.last_step or self.best.due or self.saving.due(self.met, self.step)):
            with self.engine.clock.checkpoint:
                folder = self.save()
            self.call(lambda callback: callback.on_save(self, folder))
        if step.together:
            self.met = self.step
        self.call(lambda callback: callback.on_step_done(self, step))

    # -- parts of the recipe, which subclasses may override

    def prepare(self) -> None:
        """Open the data, make the model and its optimizer, and divide them over the ranks. Collective."""
        self.data, self.held_out = self.open_data()
        config = self._count_steps()
        torch.manual_seed(config.run.seed)
        task = self.make_model()
        self.class_weights = class_weights(config, task, self.data, self.world)
        counts = counts_of(config, task, self.data.description)
        self.roles = ParameterRoles.of(config.optim, task.module)
        places = self.strategy.places(config, self.world)
        self.places = with_shares(config, places, task, self.data, self.device)
        self.engine, self.parameters = assemble(
            config,
            self.mesh,
            task,
            self.data,
            self.make_optimizer,
            device=self.device,
            make_engine=self.strategy.engine,
        )
        self.engine.counted = counts
        self.meter = meter_of(config, task, self.data.description, self.engine)
        self.schedule = schedule_of(config.optim, config.train.steps)

    def _count_steps(self) -> Config:
        """Set train.steps to the steps left of train.epochs, if that is set, and return the settings."""
        train = self.config.train
        if train.epochs:
            left = max(0, math.ceil(train.epochs * len(self.data)) - self.position)
            steps = self.batch_sizes.steps(self.batch_sizes.before(self.step) + left - 1) + 1  # the fewest for all
            self.config = self.config.model_copy(update={"train": train.model_copy(update={"steps": steps})})
            self.strategy.config = self.folder.config = self.config
        return self.config

    def open_data(self) -> tuple[Dataset, Dataset | None]:
        """Return the training and the held-out samples (see `data.open_data`). Collective."""
        return open_data(self.config, self.world)

    def make_model(self) -> Task:
        """Return the whole model and its loss, equal on every rank.

        Torch's generator has the same seed on all ranks when this is called. With model.base, every rank reads the base
        model's weights, and the call is collective.
        """
        section, about = self.config.model, self.data.description
        if not section.base:
            return build_task(section, about)
        return agree_on_errors(self.world, lambda: build_task(section, about))

    def make_optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's part of the model, whose parameters are `named`."""
        return make_optimizer(self.config.optim, named, self.roles)

    def open_store(self, world: Communicator | None = None) -> Store:
        """Open the checkpoints of the run for the ranks of `world` (default: the training ranks).

        Collective over them.
        """
        section = self.config.checkpoint
        return Store(
            self.folder.checkpoints,
            world or self.world,
            section.keep,
            files=section.files,
            local=section.local,
            redundancy=section.redundancy,
            flush_every=section.flush_every,
        )

    def train_step(self, batch: Batch) -> Step:
        """Compute the gradients of a batch and update the parameters.

        Collective over this rank's group (see `GroupPlaces`).

        Args:
            batch: This rank's share of the group's part of the global batch; its size may differ between ranks.

        Returns:
            The step, numbered `self.step + 1`, with the mean loss over the group's part of the batch. If all ranks are
            one group, this is the mean over the global batch.
        """
        config, workers, places, size = self.config, self.places.workers, self.places, self.samples
        microbatch = microbatch_size(config, self.mesh, size)

        def divide(batch: Batch) -> list[list[Microbatch]]:
            x, y = self.mesh.take(batch.x, batch.y)
            shares = workers.microbatches(size, microbatch)  # a worker of parameter servers reads a part of its share
            return [[(x[lo:hi], y[lo:hi]) for lo, hi in share if lo < len(x)] for share in shares]

        place = self.mesh.number(*self.mesh.dividing(PARTS, BLOCKS))

        def seed(worker: int, ahead: int = 0) -> None:
            number = places.first_worker + workers.local_workers[worker] + place * places.evaluating.count
            seed_worker(config.run.seed, self.step + ahead, number)

        if self.class_weights is not None:
            weigh_step(self.class_weights, batch.y, self.mesh.readers)
        upcoming = None
        if self.upcoming is not None and type(self).train_step is Trainer.train_step:  # others may change the batch
            upcoming = [m for share in divide(self.upcoming) for m in share], partial(seed, 0, 1)
        if self.engine.layer_drop is not None:
            self.engine.sharding.reducer.dropped = self.engine.layer_drop.draw(config.run.seed, self.step)
        losses = self.engine.forward_backward(
            divide(batch),
            size * self.mesh.parts.size,
            rounds=workers.rounds(size, microbatch),
            before=seed,
            upcoming=upcoming,
        )
        lr = next_rate(self.schedule, self.engine.optimizer, self.step)
        losses = torch.cat([losses[:, None], self.engine.term_sums], 1)
        # no collective operation may follow the update: see elastic
        totals = workers.begin_totals(self.mesh.replicas, losses)
        result = self.engine.step(lr)
        past, every = self.step - config.train.average_start, config.train.average_every
        if self.engine.average is not None and not result.skipped and past >= 0 and past % every == 0:
            self.engine.average.add()
        loss, *terms = totals()
        extras = {f"{LOSS} of {name}": term for name, term in zip(self.engine.terms.names, terms, strict=True)}
        return Step(self.step + 1, batch, loss, lr, result.norm, result.skipped, extras=extras)

    def evaluate(self) -> float | None:
        """Return the mean loss of the held-out samples, each counted once; None if there are none. Collective.

        Also sets `figures`, the loss and the metrics by name.
        """
        if self.held_out is None:
            return None
        with self.engine.averaged():
            self.figures = evaluate_samples(self.config, self.places, self.engine, self.held_out, self.meter)
        return self.figures[LOSS]

    def save(self) -> Path:
        """Write a checkpoint, in the background if checkpoint.background is set, and return its folder. Collective."""
        last = self.last_step
        parts, rest = self.engine.parts()
        background = self.config.checkpoint.background and not last
        durable = last or self.best.due
        folder = self.store.save(self.step, parts, self.state() | rest, background=background, durable=durable)
        self.saved = True
        return folder

    def state(self) -> dict[str, Any]:
        """Return the values stored with the tensors: position in the data, model description and callbacks' states."""
        about = self.data.description
        state: dict[str, Any] = {"position": self.position, "data": about.identity}
        state[TASK] = task_values(self.config.model, about)
        for callback in self.callbacks:
            state |= callback.state(self)
        return state

    def resume(self) -> None:
        """Restore the checkpoint that checkpoint.resume names, or begin at step 0. Collective.

        Raises:
            InputError: If the path is not a checkpoint, or its run used other data.
            CheckpointError: If there are checkpoints, but all of them are incomplete or damaged.
        """
        never = self.config.checkpoint.resume == "never"
        self.store.prepare(set_aside=never)
        states = (callback.restore(self) for callback in self.callbacks)
        restored = next((state for state in states if state is not None), None)
        if restored is None:
            if self.store.remark:
                self.say(self.store.remark)
            restored = Restored(0, {}, own=False) if never else load_newest(self)
        self.step = self.folder.step = restored.step
        self.position = restored.values.get("position", 0)
        self.met, self.resumed_step = self.step, restored.step if restored.own else None
        if self.config.train.epochs and self.position != self.batch_sizes.before(self.step):  # batch sizes changed
            config = self._count_steps()
            self.schedule = schedule_of(config.optim, config.train.steps)
        values = restored.values
        self.call(lambda callback: callback.on_restore(self, values))

    # -- internals

    def _explaining(self) -> AbstractContextManager[None]:
        """Return a context manager that explains failed allocations, with the settings that would help."""

        def advice() -> str:
            if self.own_model:
                return ADVICE
            on, world = self.device, self.world
            limit = devices.total_memory_bytes(on) if devices.is_accelerator(on) else node_memory_bytes()
            ranks, about, count = (world.num_nodes, world.size), self.data.description, devices.count(on.type)
            return MemoryAdvice(self.config, about, *ranks, limit, on.type, count).text()

        return explain_out_of_memory(on=self.device, engine=lambda: getattr(self, "engine", None), advice=advice)

    def make_room(self) -> None:
        """Rename damaged checkpoints whose folders the run will write again, and check the free space. Collective.

        Raises:
            InputError: On all ranks, if a folder cannot be moved, or the free space is too small.
        """
        for moved in self.store.make_way(self.step):
            self.say(moved)
        self.store.require_room(self.engine.checkpoint_bytes(), saves_after(self.step, self.config))

    def _agree_to_stop(self) -> None:
        """End training if any rank asked for it, and raise a background save's error if any rank has one.

        Collective.
        """
        flags = torch.tensor([bool(self.stop_reason), self.store.failing], dtype=torch.uint8)
        self.world.all_reduce(flags, "max")
        stop, failing = flags.tolist()
        if stop:
            self._ending = True
            self.stop_reason = self.stop_reason or "another rank requested it"
            self.say(f"stopping after step {self.step}: {self.stop_reason}")
        if failing:
            self.store.finish()
