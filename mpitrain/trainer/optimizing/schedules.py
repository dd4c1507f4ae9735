"""The learning rate over the steps: a curve or a cycle of ours, or a class of torch.optim.lr_scheduler.

Each is a function of the step, so that a run that goes on from a checkpoint needs nothing but the number of that; but
for ReduceLROnPlateau, which has a state (see `PlateauSchedule`).
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpitrain.config.learning_rate import CYCLES, DECAYS, LearningRate, OneCycle, cycle_of
from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal
from mpitrain.trainer.optimizing.optimizer import optimizer_class, refuse_unknown

PLATEAU = ReduceLROnPlateau.__name__
_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
_NEED_MORE = ("LRScheduler", "_LRScheduler", "SequentialLR", "ChainedScheduler")
_CALL_A_FUNCTION = ("LambdaLR", "MultiplicativeLR")
_OF_DEEPSPEED = {"OneCycle": "one-cycle", "LRRangeTest": "range-test", "WarmupLR": "constant"}
_OF_DEEPSPEED |= {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
S = TypeVar("S", bound=lr_scheduler.LRScheduler)
SECOND_BETA = 0.99  # beside a first one that goes round, as DeepSpeed has it


class RateSchedule(Protocol):
    """Gives a learning rate for each step."""

    def rate(self, step: int) -> float:
        """The rate of step `step`, from 0."""


def schedule_of(section: OptimSection, steps: int, *, evaluates: bool = True) -> RateSchedule:
    """Return the schedule that a configuration names, for a run of `steps`. Raises InputError for settings it refuses.

    evaluates: Whether the held-out loss will be told to a schedule that follows it.
    """
    if section.schedule in DECAYS:
        return LearningRate.of(section, steps)
    if section.schedule in CYCLES:
        return _cycle(section, steps)
    if section.schedule != PLATEAU:
        return TorchSchedule(section, steps)
    if not evaluates:
        raise refusal(
            f"optim.schedule {PLATEAU} follows held-out losses, which a loop of your own has; leave it out, and step "
            "torch's with engine.optimizer and what engine.evaluate returns, or run mpitrain.train, which does"
        )
    return PlateauSchedule(section)


def _cycle(section: OptimSection, steps: int) -> RateSchedule:
    cycle = cycle_of(section, steps)
    kind = optimizer_class("optim.name", section.name)
    if isinstance(cycle, OneCycle) and cycle.cycle_momentum and "betas" not in inspect.signature(kind).parameters:
        raise refusal(
            f"optim.schedule_options: cycle_momentum moves the first of betas, and {kind.__name__} has none; leave it "
            "out, or use adamw"
        )
    return cycle


def next_rate(schedule: RateSchedule, optimizer: torch.optim.Optimizer, step: int) -> float:
    """The rate of step `step`, whose momentum the optimizer is given where the schedule has one."""
    momentum = schedule.momentum(step) if isinstance(schedule, OneCycle) else None
    if momentum is not None:
        for group in optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, SECOND_BETA)
    return schedule.rate(step)


class TorchSchedule:
    """The rates that a class of torch.optim.lr_scheduler gives an optimizer of one parameter group.

    Where it lacks them, `total_steps` and `T_max` are the steps of the run, `max_lr` is optim.lr, and `base_lr` and
    `eta_min` are optim.lr_end.

    Args:
        section: Names the class.
        steps: Of the run.

    Raises:
        InputError: There is no such class, it refuses its arguments, or it needs more than the number of a step.
    """

    def __init__(self, section: OptimSection, steps: int) -> None:
        self._kind = kind = _class_of("optim.schedule", section.schedule)
        accepted = inspect.signature(kind).parameters
        options: dict[str, Any] = {
            "total_steps": steps,
            "T_max": steps,
            "max_lr": section.lr,
            "base_lr": section.lr_end,
        }
        options = {key: value for key, value in options.items() if key in accepted}
        options |= section.schedule_options
        refuse_unknown("optim.schedule_options", kind, options, ("optimizer", "last_epoch"))
        if options.get("cycle_momentum"):
            raise refusal(
                f"optim.schedule_options: {kind.__name__} has no cycle_momentum here; leave it out, or use one-cycle"
            )
        if "cycle_momentum" in accepted:
            options["cycle_momentum"] = False
        self._optimizer, self._scheduler = _following(kind, section.lr, options)
        self._rates = [self._current()]

    def _current(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def rate(self, step: int) -> float:
        """The rate of step `step`, from 0."""
        while len(self._rates) <= step:
            self._optimizer.step()
            try:
                self._scheduler.step()
            except ValueError as error:
                raise refusal(f"optim.schedule: {self._kind.__name__} ends before train.steps: {error}") from None
            self._rates.append(self._current())
        return self._rates[step]


def _following(kind: type[S], lr: float, options: Mapping[str, Any]) -> tuple[torch.optim.Optimizer, S]:
    """Make an optimizer of one number, and a scheduler that sets its rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    make: Any = kind
    try:
        return optimizer, make(optimizer, **options)
    except (TypeError, ValueError) as error:
        raise refusal(f"optim.schedule: {kind.__name__} refuses optim.schedule_options: {error}") from None


