"""From a DeepSpeed configuration to our settings, and to what no setting of ours says.

Its file is JSON, also with comments and commas at an end, as DeepSpeed reads it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.choices import Precision
from mpitrain.config.batch_sizes import accumulation
from mpitrain.config.deepspeed.keys import AUTO, AUTO_OF, BATCH, DTYPES, MANAGED, MONITORS, SECTIONS, Findings, is_off
from mpitrain.config.deepspeed.optimizing import OfDeepSpeed, read_optimizer, read_schedule
from mpitrain.config.parallel import CommSection
from mpitrain.config.settings import Config
from mpitrain.errors import refusal, refusing
from mpitrain.storage.disk import read_plain

_LARGEST = 1 << 20  # bytes of a file
# A string, or a comment, that has no end is one match up to where it breaks off: tried again from each of its
# characters, it would take quadratic time.
_STRING = r'"(?:[^"\\\n]|\\.)*"?'
_COMMENTS = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/|(/\*.*)", re.DOTALL)
_LAST_COMMAS = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")
_LARGEST_POWER = 1000  # of 2
_LEAST_BUCKET = 1.0  # MiB: some ask for buckets of nothing, so that each tensor goes by itself


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A DeepSpeed configuration in our settings, and what no setting of ours says.

    Attributes:
        config: Our settings that ask for the same. `optim` has no name where the configuration has no optimizer.
        scale: Arguments of the `LossScale`; None where the precision needs none.
        reduce_dtype: Type in which gradients are added up; None for the parameters' own.
        any_optimizer: Whether optimizers are taken that are not known to work element by element.
        schedule: Schedule of the learning rate, where the configuration names one of DeepSpeed's.
        torch_schedule: (class of torch.optim.lr_scheduler, its options), where it names one of those.
        trackers: Monitors that are on, each with the settings of a trainer that has the same.
        without_effect: Keys that were given and mean nothing here.
        filled: What was put in place of "auto", as `key value (our setting)`.
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
    """The JSON object in a file. Raises InputError where there is none, or a key twice."""
    try:
        text = read_plain(path, _LARGEST).decode("utf-8-sig")
        try:
            values = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            plain = _kept_strings(_LAST_COMMAS, _kept_strings(_COMMENTS, text))
            try:
                values = json.loads(plain, object_pairs_hook=_once)
            except json.JSONDecodeError:
                raise error from None  # whose place is one of the file
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(f"{path} cannot be read as JSON: {error}; mend the file") from None
    if not isinstance(values, dict):
        raise refusal(f"{path} holds no JSON object; give a DeepSpeed configuration")
    return values


def _kept_strings(pattern: re.Pattern[str], text: str) -> str:
    """The text without what the pattern matches, but for its groups: strings, and a comment without an end."""
    return pattern.sub(lambda match: match[match.lastindex] if match.lastindex else "", text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return found


def looks_like_deepspeed(values: Mapping[str, Any]) -> bool:
    """Return whether these are the values of a DeepSpeed configuration rather than of ours."""
    return bool(set(values) & (set(SECTIONS[""].taken) - {"optimizer", "scheduler", "checkpoint"}))


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
        return _read(values, ranks, Findings(origin), auto or Config(), origin)


def _read(given: Mapping[str, Any], ranks: int, findings: Findings, auto: Config, origin: str) -> DeepSpeedConfig:
    filled: list[str] = []
    values = _filled(given, "", auto, findings, filled)
    findings.look(values, "")
    for key in ("checkpoint", "compile"):  # which ask for nothing unless they are told to
        section = findings.section(key, values.get(key))
        if key in values and is_off(section):
            findings.ignored.append(key)
        else:
            findings.look(section, key)
    if not values.get(MANAGED, True):
        findings.unsupported(f"{MANAGED} false")
    micro, steps = 0, 1
    numbers = [None if values.get(key) is None else findings.whole(key, values[key], 1) for key in BATCH]
    with findings.noting():
        micro, steps = accumulation(*numbers, ranks=ranks, names=BATCH)
    zero = values.get("zero_optimization")
    if not isinstance(zero, Mapping):  # before there was a section, the key said true for stage 1, or false
        zero = {"stage": int(bool(zero))}
    parallel = _zero(zero, findings)
    precision, scale = _precision(values, findings)
    section = findings.section("optimizer", values.get("optimizer"))
    params = dict(findings.section("optimizer.params", section.get("params")))
    clip = values.get("gradient_clipping", params.pop("max_grad_norm", None))
    clip = 1.0 if clip is None else findings.number("gradient_clipping", clip or 0.0)  # DeepSpeed's default is 1
    optim = read_optimizer(section, params, findings)
    schedule, torch_schedule = read_schedule(findings.section("scheduler", values.get("scheduler")), optim, findings)
    trackers = _monitors(values, findings)
    ours = {
        "train": {
            "precision": precision,
            "clip": max(0.0, clip),  # a negative one clips nothing
            "recompute": _recompute(values.get("activation_checkpointing"), findings),
            "accumulation": steps,
            **({"batch": micro * steps * ranks} if micro else {}),
        },
        "optim": {**optim, "no_decay": "nothing"},
        "parallel": parallel,
        "comm": {"bucket_mb": _bucket_mb(zero.get("reduce_bucket_size"), 4 if precision == "fp32" else 2, findings)},
    }
    reduce_dtype = _reduce_dtype(values, findings)
    findings.tell()
    return DeepSpeedConfig(
        Config.from_dict(ours, origin),
        scale=scale,
        reduce_dtype=reduce_dtype,
        any_optimizer=bool(values.get("zero_allow_untested_optimizer", False)),
        schedule=schedule,
        torch_schedule=torch_schedule,
        trackers=trackers,
        without_effect=tuple(findings.ignored),
        filled=tuple(filled),
    )


def _filled(
    values: Mapping[str, Any], section: str, auto: Config, findings: Findings, told: list[str]
) -> dict[str, Any]:
    """Return the values of a section with our settings where it says "auto".

    What DeepSpeed has a default for is left out; an "auto" of a key that only tunes its own machinery stays.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        if not isinstance(key, str):
            prefix = f"{section}." if section else ""
            findings.wrong(f"{prefix}{key!r:.80} is no name", "write keys as texts")
        elif isinstance(value, Mapping):
            found[key] = _filled(value, name, auto, findings, told)
        elif not isinstance(value, str) or value != AUTO:
            found[key] = value
        elif (ours := _setting(name, auto)) is not None:
            found[key] = ours
            told.append(f"{name} {ours} ({AUTO_OF[name]})")
        elif name in AUTO_OF:
            continue
        elif name.partition(".")[0] in MONITORS or any(key in keys.harmless for keys in SECTIONS.values()):
            found[key] = value
        else:
            findings.wrong(f'{name} is "auto", for which we have no setting', "give a value")
    return found


