"""A DeepSpeed configuration (ds_config.json), read into plain values.

What has a counterpart is taken over; what only tunes DeepSpeed's own machinery, and what is switched off, is named in
`DeepSpeedConfig.without_effect`; anything else is an error that names the key. See the "DeepSpeed Configuration JSON"
page of DeepSpeed's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.choices import Decay, Precision
from mpitrain.config.batch import accumulation
from mpitrain.config.learning_rate import LearningRate
from mpitrain.config.parallel import CommSection
from mpitrain.errors import InputError, refusal
from mpitrain.storage.disk import read_plain

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MANAGED = "managed_gradient_accumulation"  # step() counts microbatches, as ours does
_KNOWN = {*BATCH_KEYS, "zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "gradient_clipping", _MANAGED}
_KNOWN |= {"activation_checkpointing", "communication_data_type", "data_types", "zero_allow_untested_optimizer"}
_TUNING = {"steps_per_print", "wall_clock_breakdown", "dump_state", "prescale_gradients", "gradient_predivide_factor"}
_TUNING |= {"dataloader_drop_last", "disable_allgather", "memory_breakdown", "zero_force_ds_cpu_optimizer", "aio"}
# what a configuration may have as long as it is switched off
_UNSUPPORTED = {"amp", "autotuning", "checkpoint", "comet", "comms_logger", "compile", "compression_training"}
_UNSUPPORTED |= {"csv_monitor", "curriculum_learning", "data_efficiency", "eigenvalue", "elasticity", "flops_profiler"}
_UNSUPPORTED |= {"hybrid_engine", "nebula", "progressive_layer_drop", "quantize_training", "sparse_attention"}
_UNSUPPORTED |= {"seq_parallel_communication_data_type", "sparse_gradients", "tensor_parallel", "tensorboard"}
_UNSUPPORTED |= {"torch_autocast", "use_data_before_expert_parallelism", "wandb", "zenflow"}
_ZERO_TUNING = {"allgather_partitions", "allgather_bucket_size", "contiguous_gradients", "load_from_fp32_weights"}
_ZERO_TUNING |= {"log_trace_cache_warnings", "memory_efficient_linear", "overlap_comm", "reduce_scatter"}
_ZERO_TUNING |= {"round_robin_gradients", "sub_group_size", "stage3_gather_16bit_weights_on_model_save"}
_ZERO_TUNING |= {"stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"}
_ZERO_TUNING |= {"stage3_param_persistence_threshold", "stage3_model_persistence_threshold"}
_ZERO_TUNING.add("stage3_prefetch_bucket_size")
_ONE_IS_OFF = {"zero_hpz_partition_size": 1, "mics_shard_size": -1}  # the values that ask for nothing
_DTYPES: dict[str, Precision] = {"fp32": "fp32", "fp16": "fp16", "bfp16": "bf16", "bf16": "bf16"}
_SCHEDULES: dict[str, Decay] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


@dataclass(frozen=True)
class LossScaling:
    """What the loss is multiplied by in fp16.

    Attributes:
        value: The factor, or where a dynamic one begins.
        dynamic: Whether it is halved when gradients overflow and doubled after `patience` steps that did not.
        least: What a dynamic factor does not go below.
        spare: Overflows that are let pass before it is halved.
        refill: Whether each good step gives the spare ones back.
    """

    value: float
    dynamic: bool = False
    patience: int = 2000
    least: float = 1.0
    spare: int = 0
    refill: bool = False


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration asks for, in our words.

    Attributes:
        microbatch: Samples that a rank gives at a time; 0 where nothing is said.
        accumulate: Backward passes of an update.
        scale: Of the loss; None where the precision needs none.
        clip: Largest norm of the gradients; 0 for no clipping.
        offload: Where optimizer states go: `host`, a folder, or empty for the device.
        reduce_dtype: In which gradients are added up; None for the parameters' own.
        any_optimizer: Whether optimizers are taken that are not known to work element by element.
        optimizer: (class of torch.optim, its options), or None where there is none.
        without_effect: Keys that were given and mean nothing here.
    """

    microbatch: int
    accumulate: int
    precision: Precision
    scale: LossScaling | None
    clip: float
    recompute: bool
    zero: int
    offload: str
    reduce_dtype: Precision | None
    bucket_mb: float
    any_optimizer: bool
    optimizer: tuple[str, dict[str, Any]] | None
    schedule: LearningRate | None
    without_effect: tuple[str, ...]


