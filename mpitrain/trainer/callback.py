"""Callbacks: what is done at the steps of a `Trainer` without being a line in its loop.

setup
  on_restore   on_fit_start
    on_update -> (ranks agree whether to stop) -> on_evaluate -> on_step_end -> on_save -> on_step_done    each step

What is between on_update and on_step_end, and on_save, come where all ranks are together, which in parallel.mode local
and server is not after each step; there the steps in between are told late.

  on_fit_end
on_exception                                          instead of what is left, where something was raised
teardown                                              in any case
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from mpitrain.data import Batch


@dataclass
class Step:
    """One step of training, as far as it is done.

    number: from 1. batch: this rank's share of the global batch; without its samples where the step is told late. loss:
    the mean over the global batch, in nats where it is a cross-entropy. norm: of the gradients, before clipping.
    skipped: whether nothing was updated, because the norm is not finite. began: `time.perf_counter()` when it did.
    seconds: what it took, without evaluation and saving; 0 as long as that is not known. together: whether all ranks
    came together after it (see `run`). met: `time.monotonic()` when all ranks had done it. held_out_loss:
    None where the step was not evaluated. lost: the ranks that died since the step before. extras: further figures for
    its line in metrics.jsonl.
    """

    number: int
    batch: Batch
    loss: float
    lr: float
    norm: float
    skipped: bool
    began: float = 0.0
    seconds: float = 0.0
    together: bool = True
    met: float = 0.0
    held_out_loss: float | None = None
    lost: tuple[int, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """A state that training goes on from. step: steps done. values: what was kept with it, see `Callback.state`.

    own: whether it is this run's, and not one that another run has left.
    """

    step: int
    values: dict[str, Any]
    own: bool = True


class Callback:
    """Something that is called at the events of a `Trainer`'s run; each method does nothing unless it is overridden.

    Every rank calls the same methods of the same callbacks in the same order, so that a method may be collective over
    `trainer.world`. Where a method raises an error on one rank alone, the job ends with that error. `trainer` is the
    `Trainer` whose run it is, which an override may name as its type, or a subclass.
    """

    def setup(self, trainer: Any) -> None:
        """Before data and model are there. The run folder is this job's where run.dir names it, else not there yet."""

    def restore(self, trainer: Any) -> Restored | None:
        """Put the model and the optimizer into a state from elsewhere than a checkpoint, and say which one it is.

        None leaves it to the next callback, and at last to the checkpoints.
        """
        return None

    def on_restore(self, trainer: Any, values: dict[str, Any]) -> None:
        """The state is in place. values: what callbacks gave as their `state` when it was saved; empty at step 0."""

    def on_fit_start(self, trainer: Any) -> None:
        """The first step of this start is about to begin."""

    def on_update(self, trainer: Any, step: Step) -> None:
        """The optimizer has updated this rank's parameters; `trainer.request_stop` makes this step the last one."""

    def on_evaluate(self, trainer: Any, loss: float) -> None:
        """The held-out samples were evaluated. loss: their mean; `trainer.figures` has the metrics, too, by name."""

    def on_step_end(self, trainer: Any, step: Step) -> None:
        """All of a step is done but saving. Figures put into `step.extras` come into its line of metrics.jsonl."""

    def state(self, trainer: Any) -> dict[str, Any]:
        """Return values to keep in checkpoints: such as JSON can hold, under names of one's own."""
        return {}

    def on_save(self, trainer: Any, folder: Path) -> None:
        """A checkpoint was written, or begun to be with checkpoint.background."""

    def on_step_done(self, trainer: Any, step: Step) -> None:
        """All of a step is done, its checkpoint too; where `step.together`, all ranks are at this point."""

    def on_fit_end(self, trainer: Any) -> None:
        """The last step is done and saved."""

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        """Something was raised; it is raised again afterwards. Other ranks may be gone: nothing collective here."""

    def teardown(self, trainer: Any) -> None:
        """The run folder is about to be given up. Nothing collective here."""
