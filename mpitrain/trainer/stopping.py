"""Decisions about a run: when it is stopped before it is done, when it learns slower, and which checkpoint is the best.

A run is saved and can go on where a signal or a file asks it to stop, or its time is up. Everybody may be asked; the
ranks agree on it at the end of a step.

Steps that teach nothing are skipped because their gradients are not finite, or have a loss that is not. A step now and
then that fp16's loss scale makes overflow is none of them. What counts is the row of such steps that has not ended:
after it began, checkpoints are marked, so that they push out none from before, and a run that ends in it has failed. A
run whose very first losses are not finite ends at once: there is nothing that more of them could mend.

Decisions by held-out figures look at one figure each, the loss or a metric, and are told by it whether larger or
smaller is better; a metric of one's own says so itself (`higher_is_better`). Rank 0's figure counts. What was the best
is kept in checkpoints, so a run that goes on from one of its own goes on comparing.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpitrain import early
from mpitrain.checkpoint import FRUITLESS
from mpitrain.checkpoint.folders import is_checkpoint
from mpitrain.errors import NothingLearned, refusal
from mpitrain.monitor.run_files import HELD_OUT
from mpitrain.storage.text import counted, spoken
from mpitrain.trainer.engine import LossScale
from mpitrain.trainer.held_out.measuring import DIRECTION, LOSS
from mpitrain.trainer.optimizing import PLATEAU, PlateauSchedule
from mpitrain.trainer.recording.records import figure
from mpitrain.trainer.run import Callback, Run, Step

STOP_FILE = "stop"  # in the run folder: `touch RUN/stop`
_LOOK_EVERY = 2.0  # seconds between looks at the file, which may lie on a slow file system
FIRST = 3  # losses in a row that are not finite, from a run's first step on, after which it is given up
_SLACK = 3.0  # how many of the longest steps or saves seen fit before the end


class StopInTime(Callback):
    """Makes a step the last one where there is reason to stop; the run is saved and can go on.

    A SIGUSR1 that came while the program was being imported counts.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # those of the signals before; empty where none of ours are there
        self._asked = ""
        self._file: Path | None = None  # which asks to stop; None on ranks that do not look at it and the clock
        self._end: float | None = None
        self._margin = self._longest = self._looked = 0.0
        self._last = 0.0  # time.monotonic() of the last update, or of the start

    def setup(self, trainer: Run) -> None:
        """Install the handlers of SIGUSR1 and SIGTERM until `teardown`."""
        self._margin, self._longest = trainer.config.run.stop_before, 0.0  # more where steps or saves take long
        self._file, self._asked = None, ""
        self._handlers = {n: signal.signal(n, self._ask) for n in (signal.SIGUSR1, signal.SIGTERM)}
        self._asked = self._asked or early.asked()

    def _ask(self, number: int, frame: object) -> None:
        self._asked = signal.Signals(number).name  # nothing more in a handler

    def reason(self) -> str:
        """Why to stop, in a few words; empty while there is no reason."""
        if not self._asked and self._file is not None:
            if self._end is not None and time.time() > self._end - max(self._margin, _SLACK * self._longest):
                self._asked = "the job's time is up"
            elif time.monotonic() - self._looked > _LOOK_EVERY:
                self._looked = time.monotonic()
                if self._file.exists():
                    self._asked = f"{self._file} is there"
        return self._asked

    def on_fit_start(self, trainer: Run) -> None:
        self._last = time.monotonic()
        if trainer.world.rank == 0:  # which looks at the file and the clock
            self._file, self._end = trainer.folder.path / STOP_FILE, end_of_job(os.environ)

    def on_update(self, trainer: Run, step: Step) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)  # of a step, with a save where there was one
        self._last = now
        if reason := self.reason():
            trainer.request_stop(reason)

    def teardown(self, trainer: Run) -> None:
        """Put the handlers of before back, and remove the file that was heeded."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._file is not None and self._asked:  # done as asked; the next start shall not stop at once
            self._file.unlink(missing_ok=True)
        self._handlers, self._file = {}, None


def end_of_job(environment: Mapping[str, str]) -> float | None:
    """Return when the batch system ends this job, in seconds since 1970; None where that is not known."""
    if end := environment.get("SLURM_JOB_END_TIME"):
        return float(end)
    if job := environment.get("SLURM_JOB_ID"):
        return _ask_slurm(job)
    if walltime := environment.get("PBS_WALLTIME"):
        return time.time() + float(walltime)  # from now: PBS does not tell when the job began
    return None


def _ask_slurm(job: str) -> float | None:
    """The end by what squeue says is left: [days-][[hours:]minutes:]seconds, or a word."""
    try:
        told = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    left = seconds_of(told)
    return time.time() + left if left is not None else None


def seconds_of(text: str) -> float | None:
    """Seconds of a duration as Slurm writes it; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


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
        adjusting = scale.dynamic and step - since <= scale.spare  # such a row is no more than that takes
        return Fruitless(since, finite and adjusting, skipped, loss)

    @property
    def bad(self) -> bool:
        return self.since > 0 and not self.expected

    def hopeless(self, step: int, most: int) -> bool:
        """Return whether to give the run up after step `step`. most: steps of a row; 0: no limit."""
        from_the_start = self.since == 1 and not math.isfinite(self.loss)
        length = step - self.since + 1 if self.since else 0
        return 0 < (min(FIRST, most) if from_the_start else most) <= length

    @property
    def reason(self) -> str:
        """The fault, as half a sentence."""
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

    def on_restore(self, trainer: Run, values: dict[str, Any]) -> None:
        self.row = Fruitless(values.get(FRUITLESS, 0))

    def on_update(self, trainer: Run, step: Step) -> None:
        before, self.row = self.row, self.row.after(step.number, step.loss, step.skipped, trainer.engine.scale)
        if self.row.hopeless(step.number, trainer.config.train.abort_after):
            raise refusal(f"{self.row.reason}; {_mend(trainer.store.newest_fruitful(), self.row.since)}")
        if self.row.bad and not before.bad:
            trainer.say(self.row.reason)

    def state(self, trainer: Run) -> dict[str, Any]:
        return {FRUITLESS: self.row.since if self.row.bad else 0}

    def on_fit_end(self, trainer: Run) -> None:
        """Raise NothingLearned where the run is over; one that is only interrupted may learn yet."""
        if self.row.bad and trainer.done:
            raise NothingLearned(
                f"{self.row.reason}; {_mend(trainer.store.newest_fruitful(), self.row.since)}", agreed=True
            )


