"""The learning rate of each step, as a configuration says it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mpitrain.choices import Decay
from mpitrain.config.training import OptimSection

# what is left of the way from the last rate to the peak, when so much of the steps after the warm-up is done
DECAYS: dict[Decay, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


@dataclass(frozen=True)
class LearningRate:
    """A learning rate that warms up from `first` to `peak`, then stays, or goes down to `last` at step `steps`.

    Attributes:
        kind: What follows the warm-up.
        peak: The rate after the warm-up.
        first: The rate that the warm-up begins from.
        last: The rate at the last step, where it decays.
        warmup: How many steps the warm-up takes.
        steps: How many steps there are.
        logarithmic: Whether the warm-up follows log(step) instead of a line.
    """

    kind: Decay
    peak: float
    first: float = 0.0
    last: float = 0.0
    warmup: int = 0
    steps: int = 0
    logarithmic: bool = False

    @staticmethod
    def of(section: OptimSection, steps: int) -> LearningRate:
        """What a configuration says, for a run of `steps`."""
        return LearningRate(section.schedule, section.lr, warmup=section.warmup, steps=steps)

    def rate(self, step: int) -> float:
        """The rate of step `step`, from 0."""
        if step < self.warmup:
            if self.logarithmic:
                done = math.log(step + 1) / math.log(self.warmup) if self.warmup > 1 else 1.0
                return self.first + (self.peak - self.first) * done
            return self.first + (self.peak - self.first) * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.last + (self.peak - self.last) * DECAYS[self.kind](progress)
