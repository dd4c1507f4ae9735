"""A run as callbacks and strategies see it, and what a strategy is.

    parallel.mode   take each step as one                  all ranks meet
    sync            all ranks                              after each step
    local           the ranks of a group                   after every parallel.local_steps steps
    server          each worker by itself                  where the run is evaluated, saved or ended

A strategy is what `Trainer` asks for the differences: it puts the ranks into places, says which engine they compute
with, and gives the steps as they become known. The trainer's loop, its callbacks and its checkpoints are the same.

`Trainer` imports the callbacks and strategies; these import `Run`, and nothing here imports any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpitrain.checkpoint import Store
from mpitrain.comm import Communicator
from mpitrain.config.batch_sizes import BatchSizes
from mpitrain.config.settings import Config
from mpitrain.data import Batch, Dataset
from mpitrain.mesh import Mesh
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.data import GroupPlaces
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.folder import RunFolder
from mpitrain.trainer.held_out.measuring import Meter
from mpitrain.trainer.optimizing.schedules import RateSchedule


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
    step = position = 0
    resumed_step: int | None = None
    saved = False
    # why this rank is to stop; whether all ranks agreed on it; whether the run is then done
    _stop, _ending, _ended = "", False, False

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

    @property
    def stop_asked(self) -> bool:
        """Whether this rank has reason to stop, on which all ranks agree when they come together."""
        return bool(self._stop)

    @property
    def stop_reason(self) -> str:
        """Why training stops before its end, in a few words; empty where it does not."""
        return self._stop

    def request_stop(self, reason: str) -> None:
        """End training when the ranks come together: after this step, if called in its `on_update`.

        One rank's request is enough. reason: a few words, for people.
        """
        self._stop = self._stop or reason

    def end(self, reason: str) -> None:
        """Have the run done with this step. On all ranks alike, where these are together: in `on_evaluate`.

        reason: a few words, for people.
        """
        self._stop, self._ending, self._ended = reason, True, True

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