def _mend(good: Path | None, since: int) -> str:
    """Return advice for a run that learns nothing since a step. good: its newest checkpoint from before."""
    if since == 1:
        return "look for values that are not finite in data.path, lower optim.lr, or use another train.precision"
    again = f"start from --checkpoint.resume {good} in another run.dir" if good is not None else "start again"
    return f"lower optim.lr, or look for values that are not finite in data.path, and {again}"


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

    def after_evaluation(self, trainer: Run, key: str, margin: float = 0.0) -> Best:
        """Return the best after the run's last evaluation. Collective. key: The setting that names the metric."""
        value = value_of(trainer, key, self.metric)
        return self.after(value, trainer.step, higher(trainer, key, self.metric), margin)

    def kept(self) -> dict[str, Any]:
        """Return the fields as JSON has them, which knows no NaN."""
        return asdict(self) | {"value": None if math.isnan(self.value) else self.value}

    @staticmethod
    def of(values: dict[str, Any] | None, metric: str) -> Best:
        """Return the best that `kept` returned, if it is of the same figure. metric: also as metrics.jsonl names it."""
        metric = metric.removeprefix(HELD_OUT)
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
        self.best = Best.of(own.get(self.KEY), trainer.config.train.monitor)
        if trainer.config.train.patience:
            higher(trainer, "train.monitor", self.best.metric)
            self._end(trainer, "set train.patience to more, or to 0, to go on")

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        if trainer.config.train.patience:
            self.best = self.best.after_evaluation(trainer, "train.monitor", trainer.config.train.min_delta)
            self._end(trainer)

    def _end(self, trainer: Run, more: str = "") -> None:
        if self.best.waited >= trainer.config.train.patience:
            best = f"{words(self.best.metric)} {figure(self.best.metric, self.best.value)}"
            found = f"the best was {best} at step {self.best.step}" if self.best.step else "none was finite"
            trainer.end(f"{words(self.best.metric)} no better in {counted(self.best.waited, 'evaluation')}, {found}")
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
        self.best = Best.of(values.get(self.KEY) if trainer.resumed_step is not None else None, named)
        if not trainer.world.on_root(lambda: is_checkpoint(trainer.store.folder(self.best.step))):
            self.best = Best(self.best.metric)
        higher(trainer, "checkpoint.best", self.best.metric)
        trainer.store.keeps_best, trainer.store.best = True, self.best.step or -1

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        if trainer.config.checkpoint.best:
            self.best = self.best.after_evaluation(trainer, "checkpoint.best")
            self.due = self.best.step == trainer.step
            if self.due:
                trainer.store.best = trainer.step

    def on_save(self, trainer: Run, folder: Path) -> None:
        self.due = False

    def state(self, trainer: Run) -> dict[str, Any]:
        return {self.KEY: self.best.kept()} if trainer.config.checkpoint.best else {}


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
