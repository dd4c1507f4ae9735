"""The schedule of a DeepSpeed configuration: a curve or a cycle of ours, or a class of torch.optim.lr_scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from mpitrain.choices import Cycle, Decay
from mpitrain.config.cycles import CYCLES, OneCycle, RangeTest, made
from mpitrain.config.deepspeed.findings import Findings
from mpitrain.config.deepspeed.optimizers import has_betas
from mpitrain.config.learning_rate import LearningRate

_WARMUPS: dict[str, Decay] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_CYCLES: dict[str, Cycle] = {"OneCycle": "one-cycle", "LRRangeTest": "range-test"}
_TAKEN = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type"}
_TAKEN |= {"cos_min_ratio", "warmup_min_ratio"}

OfDeepSpeed = LearningRate | OneCycle | RangeTest


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
) -> LearningRate:
    kind = _WARMUPS[name]
    findings.look(params, "scheduler.params.", _TAKEN)
    numbers = {
        key: findings.number(f"scheduler.params.{key}", value)
        for key, value in params.items()
        if key in _TAKEN - {"warmup_type"} and value is not None
    }
    if kind != "constant" and "total_num_steps" not in numbers:
        findings.wrong(f"scheduler.params has no total_num_steps for {name}", "give the steps of the whole training")
    peak = numbers.get("warmup_max_lr", (optimizer[1] if optimizer else {}).get("lr", 1e-3))
    return LearningRate(
        kind,
        peak=peak,
        first=numbers.get("warmup_min_lr", peak * numbers.get("warmup_min_ratio", 0.0)),
        last=peak * numbers.get("cos_min_ratio", 0.0001) if kind == "cosine" else 0.0,
        warmup=int(numbers.get("warmup_num_steps", 1000)),
        steps=int(numbers.get("total_num_steps", 0)),
        logarithmic=params.get("warmup_type", "log") != "linear",
    )


def _cycle(
    name: str, params: dict[str, Any], optimizer: tuple[str, dict[str, Any]] | None, findings: Findings
) -> OneCycle | RangeTest | None:
    kind = CYCLES[_CYCLES[name]]
    known = {field.name for field in fields(kind)}
    findings.look(params, "scheduler.params.", known)
    schedule = None
    with findings.noting(f"scheduler.params of {name}: "):
        schedule = made(kind, {key: value for key, value in params.items() if key in known})
    if isinstance(schedule, OneCycle) and schedule.cycle_momentum and not has_betas(optimizer):
        findings.ignored.append("scheduler.params.cycle_momentum")  # DeepSpeed moves betas alone, too
        return replace(schedule, cycle_momentum=False)
    return schedule
