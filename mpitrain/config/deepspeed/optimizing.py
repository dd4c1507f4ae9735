"""The optimizer of a DeepSpeed configuration, and its schedule: one of DeepSpeed's, or a class of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mpitrain.choices import Decay
from mpitrain.config.deepspeed.keys import Findings, Keys
from mpitrain.config.learning_rate import OneCycle, RangeTest, WarmUp, made

_ADAM = ("adam", "adamw")
# what each takes over; torch says what it does not know of its other classes
_KNOWN = {
    **{name: {"betas", "eps", "amsgrad", "foreach", "fused", "maximize"} for name in _ADAM},
    "lion": {"betas"},
    "muon": {"momentum", "nesterov", "ns_steps", "betas", "eps"},
    "lamb": {"betas", "eps", "bias_correction", "min_coeff", "max_coeff"},
}
_LAMB = {"eps": 1e-8, "min_coeff": 0.01, "max_coeff": 10.0}  # DeepSpeed's defaults where ours are others
_OURS = {"lion": "Lion", "muon": "Muon", "lamb": "lamb"}
_ADAMS_OWN = {"adam_w_mode", "bias_correction"}
# that say how DeepSpeed computes, and not what
_HARMLESS = {"torch_adam", "set_grad_none", "fp32_optimizer_states", "legacy_fusion", "capturable"}
_COMPRESSED = (
    'use "AdamW", whose updates it approximates; fewer bytes go with communication_data_type "bf16", or '
    "comm.compression of a configuration of ours"
)
_BY_WIDTH = 'use {} and "optim.groups" of a configuration of ours, which give parameters rates of their own'
_INSTEAD = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED.replace("AdamW", "Lamb"),
    "fusedlamb": 'use "Lamb"',
    "muadam": _BY_WIDTH.format('"Adam"'),
    "muadamw": _BY_WIDTH.format('"AdamW"'),
    "musgd": _BY_WIDTH.format('"SGD"'),
    "fusedadam": 'use "Adam", which is fused',
    "cpuadam": 'use "Adam", which is fused',
    "deepspeedcpuadam": 'use "Adam", which is fused',
}


def read_optimizer(section: Mapping[str, Any], params: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the keys of [optim], none where there is no optimizer. DeepSpeed's Adam is AdamW unless told otherwise."""
    findings.look(section, "optimizer")
    if not section:
        return {}
    if "type" not in section:
        findings.wrong("optimizer.type is missing", "name a class of torch.optim")
        return {}
    name = str(section["type"])
    kind = name.lower()
    if kind in _INSTEAD:
        findings.wrong(f"optimizer.type {name} has no counterpart here", _INSTEAD[kind])
        return {}
    decay = findings.number("optimizer.params.weight_decay", params.get("weight_decay", 0.0))
    rates = {"lr": findings.number("optimizer.params.lr", params["lr"])} if "lr" in params else {}
    options = {key: value for key, value in params.items() if key not in ("lr", "weight_decay")}
    if kind in _KNOWN:
        taken = _KNOWN[kind] | (_ADAMS_OWN if kind in _ADAM else set())
        findings.look(options, "optimizer.params", Keys({*taken, "lr", "weight_decay"}, _HARMLESS))
        options = {key: value for key, value in options.items() if key in taken}
    if kind in _ADAM:
        name, options = _adam(kind, options, findings)
    elif kind == "lamb":
        options = _lamb(options, findings)
    return {"name": _OURS.get(kind, name), "weight_decay": decay, "options": options, **rates}


def _adam(kind: str, options: dict[str, Any], findings: Findings) -> tuple[str, dict[str, Any]]:
    decoupled = bool(options.pop("adam_w_mode", True)) or kind == "adamw"
    if options.pop("bias_correction", True):
        return "AdamW" if decoupled else "Adam", options
    for key in sorted(set(options) - {"betas", "eps"}):
        if options.pop(key):
            findings.wrong(f"optimizer.params.{key} does not go with bias_correction false", "leave one of them out")
    return "UncorrectedAdamW", options if decoupled else options | {"decoupled": False}


def _lamb(options: dict[str, Any], findings: Findings) -> dict[str, Any]:
    options = _LAMB | options
    for key in _LAMB:
        options[key] = findings.number(f"optimizer.params.{key}", options[key])
    least, most = options.pop("min_coeff"), options.pop("max_coeff")
    if not 0.0 <= least <= most:
        findings.wrong(
            f"optimizer.params.min_coeff {least:g} and max_coeff {most:g} are no range from 0 on",
            "give the smaller one as min_coeff",
        )
    return options | {"least": least, "most": most, "correct": bool(options.pop("bias_correction", True))}


