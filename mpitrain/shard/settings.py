"""What `mpitrain.initialize` needs to know, whichever kind of configuration it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpitrain.comm import compression
from mpitrain.config import Config
from mpitrain.errors import InputError
from mpitrain.shard.precision import LossScale
from mpitrain.shard.schedule import Schedule
from mpitrain.shard.sharding import Options


@dataclass(frozen=True)
class Settings:
    """microbatch: samples a rank gives at a time (0: not said). accumulate: backward passes per step.

    scale: of the loss; None for the precision's own. any_optimizer: take optimizers not known to be element-wise.
    optimizer: (class of torch.optim, options), to be made when none is given. without_effect: keys that were given
    and mean nothing here.
    """

    microbatch: int
    accumulate: int
    precision: str
    clip: float
    recompute: bool
    options: Options
    scale: LossScale | None = None
    any_optimizer: bool = False
    optimizer: tuple[str, dict[str, Any]] | None = None
    schedule: Schedule | None = None
    without_effect: tuple[str, ...] = ()


def from_config(config: Config, ranks: int, *, own_optimizer: bool) -> Settings:
    """Settings of our own configuration. own_optimizer: the caller brings an optimizer, whose rates stay its own."""
    train, parallel = config.train, config.parallel
    if parallel.pipeline > 1 or parallel.tensor > 1:
        raise InputError("initialize takes data-parallel settings; pipeline and tensor stages are for mpitrain.train")
    micro, steps = accumulation(
        train.batch, train.microbatch or None, None, ranks=ranks, names=("train.batch", "train.microbatch", "")
    )
    return Settings(
        microbatch=micro,
        accumulate=steps,
        precision=train.precision,
        clip=train.clip,
        recompute=train.recompute,
        options=replace(options_of(config), reproducible=False),  # needs leaves, which are the trainer's
        schedule=None if own_optimizer else Schedule.of(config.optim, train.steps),
    )


def options_of(config: Config) -> Options:
    """How a configuration places parameters, gradients and states."""
    parallel, comm = config.parallel, config.comm
    return Options(
        zero=parallel.zero,
        bucket_mb=comm.bucket_mb,
        algorithm=comm.algorithm,
        compression=None if comm.compression == "none" else compression.from_name(comm.compression),
        share_node=parallel.share_node,
        shard_within=parallel.shard_within,
        reshard_after_forward=parallel.reshard,
        reproducible=config.run.reproducible,
        offload=parallel.offload,
    )


def accumulation(
    batch: int | None, microbatch: int | None, steps: int | None, *, ranks: int, names: Sequence[str]
) -> tuple[int, int]:
    """(microbatch, steps) from those of the three numbers that are given: batch = microbatch * steps * ranks.

    Raises InputError, in the names given, when they do not fit each other.
    """
    if batch is None:
        return microbatch or 0, steps or 1
    if microbatch is None:
        microbatch = batch // ((steps or 1) * ranks)
    if steps is None:
        steps = batch // (microbatch * ranks) if microbatch else 0
    if microbatch * steps * ranks != batch or not batch:
        told = f"{microbatch} x {steps} x {ranks} ranks" if microbatch and steps else f"{ranks} ranks"
        raise InputError(f"{names[0]} {batch} is not {told}; make it microbatch x accumulation x ranks", agreed=True)
    return microbatch, steps
