"""The learning rate of each step, as a configuration says it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from mpitrain.choices import Decay
from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal


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
        """What a configuration says, for a run of `steps`."""
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
        """How much of the steps after the warm-up is done, `since` of them being."""
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
