"""parallel.mode sync: all ranks take each step together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.data.on_device import on_device
from mpitrain.errors import refusal
from mpitrain.mesh import Mesh
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.data import GroupPlaces, batches
from mpitrain.trainer.elastic import Survivors
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.run import Run, Step, Strategy


class Synchronous(Strategy):
    """All ranks take each step together: data parallel and ZeRO, with pipeline stages and tensor parallel layers."""

    survivors = Survivors

    def places(self, config: Config, world: Communicator) -> GroupPlaces:
        parallel = config.parallel
        mesh = Mesh.make(world, parallel.data, parallel.pipeline, parallel.tensor)
        workers = VirtualWorkers.of(mesh.data.size, config.run.reproducible, config.run.workers, mesh.data.rank)
        return GroupPlaces(mesh, workers, mesh.data, workers)

    def steps(self, trainer: Run) -> Iterator[Step]:
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
        if why := workers.conflict(size, config.train.microbatch, synchronous=engine.synchronous, gathers=gathers):
            raise refusal(why)
