"""Strategies of ranks that train together: which of them take each step as one, and when all of them meet.

    parallel.mode   take each step as one                  all ranks meet
    sync            all ranks                              after each step
    local           the ranks of a group                   after every parallel.local_steps steps
    server          each worker by itself                  where the run is evaluated, saved or ended

A strategy is what `Trainer` asks for the differences: it puts the ranks into places, says which engine they compute
with, and gives the steps as they become known. The trainer's loop, its callbacks and its checkpoints are the same.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.data.on_device import on_device
from mpitrain.errors import refusal
from mpitrain.mesh import Mesh
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.callback import Step
from mpitrain.trainer.data import batches
from mpitrain.trainer.elastic import Survivors
from mpitrain.trainer.engine import Engine

if TYPE_CHECKING:
    from mpitrain.trainer.trainer import Trainer


@dataclass(frozen=True)
class GroupPlaces:
    """The place of this rank. A group is the ranks that take each step as one.

    Attributes:
        mesh: The ranks of this rank's group.
        workers: How the group divides its part of a global batch.
        everyone: All ranks that have the same part of the model as this one, of all groups.
        evaluating: How these divide held-out samples; as many virtual workers as all groups have together.
        first_worker: The virtual workers of the groups before this one: where its own are in a numbering of all.
    """

    mesh: Mesh
    workers: VirtualWorkers
    everyone: Communicator
    evaluating: VirtualWorkers
    first_worker: int = 0


class Strategy(ABC):
    """A value of parallel.mode. Made once a `Trainer`; nothing collective happens then.

    Attributes:
        engine: Makes the engine of the steps; called as `Engine` is.
    """

    engine: Callable[..., Engine] = Engine

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
    def steps(self, trainer: Trainer) -> Iterator[Step]:
        """Train, from `trainer.step` on, and give each step of the run in order, on every rank, once it is known.

        The loss of a step is the mean over its global batch. A step is `together` where all ranks have come to the
        same point: they may then do collective things, and training goes on when the next step is asked for. What is
        given last before the generator is closed is such a step.
        """

    def next_meeting(self, trainer: Trainer) -> int:
        """The step after which all ranks come together next, if nothing stops them earlier; they are together now."""
        return trainer.step + 1

    def role(self, rank: int) -> str:
        """Return the role of a rank of the world: worker, or server where it takes no steps itself."""
        return "worker"

    def survivors(self, trainer: Trainer) -> Survivors:
        """Return the callback that goes on when ranks die, with elastic.mode shrink."""
        return Survivors(trainer)

    def describe(self) -> str:
        """Describe this mode in a few words for the banner; empty for plain training."""
        return ""


class Synchronous(Strategy):
    """All ranks take each step together: data parallel and ZeRO, with pipeline stages and tensor parallel layers."""

    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        parallel = config.parallel
        mesh = Mesh.make(world, parallel.data, parallel.pipeline, parallel.tensor)
        workers = VirtualWorkers.of(mesh.data, config.run.reproducible, config.run.workers)
        return GroupPlaces(mesh, workers, mesh.data, workers)

    def steps(self, trainer: Trainer) -> Iterator[Step]:
        config, clock, workers = trainer.config, trainer.engine.clock, trainer.places.workers
        require_samples(config, trainer.engine, workers, trainer.batch_sizes.after(trainer.step))
        if trainer.engine.note:
            trainer.say(trainer.engine.note)
        start = trainer.position
        with batches(config, workers.share, trainer.data, start, trainer.device, step=trainer.step) as loader:
            coming = on_device(loader, trainer.device)
            while True:
                began = time.perf_counter()
                clock.step(trainer.step + 1)
                trainer.samples = trainer.batch_sizes.size(trainer.step)
                with clock.data:
                    batch = next(coming)
                step = trainer.train_step(batch)
                step.began = began
                yield step


def require_samples(config: Config, engine: Engine, workers: VirtualWorkers, sizes: Iterable[int]) -> None:
    """Raise InputError on all ranks where a batch to come gives some of them too few samples for the others.

    Args:
        config: Says how large microbatches are.
        engine: Of this rank.
        workers: How a group divides its part of a batch.
        sizes: Of these parts, of every group.
    """
    if engine.pipeline is not None:
        return
    gathers = engine.sharding.parameters.gathers
    for size in sizes:
        microbatch = config.train.microbatch
        if why := workers.conflict(size, microbatch, synchronous=engine.synchronous, gathers=gathers):
            raise refusal(why)
