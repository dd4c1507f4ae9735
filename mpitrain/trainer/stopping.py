"""Decisions about a run: when to stop it early, when to lower the learning rate, and which checkpoint is the best.

A signal, a file, or the end of the job's time stops a run; it is saved and can be resumed. Any rank may receive the
request, and all ranks agree on it at the end of a step.

A non-finite step teaches nothing, because its gradients or its loss are not finite. An occasional step whose gradients
overflow in fp16 does not count, because the loss scale adapts. A series of such steps has consequences: checkpoints
made during it are marked, so that they do not replace earlier ones, and a run that ends in it has failed. A run whose
very first losses are not finite ends at once, because further steps cannot help.

Decisions by held-out figures compare one figure, the loss or a metric, which says whether larger or smaller is better;
a user's metric has the attribute `higher_is_better`. All ranks use the figure of rank 0. The best figure so far is
stored in checkpoints, so a resumed run continues to compare with it.
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
from mpitrain.checkpoint import NON_FINITE_SINCE
from mpitrain.checkpoint.folders import is_checkpoint
from mpitrain.errors import NothingLearned, refusal
from mpitrain.monitor.run_files import HELD_OUT
from mpitrain.storage.text import counted, with_spaces
from mpitrain.trainer.engine import LossScale
from mpitrain.trainer.held_out.measuring import DIRECTION, LOSS
from mpitrain.trainer.optimizing import PLATEAU, PlateauSchedule
from mpitrain.trainer.recording.records import figure
from mpitrain.trainer.run import Callback, Run, Step

STOP_FILE = "stop"  # in the run folder: `touch RUN/stop`
_CHECK_EVERY = 2.0  # seconds between checks for the file, which may be on a slow file system
FIRST = 3  # a run ends if this many losses from the first step on are not finite
_SLACK = 3.0  # time left before the job's end at which to stop, in multiples of the longest step or save so far


class StopInTime(Callback):
    """Stops a run on a signal, a file or the end of the job's time; the run is saved and can be resumed.

    A SIGUSR1 that arrived while the program was imported counts, too.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # previous signal handlers; empty while ours are not installed
        self._request = ""
        self._file: Path | None = None  # stop file; None on ranks that check neither the file nor the clock
        self._end: float | None = None
        self._margin = self._longest = self._checked = 0.0
        self._last = 0.0  # time.monotonic() of the last update or of the start

    def setup(self, trainer: Run) -> None:
        """Install the handlers of SIGUSR1 and SIGTERM until `teardown`."""
        self._margin, self._longest = trainer.config.run.stop_before, 0.0  # long steps or saves extend the margin
        self._file, self._request = None, ""
        self._handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGUSR1, signal.SIGTERM)}
        self._request = self._request or early.received_signal()

    def _on_signal(self, number: int, frame: object) -> None:
        self._request = signal.Signals(number).name  # a handler should do no more than this

    def reason(self) -> str:
        """Return the reason to stop in a few words; empty if there is none."""
        if not self._request and self._file is not None:
            if self._end is not None and time.time() > self._end - max(self._margin, _SLACK * self._longest):
                self._request = "the job's time is up"
            elif time.monotonic() - self._checked > _CHECK_EVERY:
                self._checked = time.monotonic()
                if self._file.exists():
                    self._request = f"{self._file} exists"
        return self._request

    def on_fit_start(self, trainer: Run) -> None:
        self._last = time.monotonic()
        if trainer.world.rank == 0:  # only rank 0 checks the file and the clock
            self._file, self._end = trainer.folder.path / STOP_FILE, end_of_job(os.environ)

    def on_update(self, trainer: Run, step: Step) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)  # longest step, including its save
        self._last = now
        if reason := self.reason():
            trainer.request_stop(reason)

    def teardown(self, trainer: Run) -> None:
        """Restore the previous signal handlers, and remove the stop file if it stopped the run."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._file is not None and self._request:  # otherwise the next start would stop at once
            self._file.unlink(missing_ok=True)
        self._handlers, self._file = {}, None


def end_of_job(environment: Mapping[str, str]) -> float | None:
    """Return the time at which the batch system ends this job, in seconds since 1970; None if unknown."""
    if end := environment.get("SLURM_JOB_END_TIME"):
        return float(end)
    if job := environment.get("SLURM_JOB_ID"):
        return _ask_slurm(job)
    if walltime := environment.get("PBS_WALLTIME"):
        return time.time() + float(walltime)  # from now, because PBS does not say when the job began
    return None


def _ask_slurm(job: str) -> float | None:
    """Return the end of the job, in seconds since 1970, from the time left that squeue shows; None if unknown."""
    try:
        output = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    remaining = seconds_of(output)
    return time.time() + remaining if remaining is not None else None


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration in Slurm's format; None for words such as UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True)
class NonFiniteSteps:
    """A series of non-finite steps that ends with the last step done.

    Attributes:
        since: First step of the series; 0 if the last step was good.
        expected: True if the series may be the search for a loss scale.
        skipped: True if the last step of the series updated nothing.
        loss: Loss of the last step of the series.
    """

    since: int = 0
    expected: bool = False
    skipped: bool = True
    loss: float = math.nan

    def after(self, step: int, loss: float, skipped: bool, scale: LossScale) -> NonFiniteSteps:
        """Return the series after one more step.

        Args:
            step: Number of the step.
            loss: Its loss.
            skipped: True if it updated nothing.
            scale: Loss scale of the engine.
        """
        finite = math.isfinite(loss)
        if finite and not skipped:
            return NonFiniteSteps()
        since = self.since or step
        adjusting = scale.dynamic and step - since <= scale.spare  # the scale needs this many steps to adapt
        return NonFiniteSteps(since, finite and adjusting, skipped, loss)

    @property
    def bad(self) -> bool:
        return self.since > 0 and not self.expected

    def should_abort(self, step: int, most: int) -> bool:
        """Return whether to give up the run after a step.

        Args:
            step: Number of the step.
            most: Largest length of a series; 0 for no limit.
        """
        from_the_start = self.since == 1 and not math.isfinite(self.loss)
        length = step - self.since + 1 if self.since else 0
        return 0 < (min(FIRST, most) if from_the_start else most) <= length

    @property
    def reason(self) -> str:
        """The fault, as half a sentence."""
        if self.since == 1 and not math.isfinite(self.loss):
            return f"the loss has been {self.loss} since the first step, so nothing was learned"
        if self.skipped:
            return f"nothing has been learned since step {self.since}, because the gradients are not finite"
        return f"the loss has been {self.loss} since step {self.since}"


class LearningCheck(Callback):
    """Fails a run that ends in a series of non-finite steps, and marks the checkpoints made during it.

    Attributes:
        series: Series of non-finite steps that ends with the last step done.
    """

    def __init__(self) -> None:
        self.series = NonFiniteSteps()

    def on_restore(self, trainer: Run, values: dict[str, Any]) -> None:
        self.series = NonFiniteSteps(values.get(NON_FINITE_SINCE, 0))

    def on_update(self, trainer: Run, step: Step) -> None:
        before, self.series = self.series, self.series.after(step.number, step.loss, step.skipped, trainer.engine.scale)
        if self.series.should_abort(step.number, trainer.config.train.abort_after):
            raise refusal(f"{self.series.reason}; {_advice(trainer.store.newest_finite(), self.series.since)}")
        if self.series.bad and not before.bad:
            trainer.say(self.series.reason)

    def state(self, trainer: Run) -> dict[str, Any]:
        return {NON_FINITE_SINCE: self.series.since if self.series.bad else 0}

    def on_fit_end(self, trainer: Run) -> None:
        """Raise NothingLearned if the run is over; an interrupted run may still recover."""
        if self.series.bad and trainer.done:
            raise NothingLearned(
                f"{self.series.reason}; {_advice(trainer.store.newest_finite(), self.series.since)}", agreed=True
            )


def _advice(good: Path | None, since: int) -> str:
    """Return advice for a run that learns nothing since a step.

    Args:
        good: Newest checkpoint from before that step; None if there is none.
        since: First step of the series.
    """
    if since == 1:
        return "check data.path for values that are not finite, lower optim.lr, or use another train.precision"
    again = f"start again with --checkpoint.resume {good} and another run.dir" if good is not None else "start again"
    return f"lower optim.lr, or check data.path for values that are not finite, and {again}"


@dataclass(frozen=True)
class Best:
    """Best figure so far.

    Attributes:
        metric: Name of the figure.
        value: The figure; NaN if there is none yet.
        step: Step after which it was measured.
        waited: Evaluations since then that were not better.
    """

    metric: str
    value: float = math.nan
    step: int = 0
    waited: int = 0

    def after(self, value: float, step: int, higher: bool, margin: float = 0.0) -> Best:
        """Return the best figure after one more evaluation.

        Args:
            value: Figure of that evaluation.
            step: Its step.
            higher: If true, larger figures are better.
            margin: Smallest difference that counts as an improvement.
        """
        ahead = value - self.value if higher else self.value - value
        if math.isfinite(value) and (math.isnan(self.value) or ahead > margin):
            return Best(self.metric, value, step)
        return Best(self.metric, self.value, self.step, self.waited + 1)

    def after_evaluation(self, trainer: Run, key: str, margin: float = 0.0) -> Best:
        """Return the best figure after the run's last evaluation. Collective.

        Args:
            trainer: Trainer of the run.
            key: Setting that names the metric, for messages.
            margin: Smallest difference that counts as an improvement.
        """
        value = value_of(trainer, key, self.metric)
        return self.after(value, trainer.step, is_larger_better(trainer, key, self.metric), margin)

    def saved_values(self) -> dict[str, Any]:
        """Return the fields for a checkpoint; NaN becomes None, because JSON cannot represent it."""
        return asdict(self) | {"value": None if math.isnan(self.value) else self.value}

    @staticmethod
    def of(values: dict[str, Any] | None, metric: str) -> Best:
        """Return the best figure that `saved_values` stored, or an empty one if it is of another metric.

        Args:
            values: Return value of `saved_values`; None if there is none.
            metric: Name of the metric, with or without the prefix that it has in metrics.jsonl.
        """
        metric = metric.removeprefix(HELD_OUT)
        if not values or values["metric"] != metric:
            return Best(metric)
        return Best(**values | {"value": math.nan if values["value"] is None else values["value"]})


class EarlyStopping(Callback):
    """Ends a run if train.patience evaluations in a row did not improve the best figure (train.monitor)."""

    KEY = "early_stopping"

    def __init__(self) -> None:
        self.best = Best(LOSS)

    def setup(self, trainer: Run) -> None:
        train = trainer.config.train
        if train.patience and not train.evaluate_every:
            raise refusal(
                "train.patience counts evaluations, but train.evaluate_every 0 evaluates only at the end; set "
                "train.evaluate_every to the steps between evaluations, or train.patience to 0"
            )

    def on_restore(self, trainer: Run, values: dict[str, Any]) -> None:
        saved = values if trainer.resumed_step is not None else {}
        self.best = Best.of(saved.get(self.KEY), trainer.config.train.monitor)
        if trainer.config.train.patience:
            is_larger_better(trainer, "train.monitor", self.best.metric)
            self._end(trainer, "to continue, raise train.patience or set it to 0")

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        if trainer.config.train.patience:
            self.best = self.best.after_evaluation(trainer, "train.monitor", trainer.config.train.min_delta)
            self._end(trainer)

    def _end(self, trainer: Run, more: str = "") -> None:
        if self.best.waited >= trainer.config.train.patience:
            best = figure(self.best.metric, self.best.value)
            outcome = f"the best was {best} at step {self.best.step}" if self.best.step else "none was finite"
            waited = counted(self.best.waited, "evaluation")
            trainer.end(f"{held_out_name(self.best.metric)} has not improved in {waited}; {outcome}")
            trainer.say(f"ending after step {trainer.step}: {trainer.stop_reason}" + (f"; {more}" if more else ""))

    def state(self, trainer: Run) -> dict[str, Any]:
        return {self.KEY: self.best.saved_values()} if trainer.config.train.patience else {}


class LowerRate(Callback):
    """Passes held-out losses to a schedule that follows them (optim.schedule ReduceLROnPlateau)."""

    KEY = "plateau"

    def on_restore(self, trainer: Run, values: dict[str, Any]) -> None:
        if not isinstance(trainer.schedule, PlateauSchedule):
            return
        if trainer.held_out is None or not trainer.config.train.evaluate_every:
            reason = "data.path has no held-out samples; prepare the data with --held-out"
            if trainer.held_out is not None:
                reason = "train.evaluate_every 0 measures it only at the end; set it to the steps between evaluations"
            raise refusal(f"optim.schedule {PLATEAU} follows the held-out loss, but {reason}")
        if trainer.resumed_step is not None and self.KEY in values:
            trainer.schedule.load(values[self.KEY])

    def on_evaluate(self, trainer: Run, loss: float) -> None:
        if isinstance(trainer.schedule, PlateauSchedule):
            trainer.schedule.observe(value_of(trainer, "optim.schedule", LOSS))

    def state(self, trainer: Run) -> dict[str, Any]:
        return {self.KEY: trainer.schedule.state()} if isinstance(trainer.schedule, PlateauSchedule) else {}


class BestCheckpoint(Callback):
    """Requests a checkpoint after each evaluation that is the best so far (checkpoint.best), and keeps that checkpoint.

    Attributes:
        due: True if the step that was done last needs such a checkpoint.
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
        is_larger_better(trainer, "checkpoint.best", self.best.metric)
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
        return {self.KEY: self.best.saved_values()} if trainer.config.checkpoint.best else {}


