"""What `mpitrain.initialize` needs to know, whichever kind of configuration it comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mpitrain.choices import Precision
from mpitrain.comm import compression
from mpitrain.config.batch_sizes import accumulation
from mpitrain.config.deepspeed import DeepSpeedConfig
from mpitrain.config.parallel import ParallelSection
from mpitrain.config.settings import Config
from mpitrain.errors import InputError, refusal
from mpitrain.layers.precision import DTYPES
from mpitrain.mesh import mesh_shape
from mpitrain.pipe.schedules import default_microbatches
from mpitrain.shard.sharding import Options
from mpitrain.trainer.engine import LossScale
from mpitrain.trainer.optimizing.schedules import RateSchedule, schedule_of


@dataclass(frozen=True)
class Settings:
    """microbatch: samples a rank gives at a time (0: not said). accumulate: backward passes per step.

    scale: of the loss; None for the precision's own. any_optimizer: take optimizers not known to be element-wise.
    optimizer: (class of torch.optim, options), to be made when none is given. torch_schedule: the same of
    torch.optim.lr_scheduler. skips: whether steps that updated nothing do not count for the schedule.
    filled: what stands for "auto". timeout: of communication, seconds.
    device: where to move a model that is on the CPU; auto leaves it. carry: `comm.device`. compile: the model's blocks.
    parallel: how the model is divided over a mesh.
    without_effect: keys that were given and mean nothing here. trackers: those that a trainer has, and a loop has not,
    and the settings of that.
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
    schedule: RateSchedule | None = None
    skips: bool = False
    torch_schedule: tuple[str, dict[str, Any]] | None = None
    timeout: float | None = None
    device: str = "auto"
    carry: str | None = None
    compile: bool = False
    parallel: ParallelSection = field(default_factory=ParallelSection)
    without_effect: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    trackers: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


# keys that mt.initialize takes over, and the only value it can have of some others
_TAKEN = {"train.batch", "train.microbatch", "train.accumulation", "train.precision", "train.clip", "train.recompute"}
_TAKEN |= {"parallel.zero", "parallel.share_node", "parallel.shard_within", "parallel.reshard", "parallel.offload"}
_TAKEN.add("parallel.offload_parameters")
_TAKEN |= {
    "parallel.data",
    "parallel.pipeline",
    "parallel.tensor",
    "parallel.schedule",
    "parallel.chunks",
    "parallel.cut",
}
_TAKEN |= {"parallel.slices", "parallel.sequence", "parallel.whole"}
_TAKEN |= {"comm.algorithm", "comm.bucket_mb", "comm.compression", "comm.timeout", "comm.device"}
_TAKEN |= {"run.device", "model.compile"}
_FOR_RATES = {"train.steps", "optim.schedule", "optim.warmup", "optim.schedule_options", "optim.lr_end"}
_FOR_RATES |= {"optim.decay_steps"}
_FOR_OPTIMIZER = {"optim.name", "optim.lr", "optim.weight_decay", "optim.options", "optim.groups", "optim.no_decay"}
_ONLY = {
    "run.reproducible": False,
    "data.record_ids": False,
    "train.evaluate_every": 0,
    "parallel.mode": "sync",
    "checkpoint.every": 0,
    "checkpoint.background": False,
    "elastic.mode": "off",
    "monitor.tensorboard": False,
    "monitor.wandb": False,
    "monitor.mlflow": False,
    "monitor.tracker": "",
    "monitor.timeline": "",
}
# keys without which training would go another way than the run whose configuration it is
_DECISIVE = {"run.reproducible", "parallel.mode", "train.epochs"}


def from_config(config: Config, ranks: int, *, own_optimizer: bool, origin: str = "config") -> Settings:
    """Settings of our own configuration.

    Args:
        config: Written for `mpitrain.initialize`, or that of a whole run, which has all sections (RUN/config.toml).
        ranks: All ranks.
        own_optimizer: Whether the caller brings an optimizer, whose learning rates stay its own.
        origin: What errors call the configuration.

    Raises:
        InputError: Keys were given that `mpitrain.initialize` does nothing with. Of a run's configuration, keys that
            hold their defaults are passed over, and others are named in `Settings.without_effect` unless the training
            would be another one without them.
    """
    train = config.train
    unused = _unused(config, own_optimizer)
    without_effect: tuple[str, ...] = ()
    if config.model_fields_set == set(Config.model_fields):
        without_effect = tuple(key for key in unused if key not in _DECISIVE and not _is_default(config, key))
        unused = [key for key in unused if key in _DECISIVE and not _is_default(config, key)]
    if unused:
        raise _refusal(unused, origin)
    micro, steps = _batch(config, ranks)
    return Settings(
        microbatch=micro,
        accumulate=steps,
        precision=train.precision,
        clip=train.clip,
        recompute=train.recompute,
        options=options_of(config),
        schedule=None if own_optimizer else schedule_of(config.optim, train.steps, evaluates=False),
        timeout=config.comm.timeout if "timeout" in config.comm.model_fields_set else None,
        device=config.run.device,
        carry=config.comm.device if "device" in config.comm.model_fields_set else None,
        compile=config.model.compile,
        parallel=config.parallel,
        without_effect=without_effect,
    )


def _batch(config: Config, ranks: int) -> tuple[int, int]:
    """(samples of a microbatch, microbatches of a step). Raises InputError where they do not go with the mesh."""
    train, parallel = config.train, config.parallel
    data, stages, _ = mesh_shape(ranks, parallel.data, parallel.pipeline, parallel.tensor)
    batch, micro = train.batch if "batch" in train.model_fields_set else None, train.microbatch or None
    if stages > 1:
        if batch is None:
            raise refusal(
                "a pipeline takes the microbatches of a step together: set train.batch, and train.microbatch if there "
                "are to be more or fewer of them than two a stage"
            )
        if micro is None and not train.accumulation and batch % data == 0:
            share = batch // data
            least = min(default_microbatches(stages), share)
            micro = share // next(count for count in range(least, share + 1) if share % count == 0)
    names = ("train.batch", "train.microbatch", "train.accumulation")
    return accumulation(batch, micro, train.accumulation or None, ranks=data, names=names)


def _unused(config: Config, own_optimizer: bool) -> list[str]:
    """The keys that were given, and with which `mpitrain.initialize` does nothing."""
    taken = _TAKEN if own_optimizer else _TAKEN | _FOR_RATES | _FOR_OPTIMIZER
    unused = []
    for name in Config.model_fields:
        section = getattr(config, name)
        for key in section.model_fields_set:
            full, value = f"{name}.{key}", getattr(section, key)
            if full not in taken and not (full in _ONLY and _ONLY[full] == value):
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
        offload_parameters=parallel.offload_parameters,
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
            offload_parameters=read.offload_parameters,
            reduce_dtype=DTYPES[read.reduce_dtype] if read.reduce_dtype is not None else None,
            bucket_mb=read.bucket_mb,
        ),
        scale=LossScale(**asdict(read.scale)) if read.scale is not None else None,
        any_optimizer=read.any_optimizer,
        optimizer=read.optimizer,
        schedule=read.schedule,
        skips=True,
        torch_schedule=read.torch_schedule,
        without_effect=read.without_effect,
        filled=read.filled,
        trackers=(read.trackers, read.trackers_instead),
    )