def _setting(name: str, auto: Config) -> Any:
    """Return what an "auto" stands for; None: there is no such setting, or it says nothing."""
    section, _, key = AUTO_OF.get(name, "").partition(".")
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


def _bucket_mb(elements: Any, itemsize: int, findings: Findings) -> float:
    if elements is None:
        return float(CommSection().bucket_mb)
    return max(_LEAST_BUCKET, findings.number("zero_optimization.reduce_bucket_size", elements) * itemsize / (1 << 20))


def _monitors(values: Mapping[str, Any], findings: Findings) -> dict[str, str]:
    """Return the monitors that are on, each with the settings of a trainer that has the same; ignore the others."""
    on = {key: instead for key, instead in MONITORS.items() if not is_off(values.get(key))}
    findings.ignored += [key for key in MONITORS if key in values and key not in on]
    wandb = values.get("wandb")
    project = wandb.get("project") if "wandb" in on and isinstance(wandb, Mapping) else None
    if project and project != AUTO:
        on["wandb"] += f', monitor.project = "{project}"'
    return on


def _recompute(section: Mapping[str, Any] | None, findings: Findings) -> bool:
    """Return whether activations are recomputed: there is such a section, and not everything in it is off."""
    if section is None:
        return False
    section = findings.section("activation_checkpointing", section)
    findings.look(section, "activation_checkpointing")
    return not section or not all(is_off(value) for value in section.values())


def _reduce_dtype(values: Mapping[str, Any], findings: Findings) -> Precision | None:
    section = findings.section("data_types", values.get("data_types"))
    findings.look(section, "data_types")
    found: set[Precision] = set()
    sent = values.get("communication_data_type", "fp32" if values.get("fp32_allreduce") else None)
    for name in (sent, section.get("grad_accum_dtype")):
        if name is not None and (not isinstance(name, str) or name not in DTYPES):
            findings.wrong(f"{name!r:.80} is no type to reduce in", f"use one of {sorted(DTYPES)}")
        elif name is not None:
            found.add(DTYPES[name])
    if len(found) > 1:
        findings.wrong(
            "gradients are added up and sent in one type, but communication_data_type and data_types.grad_accum_dtype "
            "differ",
            "make them equal",
        )
    return found.pop() if found else None


def _zero(section: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the keys of [parallel]: the stage, where optimizer states go, where parameters go."""
    findings.look(section, "zero_optimization")
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
    return {"zero": stage, "offload": states, "offload_parameters": parameters}


def _offload(section: Mapping[str, Any], key: str, before: str, findings: Findings) -> str:
    """`host`, a folder, or empty for nothing. before: what the key was called in DeepSpeed's first versions."""
    name = f"zero_optimization.{key}"
    offload = findings.section(name, section.get(key)) or ({"device": "cpu"} if section.get(before) else {})
    findings.look(offload, name)
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


def _precision(values: Mapping[str, Any], findings: Findings) -> tuple[Precision, dict[str, Any] | None]:
    """Return (precision, arguments of the `LossScale`)."""
    before = values.get("bfloat16")  # what the section was called in DeepSpeed's first versions
    bf16, fp16 = findings.section("bf16", values.get("bf16", before)), findings.section("fp16", values.get("fp16"))
    findings.look(bf16, "bf16")
    if bf16.get("enabled") and fp16.get("enabled"):
        findings.wrong("bf16 and fp16 are both enabled", "choose one")
    if bf16.get("enabled"):
        return "bf16", None
    if not fp16.get("enabled"):
        return "fp32", None
    findings.look(fp16, "fp16")
    if fixed := findings.number("fp16.loss_scale", fp16.get("loss_scale", 0)):
        return "fp16", {"value": fixed}
    power = findings.number("fp16.initial_scale_power", fp16.get("initial_scale_power", 16))
    if abs(power) > _LARGEST_POWER:
        findings.wrong(f"fp16.initial_scale_power {power:g} is out of range", "give a power of 2, as 16")
        power = 0.0
    return "fp16", {
        "value": 2.0**power,
        "dynamic": True,
        "patience": findings.whole("fp16.loss_scale_window", fp16.get("loss_scale_window", 1000)),
        "least": findings.number("fp16.min_loss_scale", fp16.get("min_loss_scale", 1)),
        "spare": findings.whole("fp16.hysteresis", fp16.get("hysteresis", 2)) - 1,
        "refill": bool(fp16.get("consecutive_hysteresis", False)),
    }
