"""16-bit training: parameters and activations in 16 bits, the optimizer's copy and states in fp32.

Micikevicius et al. 2018, Mixed Precision Training: a copy of the weights in fp32, and for fp16 a loss multiplied by
a scale so that small gradients do not become zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.choices import Precision


@dataclass
class LossScale:
    """The number losses are multiplied by: halved when gradients overflow, doubled after `patience` good steps.

    spare: overflows that are let pass before it is halved, counted anew once it is doubled; refill: at each good step.
    """

    value: float = 1.0
    dynamic: bool = False
    patience: int = 2000
    good: int = 0
    least: float = 1.0
    spare: int = 0
    refill: bool = False
    passed: int = 0

    @staticmethod
    def of(precision: Precision, initial: float = 2.0**16) -> LossScale:
        return LossScale(initial, dynamic=True) if precision == "fp16" else LossScale()

    def update(self, overflowed: bool) -> None:
        if not self.dynamic:
            return
        self.good = 0 if overflowed else self.good + 1
        if overflowed and self.passed < self.spare:
            self.passed += 1
        elif overflowed:
            self.value = max(self.least, self.value / 2)
        elif self.good == self.patience:
            self.value, self.good, self.passed = self.value * 2, 0, 0
        elif self.refill:
            self.passed = 0

    def explains(self, overflows: int) -> bool:
        """Whether so many overflows in a row are no more than its adjustment takes."""
        return self.dynamic and overflows <= 1 + self.spare

    def state(self) -> dict[str, float]:
        return {"scale": self.value, "good": self.good, "passed": self.passed}

    def load(self, state: dict[str, float]) -> None:
        self.value, self.good, self.passed = float(state["scale"]), int(state["good"]), int(state.get("passed", 0))
