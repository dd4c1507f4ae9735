"""From the values of a DeepSpeed configuration to what it asks for in our words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.choices import Precision
from mpitrain.config.batch_sizes import accumulation
from mpitrain.config.deepspeed import keys
from mpitrain.config.deepspeed.keys import (
    AUTO,
    BATCH,
    FP16_TAKEN,
    HARMLESS,
    MONITORS,
    OFFLOAD_HARMLESS,
    ZERO_HARMLESS,
    Findings,
    is_off,
)
from mpitrain.config.deepspeed.optimizing import OfDeepSpeed, read_optimizer, read_schedule
from mpitrain.config.parallel import CommSection
from mpitrain.config.settings import Config
from mpitrain.errors import refusing

_LARGEST_POWER = 1000  # of 2
_LEAST_BUCKET = 1.0  # MiB: some ask for buckets of nothing, so that each tensor goes by itself


def looks_like_deepspeed(values: Mapping[str, Any]) -> bool:
    """Whether these are the values of a DeepSpeed configuration rather than of ours."""
    return bool(set(values) & (keys.TAKEN - {"optimizer", "scheduler", "checkpoint"}))


def read_deepspeed(
    values: Mapping[str, Any], ranks: int, origin: str = "config", auto: Config | None = None
) -> DeepSpeedConfig:
    """Read the values of a DeepSpeed configuration.

    Args:
        values: The JSON object.
        ranks: Data-parallel ranks, by which its batch is divided.
        origin: What errors call the configuration.
        auto: Our settings, which stand where it says "auto".

    Raises:
        InputError: Keys cannot be taken over, or contradict each other; one message names them all.
    """
    with refusing(f"{origin} cannot be taken for a DeepSpeed configuration", "compare it with its manual", agreed=True):
        return _read(values, ranks, Findings(origin), auto)


def _read(values: Mapping[str, Any], ranks: int, findings: Findings, auto: Config | None) -> DeepSpeedConfig:
    values, put_in = filled(values, auto or Config(), findings)
    findings.look(values, "", keys.TAKEN, keys.HARMLESS, keys.UNSUPPORTED)
    _look_at_others(values, findings)
    if not values.get(keys.MANAGED, True):
        findings.unsupported(f"{keys.MANAGED} false")
    micro, steps = 0, 1
    given = [None if values.get(key) is None else findings.whole(key, values[key], 1) for key in keys.BATCH]
    with findings.noting():
        micro, steps = accumulation(*given, ranks=ranks, names=keys.BATCH)
    zero = _zero_section(values.get("zero_optimization"))
    stage, offload, offload_parameters = _zero(zero, findings)
    precision, scale = _precision(values, findings)
    section = findings.section("optimizer", values.get("optimizer"))
    params = dict(findings.section("optimizer.params", section.get("params")))
    clip = values.get("gradient_clipping", params.pop("max_grad_norm", None))
    optimizer = read_optimizer(section, params, findings)
    schedule, torch_schedule = read_schedule(
        findings.section("scheduler", values.get("scheduler")), optimizer, findings
    )
    trackers, instead = read_monitors(values, findings)
    read = DeepSpeedConfig(
        microbatch=micro,
        accumulate=steps,
        precision=precision,
        scale=scale,
        clip=1.0
        if clip is None
        else findings.number("gradient_clipping", clip or 0.0),  # as DeepSpeed clips where nothing is said
        recompute=_recompute(values.get("activation_checkpointing"), findings),
        zero=stage,
        offload=offload,
        offload_parameters=offload_parameters,
        reduce_dtype=_reduce_dtype(values, findings),
        bucket_mb=_bucket_mb(zero.get("reduce_bucket_size"), 4 if precision == "fp32" else 2, findings),
        any_optimizer=bool(values.get("zero_allow_untested_optimizer", False)),
        optimizer=optimizer,
        schedule=schedule,
        torch_schedule=torch_schedule,
        trackers=trackers,
        trackers_instead=instead,
        without_effect=tuple(findings.ignored),
        filled=put_in,
    )
    findings.tell()
    return read


def _look_at_others(values: Mapping[str, Any], findings: Findings) -> None:
    """The sections of DeepSpeed's checkpoints and of torch.compile, which ask for nothing unless they are told to."""
    for key, harmless in {"checkpoint": keys.CHECKPOINT_HARMLESS, "compile": keys.COMPILE_HARMLESS}.items():
        section = findings.section(key, values.get(key))
        if key in values and is_off(section):
            findings.ignored.append(key)
        else:
            findings.look(section, f"{key}.", (), harmless)


