"""The learning rate of each step: decays and cycles of ours, and the warm-ups of a DeepSpeed configuration.

Cycles are of Smith 2018, "A disciplined approach to neural network hyper-parameters: Part 1". Their keys are those of
DeepSpeed's OneCycle and LRRangeTest, and step `step`, from 0, has the rate that these give that update.
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
    """A learning rate that warms up from 0 to `peak`, then stays, or goes down to `last` at step `steps`.

    An inverse square root goes on towards `last`, however many steps there are.

    Attributes:
        kind: What follows the warm-up.
        peak: The rate after the warm-up.
        last: The rate at the last step, where it decays.
        warmup: How many steps the warm-up takes.
        steps: How many steps there are.
        decay: Steps that wsd decays in; below 1: their share of all steps.
        power: Of the polynomial.
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
        """Return the rate that a configuration asks for, in a run of `steps`."""
        kind = cast(Decay, section.schedule)
        unknown = set(section.schedule_options) - ({"power"} if kind == "polynomial" else set())
        if unknown:
            raise refusal(
                f"optim.schedule_options: {kind} has no {', '.join(sorted(unknown))}; polynomial has power, a class "
                "of torch.optim.lr_scheduler its arguments"
            )
        power = float(section.schedule_options.get("power", 2.0))
        rates = section.lr, section.lr_end
        return LearningRate(kind, *rates, section.warmup, steps, decay=section.decay_steps, power=power)

    def rate(self, step: int) -> float:
        """The rate of step `step`, from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.last + (self.peak - self.last) * DECAYS[self.kind](self, step - self.warmup)

    def progress(self, since: int) -> float:
        """Return the share of the steps after the warm-up that is done, after `since` of them."""
        return min(1.0, since / max(1, self.steps - self.warmup))


def _stable_then_down(curve: LearningRate, since: int) -> float:
    decay = curve.decay if curve.decay >= 1 else math.ceil(curve.decay * curve.steps)
    return min(1.0, max(0.0, curve.steps - curve.warmup - since) / max(1, decay))


def _inverse_sqrt(curve: LearningRate, since: int) -> float:
    scale = curve.warmup or _TIMESCALE
    return math.sqrt(scale / (since + scale))


_TIMESCALE = 10_000  # steps in which an inverse square root without a warm-up comes down to 0.7, as in transformers

# what is left of the way from the last rate to the peak, so many steps after the warm-up
DECAYS: dict[Decay, Callable[[LearningRate, int], float]] = {
    "constant": lambda curve, since: 1.0,
    "linear": lambda curve, since: 1 - curve.progress(since),
    "cosine": lambda curve, since: 0.5 * (1 + math.cos(math.pi * curve.progress(since))),
    "wsd": _stable_then_down,  # warm-up, stable, decay: Hu et al. 2024, MiniCPM, section 4
    "inverse-sqrt": _inverse_sqrt,  # Vaswani et al. 2017, section 5.3
    "polynomial": lambda curve, since: (1 - curve.progress(since)) ** curve.power,
}


_MOST = 0.999  # that a momentum which grows after the cycle comes to
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Steps = Annotated[int, Field(ge=0)]
_SomeSteps = Annotated[int, Field(gt=0)]
_Momentum = Annotated[float, Field(ge=0, lt=1)]


class OneCycle(Section):
    """Up from the least rate to the largest, down again, and then slowly below the least one.

    Attributes:
        cycle_min_lr: The rate at both ends of the cycle.
        cycle_max_lr: The rate between its two halves.
        cycle_first_step_size: Steps of the first half.
        cycle_second_step_size: Steps of the second; 0: as many as of the first.
        cycle_first_stair_count: How many stairs the first half climbs; 0: it is a line.
        cycle_second_stair_count: The same of the second; -1: as many as of the first.
        decay_step_size: After the cycle, steps in which the divisor of the least rate grows by `decay_lr_rate`, and the
            factor of the largest momentum by `decay_mom_rate`; 0: both stay.
        decay_lr_rate: See there.
        decay_mom_rate: See there.
        cycle_momentum: Whether the first beta of Adam and its kin goes the other way, between the two moments, with
            0.99 as the second.
        cycle_min_mom: The momentum between the halves.
        cycle_max_mom: The momentum at both ends.
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
        """The rate of step `step`, from 0."""
        if (since := step - self._steps) >= 0:
            return self.cycle_min_lr / (1 + self.decay_lr_rate * self._intervals(since))
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(step)

    def momentum(self, step: int) -> float | None:
        """The first beta of step `step`; None where the optimizer's own stays."""
        if not self.cycle_momentum:
            return None
        if (since := step - self._steps) >= 0:
            return min(_MOST, self.cycle_max_mom * (1 + self.decay_mom_rate * self._intervals(since)))
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
        """Return the height in the cycle: 0 at its ends, 1 between its halves."""
        first, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        if step <= first:
            done, of = step, first
        else:
            done, of = self._steps - step, self._second
            stairs = stairs if self.cycle_second_stair_count < 0 else self.cycle_second_stair_count
        return done * stairs // of / stairs if stairs else done / of


