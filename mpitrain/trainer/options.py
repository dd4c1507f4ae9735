"""Settings that `mpitrain.initialize` follows."""

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
    """Settings of a training loop of one's own.

    Attributes:
        config: The configuration; of a DeepSpeed configuration our settings that ask for the same.
        microbatch: Samples that a rank gives at a time; 0 where nothing is said.
        accumulate: Backward passes of a step.
        schedule: Schedule of the learning rate; None where the optimizer or a scheduler has it.
        without_effect: Keys that were given and mean nothing here.
        deepspeed: What a DeepSpeed configuration asks for; None where it is one of ours.
    """

    config: Config
    microbatch: int
    accumulate: int
    schedule: RateSchedule | None
    without_effect: tuple[str, ...] = ()
    deepspeed: DeepSpeedConfig | None = None


def from_config(config: Config, ranks: int, *, own_optimizer: bool, origin: str = "config") -> Settings:
    """Return the settings of our own configuration.

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
    unused = {key: field for key, field, value in _given(config) if not _accepted(field, value, own_optimizer)}
    without_effect: list[str] = []
    if config.model_fields_set == set(Config.model_fields):
        changed = {key: field for key, field, value in _given(config) if key in unused and value != field.default}
        without_effect = sorted(key for key, field in changed.items() if not declared(field, "decisive"))
        unused = {key: field for key, field in changed.items() if declared(field, "decisive")}
    if unused:
        names = sorted(unused)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        beside = any(declared(field, "loop") == "for_optimizer" for field in unused.values())
        why = " beside an optimizer of your own" if beside else ""
        raise refusal(
            f"{origin}: mt.initialize does nothing with {shown}{why}; remove them, or run mpitrain.train, which does"
        )
    schedule = None if own_optimizer else schedule_of(config.optim, config.train.steps, evaluates=False)
    return Settings(config, *_batch(config, ranks), schedule, tuple(without_effect))


def from_deepspeed(read: DeepSpeedConfig, ranks: int) -> Settings:
    """Return the settings of a DeepSpeed configuration."""
    return Settings(read.config, *_batch(read.config, ranks), read.schedule, read.without_effect, read)


def every_setting(config: Config) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield all settings, as (section.key, declaration, value)."""
    for name in Config.model_fields:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items():
            yield f"{name}.{key}", field, getattr(section, key)


def _given(config: Config) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield the settings that were given."""
    for full, field, value in every_setting(config):
        name, _, key = full.partition(".")
        if key in getattr(config, name).model_fields_set:
            yield full, field, value


def _accepted(field: FieldInfo, value: Any, own_optimizer: bool) -> bool:
    """Return whether `mpitrain.initialize` follows a setting, or the value asks for nothing (off, an empty default)."""
    loop, off = declared(field, "loop"), declared(field, "off")
    followed = not own_optimizer if loop == "for_optimizer" else bool(loop)
    return followed or value == (field.default if off is None and not field.default else off)


def _batch(config: Config, ranks: int) -> tuple[int, int]:
    """(samples of a microbatch, microbatches of a step). Raises InputError where they do not go with the mesh."""
    train, parallel = config.train, config.parallel
    axes = axes_of(parallel)
    shape_of(axes, ranks)
    stages = count_along(axes, BLOCKS)
    data = count_readers(axes, ranks)
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
