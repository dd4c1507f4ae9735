"""Decisions by held-out figures: the best checkpoint is kept, a run ends or learns slower that gets no better.

The first two look at one figure each, the loss or a metric, and are told by it whether larger or smaller is better; a
metric of one's own says so itself (`higher_is_better`). Rank 0's figure counts. What was the best is kept in
checkpoints, so a run that goes on from one of its own goes on comparing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.folders import is_checkpoint
from mpitrain.errors import refusal
from mpitrain.monitor.run_files import HELD_OUT
from mpitrain.storage.text import counted, spoken
from mpitrain.trainer.callback import Callback
from mpitrain.trainer.held_out.measuring import DIRECTION, LOSS
from mpitrain.trainer.optimizing.schedules import PLATEAU, PlateauSchedule
from mpitrain.trainer.recording.records import figure
from mpitrain.trainer.run import Run


@dataclass(frozen=True)
class Best:
    """The best figure so far.

    Attributes:
        metric: What it is of.
        value: NaN as long as there was none.
        step: After which it was measured.
        waited: Evaluations since then that were no better.
    """

    metric: str
    value: float = math.nan
    step: int = 0
    waited: int = 0

    def after(self, value: float, step: int, higher: bool, margin: float = 0.0) -> Best:
        """The best after one more evaluation. margin: by how much more than this it must be better."""
        ahead = value - self.value if higher else self.value - value
        if math.isfinite(value) and (math.isnan(self.value) or ahead > margin):
            return Best(self.metric, value, step)
        return Best(self.metric, self.value, self.step, self.waited + 1)

    @property
    def text(self) -> str:
        return f"{words(self.metric)} {figure(self.metric, self.value)}"

    def kept(self) -> dict[str, Any]:
        """Return the fields as JSON has them, which knows no NaN."""
        return asdict(self) | {"value": None if math.isnan(self.value) else self.value}

    @staticmethod
    def of(values: dict[str, Any] | None, metric: str) -> Best:
        """Return the best that `kept` returned, if it is of the same figure."""
        if not values or values["metric"] != metric:
            return Best(metric)
        return Best(**values | {"value": math.nan if values["value"] is None else values["value"]})


class EarlyStopping(Callback):
    """Ends a run when train.patience evaluations in a row were no better than the best before (train.monitor)."""

    KEY = "early_stopping"

    def __init__(self) -> None:
        self.best = Best(LOSS)

    def setup(self, trainer: Run) -> None:
        train = trainer.config.train
        if train.patience and not train.evaluate_every:
            raise refusal(
                "train.patience counts evaluations, and with train.evaluate_every 0 there is one, at the end; set it "
                "to the steps between two, or train.patience to 0"
            )

    def on_restore(self, trainer: Run, values: dict[str, Any]) -> None:
        own = values if trainer.resumed_step is not None else {}
        self.best = Best.of(own.get(self.KEY), plain(trainer.config.train.monitor))
        if trainer.config.train.patience:
            higher(trainer, "train.monitor", self.best.metric)
            self._end(trainer, "set train.patience to more, or to 0, to go on")

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        train = trainer.config.train
        if train.patience:
            value = value_of(trainer, "train.monitor", self.best.metric)
            better = higher(trainer, "train.monitor", self.best.metric)
            self.best = self.best.after(value, trainer.step, better, train.min_delta)
            self._end(trainer)

    def _end(self, trainer: Run, more: str = "") -> None:
        if self.best.waited >= trainer.config.train.patience:
            found = f"the best was {self.best.text} at step {self.best.step}" if self.best.step else "none was finite"
            times = counted(self.best.waited, "evaluation")
            trainer.end(f"{words(self.best.metric)} no better in {times}, {found}")
            trainer.say(f"ending after step {trainer.step}: {trainer.stop_reason}" + (f"; {more}" if more else ""))

    def state(self, trainer: Run) -> dict[str, Any]:
        return {self.KEY: self.best.kept()} if trainer.config.train.patience else {}


class LowerRate(Callback):
    """Tells a schedule that follows the held-out loss each of them (optim.schedule ReduceLROnPlateau)."""

    KEY = "plateau"

    def on_restore(self, trainer: Run, values: dict[str, Any]) -> None:
        if not isinstance(trainer.schedule, PlateauSchedule):
            return
        if trainer.held_out is None or not trainer.config.train.evaluate_every:
            lacks = "data.path has no such samples; prepare the data with --held-out"
            if trainer.held_out is not None:
                lacks = "train.evaluate_every 0 has it measured at the end alone; set the steps between two evaluations"
            raise refusal(f"optim.schedule {PLATEAU} follows the held-out loss, and {lacks}")
        if trainer.resumed_step is not None and self.KEY in values:
            trainer.schedule.load(values[self.KEY])

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        if isinstance(trainer.schedule, PlateauSchedule):
            trainer.schedule.observe(value_of(trainer, "optim.schedule", LOSS))

    def state(self, trainer: Run) -> dict[str, Any]:
        return {self.KEY: trainer.schedule.state()} if isinstance(trainer.schedule, PlateauSchedule) else {}


class BestCheckpoint(Callback):
    """Has a checkpoint written after each evaluation that is the best so far (checkpoint.best), and it kept.

    due: whether that is so after the step that was done last.
    """

    KEY = "best_checkpoint"

    def __init__(self) -> None:
        self.best, self.due = Best(LOSS), False

    def on_restore(self, trainer: Run, values: dict[str, Any]) -> None:
        named = trainer.config.checkpoint.best
        self.due = False
        if not named:
            return
        self.best = Best.of(values.get(self.KEY) if trainer.resumed_step is not None else None, plain(named))
        folder = trainer.store.folder(self.best.step)
        if not trainer.world.on_root(lambda: is_checkpoint(folder)):
            self.best = Best(self.best.metric)
        higher(trainer, "checkpoint.best", self.best.metric)
        trainer.store.keeps_best, trainer.store.best = True, self.best.step or -1

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        if trainer.config.checkpoint.best:
            name = self.best.metric
            value = value_of(trainer, "checkpoint.best", name)
            self.best = self.best.after(value, trainer.step, higher(trainer, "checkpoint.best", name))
            self.due = self.best.step == trainer.step
            if self.due:
                trainer.store.best = trainer.step

    def on_save(self, trainer: Run, folder: Path) -> None:
        self.due = False

    def state(self, trainer: Run) -> dict[str, Any]:
        return {self.KEY: self.best.kept()} if trainer.config.checkpoint.best else {}


def plain(name: str) -> str:
    """The name of a figure without what metrics.jsonl puts before it."""
    return name.removeprefix(HELD_OUT)


def words(name: str) -> str:
    return f"held-out {spoken(name)}"


def higher(trainer: Run, key: str, name: str) -> bool:
    """Return whether a larger figure of that name is a better one.

    Raises:
        InputError: On all ranks, where nothing is held out, there is no such figure, or it does not say.
    """
    if trainer.held_out is None:
        raise refusal(f"{key} {name} is of held-out samples, and data.path has none; prepare the data with --held-out")
    known = trainer.meter.directions
    if name not in known:
        raise refusal(f"{key} {name!r} is not measured; choose {', '.join(known)}, or add it to train.metrics")
    direction = known[name]
    if direction is None:
        raise refusal(
            f"{key} {name}: whether more of it is better is not said; give the function (a model: a dict by names) an "
            f"attribute {DIRECTION}, True or False"
        )
    return direction


def value_of(trainer: Run, key: str, name: str) -> float:
    """The figure of the last evaluation, rank 0's on all ranks. Collective."""

    def find() -> float:
        if name not in trainer.figures:
            raise refusal(f"{key} {name!r} was not measured, since it is not of what the model puts out; choose loss")
        return trainer.figures[name]

    return float(trainer.world.on_root(find))