class RangeTest(Section):
    """Ever higher, until the loss no longer falls: the rate a model bears is just below.

    Attributes:
        lr_range_test_min_lr: The first rate.
        lr_range_test_step_size: Steps in which the rate grows by `lr_range_test_step_rate` times the first one.
        lr_range_test_step_rate: See there.
        lr_range_test_staircase: Whether it grows at the end of those steps, instead of at each.
    """

    lr_range_test_min_lr: _Number = 1e-3
    lr_range_test_step_size: _SomeSteps = 2000
    lr_range_test_step_rate: _Number = 1.0
    lr_range_test_staircase: StrictBool = False

    def rate(self, step: int) -> float:
        """The rate of step `step`, from 0."""
        size = self.lr_range_test_step_size
        intervals = step // size if self.lr_range_test_staircase else step / size
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * intervals)


CYCLES: dict[Cycle, type[OneCycle] | type[RangeTest]] = {"one-cycle": OneCycle, "range-test": RangeTest}


def cycle_of(section: OptimSection, steps: int) -> OneCycle | RangeTest:
    """Return the cycle that a configuration asks for; what optim.schedule_options lack comes from its other settings.

    The cycle is then the whole run, between optim.lr and optim.lr_end or, where that is 0, a tenth of optim.lr; betas
    stay. The test begins at optim.lr_end, or a hundredth of optim.lr, and reaches optim.lr at the end.

    Raises:
        InputError: There is no such option, or it is out of range.
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
        return made(kind, options | section.schedule_options)
    except InputError as error:
        raise refusal(f"optim.schedule_options: {error}") from None


def made(kind: type[OneCycle] | type[RangeTest], options: Mapping[str, Any]) -> OneCycle | RangeTest:
    """Return a schedule of the class with these attributes; None stands for an attribute's default.

    Raises:
        InputError: An attribute is missing, unknown, or no number that it can be.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(set(given) - set(kind.model_fields)):
        raise refusal(f"there is no {', '.join(unknown)}; there are {', '.join(kind.model_fields)}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise refusal(f"{first_problem(error)}; fix it") from None


@dataclass(frozen=True)
class WarmUp:
    """A warm-up of DeepSpeed (WarmupLR, WarmupDecayLR or WarmupCosineLR), and what follows it.

    DeepSpeed makes update 0 with the rate that a schedule begins from. It steps the schedule after each update that was
    not skipped, and calls the first such step batch 0: update n has the rate of batch n - 1.

    Attributes:
        kind: constant for WarmupLR, linear for WarmupDecayLR, cosine for WarmupCosineLR.
        peak: The rate after the warm-up; None: each parameter group's own.
        first: The rate that the warm-up begins from, and that a line goes down to; of a cosine, as a ratio of `peak`.
        last: What a cosine goes down to, as a ratio of `peak`.
        warmup: Updates that the warm-up takes, at least 2.
        steps: Updates of the whole training.
        logarithmic: Whether the warm-up follows log(update) instead of a line.
    """

    kind: Decay
    peak: float | None
    first: float = 0.0
    last: float = 0.0
    warmup: int = 1000
    steps: int = 0
    logarithmic: bool = True

    def rate(self, update: int, own: float = 1.0) -> float:
        """The rate of update `update`, from 0, of a parameter group whose own rate is `own`."""
        peak, batch = own if self.peak is None else self.peak, update - 1
        if batch < 0:
            return 0.0 if self.kind == "cosine" else self.first  # a cosine from 0, whatever its ratio
        if batch >= self.warmup:
            share = self._after(batch)
        else:
            share = math.log(batch + 1) / math.log(self.warmup) if self.logarithmic else batch / self.warmup
        if self.kind != "cosine":
            return self.first + (peak - self.first) * share
        low = self.first if batch < self.warmup else self.last
        return peak * (low + (1 - low) * share)

    def _after(self, batch: int) -> float:
        """Return the height of the rate at a batch after the warm-up, from 1 to 0."""
        steps = max(1, self.steps - self.warmup)
        if self.kind == "linear":
            return max(0.0, (self.steps - batch) / steps)
        done = min(1.0, (batch + 1 - self.warmup) / steps)
        return (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1.0