def held_out_name(name: str) -> str:
    return f"held-out {with_spaces(name)}"


def is_larger_better(trainer: Run, key: str, name: str) -> bool:
    """Return whether larger values of a figure are better.

    Args:
        trainer: Trainer of the run.
        key: Setting that names the figure, for messages.
        name: Name of the figure.

    Raises:
        InputError: On all ranks, if there are no held-out samples or no such figure, or its direction is unknown.
    """
    if trainer.held_out is None:
        raise refusal(f"{key} {name} needs held-out samples, but data.path has none; prepare the data with --held-out")
    known = trainer.meter.directions
    if name not in known:
        raise refusal(f"{key} {name!r} is not measured; choose {', '.join(known)}, or add it to train.metrics")
    direction = known[name]
    if direction is None:
        raise refusal(
            f"{key} {name}: it is unknown whether larger values are better; set the attribute {DIRECTION} of the "
            "function to True or False (of a model: to a dict of these by metric)"
        )
    return direction


def value_of(trainer: Run, key: str, name: str) -> float:
    """Return a figure of the last evaluation; all ranks get that of rank 0. Collective.

    Args:
        trainer: Trainer of the run.
        key: Setting that names the figure, for messages.
        name: Name of the figure.

    Raises:
        InputError: On all ranks, if the figure was not measured.
    """

    def find() -> float:
        if name not in trainer.figures:
            raise refusal(f"{key} {name!r} was not measured, because it does not suit the model's output; use loss")
        return trainer.figures[name]

    return float(trainer.world.on_root(find))
