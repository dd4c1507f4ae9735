"""Steps that teach nothing: skipped because their gradients are not finite, or with a loss that is not.

A step now and then that fp16's loss scale makes overflow is none of them. What counts is the row of such steps that has
not ended: after it began, checkpoints are marked, so that they push out none from before, and a run that ends in it has
failed. A run whose very first losses are not finite ends at once: there is nothing that more of them could mend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.checkpoint import FRUITLESS
from mpitrain.errors import NothingLearned, refusal
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.precision import LossScale

if TYPE_CHECKING:
    from mpitrain.trainer.trainer import Trainer

FIRST = 3  # losses in a row that are not finite, from a run's first step on, after which it is given up


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

    def hopeless(self, step: int, most: int) -> bool:
        """Whether the run is to be given up, the last step done being `step`. most: steps of a row; 0: no limit."""
        from_the_start = self.since == 1 and not math.isfinite(self.loss)
        return 0 < (min(FIRST, most) if from_the_start else most) <= self.count(step)

    @property
    def reason(self) -> str:
        """What is wrong, as half a sentence."""
        if self.since == 1 and not math.isfinite(self.loss):
            return f"the loss is {self.loss} from the first step on, so that nothing was learned"
        if self.skipped:
            return f"nothing was learned since step {self.since}, because the gradients are not finite"
        return f"the loss is {self.loss} since step {self.since}"


class LearningCheck(Callback):
    """Fails a run whose last steps taught nothing, and marks the checkpoints made meanwhile.

    row: the row of such steps up to the last step done.
    """

    def __init__(self) -> None:
        self.row = Fruitless()

    def on_restore(self, trainer: Trainer, values: dict[str, Any]) -> None:
        self.row = Fruitless(values.get(FRUITLESS, 0))

    def on_update(self, trainer: Trainer, step: Step) -> None:
        before, self.row = self.row, self.row.after(step.number, step.loss, step.skipped, trainer.engine.scale)
        if self.row.hopeless(step.number, trainer.config.train.abort_after):
            raise refusal(f"{self.row.reason}; {_mend(trainer.store.newest_fruitful(), self.row.since)}")
        if self.row.bad and not before.bad:
            trainer.say(self.row.reason)

    def state(self, trainer: Trainer) -> dict[str, Any]:
        return {FRUITLESS: self.row.since if self.row.bad else 0}

    def on_fit_end(self, trainer: Trainer) -> None:
        """Raise NothingLearned where the run is over; one that is only interrupted may learn yet."""
        if self.row.bad and trainer.done:
            raise NothingLearned(
                f"{self.row.reason}; {_mend(trainer.store.newest_fruitful(), self.row.since)}", agreed=True
            )


def _mend(good: Path | None, since: int) -> str:
    """What to do about a run that learns nothing since a step. good: its newest checkpoint from before."""
    if since == 1:
        return "look for values that are not finite in data.path, lower optim.lr, or use another train.precision"
    again = f"start from --checkpoint.resume {good} in another run.dir" if good is not None else "start again"
    return f"lower optim.lr, or look for values that are not finite in data.path, and {again}"
