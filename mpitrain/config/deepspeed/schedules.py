"""The schedule of a DeepSpeed configuration: one of DeepSpeed's, or a class of torch.optim.lr_scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mpitrain.choices import Decay
from mpitrain.config.cycles import OneCycle, RangeTest, made
from mpitrain.config.deepspeed.findings import Findings
from mpitrain.config.deepspeed.optimizers import has_betas
from mpitrain.config.deepspeed.warm_ups import WarmUp

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
    section: Mapping[str, Any], optimizer: tuple[str, dict[str, Any]] | None, findings: Findings
) -> tuple[OfDeepSpeed | None, tuple[str, dict[str, Any]] | None]:
    """(one of DeepSpeed's schedules, one of torch's); a configuration has at most one."""
    findings.look(section, "scheduler.", {"type", "params"})
    if not section or section.get("type") is None:  # as DeepSpeed takes a null
        return None, None
    name, params = str(section["type"]), dict(findings.section("scheduler.params", section.get("params")))
    if name in _CYCLES:
        return _cycle(name, params, optimizer, findings), None
    if name in _WARMUPS:
        return _warmup(name, params, optimizer, findings), None
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


def _warmup(
    name: str, params: dict[str, Any], optimizer: tuple[str, dict[str, Any]] | None, findings: Findings
) -> WarmUp:
    kind = _WARMUPS[name]
    taken = _TAKEN_OF_COSINE if kind == "cosine" else _TAKEN_OF_RATES
    findings.look(params, "scheduler.params.", taken - ({"total_num_steps"} if kind == "constant" else set()))
    numbers = {
        key: findings.number(f"scheduler.params.{key}", value)
        for key, value in params.items()
        if key in taken - {"warmup_type"} and value is not None
    }
    if kind != "constant" and "total_num_steps" not in numbers:
        findings.wrong(f"scheduler.params has no total_num_steps for {name}", "give the steps of the whole training")
    if (curve := params.get("warmup_type") or "log") not in _TYPES:
        findings.wrong(f"scheduler.params.warmup_type {curve!r:.80} is unknown", "give log or linear")
    peak = (optimizer[1] if optimizer else {}).get("lr")
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
    name: str, params: dict[str, Any], optimizer: tuple[str, dict[str, Any]] | None, findings: Findings
) -> OneCycle | RangeTest | None:
    kind = _CYCLES[name]
    known = {field.name for field in fields(kind)}
    findings.look(params, "scheduler.params.", known)
    schedule = None
    with findings.noting(f"scheduler.params of {name}: "):
        schedule = made(kind, {key: value for key, value in params.items() if key in known})
    if params.get("cycle_second_step_size") == 0:
        findings.wrong(
            "scheduler.params.cycle_second_step_size 0 leaves the cycle no second half",
            "leave it out for as many steps as the first has",
        )
    if isinstance(schedule, OneCycle) and schedule.cycle_momentum and not has_betas(optimizer):
        findings.ignored.append("scheduler.params.cycle_momentum")  # DeepSpeed moves betas alone, too
        return replace(schedule, cycle_momentum=False)
    return schedule
