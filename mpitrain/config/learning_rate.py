"""The learning rate of each step: our own decays and cycles, and the warm-ups of a DeepSpeed configuration.

The cycles (`OneCycle`, `RangeTest`) have the same keys as DeepSpeed's OneCycle and LRRangeTest, and give the same rate
at each step, counted from 0.

Reference:
    Smith 2018, "A disciplined approach to neural network hyper-parameters: Part 1".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import Field, StrictBool, ValidationError

from mpitrain.choices import Cycle, Decay
from mpitrain.config.section import Section
from mpitrain.config.training import OptimSection
from mpitrain.errors import InputError, first_problem, refusal


@dataclass(frozen=True)
class LearningRate:
    """A learning rate that warms up linearly from 0 to `peak` and then follows a decay of `kind`.

    A constant rate stays at `peak`. An inverse square root decreases towards `last` without reaching it. All other
    kinds reach `last` at step `steps`.

    Attributes:
        kind: Shape of the curve after the warm-up, a key of `DECAYS`.
        peak: Learning rate at the end of the warm-up.
        last: Learning rate at the end of the decay, default 0; not used by a constant rate.
        warmup: Steps of the warm-up, default 0.
        steps: Steps of the whole run.
        decay: Steps of the decay of wsd; a value below 1 is a fraction of `steps`. Default 0.2.
        power: Exponent of the polynomial, default 2.
    """

    kind: Decay
    peak: float
    last: float = 0.0
    warmup: int = 0
    steps: int = 0
    decay: float = 0.2
    power: float = 2.0

    @staticmethod
    def of(section: OptimSection, steps: int) -> LearningRate:
        """Return the learning rate that the section [optim] describes.

        Args:
            section: The settings of [optim]; `schedule` must be a key of `DECAYS`.
            steps: Optimizer steps of the whole run.

        Raises:
            InputError: optim.schedule_options has a key that this schedule does not know.
        """
        kind = cast(Decay, section.schedule)
        unknown = set(section.schedule_options) - ({"power"} if kind == "polynomial" else set())
        if unknown:
            raise refusal(
                f"optim.schedule_options: {kind} has no option {', '.join(sorted(unknown))}; polynomial has "
                "the option power, and a class of torch.optim.lr_scheduler has its arguments"
            )
        power = float(section.schedule_options.get("power", 2.0))
        rates = section.lr, section.lr_end
        return LearningRate(kind, *rates, section.warmup, steps, decay=section.decay_steps, power=power)

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.last + (self.peak - self.last) * DECAYS[self.kind](self, step - self.warmup)

    def progress(self, since: int) -> float:
        """Return the finished fraction (0 to 1) of the steps after the warm-up, if `since` of them are finished."""
        return min(1.0, since / max(1, self.steps - self.warmup))


def _stable_then_down(curve: LearningRate, since: int) -> float:
    decay = curve.decay if curve.decay >= 1 else math.ceil(curve.decay * curve.steps)
    return min(1.0, max(0.0, curve.steps - curve.warmup - since) / max(1, decay))


def _inverse_sqrt(curve: LearningRate, since: int) -> float:
    scale = curve.warmup or _TIMESCALE
    return math.sqrt(scale / (since + scale))


_TIMESCALE = 10_000  # steps after which an inverse square root without a warm-up is 0.7, as in transformers

# (rate - last) / (peak - last), `since` steps after the warm-up
DECAYS: dict[Decay, Callable[[LearningRate, int], float]] = {
    "constant": lambda curve, since: 1.0,
    "linear": lambda curve, since: 1 - curve.progress(since),
    "cosine": lambda curve, since: 0.5 * (1 + math.cos(math.pi * curve.progress(since))),
    "wsd": _stable_then_down,  # warm-up, stable, decay: Hu et al. 2024, MiniCPM, section 4
    "inverse-sqrt": _inverse_sqrt,  # Vaswani et al. 2017, section 5.3
    "polynomial": lambda curve, since: (1 - curve.progress(since)) ** curve.power,
}


_MAX_MOMENTUM = 0.999  # upper limit of a momentum that grows after the cycle
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Steps = Annotated[int, Field(ge=0)]
_SomeSteps = Annotated[int, Field(gt=0)]
_Momentum = Annotated[float, Field(ge=0, lt=1)]


class OneCycle(Section):
    """A learning rate that rises to a maximum, falls back to the minimum, and then decays slowly below it.

    After the cycle, with n = (steps since its end) / `decay_step_size`, the rate is
    cycle_min_lr / (1 + decay_lr_rate · n), and the momentum cycle_max_mom · (1 + decay_mom_rate · n), at most 0.999.

    Attributes:
        cycle_min_lr: Learning rate at the start and at the end of the cycle.
        cycle_max_lr: Learning rate in the middle of the cycle.
        cycle_first_step_size: Steps of the first half, default 2000.
        cycle_second_step_size: Steps of the second half; 0, the default: the length of the first half.
        cycle_first_stair_count: Stairs in the first half; 0, the default: a straight line.
        cycle_second_stair_count: Stairs in the second half; 0: a straight line; -1, the default: as in the first half.
        decay_step_size: Steps per unit of n after the cycle; 0, the default: neither rate nor momentum changes.
        decay_lr_rate: Growth of the divisor of the rate per unit of n, default 0.
        decay_mom_rate: Growth of the factor of the momentum per unit of n, default 0.
        cycle_momentum: If true, the default, the first beta of Adam and similar optimizers moves between cycle_max_mom
            and cycle_min_mom in the opposite direction, and the second beta is 0.99.
        cycle_min_mom: Momentum in the middle of the cycle, default 0.8.
        cycle_max_mom: Momentum at the start and at the end of the cycle, default 0.9.
    """

    cycle_min_lr: _Number
    cycle_max_lr: _Number
    cycle_first_step_size: _SomeSteps = 2000
    cycle_second_step_size: _Steps = 0
    cycle_first_stair_count: _Steps = 0
    cycle_second_stair_count: Annotated[int, Field(ge=-1)] = -1
    decay_step_size: _Steps = 0
    decay_lr_rate: _Number = 0.0
    decay_mom_rate: _Number = 0.0
    cycle_momentum: StrictBool = True
    cycle_min_mom: _Momentum = 0.8
    cycle_max_mom: _Momentum = 0.9

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        if (since := step - self._steps) >= 0:
            return self.cycle_min_lr / (1 + self.decay_lr_rate * self._intervals(since))
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(step)

    def momentum(self, step: int) -> float | None:
        """Return the first beta of step `step`, counted from 0; None if the optimizer keeps its own."""
        if not self.cycle_momentum:
            return None
        if (since := step - self._steps) >= 0:
            return min(_MAX_MOMENTUM, self.cycle_max_mom * (1 + self.decay_mom_rate * self._intervals(since)))
        return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self._height(step)

    @property
    def _second(self) -> int:
        return self.cycle_second_step_size or self.cycle_first_step_size

    @property
    def _steps(self) -> int:
        return self.cycle_first_step_size + self._second

    def _intervals(self, since: int) -> float:
        return since / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self, step: int) -> float:
        """Return the height of the cycle at `step`: 0 at its start and end, 1 in its middle."""
        first, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        if step <= first:
            done, of = step, first
        else:
            done, of = self._steps - step, self._second
            stairs = stairs if self.cycle_second_stair_count < 0 else self.cycle_second_stair_count
        return done * stairs // of / stairs if stairs else done / of


class RangeTest(Section):
    """A learning rate that grows until the loss diverges; a usable rate lies just below that point.

    Attributes:
        lr_range_test_min_lr: Learning rate of the first step, default 1e-3.
        lr_range_test_step_size: Steps of one interval, default 2000.
        lr_range_test_step_rate: Growth of the rate per interval, as a multiple of the first rate, default 1.
        lr_range_test_staircase: If true, the rate grows at the end of each interval; else, the default, at each step.
    """

    lr_range_test_min_lr: _Number = 1e-3
    lr_range_test_step_size: _SomeSteps = 2000
    lr_range_test_step_rate: _Number = 1.0
    lr_range_test_staircase: StrictBool = False

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        size = self.lr_range_test_step_size
        intervals = step // size if self.lr_range_test_staircase else step / size
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * intervals)


CYCLES: dict[Cycle, type[OneCycle] | type[RangeTest]] = {"one-cycle": OneCycle, "range-test": RangeTest}


def cycle_of(section: OptimSection, steps: int) -> OneCycle | RangeTest:
    """Return the cycle or range test that the section [optim] describes.

    Keys missing from optim.schedule_options get these defaults. A one-cycle spans the whole run, between optim.lr_end
    (optim.lr / 10 if that is 0) and optim.lr, and leaves the betas alone. A range test grows from optim.lr_end
    (optim.lr / 100 if that is 0) to optim.lr at the end of the run.

    Args:
        section: The settings of [optim]; `schedule` is one-cycle or range-test.
        steps: Optimizer steps of the whole run.

    Raises:
        InputError: optim.schedule_options has an unknown key, or a value out of range.
    """
    if section.schedule == "one-cycle":
        half = max(1, steps // 2)
        options = {"cycle_min_lr": section.lr_end or section.lr / 10, "cycle_max_lr": section.lr}
        options["cycle_momentum"] = False
        if "cycle_first_step_size" not in section.schedule_options:
            options |= {"cycle_first_step_size": half, "cycle_second_step_size": max(1, steps - half)}
    else:
        first = section.lr_end or section.lr / 100
        options = {"lr_range_test_min_lr": first, "lr_range_test_step_size": max(1, steps - 1)}
        options["lr_range_test_step_rate"] = section.lr / first - 1
    kind = CYCLES["one-cycle" if section.schedule == "one-cycle" else "range-test"]
    try:
        return make_cycle(kind, options | section.schedule_options)
    except InputError as error:
        raise refusal(f"optim.schedule_options: {error}") from None


def make_cycle(kind: type[OneCycle] | type[RangeTest], options: Mapping[str, Any]) -> OneCycle | RangeTest:
    """Create a cycle from a mapping of its attributes.

    Args:
        kind: The class to create.
        options: Values by attribute name; None stands for the default.

    Raises:
        InputError: An attribute is missing, unknown, not a number, or out of range.
    """
    values = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(set(values) - set(kind.model_fields)):
        raise refusal(f"there is no option {', '.join(unknown)}; the options are {', '.join(kind.model_fields)}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise refusal(f"{first_problem(error)}; fix it") from None


@dataclass(frozen=True)
class WarmUp:
    """A learning rate schedule of DeepSpeed with a warm-up: WarmupLR, WarmupDecayLR or WarmupCosineLR.

    DeepSpeed runs update 0 with the initial rate of the schedule. It advances the schedule after each update that was
    not skipped, and counts the first advance as batch 0, so update n has the rate of batch n - 1.

    Attributes:
        kind: constant for WarmupLR, linear for WarmupDecayLR, cosine for WarmupCosineLR.
        peak: Learning rate at the end of the warm-up; None: the own rate of each parameter group.
        first: Learning rate at the start of the warm-up, and at the end of a linear decay; for cosine, as a ratio of
            `peak`. Default 0.
        last: Learning rate at the end of a cosine, as a ratio of `peak`, default 0.
        warmup: Updates of the warm-up, at least 2; default 1000.
        steps: Updates of the whole training.
        logarithmic: If true, the default, the warm-up grows with log(update); else linearly.
    """

    kind: Decay
    peak: float | None
    first: float = 0.0
    last: float = 0.0
    warmup: int = 1000
    steps: int = 0
    logarithmic: bool = True

    def rate(self, update: int, group_rate: float = 1.0) -> float:
        """Return the learning rate of one parameter group.

        Args:
            update: Number of the update, from 0.
            group_rate: Learning rate of the parameter group itself, used if `peak` is None.
        """
        peak, batch = group_rate if self.peak is None else self.peak, update - 1
        if batch < 0:
            return 0.0 if self.kind == "cosine" else self.first  # a cosine starts at 0, whatever `first` is
        if batch >= self.warmup:
            share = self._after(batch)
        else:
            share = math.log(batch + 1) / math.log(self.warmup) if self.logarithmic else batch / self.warmup
        if self.kind != "cosine":
            return self.first + (peak - self.first) * share
        low = self.first if batch < self.warmup else self.last
        return peak * (low + (1 - low) * share)

    def _after(self, batch: int) -> float:
        """Return the relative height of the rate, from 1 down to 0, at a batch after the warm-up."""
        steps = max(1, self.steps - self.warmup)
        if self.kind == "linear":
            return max(0.0, (self.steps - batch) / steps)
        done = min(1.0, (batch + 1 - self.warmup) / steps)
        return (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1.0
