"""What `mpitrain.initialize` needs to know, whichever kind of configuration it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.comm import compression
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.shard.sharding import Options
from mpitrain.trainer.learning_rate import LearningRate
from mpitrain.trainer.precision import LossScale


@dataclass(frozen=True)
class Settings:
    """microbatch: samples a rank gives at a time (0: not said). accumulate: backward passes per step.

    scale: of the loss; None for the precision's own. any_optimizer: take optimizers not known to be element-wise.
    optimizer: (class of torch.optim, options), to be made when none is given. timeout: of communication, seconds.
    without_effect: keys that were given and mean nothing here.
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
    schedule: LearningRate | None = None
    timeout: float | None = None
    without_effect: tuple[str, ...] = ()


# keys that mt.initialize takes over, and the only value it can have of some others
_TAKEN = {"train.batch", "train.microbatch", "train.precision", "train.clip", "train.recompute"}
_TAKEN |= {"parallel.zero", "parallel.share_node", "parallel.shard_within", "parallel.reshard", "parallel.offload"}
_TAKEN |= {"comm.algorithm", "comm.bucket_mb", "comm.compression", "comm.timeout"}
_FOR_RATES = {"train.steps", "optim.schedule", "optim.warmup"}
_FOR_OPTIMIZER = {"optim.name", "optim.lr", "optim.weight_decay", "optim.options"}
_ONLY = {
    "run.reproducible": False,
    "data.record_ids": False,
    "train.evaluate_every": 0,
    "parallel.pipeline": 1,
    "parallel.tensor": 1,
    "parallel.sequence": False,
    "parallel.chunks": 1,
    "checkpoint.every": 0,
    "checkpoint.background": False,
    "elastic.mode": "off",
    "monitor.tensorboard": False,
    "monitor.timeline": False,
}


def from_config(config: Config, ranks: int, *, own_optimizer: bool, origin: str = "config") -> Settings:
    """Settings of our own configuration. own_optimizer: the caller brings an optimizer, whose rates stay its own.

    Raises InputError naming the keys that were given and that `mpitrain.initialize` does nothing with.
    """
    train = config.train
    _refuse_what_is_not_used(config, ranks, own_optimizer, origin)
    batch = train.batch if "batch" in train.model_fields_set else None
    micro, steps = accumulation(
        batch, train.microbatch or None, None, ranks=ranks, names=("train.batch", "train.microbatch", "")
    )
    return Settings(
        microbatch=micro,
        accumulate=steps,
        precision=train.precision,
        clip=train.clip,
        recompute=train.recompute,
        options=options_of(config),
        schedule=None if own_optimizer else LearningRate.of(config.optim, train.steps),
        timeout=config.comm.timeout if "timeout" in config.comm.model_fields_set else None,
    )


def _refuse_what_is_not_used(config: Config, ranks: int, own_optimizer: bool, origin: str) -> None:
    taken = _TAKEN if own_optimizer else _TAKEN | _FOR_RATES | _FOR_OPTIMIZER
    unused = []
    for name in Config.model_fields:
        section = getattr(config, name)
        for key in section.model_fields_set:
            full, value = f"{name}.{key}", getattr(section, key)
            fits = value in ("auto", ranks) if full == "parallel.data" else _ONLY.get(full) == value and full in _ONLY
            if full not in taken and not fits:
                unused.append(full)
    if not unused:
        return
    unused.sort()
    shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
    why = " beside an optimizer of your own" if any(key in _FOR_RATES | _FOR_OPTIMIZER for key in unused) else ""
    raise InputError(
        f"{origin}: mt.initialize does nothing with {shown}{why}; remove them, or run mpitrain.train, which does",
        agreed=True,
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
