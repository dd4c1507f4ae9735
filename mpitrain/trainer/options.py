"""What `mpitrain.initialize` needs to know, whichever kind of configuration it comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpitrain.choices import Precision
from mpitrain.comm import compression
from mpitrain.config.batch import accumulation
from mpitrain.config.deepspeed import DeepSpeedConfig
from mpitrain.config.learning_rate import LearningRate
from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.layers.precision import DTYPES
from mpitrain.shard.sharding import Options
from mpitrain.trainer.precision import LossScale


@dataclass(frozen=True)
class Settings:
    """microbatch: samples a rank gives at a time (0: not said). accumulate: backward passes per step.

    scale: of the loss; None for the precision's own. any_optimizer: take optimizers not known to be element-wise.
    optimizer: (class of torch.optim, options), to be made when none is given. timeout: of communication, seconds.
    device: where to move a model that is on the CPU; auto leaves it. carry: `comm.device`. compile: the model's blocks.
    without_effect: keys that were given and mean nothing here.
    """

    microbatch: int
    accumulate: int
    precision: Precision
    clip: float
    recompute: bool
    options: Options
    scale: LossScale | None = None
    any_optimizer: bool = False
    optimizer: tuple[str, dict[str, Any]] | None = None
    schedule: LearningRate | None = None
    timeout: float | None = None
    device: str = "auto"
    carry: str | None = None
    compile: bool = False
    without_effect: tuple[str, ...] = ()


# keys that mt.initialize takes over, and the only value it can have of some others
_TAKEN = {"train.batch", "train.microbatch", "train.precision", "train.clip", "train.recompute"}
_TAKEN |= {"parallel.zero", "parallel.share_node", "parallel.shard_within", "parallel.reshard", "parallel.offload"}
_TAKEN |= {"comm.algorithm", "comm.bucket_mb", "comm.compression", "comm.timeout", "comm.device"}
_TAKEN |= {"run.device", "model.compile"}
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
    "parallel.mode": "sync",
    "checkpoint.every": 0,
    "checkpoint.background": False,
    "elastic.mode": "off",
    "monitor.tensorboard": False,
    "monitor.timeline": False,
}
# keys without which training would go another way than the run whose configuration it is
_DECISIVE = {"run.reproducible", "parallel.data", "parallel.pipeline", "parallel.tensor", "parallel.mode"}


def from_config(config: Config, ranks: int, *, own_optimizer: bool, origin: str = "config") -> Settings:
    """Settings of our own configuration.

    Args:
        config: Written for `mpitrain.initialize`, or that of a whole run, which has all sections (RUN/config.toml).
        ranks: Data-parallel ranks.
        own_optimizer: Whether the caller brings an optimizer, whose learning rates stay its own.
        origin: What errors call the configuration.

    Raises:
        InputError: Keys were given that `mpitrain.initialize` does nothing with. Of a run's configuration, keys that
            hold their defaults are passed over, and others are named in `Settings.without_effect` unless the training
            would be another one without them.
    """
    train = config.train
    unused = _unused(config, ranks, own_optimizer)
    without_effect: tuple[str, ...] = ()
    if config.model_fields_set == set(Config.model_fields):
        without_effect = tuple(key for key in unused if key not in _DECISIVE and not _is_default(config, key))
        unused = [key for key in unused if key in _DECISIVE and not _is_default(config, key)]
    if unused:
        raise _refusal(unused, origin)
    batch = train.batch if "batch" in train.model_fields_set else None
    names = ("train.batch", "train.microbatch", "")
    micro, steps = accumulation(batch, train.microbatch or None, None, ranks=ranks, names=names)
    return Settings(
        microbatch=micro,
        accumulate=steps,
        precision=train.precision,
        clip=train.clip,
        recompute=train.recompute,
        options=options_of(config),
        schedule=None if own_optimizer else LearningRate.of(config.optim, train.steps),
        timeout=config.comm.timeout if "timeout" in config.comm.model_fields_set else None,
        device=config.run.device,
        carry=config.comm.device if "device" in config.comm.model_fields_set else None,
        compile=config.model.compile,
        without_effect=without_effect,
    )


def _unused(config: Config, ranks: int, own_optimizer: bool) -> list[str]:
    """The keys that were given, and with which `mpitrain.initialize` does nothing."""
    taken = _TAKEN if own_optimizer else _TAKEN | _FOR_RATES | _FOR_OPTIMIZER
    unused = []
    for name in Config.model_fields:
        section = getattr(config, name)
        for key in section.model_fields_set:
            full, value = f"{name}.{key}", getattr(section, key)
            fits = value in ("auto", ranks) if full == "parallel.data" else _ONLY.get(full) == value and full in _ONLY
            if full not in taken and not fits:
                unused.append(full)
    return sorted(unused)


def _is_default(config: Config, key: str) -> bool:
    section, _, name = key.partition(".")
    values = getattr(config, section)
    return bool(getattr(values, name) == type(values).model_fields[name].default)


def _refusal(unused: list[str], origin: str) -> InputError:
    shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
    why = " beside an optimizer of your own" if any(key in _FOR_RATES | _FOR_OPTIMIZER for key in unused) else ""
    return refusal(
        f"{origin}: mt.initialize does nothing with {shown}{why}; remove them, or run mpitrain.train, which does"
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


def from_deepspeed(read: DeepSpeedConfig) -> Settings:
    """Settings of a DeepSpeed configuration."""
    return Settings(
        microbatch=read.microbatch,
        accumulate=read.accumulate,
        precision=read.precision,
        clip=read.clip,
        recompute=read.recompute,
        options=Options(
            zero=read.zero,
            offload=read.offload,
            reduce_dtype=DTYPES[read.reduce_dtype] if read.reduce_dtype is not None else None,
            bucket_mb=read.bucket_mb,
        ),
        scale=LossScale(**asdict(read.scale)) if read.scale is not None else None,
        any_optimizer=read.any_optimizer,
        optimizer=read.optimizer,
        schedule=read.schedule,
        without_effect=read.without_effect,
    )
