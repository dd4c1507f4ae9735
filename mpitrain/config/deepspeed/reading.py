"""Conversion of a DeepSpeed configuration to our settings, and to the features that no setting of ours describes.

The file is JSON that may contain comments and trailing commas, as DeepSpeed accepts it.

Reference:
    The "DeepSpeed" page of Hugging Face's transformers, for "auto".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.choices import Decay, Precision
from mpitrain.config.batch_sizes import accumulation
from mpitrain.config.deepspeed.keys import BATCH, MANAGED, MONITORS, SCALING, SECTIONS, Findings, Keys, is_off
from mpitrain.config.learning_rate import OneCycle, RangeTest, WarmUp, make_cycle
from mpitrain.config.parallel import CommSection
from mpitrain.config.settings import Config
from mpitrain.errors import refusal, refusing
from mpitrain.storage.disk import from_json, read_plain

_LARGEST = 1 << 20  # bytes of a file
# An unterminated string or comment is matched to its end in one piece; retrying from each of its characters would take
# quadratic time.
_STRING = r'"(?:[^"\\\n]|\\.)*"?'
_COMMENTS = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/|(/\*.*)", re.DOTALL)
_LAST_COMMAS = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")
_DTYPES: dict[str, Precision] = {"fp32": "fp32", "fp16": "fp16", "bfp16": "bf16", "bf16": "bf16"}
_AUTO = "auto"
# our setting that replaces "auto" of a key; empty: the key is left out, because DeepSpeed has a default
_AUTO_OF = {
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.microbatch",
    "gradient_accumulation_steps": "",  # follows from the two keys above
    "gradient_clipping": "train.clip",
    "fp16.enabled": "train.precision",
    "bf16.enabled": "train.precision",
    "bfloat16.enabled": "train.precision",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "optimizer.params.betas": "optim.options",
    "optimizer.params.eps": "optim.options",
    "scheduler.params.warmup_max_lr": "optim.lr",
    "scheduler.params.warmup_num_steps": "optim.warmup",
    "scheduler.params.total_num_steps": "train.steps",
    "zero_optimization.reduce_bucket_size": "",
    "amp.enabled": "",  # our counterpart is the sections fp16 and bf16
    "amp.opt_level": "",
    **{f"fp16.{key}": "" for key in SCALING.split()},
    **{f"scheduler.params.{key}": "" for key in ("warmup_min_lr", "warmup_type", "warmup_min_ratio", "cos_min_ratio")},
}
_LARGEST_POWER = 1000  # exponent of 2
_LEAST_BUCKET = 1.0  # MiB; some configurations use buckets of size 0 so that each tensor is reduced separately


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A DeepSpeed configuration as our settings, and the features that no setting of ours describes.

    Attributes:
        config: Our settings for the same training. [optim] has no name if the configuration has no optimizer.
        scale: Arguments of the `LossScale`; None if the precision needs no loss scale.
        reduce_dtype: Type in which gradients are summed; None: the type of the parameters.
        any_optimizer: If true, optimizers are accepted that are not known to work element by element.
        schedule: Learning rate schedule, if the configuration names one of DeepSpeed's; else None.
        torch_schedule: (class of torch.optim.lr_scheduler, its options), if it names one of torch's; else None.
        trackers: Monitors that are on, each with the setting of `Trainer` that replaces it.
        without_effect: Keys of the configuration that are ignored.
        filled: Replacements of "auto", each as `key value (our setting)`.
    """

    config: Config
    scale: Mapping[str, Any] | None
    reduce_dtype: Precision | None
    any_optimizer: bool
    schedule: OfDeepSpeed | None
    torch_schedule: tuple[str, dict[str, Any]] | None
    trackers: Mapping[str, str]
    without_effect: tuple[str, ...]
    filled: tuple[str, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, which may contain comments and trailing commas.

    Raises:
        InputError: The file cannot be read, is not a JSON object, or contains a key twice.
    """
    try:
        text = read_plain(path, _LARGEST).decode("utf-8-sig")
        try:
            values = from_json(text)
        except json.JSONDecodeError as error:
            plain = _remove_outside_strings(_LAST_COMMAS, _remove_outside_strings(_COMMENTS, text))
            try:
                values = from_json(plain)
            except json.JSONDecodeError:
                raise error from None  # its line and column refer to the original text
    except (OSError, ValueError) as error:
        raise refusal(f"{path} cannot be read as JSON: {error}; fix the file") from None
    if not isinstance(values, dict):
        raise refusal(f"{path} contains no JSON object; give a DeepSpeed configuration")
    return values


def _remove_outside_strings(pattern: re.Pattern[str], text: str) -> str:
    """Remove the matches of `pattern` from the text, but keep its groups: strings and unterminated comments."""
    return pattern.sub(lambda match: match[match.lastindex] if match.lastindex else "", text)


def looks_like_deepspeed(values: Mapping[str, Any]) -> bool:
    """Return True if the values have keys that only a DeepSpeed configuration has, not one of ours."""
    return bool(set(values) & (set(SECTIONS[""].converted) - {"optimizer", "scheduler", "checkpoint"}))


def read_deepspeed(
    values: Mapping[str, Any], ranks: int, origin: str = "config", auto: Config | None = None
) -> DeepSpeedConfig:
    """Convert the values of a DeepSpeed configuration to our settings.

    Args:
        values: The JSON object of the configuration.
        ranks: Number of data-parallel ranks among which the batch is divided.
        origin: Name of the configuration in error messages.
        auto: Our settings that replace "auto"; None: the defaults.

    Raises:
        InputError: Some keys have no counterpart, are wrong, or contradict each other; one message names them all.
    """
    with refusing(
        f"{origin} cannot be read as a DeepSpeed configuration",
        "compare it with DeepSpeed's documentation",
        agreed=True,
    ):
        return _read(values, ranks, Findings(origin), auto or Config(), origin)


def _read(original: Mapping[str, Any], ranks: int, findings: Findings, auto: Config, origin: str) -> DeepSpeedConfig:
    replacements: list[str] = []
    values = _replace_auto(original, "", auto, findings, replacements)
    findings.check_section(values, "")
    for key in ("checkpoint", "compile"):  # sections that do nothing unless a key in them is on
        section = findings.section(key, values.get(key))
        if key in values and is_off(section):
            findings.ignored.append(key)
        else:
            findings.check_section(section, key)
    if not values.get(MANAGED, True):
        findings.unsupported(f"{MANAGED} false")
    micro, steps = 0, 1
    numbers = [None if values.get(key) is None else findings.integer(key, values[key], 1) for key in BATCH]
    with findings.recording_errors():
        micro, steps = accumulation(*numbers, ranks=ranks, names=BATCH)
    zero = values.get("zero_optimization")
    if not isinstance(zero, Mapping):  # early versions had a boolean here; true means stage 1
        zero = {"stage": int(bool(zero))}
    parallel = _zero(zero, findings)
    precision, scale = _precision(values, findings)
    section = findings.section("optimizer", values.get("optimizer"))
    params = dict(findings.section("optimizer.params", section.get("params")))
    clip = values.get("gradient_clipping", params.pop("max_grad_norm", None))
    clip = 1.0 if clip is None else findings.number("gradient_clipping", clip or 0.0)  # DeepSpeed's default is 1
    optim = _optimizer(section, params, findings)
    schedule, torch_schedule = _schedule(findings.section("scheduler", values.get("scheduler")), optim, findings)
    trackers = _monitors(values, findings)
    bucket_mb = CommSection().bucket_mb
    if (elements := zero.get("reduce_bucket_size")) is not None:
        nbytes = findings.number("zero_optimization.reduce_bucket_size", elements) * (4 if precision == "fp32" else 2)
        bucket_mb = max(_LEAST_BUCKET, nbytes / (1 << 20))
    ours = {
        "train": {
            "precision": precision,
            "clip": max(0.0, clip),  # a negative value means no clipping
            **_activations(values.get("activation_checkpointing"), findings),
            "accumulation": steps,
            **({"batch": micro * steps * ranks} if micro else {}),
        },
        "optim": {**optim, "no_decay": "nothing"},
        "parallel": parallel,
        "comm": {"bucket_mb": bucket_mb},
    }
    reduce_dtype = _reduce_dtype(values, findings)
    findings.raise_errors()
    return DeepSpeedConfig(
        Config.from_dict(ours, origin),
        scale=scale,
        reduce_dtype=reduce_dtype,
        any_optimizer=bool(values.get("zero_allow_untested_optimizer", False)),
        schedule=schedule,
        torch_schedule=torch_schedule,
        trackers=trackers,
        without_effect=tuple(findings.ignored),
        filled=tuple(replacements),
    )


def _replace_auto(
    values: Mapping[str, Any], section: str, auto: Config, findings: Findings, replacements: list[str]
) -> dict[str, Any]:
    """Return the values of a section with each "auto" replaced by our setting.

    A key for which we have no setting is left out if DeepSpeed has a default for it, and keeps "auto" if it only tunes
    DeepSpeed's own machinery; any other one is recorded as an error.

    Args:
        values: Values of the section.
        section: Name of the section; empty for the whole configuration.
        auto: Our settings that replace "auto".
        findings: Collector of errors.
        replacements: List to which each replacement is appended as `key value (our setting)`.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        if not isinstance(key, str):
            findings.add_error(f"{name!r:.80} is not a key", "write each key as a string")
        elif isinstance(value, Mapping):
            result[key] = _replace_auto(value, name, auto, findings, replacements)
        elif not isinstance(value, str) or value != _AUTO:
            result[key] = value
        elif (ours := _setting(name, auto)) is not None:
            result[key] = ours
            replacements.append(f"{name} {ours} ({_AUTO_OF[name]})")
        elif name in _AUTO_OF:
            continue
        elif name.partition(".")[0] in MONITORS or any(key in keys.harmless for keys in SECTIONS.values()):
            result[key] = value
        else:
            findings.add_error(f'{name} is "auto", but mpitrain has no setting for it', "give a value")
    return result


def _setting(name: str, auto: Config) -> Any:
    """Return the value that replaces "auto" of key `name`; None if there is no such setting, or it is not set."""
    section, _, key = _AUTO_OF.get(name, "").partition(".")
    if not section:
        return None
    settings = getattr(auto, section)
    value = getattr(settings, key)
    if key == "precision":
        return value == ("fp16" if name == "fp16.enabled" else "bf16")
    if key == "options":
        return value.get(name.rpartition(".")[2])
    if name in BATCH:
        return (value or None) if key in settings.model_fields_set else None
    return value


def _monitors(values: Mapping[str, Any], findings: Findings) -> dict[str, str]:
    """Return the enabled monitors, each with our setting that replaces it; report the others as ignored."""
    on = {key: instead for key, instead in MONITORS.items() if not is_off(values.get(key))}
    findings.ignored += [key for key in MONITORS if key in values and key not in on]
    wandb = values.get("wandb")
    project = wandb.get("project") if "wandb" in on and isinstance(wandb, Mapping) else None
    if project and project != _AUTO:
        on["wandb"] += f', monitor.project = "{project}"'
    return on


def _activations(section: Mapping[str, Any] | None, findings: Findings) -> dict[str, Any]:
    """Return the keys of [train] for activations: they are recomputed unless all keys of the section are off."""
    if section is None:
        return {}
    section = findings.section("activation_checkpointing", section)
    findings.check_section(section, "activation_checkpointing")
    recompute = not section or not all(is_off(value) for value in section.values())
    offload = "" if is_off(section.get("cpu_checkpointing")) else "host"
    return {"recompute": recompute, "offload_activations": offload}


def _reduce_dtype(values: Mapping[str, Any], findings: Findings) -> Precision | None:
    section = findings.section("data_types", values.get("data_types"))
    findings.check_section(section, "data_types")
    dtypes: set[Precision] = set()
    sent = values.get("communication_data_type", "fp32" if values.get("fp32_allreduce") else None)
    for name in (sent, section.get("grad_accum_dtype")):
        if name is not None and (not isinstance(name, str) or name not in _DTYPES):
            findings.add_error(f"{name!r:.80} is not a type for reducing gradients", f"use one of {sorted(_DTYPES)}")
        elif name is not None:
            dtypes.add(_DTYPES[name])
    if len(dtypes) > 1:
        findings.add_error(
            "gradients are summed and sent in one type, but communication_data_type and "
            "data_types.grad_accum_dtype differ",
            "make them equal",
        )
    return dtypes.pop() if dtypes else None


def _zero(section: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the keys of [parallel]: zero (the stage), offload (optimizer states) and offload_parameters."""
    findings.check_section(section, "zero_optimization")
    if not section.get("ignore_unused_parameters", True):
        findings.unsupported("zero_optimization.ignore_unused_parameters false")
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        findings.add_error(f"zero_optimization.stage {stage!r:.80} is not a stage", "give 0, 1, 2 or 3")
        stage = 0
    states = _offload(section, "offload_optimizer", "cpu_offload", findings)
    parameters = _offload(section, "offload_param", "cpu_offload_params", findings)
    if parameters and stage < 3:  # DeepSpeed uses it at stage 3 only
        findings.ignored.append("zero_optimization.offload_param")
        parameters = ""
    return {"zero": stage, "offload": states, "offload_parameters": parameters}


def _offload(section: Mapping[str, Any], key: str, before: str, findings: Findings) -> str:
    """Return the target of an offload section: "host", a folder, or "" if nothing is offloaded.

    Args:
        section: Values of zero_optimization.
        key: Name of the offload section.
        before: Boolean key with the same meaning in DeepSpeed's first versions.
        findings: Collector of errors.
    """
    name = f"zero_optimization.{key}"
    offload = findings.section(name, section.get(key)) or ({"device": "cpu"} if section.get(before) else {})
    findings.check_section(offload, name)
    device = offload.get("device", "none")
    if device == "none" and offload:
        findings.ignored.append(name)
    if device == "nvme":
        if not offload.get("nvme_path"):
            findings.add_error(f"{name}.device nvme needs an nvme_path", "give a folder")
        return str(offload.get("nvme_path") or "")
    if device not in ("none", "cpu"):
        findings.add_error(f"{name}.device {device!r:.80} is unknown", "give none, cpu or nvme")
    return "host" if device == "cpu" else ""


def _precision(values: Mapping[str, Any], findings: Findings) -> tuple[Precision, dict[str, Any] | None]:
    """Return (precision, arguments of the `LossScale` or None if the precision needs none)."""
    before = values.get("bfloat16")  # the section's name in DeepSpeed's first versions
    bf16, fp16 = findings.section("bf16", values.get("bf16", before)), findings.section("fp16", values.get("fp16"))
    findings.check_section(bf16, "bf16")
    if bf16.get("enabled") and fp16.get("enabled"):
        findings.add_error("bf16 and fp16 are both enabled", "choose one")
    if bf16.get("enabled"):
        return "bf16", None
    if not fp16.get("enabled"):
        return "fp32", None
    findings.check_section(fp16, "fp16")
    if fixed := findings.number("fp16.loss_scale", fp16.get("loss_scale", 0)):
        return "fp16", {"value": fixed}
    power = findings.number("fp16.initial_scale_power", fp16.get("initial_scale_power", 16))
    if abs(power) > _LARGEST_POWER:
        findings.add_error(f"fp16.initial_scale_power {power:g} is out of range", "give an exponent of 2, such as 16")
        power = 0.0
    return "fp16", {
        "value": 2.0**power,
        "dynamic": True,
        "patience": findings.integer("fp16.loss_scale_window", fp16.get("loss_scale_window", 1000)),
        "least": findings.number("fp16.min_loss_scale", fp16.get("min_loss_scale", 1)),
        "spare": findings.integer("fp16.hysteresis", fp16.get("hysteresis", 2)) - 1,
        "refill": bool(fp16.get("consecutive_hysteresis", False)),
    }


# -- the optimizer, and its schedule: one of DeepSpeed's, or a class of torch

_ADAM = ("adam", "adamw")
# options that each optimizer accepts; torch itself checks those of its other classes
_KNOWN = {
    **{name: {"betas", "eps", "amsgrad", "foreach", "fused", "maximize"} for name in _ADAM},
    "lion": {"betas"},
    "muon": {"momentum", "nesterov", "ns_steps", "betas", "eps"},
    "lamb": {"betas", "eps", "bias_correction", "min_coeff", "max_coeff"},
}
_LAMB = {"eps": 1e-8, "min_coeff": 0.01, "max_coeff": 10.0}  # DeepSpeed's defaults that differ from ours
_OUR_NAMES = {"lion": "Lion", "muon": "Muon", "lamb": "lamb"}
_ADAM_OPTIONS = {"adam_w_mode", "bias_correction"}
# options that change how DeepSpeed computes, but not the result
_HARMLESS = {"torch_adam", "set_grad_none", "fp32_optimizer_states", "legacy_fusion", "capturable"}
_COMPRESSED = (
    'use "AdamW", whose updates it approximates; to send fewer bytes, set communication_data_type "bf16", or '
    "comm.compression in an mpitrain configuration"
)
_BY_WIDTH = "use {} with optim.groups of an mpitrain configuration, which sets the learning rate of single parameters"
_INSTEAD = {
    **dict.fromkeys(("fusedadam", "cpuadam", "deepspeedcpuadam"), 'use "Adam", which is fused'),
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED.replace("AdamW", "Lamb"),
    "fusedlamb": 'use "Lamb"',
    "muadam": _BY_WIDTH.format('"Adam"'),
    "muadamw": _BY_WIDTH.format('"AdamW"'),
    "musgd": _BY_WIDTH.format('"SGD"'),
}


def _optimizer(section: Mapping[str, Any], params: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the keys of [optim]; empty if the configuration has no optimizer.

    DeepSpeed's "Adam" is AdamW unless adam_w_mode is false.
    """
    findings.check_section(section, "optimizer")
    if not section:
        return {}
    if "type" not in section:
        findings.add_error("optimizer.type is missing", "name a class of torch.optim")
        return {}
    name = str(section["type"])
    kind = name.lower()
    if kind in _INSTEAD:
        findings.add_error(f"optimizer.type {name} has no counterpart here", _INSTEAD[kind])
        return {}
    decay = findings.number("optimizer.params.weight_decay", params.get("weight_decay", 0.0))
    rates = {"lr": findings.number("optimizer.params.lr", params["lr"])} if "lr" in params else {}
    options = {key: value for key, value in params.items() if key not in ("lr", "weight_decay")}
    if kind in _KNOWN:
        taken = _KNOWN[kind] | (_ADAM_OPTIONS if kind in _ADAM else set())
        findings.check_section(options, "optimizer.params", Keys({*taken, "lr", "weight_decay"}, _HARMLESS))
        options = {key: value for key, value in options.items() if key in taken}
    if kind in _ADAM:
        name, options = _adam(kind, options, findings)
    elif kind == "lamb":
        options = _lamb(options, findings)
    return {"name": _OUR_NAMES.get(kind, name), "weight_decay": decay, "options": options, **rates}


def _adam(kind: str, options: dict[str, Any], findings: Findings) -> tuple[str, dict[str, Any]]:
    decoupled = bool(options.pop("adam_w_mode", True)) or kind == "adamw"
    if options.pop("bias_correction", True):
        return "AdamW" if decoupled else "Adam", options
    for key in sorted(set(options) - {"betas", "eps"}):
        if options.pop(key):
            findings.add_error(
                f"optimizer.params.{key} cannot be combined with bias_correction false", "remove one of them"
            )
    return "UncorrectedAdamW", options if decoupled else options | {"decoupled": False}


def _lamb(options: dict[str, Any], findings: Findings) -> dict[str, Any]:
    options = _LAMB | options
    for key in _LAMB:
        options[key] = findings.number(f"optimizer.params.{key}", options[key])
    least, most = options.pop("min_coeff"), options.pop("max_coeff")
    if not 0.0 <= least <= most:
        findings.add_error(
            f"optimizer.params.min_coeff {least:g} and max_coeff {most:g} are not a range of numbers of at least 0",
            "set min_coeff to the smaller one",
        )
    return options | {"least": least, "most": most, "correct": bool(options.pop("bias_correction", True))}


_WARMUPS: dict[str, Decay] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


class DeepSpeedCycle(OneCycle):
    """A `OneCycle` whose update 0 has the momentum of the middle of the cycle, as in DeepSpeed."""

    def momentum(self, step: int) -> float | None:
        """Return the first beta of update `step`, counted from 0; None if the optimizer keeps its own."""
        return self.cycle_min_mom if self.cycle_momentum and not step else super().momentum(step)


_CYCLES: dict[str, type[OneCycle] | type[RangeTest]] = {"OneCycle": DeepSpeedCycle, "LRRangeTest": RangeTest}
OfDeepSpeed = WarmUp | OneCycle | RangeTest


def _schedule(
    section: Mapping[str, Any], optim: Mapping[str, Any], findings: Findings
) -> tuple[OfDeepSpeed | None, tuple[str, dict[str, Any]] | None]:
    """Return (schedule of DeepSpeed, schedule of torch); at least one of them is None."""
    findings.check_section(section, "scheduler")
    if not section or section.get("type") is None:  # DeepSpeed also accepts null
        return None, None
    name, params = str(section["type"]), dict(findings.section("scheduler.params", section.get("params")))
    if name in _CYCLES:
        return _cycle(name, params, optim, findings), None
    if name in _WARMUPS:
        return _warmup(name, params, optim, findings), None
    if not name:
        names = ", ".join((*_WARMUPS, *_CYCLES))
        findings.add_error("scheduler.type is empty", f"use {names}, or a class of torch.optim.lr_scheduler")
    elif name == "ReduceLROnPlateau":
        findings.add_error(
            "scheduler.type ReduceLROnPlateau needs held-out losses, which only your own loop has",
            "remove it, create torch's scheduler for engine.optimizer, and step it with the result of engine.evaluate",
        )
    elif name in ("LambdaLR", "MultiplicativeLR"):
        findings.add_error(
            f"scheduler.type {name} calls a function, which a file cannot contain",
            "remove it, and pass mt.initialize(scheduler=...) a function that makes the scheduler from the optimizer",
        )
    return None, (name, params)


def _warmup(name: str, params: dict[str, Any], optim: Mapping[str, Any], findings: Findings) -> WarmUp:
    kind = _WARMUPS[name]
    taken = {"warmup_num_steps", "total_num_steps"}
    taken |= {"warmup_min_ratio", "cos_min_ratio"} if kind == "cosine" else {"warmup_min_lr", "warmup_max_lr"}
    known = {"warmup_type", *taken} - ({"total_num_steps"} if kind == "constant" else set())
    findings.check_section(params, "scheduler.params", Keys(known))
    numbers = {
        key: findings.number(f"scheduler.params.{key}", value)
        for key, value in params.items()
        if key in taken and value is not None
    }
    if kind != "constant" and "total_num_steps" not in numbers:
        findings.add_error(
            f"scheduler.params has no total_num_steps for {name}", "give the steps of the whole training"
        )
    if (curve := params.get("warmup_type") or "log") not in ("log", "linear"):
        findings.add_error(f"scheduler.params.warmup_type {curve!r:.80} is unknown", "give log or linear")
    peak = optim.get("lr")
    if kind == "linear" and "warmup_max_lr" not in params:
        peak = 1e-3  # DeepSpeed's default, for this schedule only
    return WarmUp(
        kind,
        peak=numbers.get("warmup_max_lr", peak),
        first=numbers.get("warmup_min_ratio" if kind == "cosine" else "warmup_min_lr", 0.0),
        last=numbers.get("cos_min_ratio", 0.0001),
        warmup=max(2, int(numbers.get("warmup_num_steps", 1000))),
        steps=int(numbers.get("total_num_steps", 0)),
        logarithmic=curve == "log",
    )


def _cycle(
    name: str, params: dict[str, Any], optim: Mapping[str, Any], findings: Findings
) -> OneCycle | RangeTest | None:
    kind = _CYCLES[name]
    known = kind.model_fields.keys()
    findings.check_section(params, "scheduler.params", Keys(known))
    schedule = None
    with findings.recording_errors(f"scheduler.params of {name}: "):
        schedule = make_cycle(kind, {key: value for key, value in params.items() if key in known})
    if params.get("cycle_second_step_size") == 0:
        findings.add_error(
            "scheduler.params.cycle_second_step_size 0 leaves no second half of the cycle",
            "remove it to use the length of the first half",
        )
    # an optimizer that the caller passes may have betas
    has_betas = not optim or "adam" in optim["name"].lower() or optim["name"] in ("Lion", "lamb")
    if isinstance(schedule, OneCycle) and schedule.cycle_momentum and not has_betas:
        findings.ignored.append("scheduler.params.cycle_momentum")  # DeepSpeed also changes betas only
        return schedule.model_copy(update={"cycle_momentum": False})
    return schedule
