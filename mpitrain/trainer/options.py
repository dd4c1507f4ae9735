"""Settings of `mpitrain.initialize`, from a configuration of mpitrain or of DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from mpitrain.config.batch_sizes import accumulation
from mpitrain.config.deepspeed import DeepSpeedConfig
from mpitrain.config.section import declared
from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.layout.mesh import BLOCKS, axes_of, count_along, count_readers, shape_of
from mpitrain.pipe.schedule import default_microbatches
from mpitrain.trainer.optimizing import RateSchedule, schedule_of


@dataclass(frozen=True)
class Settings:
    """Settings of a user's training loop.

    Attributes:
        config: The configuration; a DeepSpeed configuration is converted into the equivalent settings of mpitrain.
        microbatch: Samples of a rank's microbatch; 0 if not specified.
        accumulate: Backward passes of a step.
        schedule: Schedule of the learning rate; None if the optimizer or a scheduler of the user sets it.
        without_effect: Keys of the configuration that have no effect here.
        deepspeed: The DeepSpeed configuration; None if the configuration is mpitrain's.
    """

    config: Config
    microbatch: int
    accumulate: int
    schedule: RateSchedule | None
    without_effect: tuple[str, ...] = ()
    deepspeed: DeepSpeedConfig | None = None


def from_config(config: Config, ranks: int, *, own_optimizer: bool, origin: str = "config") -> Settings:
    """Return the settings that a configuration of mpitrain asks for.

    Args:
        config: Configuration for `mpitrain.initialize`, or that of a whole run, which has all sections
            (RUN/config.toml).
        ranks: Number of all ranks.
        own_optimizer: If true, the caller passes an optimizer, which sets the learning rates.
        origin: Name of the configuration in errors.

    Raises:
        InputError: If a key was set that `mpitrain.initialize` ignores. In a run's configuration, such keys are
            accepted if they have their defaults; other ones are listed in `Settings.without_effect` unless they would
            change the training.
    """
    unused = {
        key: field for key, field, value in _explicit_settings(config) if not _is_accepted(field, value, own_optimizer)
    }
    without_effect: list[str] = []
    if config.model_fields_set == set(Config.model_fields):
        changed = {
            key: field for key, field, value in _explicit_settings(config) if key in unused and value != field.default
        }
        without_effect = sorted(key for key, field in changed.items() if not declared(field, "decisive"))
        unused = {key: field for key, field in changed.items() if declared(field, "decisive")}
    if unused:
        names = sorted(unused)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        beside = any(declared(field, "loop") == "for_optimizer" for field in unused.values())
        why = " because you pass your own optimizer" if beside else ""
        raise refusal(
            f"{origin}: mt.initialize ignores {shown}{why}; remove them, or run mpitrain.train, which uses them"
        )
    schedule = None if own_optimizer else schedule_of(config.optim, config.train.steps, evaluates=False)
    return Settings(config, *_batch(config, ranks), schedule, tuple(without_effect))


def from_deepspeed(read: DeepSpeedConfig, ranks: int) -> Settings:
    """Return the settings that a DeepSpeed configuration asks for.

    Args:
        read: The configuration.
        ranks: Number of all ranks.
    """
    return Settings(read.config, *_batch(read.config, ranks), read.schedule, read.without_effect, read)


def every_setting(config: Config) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield all settings as (section.key, declaration, value)."""
    for name in Config.model_fields:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items():
            yield f"{name}.{key}", field, getattr(section, key)


def _explicit_settings(config: Config) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield the settings that were set explicitly, like `every_setting`."""
    for full, field, value in every_setting(config):
        name, _, key = full.partition(".")
        if key in getattr(config, name).model_fields_set:
            yield full, field, value


def _is_accepted(field: FieldInfo, value: Any, own_optimizer: bool) -> bool:
    """Return whether `mpitrain.initialize` follows a setting, or the value is off or an empty default."""
    loop, off = declared(field, "loop"), declared(field, "off")
    followed = not own_optimizer if loop == "for_optimizer" else bool(loop)
    return followed or value == (field.default if off is None and not field.default else off)


def _batch(config: Config, ranks: int) -> tuple[int, int]:
    """Return (samples of a microbatch, microbatches of a step). Raises InputError if they do not suit the mesh."""
    train, parallel = config.train, config.parallel
    axes = axes_of(parallel)
    shape_of(axes, ranks)
    stages = count_along(axes, BLOCKS)
    data = count_readers(axes, ranks)
    batch, micro = train.batch if "batch" in train.model_fields_set else None, train.microbatch or None
    if stages > 1:
        if batch is None:
            raise refusal(
                "a pipeline computes all microbatches of a step in one call: set train.batch, and set train.microbatch "
                "if you do not want two microbatches per stage"
            )
        if micro is None and not train.accumulation and batch % data == 0:
            share = batch // data
            least = min(default_microbatches(stages), share)
            micro = share // next(count for count in range(least, share + 1) if share % count == 0)
    names = ("train.batch", "train.microbatch", "train.accumulation")
    return accumulation(batch, micro, train.accumulation or None, ranks=data, names=names)