def looks_like_deepspeed(values: Mapping[str, Any]) -> bool:
    """Whether these are the values of a DeepSpeed configuration rather than of ours."""
    return bool(set(values) & (_KNOWN - {"optimizer", "scheduler"}))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError where there is none."""
    try:
        values = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise refusal(f"{path} holds no JSON object; give a DeepSpeed configuration")
    return values


def read_deepspeed(values: Mapping[str, Any], ranks: int, origin: str = "config") -> DeepSpeedConfig:
    """Read the values of a DeepSpeed configuration.

    Args:
        values: The JSON object.
        ranks: Data-parallel ranks, by which its batch is divided.
        origin: What errors call the configuration.

    Raises:
        InputError: A key cannot be taken over, or contradicts another; the message names it.
    """
    for key, value in _flat(values):
        if value == "auto":
            raise refusal(f'{origin}: {key} is "auto", which nobody filled in; give a value')
    for key, value in values.items():
        if key not in _KNOWN | _TUNING and not (key in _UNSUPPORTED and _is_off(value)):
            raise _unsupported(origin, key)
    if not values.get(_MANAGED, True):
        raise _unsupported(origin, f"{_MANAGED} false")
    ignored = [key for key in values if key not in _KNOWN]
    micro, steps = accumulation(*(values.get(key) for key in BATCH_KEYS), ranks=ranks, names=BATCH_KEYS)
    zero, offload, hints = _zero(values.get("zero_optimization", {}), origin)
    precision, scale, further = _precision(values, origin)
    reduce = _reduce_dtype(values, origin)
    bucket = values.get("zero_optimization", {}).get("reduce_bucket_size")  # in elements
    itemsize = 4 if precision == "fp32" else 2
    optimizer = values.get("optimizer") or {}
    hints += [*further, *_only(optimizer, {"type", "params"}, f"{origin}: optimizer")]
    recompute = values.get("activation_checkpointing")
    known = {"number_checkpoints", "profile", "synchronize_checkpoint_boundary"}
    hints += _only(recompute or {}, known, f"{origin}: activation_checkpointing")
    return DeepSpeedConfig(
        microbatch=micro,
        accumulate=steps,
        precision=precision,
        scale=scale,
        clip=float(values.get("gradient_clipping", 1.0) or 0.0),  # as DeepSpeed clips where nothing is said
        recompute=recompute is not None,
        zero=zero,
        offload=offload,
        reduce_dtype=reduce,
        bucket_mb=CommSection().bucket_mb if bucket is None else float(bucket) * itemsize / (1 << 20),
        any_optimizer=bool(values.get("zero_allow_untested_optimizer", False)),
        optimizer=_optimizer(optimizer, origin),
        schedule=_schedule(values.get("scheduler"), optimizer.get("params", {}), origin),
        without_effect=(*ignored, *hints),
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return found


def _is_off(value: Any) -> bool:
    """Whether a key asks for nothing: it is false, or a section that is not enabled."""
    return not value or (isinstance(value, Mapping) and value.get("enabled", True) in (False, None))


def _unsupported(origin: str, key: str) -> InputError:
    return refusal(f"{origin}: {key} has no counterpart here; remove it")


def _only(values: Mapping[str, Any], taken: set[str], origin: str, tuning: Collection[str] = ()) -> list[str]:
    """Refuse further keys than those taken over; returns the names of those that only tune, or are switched off."""
    further = [key for key in values if key not in taken]
    for key in further:
        if key not in tuning and not _is_off(values[key]) and values[key] != _ONE_IS_OFF.get(key):
            raise refusal(f"{origin}.{key} has no counterpart here; remove it")
    return [f"{origin.rpartition(': ')[2]}.{key}" for key in further]


def _optimizer(section: Mapping[str, Any], origin: str) -> tuple[str, dict[str, Any]] | None:
    """(class of torch.optim, options). DeepSpeed's Adam is AdamW unless it is told otherwise."""
    if not section:
        return None
    if "type" not in section:
        raise refusal(f"{origin}: optimizer.type is missing; name a class of torch.optim")
    kind, params = section["type"], dict(section.get("params") or {})
    if kind.lower() in ("adam", "adamw"):
        params.pop("torch_adam", None)  # it always is
        if not params.pop("bias_correction", True):
            raise _unsupported(origin, "optimizer.params.bias_correction false")
        kind = "AdamW" if params.pop("adam_w_mode", True) or kind.lower() == "adamw" else "Adam"
    return kind, params