def _has_betas(optim: Mapping[str, Any]) -> bool:
    """Return whether a schedule that moves the momentum finds betas; an optimizer of the caller may have them."""
    return not optim or "adam" in optim["name"].lower() or optim["name"] in ("Lion", "lamb")


_WARMUPS: dict[str, Decay] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_TAKEN = {"warmup_num_steps", "warmup_type", "total_num_steps"}
_TAKEN_OF_RATES = _TAKEN | {"warmup_min_lr", "warmup_max_lr"}
_TAKEN_OF_COSINE = _TAKEN | {"warmup_min_ratio", "cos_min_ratio"}
_TYPES = ("log", "linear")


@dataclass(frozen=True)
class DeepSpeedCycle(OneCycle):
    """One cycle, whose first update DeepSpeed makes with the momentum of the peak."""

    def momentum(self, step: int) -> float | None:
        """The first beta of update `step`; None where the optimizer's own stays."""
        return self.cycle_min_mom if self.cycle_momentum and not step else super().momentum(step)


_CYCLES: dict[str, type[OneCycle] | type[RangeTest]] = {"OneCycle": DeepSpeedCycle, "LRRangeTest": RangeTest}
OfDeepSpeed = WarmUp | OneCycle | RangeTest


def read_schedule(
    section: Mapping[str, Any], optim: Mapping[str, Any], findings: Findings
) -> tuple[OfDeepSpeed | None, tuple[str, dict[str, Any]] | None]:
    """(one of DeepSpeed's schedules, one of torch's); a configuration has at most one."""
    findings.look(section, "scheduler")
    if not section or section.get("type") is None:  # as DeepSpeed takes a null
        return None, None
    name, params = str(section["type"]), dict(findings.section("scheduler.params", section.get("params")))
    if name in _CYCLES:
        return _cycle(name, params, optim, findings), None
    if name in _WARMUPS:
        return _warmup(name, params, optim, findings), None
    if not name:
        names = ", ".join((*_WARMUPS, *_CYCLES))
        findings.wrong("scheduler.type is empty", f"use {names}, or a class of torch.optim.lr_scheduler")
    elif name == "ReduceLROnPlateau":
        findings.wrong(
            "scheduler.type ReduceLROnPlateau follows held-out losses, which a loop of your own has",
            "leave it out, and step torch's with engine.optimizer and what engine.evaluate returns",
        )
    elif name in ("LambdaLR", "MultiplicativeLR"):
        findings.wrong(
            f"scheduler.type {name} calls a function, which a file cannot hold",
            "leave it out, and give mt.initialize scheduler = a function that makes it of the optimizer",
        )
    return None, (name, params)


def _warmup(name: str, params: dict[str, Any], optim: Mapping[str, Any], findings: Findings) -> WarmUp:
    kind = _WARMUPS[name]
    taken = _TAKEN_OF_COSINE if kind == "cosine" else _TAKEN_OF_RATES
    findings.look(params, "scheduler.params", Keys(taken - ({"total_num_steps"} if kind == "constant" else set())))
    numbers = {
        key: findings.number(f"scheduler.params.{key}", value)
        for key, value in params.items()
        if key in taken - {"warmup_type"} and value is not None
    }
    if kind != "constant" and "total_num_steps" not in numbers:
        findings.wrong(f"scheduler.params has no total_num_steps for {name}", "give the steps of the whole training")
    if (curve := params.get("warmup_type") or "log") not in _TYPES:
        findings.wrong(f"scheduler.params.warmup_type {curve!r:.80} is unknown", "give log or linear")
    peak = optim.get("lr")
    if kind == "linear" and "warmup_max_lr" not in params:
        peak = 1e-3  # which is DeepSpeed's default of this one alone
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
    known = {field.name for field in fields(kind)}
    findings.look(params, "scheduler.params", Keys(known))
    schedule = None
    with findings.noting(f"scheduler.params of {name}: "):
        schedule = made(kind, {key: value for key, value in params.items() if key in known})
    if params.get("cycle_second_step_size") == 0:
        findings.wrong(
            "scheduler.params.cycle_second_step_size 0 leaves the cycle no second half",
            "leave it out for as many steps as the first has",
        )
    if isinstance(schedule, OneCycle) and schedule.cycle_momentum and not _has_betas(optim):
        findings.ignored.append("scheduler.params.cycle_momentum")  # DeepSpeed moves betas alone, too
        return replace(schedule, cycle_momentum=False)
    return schedule