def make_scheduler(name: str, options: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """The scheduler of an optimizer that a DeepSpeed configuration names by its class of torch.optim.lr_scheduler.

    Raises:
        InputError: There is no such class, or it refuses the options.
    """
    try:
        return _class_of("scheduler.type", name)(optimizer, **options)
    except (TypeError, ValueError) as error:
        raise refusal(f"scheduler.type {name} refuses scheduler.params: {error}; mend them") from None


def _class_of(key: str, name: str) -> type[lr_scheduler.LRScheduler]:
    kinds = {
        key: kind
        for key, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and key not in _NEED_MORE
    }
    if name in _CALL_A_FUNCTION:
        raise refusal(
            f"{key} {name} calls a function of yours, which a configuration cannot hold; give mt.initialize a "
            "scheduler or a function that makes one of the optimizer, or choose polynomial, wsd or MultiStepLR"
        )
    if name in _OF_DEEPSPEED:
        raise refusal(f"{key} {name} of DeepSpeed is {_OF_DEEPSPEED[name]!r} here; write that")
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]
        lacks = "needs what a configuration cannot say" if name in _NEED_MORE else "is not in torch.optim.lr_scheduler"
        raise refusal(f"{key} {name!r} {lacks}; did you mean {near!r}?")
    return kinds[name]


class PlateauSchedule:
    """The rate that torch's ReduceLROnPlateau gives, told the held-out loss of each evaluation.

    `min_lr` is optim.lr_end where the options lack it. Unlike other schedules it has a state, which checkpoints keep.

    Args:
        section: Its options, and the first rate.

    Raises:
        InputError: It has no such option, or refuses one.
    """

    def __init__(self, section: OptimSection) -> None:
        options = {"min_lr": section.lr_end} | section.schedule_options
        if options.pop("mode", "min") != "min":
            raise refusal(
                f"optim.schedule_options: {PLATEAU} follows the held-out loss, which is to fall; use mode min"
            )
        refuse_unknown("optim.schedule_options", ReduceLROnPlateau, options, ("optimizer", "mode"))
        self._optimizer, self._plateau = _following(ReduceLROnPlateau, section.lr, options)

    def rate(self, step: int) -> float:
        """The rate of the steps up to the next evaluation."""
        return float(self._optimizer.param_groups[0]["lr"])

    def observe(self, loss: float) -> None:
        """Take the loss of an evaluation into account."""
        self._plateau.step(loss)

    def state(self) -> dict[str, Any]:
        """Return the state for `load`, as JSON has it, which knows no infinity."""
        kept = {name: getattr(self._plateau, name) for name in _STATE}
        return kept | {"rate": self.rate(0), "best": kept["best"] if math.isfinite(kept["best"]) else None}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for name in _STATE:
            setattr(self._plateau, name, state[name])
        self._plateau.best = math.inf if state["best"] is None else state["best"]
        self._optimizer.param_groups[0]["lr"] = state["rate"]
