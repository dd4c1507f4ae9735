"""What ranks that communicate in their layers need of each batch: agreed on before the first step, not in the midst."""

from __future__ import annotations

from collections.abc import Iterable

from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.engine import Engine


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
