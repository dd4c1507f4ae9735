"""The trainer: from a configuration to a trained model, by the ranks of a world together.

    trainer = mt.Trainer("train.toml", callbacks=[MyCallback()])
    trainer.fit()

`fit` holds the run folder and calls `train`, which is the recipe: data, model, state, steps. To train otherwise,
override `train_step`, `evaluate`, `save` or `resume`, or what they are made of; what only looks on is a `Callback`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.checkpoint import Store
from mpitrain.comm import Communicator, carry_device_memory, init, set_timeout
from mpitrain.config.learning_rate import LearningRate
from mpitrain.config.settings import Config
from mpitrain.data import Batch, Dataset
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, refusal
from mpitrain.mesh import Mesh
from mpitrain.models import build_model
from mpitrain.models.task import Task
from mpitrain.trainer import elastic
from mpitrain.trainer.assemble import assemble
from mpitrain.trainer.callback import Callback, Restored, Step
from mpitrain.trainer.console import Console
from mpitrain.trainer.data import microbatch_size, microbatches, open_data, seed_worker
from mpitrain.trainer.device import choose, full_told
from mpitrain.trainer.due import due, saves_after
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.evaluation import mean_loss
from mpitrain.trainer.folder import RunFolder
from mpitrain.trainer.fruitless import LearningCheck
from mpitrain.trainer.optimizer import make_optimizer
from mpitrain.trainer.planned import planned
from mpitrain.trainer.records import Records, SampleIds
from mpitrain.trainer.saving import SaveSchedule
from mpitrain.trainer.settings import config_of, shared_config
from mpitrain.trainer.stopping import StopInTime
from mpitrain.trainer.strategies import strategy_of
from mpitrain.trainer.strategy import GroupPlaces


class Trainer:
    """Trains a model as a configuration says. Collective over the ranks of `world` (default: all of the job).

    config, world, device: what is to be done, by whom, and on what this rank computes. devices: of all ranks, in words.
    folder: the run's folder, with its settings, metrics, logs and checkpoints.
    callbacks: in the order in which they are called; at the end of training and after it in the reverse order.

    strategy: what differs between the values of parallel.mode.

    There once `train` has made them: data, held_out (data sets; None where nothing is held out), places (this rank's
    along the axes of parallelism, and how batches are divided), engine (model, loss, optimizer and precision on this
    rank), schedule (of the learning rate), store (the checkpoints), parameters (of the whole model).

    step: steps done; while a step is taken, those before it. position: samples of the run's order that they took.
    samples: of a step's batch that this rank's group trains on. resumed_step: the step of this run that the state was
    loaded from; None where it is a run from the start. met: the last step after which all ranks came together. saved:
    whether this job has written a checkpoint. saving: when it writes the next one.
    """

    data: Dataset
    held_out: Dataset | None
    places: GroupPlaces
    engine: Engine
    schedule: LearningRate
    store: Store
    parameters: int

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path,
        callbacks: Sequence[Callback] = (),
        *,
        world: Communicator | None = None,
    ) -> None:
        """config: the settings, nested values of them, or the path of a TOML file, which rank 0 reads.

        Raises InputError on all ranks for settings that are wrong.
        """
        self.world = world if world is not None else init()
        asked = shared_config(self.world, lambda: config_of(config))
        place = choose(asked.run.device, self.world)
        self.device, self.devices = place.device, place.text
        self.config = planned(asked, self.world, self.device)
        self.strategy = strategy_of(self.config, self.world)
        self.folder = RunFolder(self.config, self.world)
        self.print: Callable[[str], None] = partial(print, flush=True)
        learning, self.records, self.saving = LearningCheck(), Records(), SaveSchedule(self.config)
        self.callbacks = [StopInTime(), learning, SampleIds(), *callbacks, Console(learning), self.records, self.saving]
        self.step = self.position = self.met = 0
        self.samples = self.config.train.batch
        self.resumed_step: int | None = None
        self.saved = False
        self._stop, self._ending = "", False  # why this rank is to stop; whether all ranks agreed on it

    # -- the recipe

    def fit(self) -> int:
        """Train until all steps are done, or there is reason to stop earlier. Collective.

        With elastic.mode shrink it goes on without ranks that die.

        Returns:
            The exit code of the run: 0 when all steps are done, 75 when it stopped earlier, saved and can go on.

        Raises:
            MpitrainError: with one line of what is wrong and how to mend it.
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
        """Hold the run folder, and have the callbacks set up, inside. Collective."""
        with self.folder:
            self.call(lambda callback: callback.setup(self))
            try:
                yield
            finally:
                self.call(lambda callback: callback.teardown(self), reverse=True)

    def train(self) -> int:
        """What `fit` does inside of the run folder; returns its exit code."""
        self._stop, self._ending = "", False
        try:
            with full_told(self.device):
                self.prepare()
            with full_told(self.device), self.open_store() as self.store:
                self.resume()
                self.make_room()
                self.call(lambda callback: callback.on_fit_start(self))
                with closing(self.strategy.steps(self)) as steps:  # type: ignore[type-var]
                    while self.step < self.config.train.steps and not self._ending:
                        self.do_step(steps)
                self.call(lambda callback: callback.on_fit_end(self), reverse=True)
        except BaseException as caught:
            error = caught
            self.call(lambda callback: callback.on_exception(self, error), reverse=True)
            raise
        return EXIT_DONE if self.step >= self.config.train.steps else EXIT_REQUEUE

    def do_step(self, steps: Iterator[Step]) -> None:
        """The next step with all that hangs on it."""
        step = next(steps)
        self.step, self.position = step.number, self.position + self.config.train.batch
        self.folder.step = self.step
        self.call(lambda callback: callback.on_update(self, step))
        if step.together:
            self._agree_to_stop()
        step.met = time.monotonic()
        step.seconds = step.seconds or time.perf_counter() - step.began
        if step.together and (self.last_step or due(self.met, self.step, self.config.train.evaluate_every)):
            step.held_out_loss = loss = self.evaluate()
            if loss is not None:
                self.call(lambda callback: callback.on_evaluate(self, loss))
        self.call(lambda callback: callback.on_step_end(self, step))
        if step.together and (self.last_step or self.saving.due(self.met, self.step)):
            folder = self.save()
            self.call(lambda callback: callback.on_save(self, folder))
        if step.together:
            self.met = self.step

    # -- its parts, to be overridden

    def prepare(self) -> None:
        """Open the data, and make the model, its optimizer and their places on the ranks. Collective."""
        config = self.config
        self.data, self.held_out = open_data(config, self.world)
        torch.manual_seed(config.run.seed)
        task = self.make_model()
        self.places = self.strategy.places(config, self.world)
        self.engine, self.parameters = assemble(
            config,
            self.mesh,
            task,
            self.data,
            self.make_optimizer,
            device=self.device,
            make_engine=self.strategy.engine,
        )
        self.schedule = LearningRate.of(config.optim, config.train.steps)

    def make_model(self) -> Task:
        """The whole model and its loss, the same on every rank: torch's generator was seeded alike just before."""
        return build_model(self.config.model, self.data.description)

    def make_optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer of this rank's part of the model. named: its parameters."""
        return make_optimizer(self.config.optim, named)

    def open_store(self, world: Communicator | None = None) -> Store:
        """The checkpoints of the run, for the ranks of `world` (default: those that train). Collective over them."""
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
        """Forward, backward and update. Collective over the ranks that take each step as one: the group.

        Args:
            batch: this rank's share of the group's part of the global batch; its sizes may differ between ranks.

        Returns:
            The step, numbered `self.step + 1`, with the mean loss over that part: where all ranks are one group, over
            the global batch.
        """
        config, workers, places, size = self.config, self.places.workers, self.places, self.samples
        microbatch = microbatch_size(config, self.mesh, size)
        shares = [microbatches(batch.x[lo:hi], batch.y[lo:hi], microbatch) for lo, hi in workers.within(size)]

        def seed(worker: int) -> None:
            number = places.first_worker + workers.own[worker] + self.mesh.pipeline.rank * places.evaluating.count
            seed_worker(config.run.seed, self.step, number)

        rounds = workers.rounds(size, microbatch)
        losses = self.engine.forward_backward(shares, size, rounds=rounds, before=seed)
        lr = self.schedule.rate(self.step)
        loss = workers.begin_total(self.mesh.data, losses)  # nothing collective may come after the update: see elastic
        result = self.engine.step(lr)
        return Step(self.step + 1, batch, loss(), lr, result.norm, result.skipped)

    def evaluate(self) -> float | None:
        """The mean loss of held-out samples, each counted once; None where none are held out. Collective."""
        if self.held_out is None:
            return None
        return mean_loss(self.config, self.places, self.engine, self.held_out)

    def save(self) -> Path:
        """Write a checkpoint, in the background if checkpoint.background says so; returns its folder. Collective."""
        last = self.last_step
        parts, rest = self.engine.parts()
        background = self.config.checkpoint.background and not last
        folder = self.store.save(self.step, parts, self.state() | rest, background=background, durable=last)
        self.saved = True
        return folder

    def state(self) -> dict[str, Any]:
        """What is kept with the model and the optimizer: the place in the data, and each callback's `state`."""
        state: dict[str, Any] = {"position": self.position, "data": self.data.description.identity}
        for callback in self.callbacks:
            state |= callback.state(self)
        return state

    def resume(self) -> None:
        """Go on from what checkpoint.resume names, or from the start. Collective.

        Raises:
            InputError: for a path that is no checkpoint, or one of other data.
            CheckpointError: where there are checkpoints and none of them is whole.
        """
        never = self.config.checkpoint.resume == "never"
        self.store.prepare(set_aside=never)
        given = (callback.restore(self) for callback in self.callbacks)
        restored = next((state for state in given if state is not None), None)
        if restored is None:
            if self.store.remark:
                self.say(self.store.remark)
            restored = Restored(0, {}, own=False) if never else self._load_newest()
        self.step = self.folder.step = restored.step
        self.position = restored.values.get("position", 0)
        self.met, self.resumed_step = self.step, restored.step if restored.own else None
        values = restored.values
        self.call(lambda callback: callback.on_restore(self, values))

    # -- for callbacks

    @property
    def tokens(self) -> int:
        """Tokens of a sample; 0 where samples are not tokens."""
        description = self.data.description
        return description.x_shape[0] if description.kind == "tokens" else 0

    @property
    def last_step(self) -> bool:
        """Whether the step that was done last is to be the last one."""
        return self._ending or self.step >= self.config.train.steps

    @property
    def mesh(self) -> Mesh:
        """The ranks that take each step as one."""
        return self.places.mesh

    @property
    def stop_asked(self) -> bool:
        """Whether this rank has reason to stop, on which all ranks agree when they come together."""
        return bool(self._stop)

    def request_stop(self, reason: str) -> None:
        """End training when the ranks come together: after this step, if called in its `on_update`.

        One rank's request is enough. reason: a few words, for people.
        """
        self._stop = self._stop or reason

    def say(self, text: str) -> None:
        """Log a line, and have rank 0 show it."""
        self.folder.log.info("%s", text)
        if self.world.rank == 0:
            self.print(text)

    def call(self, event: Callable[[Callback], object], *, reverse: bool = False) -> None:
        """Let every callback know of an event. reverse: the last one first, so that what begins first ends last."""
        for callback in reversed(self.callbacks) if reverse else self.callbacks:
            event(callback)

    def let_go(self) -> None:
        """Drop data, model and checkpoints, made for ranks that are not there any more; `train` makes them anew."""
        for name in ("data", "held_out", "places", "engine", "store"):
            vars(self).pop(name, None)

    # -- inside

    def make_room(self) -> None:
        """Raise InputError on all ranks where something is in the way of the checkpoints to come, or room lacks."""
        for moved in self.store.make_way(self.step):
            self.say(moved)
        self.store.require_room(self.engine.checkpoint_bytes(), saves_after(self.step, self.config))

    def _agree_to_stop(self) -> None:
        """Whether any rank is to stop, and whether a save in the background failed anywhere, which is raised here."""
        stop, failing = any_rank(self.world, bool(self._stop), self.store.failing)
        if stop:
            self._ending = True
            self._stop = self._stop or "another rank was asked to"
            self.say(f"stopping after step {self.step}: {self._stop}")
        if failing:
            self.store.finish()

    def _load_newest(self) -> Restored:
        """The state of the newest checkpoint that is whole, loaded; of the start, where there is none."""
        resume, reasons = self.config.checkpoint.resume, []
        candidates = self.store.newest_first() if resume == "auto" else self.store.at(Path(resume))
        for folder in candidates:
            try:
                manifest = self.store.load(folder, self.engine.parts_to_load)
                of, _ = manifest.value("data"), manifest.value("position")
            except CheckpointError as error:
                reasons.append(str(error))
                self.say(f"passed over {folder}: {error}")
                continue
            if of not in (None, self.data.description.identity):  # None: imported weights
                raise refusal(
                    f"{folder} was trained on another data set than data.path {self.config.data.path!r}; give that "
                    "one, or another run.dir"
                )
            self.engine.finish_load(manifest)
            for repaired in self.store.repairs:
                self.say(repaired)
            self.say(f"resumed from {folder}")
            return Restored(manifest.step, manifest.values, own=self.store.owns(folder))
        if reasons:
            raise CheckpointError(f"none of {len(reasons)} checkpoints can be used: {reasons[0]}", agreed=True)
        return Restored(0, {}, own=False)


def set_threads(world: Communicator, reproducible: bool) -> None:
    """A thread for each core that this rank has for itself, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if reproducible else world.process.cores.each)


def any_rank(world: Communicator, *flags: bool) -> list[bool]:
    """Whether each flag is set on any rank. Collective."""
    found = torch.tensor(flags, dtype=torch.uint8)
    world.all_reduce(found, "max")
    return [bool(flag) for flag in found]