def _bucket_mb(elements: Any, itemsize: int, findings: Findings) -> float:
    if elements is None:
        return float(CommSection().bucket_mb)
    return max(_LEAST_BUCKET, findings.number("zero_optimization.reduce_bucket_size", elements) * itemsize / (1 << 20))


def _recompute(section: Mapping[str, Any] | None, findings: Findings) -> bool:
    """Whether activations are recomputed: there is such a section, and not everything in it is off."""
    if section is None:
        return False
    section = findings.section("activation_checkpointing", section)
    findings.look(section, "activation_checkpointing.", (), keys.RECOMPUTE_HARMLESS)
    return not section or not all(is_off(value) for value in section.values())


def _reduce_dtype(values: Mapping[str, Any], findings: Findings) -> Precision | None:
    section = findings.section("data_types", values.get("data_types"))
    findings.look(section, "data_types.", {"grad_accum_dtype"})
    found: set[Precision] = set()
    sent = values.get("communication_data_type", "fp32" if values.get("fp32_allreduce") else None)
    for name in (sent, section.get("grad_accum_dtype")):
        if name is not None and (not isinstance(name, str) or name not in keys.DTYPES):
            findings.wrong(f"{name!r:.80} is no type to reduce in", f"use one of {sorted(keys.DTYPES)}")
        elif name is not None:
            found.add(keys.DTYPES[name])
    if len(found) > 1:
        findings.wrong(
            "gradients are added up and sent in one type, but communication_data_type and data_types.grad_accum_dtype "
            "differ",
            "make them equal",
        )
    return found.pop() if found else None


def _zero_section(given: Any) -> Mapping[str, Any]:
    """The section; before there was one, the key said true for stage 1, or false."""
    return given if isinstance(given, Mapping) else {"stage": int(bool(given))}


def _zero(section: Mapping[str, Any], findings: Findings) -> tuple[int, str, str]:
    """(stage, where optimizer states go, where parameters go)."""
    findings.look(section, "zero_optimization.", keys.ZERO_TAKEN, keys.ZERO_HARMLESS)
    if not section.get("ignore_unused_parameters", True):
        findings.unsupported("zero_optimization.ignore_unused_parameters false")
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        findings.wrong(f"zero_optimization.stage {stage!r:.80} is not a stage", "give 0, 1, 2 or 3")
        stage = 0
    states = _offload(section, "offload_optimizer", "cpu_offload", findings)
    parameters = _offload(section, "offload_param", "cpu_offload_params", findings)
    if parameters and stage < 3:  # DeepSpeed looks at it at stage 3 alone
        findings.ignored.append("zero_optimization.offload_param")
        parameters = ""
    return stage, states, parameters


def _offload(section: Mapping[str, Any], key: str, before: str, findings: Findings) -> str:
    """`host`, a folder, or empty for nothing. before: what the key was called in DeepSpeed's first versions."""
    name = f"zero_optimization.{key}"
    offload = findings.section(name, section.get(key)) or ({"device": "cpu"} if section.get(before) else {})
    findings.look(offload, f"{name}.", {"device", "nvme_path"}, keys.OFFLOAD_HARMLESS)
    device = offload.get("device", "none")
    if device == "none" and offload:
        findings.ignored.append(name)
    if device == "nvme":
        if not offload.get("nvme_path"):
            findings.wrong(f"{name}.device nvme needs an nvme_path", "give a folder")
        return str(offload.get("nvme_path") or "")
    if device not in ("none", "cpu"):
        findings.wrong(f"{name}.device {device!r:.80} is unknown", "give none, cpu or nvme")
    return "host" if device == "cpu" else ""