def _reduce_dtype(values: Mapping[str, Any], origin: str) -> Precision | None:
    section = values.get("data_types") or {}
    _only(section, {"grad_accum_dtype"}, f"{origin}: data_types")
    found: set[Precision] = set()
    for name in (values.get("communication_data_type"), section.get("grad_accum_dtype")):
        if name is not None and name not in _DTYPES:
            raise refusal(f"{origin}: {name!r} is no type to reduce in; use one of {sorted(_DTYPES)}")
        found |= {_DTYPES[name]} if name is not None else set()
    if len(found) > 1:
        raise refusal(
            f"{origin}: gradients are added up and sent in one type, but communication_data_type and "
            "data_types.grad_accum_dtype differ; make them equal"
        )
    return found.pop() if found else None


def _zero(section: Mapping[str, Any], origin: str) -> tuple[int, str, list[str]]:
    """(stage, offload, keys without effect)."""
    name = f"{origin}: zero_optimization"
    if not section.get("ignore_unused_parameters", True):
        raise _unsupported(origin, "zero_optimization.ignore_unused_parameters false")
    if (section.get("offload_param") or {}).get("device", "none") != "none":
        raise _unsupported(origin, "zero_optimization.offload_param")
    taken = {"stage", "offload_optimizer", "reduce_bucket_size", "ignore_unused_parameters"}
    hints = _only(section, taken, name, {*_ZERO_TUNING, "offload_param"})
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise refusal(f"{name}.stage {stage!r} is not 0, 1, 2 or 3")
    offload = section.get("offload_optimizer") or {}
    tuning = {"pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write", "ratio"}
    hints += _only(offload, {"device", "nvme_path"}, f"{name}.offload_optimizer", tuning)
    device = offload.get("device", "none")
    if device == "nvme":
        if not offload.get("nvme_path"):
            raise refusal(f"{name}.offload_optimizer.device nvme needs an nvme_path; give a folder")
        return stage, str(offload["nvme_path"]), hints
    if device not in ("none", "cpu"):
        raise refusal(f"{name}.offload_optimizer.device {device!r} is not none, cpu or nvme")
    return stage, "host" if device == "cpu" else "", hints


def _precision(values: Mapping[str, Any], origin: str) -> tuple[Precision, LossScaling | None, list[str]]:
    """(precision, loss scale, keys without effect)."""
    bf16, fp16 = values.get("bf16") or {}, values.get("fp16") or {}
    hints = _only(bf16, {"enabled", "check_grad_overflow"}, f"{origin}: bf16", {"immediate_grad_update"})
    known = {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis"}
    if fp16.get("enabled"):
        hints += _only(fp16, {*known, "consecutive_hysteresis"}, f"{origin}: fp16")
    if bf16.get("enabled") and fp16.get("enabled"):
        raise refusal(f"{origin}: bf16 and fp16 are both enabled; choose one")
    if bf16.get("enabled"):
        return "bf16", None, hints
    if not fp16.get("enabled"):
        return "fp32", None, hints
    if fixed := fp16.get("loss_scale", 0):
        return "fp16", LossScaling(float(fixed)), hints
    dynamic = LossScaling(
        2.0 ** fp16.get("initial_scale_power", 16),
        dynamic=True,
        patience=fp16.get("loss_scale_window", 1000),
        least=float(fp16.get("min_loss_scale", 1)),
        spare=int(fp16.get("hysteresis", 2)) - 1,
        refill=bool(fp16.get("consecutive_hysteresis", False)),
    )
    return "fp16", dynamic, hints


def _schedule(section: Mapping[str, Any] | None, optimizer: Mapping[str, Any], origin: str) -> LearningRate | None:
    if not section:
        return None
    name, params = f"{origin}: scheduler", section.get("params", {})
    _only(section, {"type", "params"}, name)
    kind = _SCHEDULES.get(section.get("type", ""))
    if kind is None:
        raise refusal(f"{name}.type {section.get('type')!r} is not one of {', '.join(_SCHEDULES)}")
    known = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type", "cos_min_ratio"}
    _only(params, {*known, "warmup_min_ratio"}, f"{name}.params")
    if kind != "constant" and "total_num_steps" not in params:
        raise refusal(f"{name}.params needs total_num_steps for {section['type']}")
    peak = params.get("warmup_max_lr", optimizer.get("lr", 1e-3))
    return LearningRate(
        kind,
        peak=float(peak),
        first=float(params.get("warmup_min_lr", float(peak) * params.get("warmup_min_ratio", 0.0))),
        last=float(peak) * params.get("cos_min_ratio", 0.0001) if kind == "cosine" else 0.0,
        warmup=int(params.get("warmup_num_steps", 1000)),
        steps=int(params.get("total_num_steps", 0)),
        logarithmic=kind != "cosine" and params.get("warmup_type", "log") == "log",
    )
