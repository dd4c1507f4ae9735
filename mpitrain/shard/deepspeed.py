"""A DeepSpeed configuration (ds_config.json) as settings of ours.

What has a counterpart is taken over; what only tunes DeepSpeed's own machinery is named in `Settings.without_effect`;
anything else is an error that names the key. See the "DeepSpeed Configuration JSON" page of DeepSpeed's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpitrain.errors import InputError
from mpitrain.shard.offload import HOST
from mpitrain.shard.precision import LossScale
from mpitrain.shard.schedule import Schedule
from mpitrain.shard.settings import Settings, accumulation
from mpitrain.shard.sharding import Options

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_KNOWN = {*BATCH_KEYS, "zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "gradient_clipping"}
_KNOWN |= {"activation_checkpointing", "communication_data_type", "data_types", "zero_allow_untested_optimizer"}
_TUNING = {"steps_per_print", "wall_clock_breakdown", "dump_state", "prescale_gradients", "gradient_predivide_factor"}
_ZERO_TUNING = {
    "allgather_partitions",
    "allgather_bucket_size",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_scatter",
    "round_robin_gradients",
    "sub_group_size",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bfp16": torch.bfloat16, "bf16": torch.bfloat16}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def looks_like_deepspeed(values: Mapping[str, Any]) -> bool:
    return bool(set(values) & (_KNOWN - {"optimizer", "scheduler"}))


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}", agreed=True) from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object; give a DeepSpeed configuration", agreed=True)
    return values


def from_deepspeed(values: Mapping[str, Any], ranks: int, origin: str = "config") -> Settings:
    """Settings for `ranks` data-parallel ranks. Raises InputError naming the key that cannot be taken over."""
    for key, value in _flat(values):
        if value == "auto":
            raise InputError(f'{origin}: {key} is "auto", which nobody filled in; give a value', agreed=True)
    ignored = [key for key in values if key in _TUNING]
    for key in values:
        if key not in _KNOWN | _TUNING:
            raise _unsupported(origin, key)
    micro, steps = accumulation(*(values.get(key) for key in BATCH_KEYS), ranks=ranks, names=BATCH_KEYS)
    zero, offload, hints = _zero(values.get("zero_optimization", {}), origin)
    precision, scale = _precision(values, origin)
    reduce = values.get("communication_data_type") or values.get("data_types", {}).get("grad_accum_dtype")
    if reduce is not None and reduce not in _DTYPES:
        raise InputError(f"{origin}: {reduce!r} is no type to reduce in; use one of {sorted(_DTYPES)}", agreed=True)
    bucket = values.get("zero_optimization", {}).get("reduce_bucket_size")
    optimizer = values.get("optimizer", {})
    _only(optimizer, {"type", "params"}, f"{origin}: optimizer")
    recompute = values.get("activation_checkpointing")
    if recompute:
        _only(recompute, {"number_checkpoints", "profile"}, f"{origin}: activation_checkpointing", off=True)
    return Settings(
        microbatch=micro,
        accumulate=steps,
        precision=precision,
        scale=scale,
        clip=float(values.get("gradient_clipping", 0.0)),
        recompute=recompute is not None,
        options=Options(
            zero=zero,
            offload=offload,
            reduce_dtype=_DTYPES[reduce] if reduce is not None else None,
            # DeepSpeed counts elements
            bucket_mb=25.0 if bucket is None else float(bucket) * (4 if precision == "fp32" else 2) / (1 << 20),
        ),
        any_optimizer=bool(values.get("zero_allow_untested_optimizer", False)),
        optimizer=(optimizer["type"], dict(optimizer.get("params", {}))) if optimizer else None,
        schedule=_schedule(values.get("scheduler"), optimizer.get("params", {}), origin),
        without_effect=(*ignored, *hints),
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return found


def _unsupported(origin: str, key: str) -> InputError:
    return InputError(f"{origin}: {key} has no counterpart here; remove it", agreed=True)


def _only(values: Mapping[str, Any], known: set[str], origin: str, *, off: bool = False) -> None:
    """off: further keys may be there when they are switched off."""
    for key, value in values.items():
        if key not in known and not (off and not value):
            raise InputError(f"{origin}.{key} has no counterpart here; remove it", agreed=True)


def _zero(section: Mapping[str, Any], origin: str) -> tuple[int, str, list[str]]:
    """(stage, offload, keys without effect)."""
    name = f"{origin}: zero_optimization"
    hints = [f"zero_optimization.{key}" for key in section if key in _ZERO_TUNING]
    _only(section, {"stage", "offload_optimizer", "reduce_bucket_size", *_ZERO_TUNING}, name, off=True)
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"{name}.stage {stage!r} is not 0, 1, 2 or 3", agreed=True)
    offload = section.get("offload_optimizer") or {}
    tuning = {"pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write", "ratio"}
    _only(offload, {"device", "nvme_path", *tuning}, f"{name}.offload_optimizer")
    hints += [f"zero_optimization.offload_optimizer.{key}" for key in offload if key in tuning]
    device = offload.get("device", "none")
    if device == "nvme":
        if not offload.get("nvme_path"):
            raise InputError(f"{name}.offload_optimizer.device nvme needs an nvme_path; give a folder", agreed=True)
        return stage, str(offload["nvme_path"]), hints
    if device not in ("none", "cpu"):
        raise InputError(f"{name}.offload_optimizer.device {device!r} is not none, cpu or nvme", agreed=True)
    return stage, HOST if device == "cpu" else "", hints


def _precision(values: Mapping[str, Any], origin: str) -> tuple[str, LossScale | None]:
    bf16, fp16 = values.get("bf16", {}), values.get("fp16", {})
    _only(bf16, {"enabled"}, f"{origin}: bf16", off=True)
    known = {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale"}
    _only(fp16, known, f"{origin}: fp16", off=True)
    if bf16.get("enabled") and fp16.get("enabled"):
        raise InputError(f"{origin}: bf16 and fp16 are both enabled; choose one", agreed=True)
    if bf16.get("enabled"):
        return "bf16", None
    if not fp16.get("enabled"):
        return "fp32", None
    if fixed := fp16.get("loss_scale", 0):
        return "fp16", LossScale(float(fixed))
    return "fp16", LossScale(
        2.0 ** fp16.get("initial_scale_power", 16),
        dynamic=True,
        patience=fp16.get("loss_scale_window", 1000),
        least=float(fp16.get("min_loss_scale", 1)),
    )


def _schedule(section: Mapping[str, Any] | None, optimizer: Mapping[str, Any], origin: str) -> Schedule | None:
    if not section:
        return None
    name, params = f"{origin}: scheduler", section.get("params", {})
    _only(section, {"type", "params"}, name)
    kind = _SCHEDULES.get(section.get("type", ""))
    if kind is None:
        raise InputError(f"{name}.type {section.get('type')!r} is not one of {', '.join(_SCHEDULES)}", agreed=True)
    known = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type", "cos_min_ratio"}
    _only(params, {*known, "warmup_min_ratio"}, f"{name}.params")
    if kind != "constant" and "total_num_steps" not in params:
        raise InputError(f"{name}.params needs total_num_steps for {section['type']}", agreed=True)
    peak = params.get("warmup_max_lr", optimizer.get("lr", 1e-3))
    return Schedule(
        kind,
        peak=float(peak),
        first=float(params.get("warmup_min_lr", float(peak) * params.get("warmup_min_ratio", 0.0))),
        last=float(peak) * params.get("cos_min_ratio", 0.0001) if kind == "cosine" else 0.0,
        warmup=int(params.get("warmup_num_steps", 1000)),
        steps=int(params.get("total_num_steps", 0)),
        logarithmic=kind != "cosine" and params.get("warmup_type", "log") == "log",
    )
