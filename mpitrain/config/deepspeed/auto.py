"""What "auto" stands for in a DeepSpeed configuration: our settings, as Hugging Face's Trainer puts in its own.

    their key                                     our setting
    train_batch_size                              train.batch, where it is set
    train_micro_batch_size_per_gpu                train.microbatch, where it is set
    gradient_accumulation_steps                   what the two leave over
    gradient_clipping                             train.clip
    fp16.enabled, bf16.enabled                    train.precision
    amp.enabled                                   false: ours is what stands at fp16 and bf16
    optimizer.params.lr, weight_decay             optim.lr, optim.weight_decay
    optimizer.params.betas, eps                   optim.options, else those of torch
    scheduler.params.warmup_min_lr, warmup_max_lr 0, optim.lr
    scheduler.params.warmup_num_steps             optim.warmup
    scheduler.params.total_num_steps              train.steps

An "auto" of a key that only tunes DeepSpeed's own machinery stays without effect, as the key is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.config.deepspeed.findings import Findings
from mpitrain.config.deepspeed.keys import AUTO, BATCH, FP16_TAKEN, HARMLESS, MONITORS, OFFLOAD_HARMLESS, ZERO_HARMLESS
from mpitrain.config.settings import Config

_OURS = {  # section.key of theirs: of ours
    "gradient_clipping": "train.clip",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "scheduler.params.warmup_max_lr": "optim.lr",
    "scheduler.params.warmup_num_steps": "optim.warmup",
    "scheduler.params.total_num_steps": "train.steps",
}
_BATCH = {"train_batch_size": "batch", "train_micro_batch_size_per_gpu": "microbatch"}
_PRECISIONS = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bfloat16.enabled": "bf16"}
_LEFT_OUT = {"zero_optimization.reduce_bucket_size", "optimizer.params.betas", "optimizer.params.eps"}
_LEFT_OUT |= {"scheduler.params.warmup_min_lr", "scheduler.params.warmup_type", *BATCH}
_LEFT_OUT |= {f"scheduler.params.{key}" for key in ("warmup_min_ratio", "cos_min_ratio")}
_LEFT_OUT |= {"amp.enabled", "amp.opt_level", *(f"fp16.{key}" for key in FP16_TAKEN - {"enabled"})}


def filled(values: Mapping[str, Any], config: Config, findings: Findings) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Put our settings where a configuration says "auto".

    Args:
        values: Of the DeepSpeed configuration.
        config: Our settings.
        findings: Told of an "auto" that stands for nothing of ours.

    Returns:
        (the values, in which what DeepSpeed has a default for was left out; what was put in, for people).
    """
    told: list[str] = []
    return _section(values, "", config, findings, told), tuple(told)


def _section(
    values: Mapping[str, Any], prefix: str, config: Config, findings: Findings, told: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            findings.wrong(f"{prefix}{key!r:.80} is no name", "write keys as texts")
            continue
        name = prefix + key
        if isinstance(value, Mapping):
            found[key] = _section(value, f"{name}.", config, findings, told)
        elif not isinstance(value, str) or value != AUTO:
            found[key] = value
        elif (ours := _of(name, config)) is not None:
            found[key], whence = ours
            told.append(f"{name} {found[key]} ({whence})")
        elif name.partition(".")[0] in MONITORS or key in HARMLESS | ZERO_HARMLESS | OFFLOAD_HARMLESS:
            found[key] = value
        elif name not in _LEFT_OUT:
            findings.wrong(f'{name} is "auto", for which we have no setting', "give a value")
    return found


def _of(name: str, config: Config) -> tuple[Any, str] | None:
    """(the value, our setting) that an "auto" stands for; None: there is none, or it says nothing."""
    if name in _OURS:
        section, _, key = _OURS[name].partition(".")
        return getattr(getattr(config, section), key), _OURS[name]
    if name in _BATCH and _BATCH[name] in config.train.model_fields_set and getattr(config.train, _BATCH[name]):
        return getattr(config.train, _BATCH[name]), f"train.{_BATCH[name]}"
    if name in _PRECISIONS:
        return config.train.precision == _PRECISIONS[name], "train.precision"
    option = name.removeprefix("optimizer.params.")
    if option in ("betas", "eps") and option in config.optim.options:
        return config.optim.options[option], "optim.options"
    return None
