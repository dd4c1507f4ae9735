"""Steps that teach nothing: skipped because their gradients are not finite, or with a loss that is not.

A step now and then that fp16's loss scale makes overflow is none of them. What counts is the row of such steps that has
not ended: after it began, checkpoints are marked, so that they push out none from before, and a run that ends in it has
failed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpitrain.checkpoint import FRUITLESS
from mpitrain.trainer.precision import LossScale


@dataclass(frozen=True)
class Fruitless:
    """A row of such steps up to the last step done. since: the first of them; 0: the last step was a good one.

    expected: whether it may be the search for a loss scale. skipped, loss: of the last of them.
    """

    since: int = 0
    expected: bool = False
    skipped: bool = True
    loss: float = math.nan

    def after(self, step: int, loss: float, skipped: bool, scale: LossScale) -> Fruitless:
        """The row after one more step."""
        finite = math.isfinite(loss)
        if finite and not skipped:
            return Fruitless()
        since = self.since or step
        return Fruitless(since, finite and scale.explains(step - since + 1), skipped, loss)

    @property
    def bad(self) -> bool:
        return self.since > 0 and not self.expected

    def count(self, step: int) -> int:
        """Its length, the last step done being `step`."""
        return step - self.since + 1 if self.since else 0

    @property
    def mark(self) -> dict[str, int]:
        """The value that a checkpoint made now gets."""
        return {FRUITLESS: self.since if self.bad else 0}

    @property
    def reason(self) -> str:
        """What is wrong, as half a sentence."""
        if self.skipped:
            return f"nothing was learned since step {self.since}, because the gradients are not finite"
        return f"the loss is {self.loss} since step {self.since}"
