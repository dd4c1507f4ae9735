"""A run as callbacks and strategies see it, and what a callback and a strategy are.

Callbacks do at the steps of a `Trainer` what is no line in its loop:

setup
  on_restore   on_fit_start
    on_update -> (ranks agree whether to stop) -> on_evaluate -> on_step_end -> on_save -> on_step_done    each step

What is between on_update and on_step_end, and on_save, come where all ranks are together, which in parallel.mode local
and server is not after each step; there the steps in between are told late.

  on_fit_end
on_exception                                          instead of what is left, where something was raised
teardown                                              in any case

A strategy is a value of parallel.mode:

    parallel.mode   take each step as one                  all ranks meet
    sync            all ranks                              after each step
    local           the ranks of a group                   after every parallel.local_steps steps
    server          each worker by itself                  where the run is evaluated, saved or ended

`Trainer` asks it for the differences: it puts the ranks into places, says which engine they compute
with, and gives the steps as they become known. The trainer's loop, its callbacks and its checkpoints are the same.

`Trainer` imports the callbacks and strategies; these import `Run`, and nothing here imports any of them.
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
from mpitrain.trainer.data import GroupPlaces
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.folder import RunFolder
from mpitrain.trainer.held_out.measuring import Meter
from mpitrain.trainer.optimizing import RateSchedule


@dataclass
class Step:
    """One step of training, as far as it is done.

    number: from 1. batch: this rank's share of the global batch; without its samples where the step is told late. loss:
    the mean over the global batch, in nats where it is a cross-entropy. norm: of the gradients, before clipping.
    skipped: whether nothing was updated, because the norm is not finite. began: `time.perf_counter()` when it did.
    seconds: what it took, without evaluation and saving; 0 as long as that is not known. together: whether all ranks
    came together after it (see `run`). met: `time.monotonic()` when all ranks had done it. held_out_loss:
    None where the step was not evaluated. lost: the ranks that died since the step before. extras: further figures for
    its line in metrics.jsonl.
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
    """A state that training goes on from. step: steps done. values: what was kept with it, see `Callback.state`.

    own: whether it is this run's, and not one that another run has left.
    """

    step: int
    values: dict[str, Any]
    own: bool = True


class Callback:
    """Something that is called at the events of a `Trainer`'s run; each method does nothing unless it is overridden.

    Every rank calls the same methods of the same callbacks in the same order, so that a method may be collective over
    `trainer.world`. Where a method raises an error on one rank alone, the job ends with that error. `trainer` is the
    `Trainer` whose run it is, which an override may name as its type, or a subclass.
    """

    def setup(self, trainer: Any) -> None:
        """Before data and model are there. The run folder is this job's where run.dir names it, else not there yet."""

    def restore(self, trainer: Any) -> Restored | None:
        """Put the model and the optimizer into a state from elsewhere than a checkpoint, and say which one it is.

        None leaves it to the next callback, and at last to the checkpoints.
        """
        return None

    def on_restore(self, trainer: Any, values: dict[str, Any]) -> None:
        """The state is in place. values: what callbacks gave as their `state` when it was saved; empty at step 0."""

    def on_fit_start(self, trainer: Any) -> None:
        """The first step of this start is about to begin."""

    def on_update(self, trainer: Any, step: Step) -> None:
        """The optimizer has updated this rank's parameters; `trainer.request_stop` makes this step the last one."""

    def on_evaluate(self, trainer: Any, loss: float) -> None:
        """The held-out samples were evaluated. loss: their mean; `trainer.figures` has the metrics, too, by name."""

    def on_step_end(self, trainer: Any, step: Step) -> None:
        """All of a step is done but saving. Figures put into `step.extras` come into its line of metrics.jsonl."""

    def state(self, trainer: Any) -> dict[str, Any]:
        """Return values to keep in checkpoints: such as JSON can hold, under names of one's own."""
        return {}

    def on_save(self, trainer: Any, folder: Path) -> None:
        """A checkpoint was written, or begun to be with checkpoint.background."""

    def on_step_done(self, trainer: Any, step: Step) -> None:
        """All of a step is done, its checkpoint too; where `step.together`, all ranks are at this point."""

    def on_fit_end(self, trainer: Any) -> None:
        """The last step is done and saved."""

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        """Something was raised; it is raised again afterwards. Other ranks may be gone: nothing collective here."""

    def teardown(self, trainer: Any) -> None:
        """The run folder is about to be given up. Nothing collective here."""


