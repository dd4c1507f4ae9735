"""State of a run as callbacks and strategies see it, and base classes of both.

A `Trainer` calls its callbacks in this order:

setup
  on_restore   on_fit_start
    on_update -> (ranks agree whether to stop) -> on_evaluate -> on_step_end -> on_save -> on_step_done    each step
  on_fit_end
on_exception                                          instead of the remaining events, if an error was raised
teardown                                              in any case

The agreement, on_evaluate and on_save happen only at steps after which all ranks synchronize. In parallel.mode local
and server these are not all steps, and callbacks learn of the steps in between later.

A strategy implements one value of parallel.mode:

    parallel.mode   ranks that take a step together        all ranks synchronize
    sync            all ranks                              after each step
    local           the ranks of a group                   after every parallel.local_steps steps
    server          each worker by itself                  when the run is evaluated, saved or ended

The strategy assigns the ranks to groups, chooses the class of the engine, and yields the steps as their results become
known. The trainer's loop, its callbacks and its checkpoints do not depend on the mode.

`Trainer` imports the callbacks and strategies, and these import `Run`; this module imports none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint import Store
from mpitrain.comm import Communicator
from mpitrain.config.batch_sizes import BatchSizes
from mpitrain.config.settings import Config
from mpitrain.data import Batch, Dataset
from mpitrain.layout.mesh import Mesh
from mpitrain.monitor.report.goodput import Goodput
from mpitrain.trainer.data import GroupPlaces
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.folder import RunFolder
from mpitrain.trainer.held_out.measuring import Meter
from mpitrain.trainer.optimizing import RateSchedule


@dataclass
class Step:
    """One step of training and its results.

    Attributes:
        number: Number of the step, from 1.
        batch: This rank's share of the global batch; without samples if the step is reported later.
        loss: Mean over the global batch, in nats if it is a cross-entropy.
        lr: Learning rate of the update.
        norm: 2-norm of the gradients, before clipping.
        skipped: True if nothing was updated, because the norm is not finite.
        began: `time.perf_counter()` at the beginning of the step.
        seconds: Duration without evaluation and saving; 0 while it is not known.
        together: True if all ranks synchronized after the step.
        met: `time.monotonic()` when all ranks had finished the step.
        held_out_loss: Mean loss of the held-out samples; None if the step was not evaluated.
        lost: Ranks that died since the step before.
        extras: Further figures for the step's line in metrics.jsonl.
    """

    number: int
    batch: Batch
    loss: float
    lr: float
    norm: float
    skipped: bool
    began: float = 0.0
    seconds: float = 0.0
    together: bool = True
    met: float = 0.0
    held_out_loss: float | None = None
    lost: tuple[int, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """State from which training continues.

    Attributes:
        step: Steps done.
        values: Values stored with the state (see `Callback.state`).
        own: True if this run saved the state; false if another run did.
    """

    step: int
    values: dict[str, Any]
    own: bool = True


class Callback:
    """Base class of callbacks: methods that a `Trainer` calls at the events of its run. By default they do nothing.

    All ranks call the same methods of the same callbacks in the same order, so a method may be collective over
    `trainer.world`. An error that a method raises on only one rank ends the job with that error. The argument `trainer`
    is the `Trainer` of the run; an override may annotate it with that class or a subclass.
    """

    def setup(self, trainer: Any) -> None:
        """Prepare the callback, before data and model exist.

        The run folder exists and is locked by this job if run.dir is set; otherwise it does not exist yet.
        """

    def restore(self, trainer: Any) -> Restored | None:
        """Load model and optimizer from a source other than a checkpoint.

        Returns:
            The state that was loaded; None to leave this to the next callback, and finally to the checkpoints.
        """
        return None

    def on_restore(self, trainer: Any, values: dict[str, Any]) -> None:
        """Run after the state has been restored.

        Args:
            trainer: Trainer of the run.
            values: Values that callbacks returned as their `state` when it was saved; empty at step 0.
        """

    def on_fit_start(self, trainer: Any) -> None:
        """Run before the first step of this job."""

    def on_update(self, trainer: Any, step: Step) -> None:
        """Run after the optimizer has updated this rank's parameters.

        `trainer.request_stop`, if called here, makes this step the last one.

        Args:
            trainer: Trainer of the run.
            step: The step that was taken.
        """

    def on_evaluate(self, trainer: Any, loss: float) -> None:
        """Run after the held-out samples were evaluated.

        Args:
            trainer: Trainer of the run; its `figures` has the loss and the metrics by name.
            loss: Mean loss of the held-out samples.
        """

    def on_step_end(self, trainer: Any, step: Step) -> None:
        """Run at the end of a step, after its evaluation and before it is saved.

        Args:
            trainer: Trainer of the run.
            step: The step; figures added to `step.extras` are written into its line of metrics.jsonl.
        """

    def state(self, trainer: Any) -> dict[str, Any]:
        """Return values to store in checkpoints, representable as JSON, under names that no other callback uses."""
        return {}

    def on_save(self, trainer: Any, folder: Path) -> None:
        """Run after a checkpoint was written, or with checkpoint.background, after its writing began.

        Args:
            trainer: Trainer of the run.
            folder: Folder of the checkpoint.
        """

    def on_step_done(self, trainer: Any, step: Step) -> None:
        """Run after a step and its checkpoint are done. If `step.together`, all ranks have reached this point.

        Args:
            trainer: Trainer of the run.
            step: The step.
        """

    def on_fit_end(self, trainer: Any) -> None:
        """Run after the last step was done and saved."""

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        """Run after an error, which is raised again afterwards.

        Other ranks may have died, so this must not be collective.

        Args:
            trainer: Trainer of the run.
            error: The error.
        """

    def teardown(self, trainer: Any) -> None:
        """Clean up before the lock of the run folder is released. This must not be collective."""


class Run(ABC):
    """State of a `Trainer`'s run.

    The attributes from `data` to `parameters` exist once `train` has made them.

    Attributes:
        config: Settings of the run.
        world: Ranks that train.
        device: Device of this rank.
        devices: Description of all ranks' devices, for the user.
        folder: Run folder, with settings, metrics, logs and checkpoints.
        callbacks: Callbacks in the order in which they are called; events at and after the end use the reverse order.
        own_model: True if a subclass makes the model.
        print: Function that shows a line to the user.
        strategy: Implementation of parallel.mode.
        data: Training data set.
        held_out: Held-out data set; None if there is none.
        places: This rank's position along the axes of parallelism, and the division of batches.
        engine: Model, loss, optimizer and precision on this rank.
        meter: Meter of the metrics.
        schedule: Schedule of the learning rate.
        store: Checkpoints of the run.
        parameters: Number of parameters of the whole model.
        batch_sizes: Global batch size of each step.
        samples: Samples of a step's batch that this rank's group trains on.
        upcoming: This rank's share of the next step's batch, while a step is taken that may begin it; otherwise None.
        figures: Loss and metrics of the last evaluation, by name.
        began: `time.monotonic()` when this job locked the run folder.
        start: Steps done before the first step of this job; None until then.
        step: Steps done; during a step, the steps before it.
        position: Samples of the run's order that these steps have used.
        skipped: Steps of this job without an update.
        resumed_step: Step of this run whose state was loaded; None if the run began at step 0.
        saved: True if this job has written a checkpoint.
        goodput: Account of the run's wall clock over all its starts, on rank 0; None elsewhere.
    """

    config: Config
    world: Communicator
    device: torch.device
    devices: str
    folder: RunFolder
    callbacks: list[Callback]
    own_model: bool
    print: Callable[[str], None]
    strategy: Strategy
    data: Dataset
    held_out: Dataset | None
    places: GroupPlaces
    engine: Engine
    meter: Meter
    schedule: RateSchedule
    store: Store
    parameters: int
    batch_sizes: BatchSizes
    samples: int
    figures: dict[str, float]
    began: float
    start: int | None = None
    step = position = skipped = 0
    resumed_step: int | None = None
    saved = False
    goodput: Goodput | None = None
    upcoming: Batch | None = None
    # reason for stopping early; whether all ranks agreed to stop; whether the run then counts as done
    stop_reason, _ending, _ended = "", False, False

    # -- parts of the recipe that strategies and `elastic` call

    @abstractmethod
    def working(self) -> AbstractContextManager[None]:
        """Lock the run folder and set the callbacks up; release both at the end of the block. Collective."""

    @abstractmethod
    def train(self) -> int:
        """Train while the run folder is locked, and return the exit code of `Trainer.fit`. Collective."""

    @abstractmethod
    def train_step(self, batch: Batch) -> Step:
        """Train on this rank's share of the group's part of a global batch. Collective over the group."""

    @abstractmethod
    def open_store(self, world: Communicator | None = None) -> Store:
        """Open the checkpoints of the run for the ranks of `world` (default: the training ranks).

        Collective over them.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the values stored with the tensors: position in the data, model description and callbacks' states."""

    @property
    def tokens(self) -> int:
        """Tokens of a sample; 0 if samples are not tokens."""
        description = self.data.description
        return description.x_shape[0] if description.kind == "tokens" else 0

    @property
    def begins_next_step(self) -> bool:
        """True if the step that comes may begin the one after it, which then has as many samples."""
        sizes, pipeline = self.batch_sizes, self.engine.pipeline
        two_versions = pipeline is not None and pipeline.versions is not None
        more = self.step + 1 < self.config.train.steps and sizes.size(self.step) == sizes.size(self.step + 1)
        return two_versions and more

    @property
    def last_step(self) -> bool:
        """True if no step follows the one that was done last."""
        return self._ending or self.step >= self.config.train.steps

    @property
    def done(self) -> bool:
        """True if the run is complete: all steps are done, or `end` was called."""
        return self._ended or self.step >= self.config.train.steps

    @property
    def mesh(self) -> Mesh:
        """Ranks that take each step together."""
        return self.places.mesh

    def request_stop(self, reason: str) -> None:
        """Stop training at the next step after which all ranks synchronize.

        If this is called in `on_update`, the current step may be that step. A request by one rank is enough.

        Args:
            reason: A few words for the user.
        """
        self.stop_reason = self.stop_reason or reason

    def end(self, reason: str) -> None:
        """Complete the run with this step.

        All ranks must call this at the same synchronized point, such as `on_evaluate`.

        Args:
            reason: A few words for the user.
        """
        self.stop_reason, self._ending, self._ended = reason, True, True

    def say(self, text: str) -> None:
        """Log a line, and show it to the user on rank 0."""
        self.folder.log.info("%s", text)
        if self.world.rank == 0:
            self.print(text)

    def call(self, event: Callable[[Callback], object], *, reverse: bool = False) -> None:
        """Call `event` with every callback.

        Args:
            event: Function that calls one method of a callback.
            reverse: If true, the last callback comes first, so that the first to begin is the last to end.
        """
        for callback in reversed(self.callbacks) if reverse else self.callbacks:
            event(callback)

    def let_go(self) -> None:
        """Drop data, model and checkpoint store after ranks were lost; `train` makes them again."""
        for name in ("data", "held_out", "places", "engine", "store"):
            vars(self).pop(name, None)


class Strategy(ABC):
    """Base class of the values of parallel.mode. A `Trainer` makes one; making it is not collective.

    Attributes:
        engine: Factory of the engine that takes the steps, called like `Engine`.
        survivors: Factory of the callback that continues a run when ranks die (see `elastic`); not every mode has one.
    """

    engine: Callable[..., Engine] = Engine
    survivors: Callable[[Run], Callback]

    def __init__(self, config: Config, world: Communicator) -> None:
        """Check and store the settings.

        Raises:
            InputError: On all ranks, if settings conflict in this mode, or do not suit the number of ranks.
        """
        self.config = config

    @abstractmethod
    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        """Assign each rank its place. Collective; called again whenever training is entered again.

        Args:
            config: Settings of the run.
            world: Ranks that train.
        """

    @abstractmethod
    def steps(self, trainer: Run) -> Iterator[Step]:
        """Train from `trainer.step` on, and yield each step of the run in order, on every rank, once its results are
        known.

        The loss of a step is the mean over its global batch. If a step is `together`, all ranks have reached the same
        point: they may call collective operations, and training continues when the next step is requested. The last
        step before the generator is closed must be such a step.
        """

    def next_meeting(self, trainer: Run) -> int:
        """Return the next step after which all ranks synchronize, unless something stops them earlier.

        Must be called while all ranks are synchronized.
        """
        return trainer.step + 1

    def role(self, rank: int) -> str:
        """Return the role of a rank of the world: "worker", or "server" if it takes no steps itself."""
        return "worker"

    def describe(self) -> str:
        """Return a few words about this mode for the banner; empty for plain training."""
        return ""
