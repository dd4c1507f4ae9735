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
    for size in sizes:
        if engine.synchronous and not workers.even(size, config.train.microbatch):
            raise refusal(
                f"BatchNorm needs as many microbatches on each rank as on any other, which {size} samples are not on "
                f"{workers.ranks} ranks; make train.batch, and each of train.batch_warmup, a multiple of the ranks, "
                "and of train.microbatch on each of them"
            )
        if engine.sharding.parameters.gathers and size < workers.ranks:
            raise refusal(
                f"a batch of {size} samples leaves some of {workers.ranks} ranks without one, but sharded parameters "
                "need all ranks to compute; raise train.batch, and each of train.batch_warmup"
            )
