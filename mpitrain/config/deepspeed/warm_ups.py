"""The rates of DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR.

DeepSpeed makes update 0 with the rate that a schedule begins from. It steps the schedule after each update that was not
skipped, and calls the first such step batch 0: update n has the rate of batch n - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpitrain.choices import Decay


@dataclass(frozen=True)
class WarmUp:
    """A warm-up of DeepSpeed, and what follows it.

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
        share = self._warmed(batch) if batch < self.warmup else self._after(batch)
        if self.kind != "cosine":
            return self.first + (peak - self.first) * share
        low = self.first if batch < self.warmup else self.last
        return peak * (low + (1 - low) * share)

    def _warmed(self, batch: int) -> float:
        """How far up the warm-up is at one of its batches, from 0 to 1."""
        return math.log(batch + 1) / math.log(self.warmup) if self.logarithmic else batch / self.warmup

    def _after(self, batch: int) -> float:
        """How far up the rate still is at a batch after the warm-up, from 1 to 0."""
        steps = max(1, self.steps - self.warmup)
        if self.kind == "linear":
            return max(0.0, (self.steps - batch) / steps)
        done = min(1.0, (batch + 1 - self.warmup) / steps)
        return (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1.0