def _precision(values: Mapping[str, Any], findings: Findings) -> tuple[Precision, LossScaling | None]:
    """(precision, loss scale)."""
    before = values.get("bfloat16")  # what the section was called in DeepSpeed's first versions
    bf16, fp16 = findings.section("bf16", values.get("bf16", before)), findings.section("fp16", values.get("fp16"))
    findings.look(bf16, "bf16.", {"enabled", "check_grad_overflow"}, keys.BF16_HARMLESS)
    if bf16.get("enabled") and fp16.get("enabled"):
        findings.wrong("bf16 and fp16 are both enabled", "choose one")
    if bf16.get("enabled"):
        return "bf16", None
    if not fp16.get("enabled"):
        return "fp32", None
    findings.look(fp16, "fp16.", keys.FP16_TAKEN, keys.FP16_HARMLESS)
    if fixed := findings.number("fp16.loss_scale", fp16.get("loss_scale", 0)):
        return "fp16", LossScaling(fixed)
    power = findings.number("fp16.initial_scale_power", fp16.get("initial_scale_power", 16))
    if abs(power) > _LARGEST_POWER:
        findings.wrong(f"fp16.initial_scale_power {power:g} is out of range", "give a power of 2, as 16")
        power = 0.0
    dynamic = LossScaling(
        2.0**power,
        dynamic=True,
        patience=findings.whole("fp16.loss_scale_window", fp16.get("loss_scale_window", 1000)),
        least=findings.number("fp16.min_loss_scale", fp16.get("min_loss_scale", 1)),
        spare=findings.whole("fp16.hysteresis", fp16.get("hysteresis", 2)) - 1,
        refill=bool(fp16.get("consecutive_hysteresis", False)),
    )
    return "fp16", dynamic


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
        offload_parameters: The same for parameters between their uses, at stage 3.
        reduce_dtype: In which gradients are added up; None for the parameters' own.
        any_optimizer: Whether optimizers are taken that are not known to work element by element.
        optimizer: (class of torch.optim, its options), or None where there is none.
        schedule: Of the learning rate, where the configuration names one of DeepSpeed's.
        torch_schedule: (class of torch.optim.lr_scheduler, its options), where it names one of those.
        trackers: The monitors that are on.
        trackers_instead: What a configuration of ours has in their place.
        without_effect: Keys that were given and mean nothing here.
        filled: What was put in place of "auto", as `key value (whence)`.
    """

    microbatch: int
    accumulate: int
    precision: Precision
    scale: LossScaling | None
    clip: float
    recompute: bool
    zero: int
    offload: str
    offload_parameters: str
    reduce_dtype: Precision | None
    bucket_mb: float
    any_optimizer: bool
    optimizer: tuple[str, dict[str, Any]] | None
    schedule: OfDeepSpeed | None
    torch_schedule: tuple[str, dict[str, Any]] | None
    trackers: tuple[str, ...]
    trackers_instead: tuple[str, ...]
    without_effect: tuple[str, ...]
    filled: tuple[str, ...] = ()


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


def read_monitors(values: Mapping[str, Any], findings: Findings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the monitors that are on, the settings of a trainer that does what they do); those that are off are ignored."""
    on = [key for key in MONITORS if not is_off(values.get(key))]
    findings.ignored += [key for key in MONITORS if key in values and key not in on]
    instead = [MONITORS[key] for key in on]
    project = values["wandb"].get("project") if "wandb" in on and isinstance(values["wandb"], Mapping) else None
    if project and project != "auto":
        instead.append(f'monitor.project = "{project}"')
    return tuple(on), tuple(instead)