class Run(ABC):
    """The state of a `Trainer`'s run.

    config, world, device: what is to be done, by whom, and on what this rank computes. devices: of all ranks, in words.
    folder: the run's folder, with its settings, metrics, logs and checkpoints.
    callbacks: in the order in which they are called; at the end of training and after it in the reverse order.
    own_model: whether a subclass makes the model. print: shows a line to people.

    strategy: what differs between the values of parallel.mode.

    There once `train` has made them: data, held_out (data sets; None where nothing is held out), places (this rank's
    along the axes of parallelism, and how batches are divided), engine (model, loss, optimizer and precision on this
    rank), meter (of the metrics), schedule (of the learning rate), store (the checkpoints), parameters (of the whole
    model).

    began: `time.monotonic()` when this job held the run folder. start: steps done when its first step was about to
    begin; None until then. skipped: steps of this job without an update.

    step: steps done; while a step is taken, those before it. position: samples of the run's order that they took.
    batch_sizes: of each step's global batch. samples: of a step's batch that this rank's group trains on. resumed_step:
    the step of this run that the state was loaded from; None where it is a run from the start. saved: whether this job
    has written a checkpoint. figures: of the last evaluation, the loss and the metrics by name.
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
    # why training stops before its end, in a few words; whether all ranks agreed on it; whether the run is then done
    stop_reason, _ending, _ended = "", False, False

    # -- the recipe, as far as strategies and `elastic` ask for its parts

    @abstractmethod
    def working(self) -> AbstractContextManager[None]:
        """Hold the run folder, and have the callbacks set up, inside. Collective."""

    @abstractmethod
    def train(self) -> int:
        """Train inside of the run folder; returns the exit code of `Trainer.fit`."""

    @abstractmethod
    def train_step(self, batch: Batch) -> Step:
        """Take a step with this rank's share of the group's part of the global batch. Collective over the group."""

    @abstractmethod
    def open_store(self, world: Communicator | None = None) -> Store:
        """The checkpoints of the run, for the ranks of `world` (default: those that train). Collective over them."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the values kept with the tensors: the place in the data, the model, and each callback's `state`."""

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
    def done(self) -> bool:
        """Whether the run has come to its end: all steps are done, or it was ended before."""
        return self._ended or self.step >= self.config.train.steps

    @property
    def mesh(self) -> Mesh:
        """The ranks that take each step as one."""
        return self.places.mesh

    def request_stop(self, reason: str) -> None:
        """End training when the ranks come together: after this step, if called in its `on_update`.

        One rank's request is enough. reason: a few words, for people.
        """
        self.stop_reason = self.stop_reason or reason

    def end(self, reason: str) -> None:
        """Have the run done with this step. On all ranks alike, where these are together: in `on_evaluate`.

        reason: a few words, for people.
        """
        self.stop_reason, self._ending, self._ended = reason, True, True

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


class Strategy(ABC):
    """A value of parallel.mode. Made once a `Trainer`; nothing collective happens then.

    Attributes:
        engine: Makes the engine of the steps; called as `Engine` is.
        survivors: Makes of the run the callback that goes on when ranks die (`elastic`); not for every mode.
    """

    engine: Callable[..., Engine] = Engine
    survivors: Callable[[Run], Callback]

    def __init__(self, config: Config, world: Communicator) -> None:
        """Take note of the settings.

        Raises:
            InputError: On all ranks, for settings that do not go together in this mode, or not with so many ranks.
        """
        self.config = config

    @abstractmethod
    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        """Put the ranks into their places. Collective; called anew when training is entered again."""

    @abstractmethod
    def steps(self, trainer: Run) -> Iterator[Step]:
        """Train, from `trainer.step` on, and give each step of the run in order, on every rank, once it is known.

        The loss of a step is the mean over its global batch. A step is `together` where all ranks have come to the
        same point: they may then do collective things, and training goes on when the next step is asked for. What is
        given last before the generator is closed is such a step.
        """

    def next_meeting(self, trainer: Run) -> int:
        """The step after which all ranks come together next, if nothing stops them earlier; they are together now."""
        return trainer.step + 1

    def role(self, rank: int) -> str:
        """Return the role of a rank of the world: worker, or server where it takes no steps itself."""
        return "worker"

    def describe(self) -> str:
        """Describe this mode in a few words for the banner; empty for plain training."""
        return ""
