"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpitrain.config.training import OptimSection


@dataclass(frozen=True)
class LearningRate:
    """A learning rate over steps: warm-up from `first` to `peak`, then constant, or down to `last` at `steps`.

    kind: constant, linear or cosine. logarithmic: warm up with log(step) instead of linearly.
    """

    kind: str
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
        if self.kind == "linear":
            return self.last + (self.peak - self.last) * (1 - progress)
        if self.kind == "cosine":
            return self.last + (self.peak - self.last) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak
