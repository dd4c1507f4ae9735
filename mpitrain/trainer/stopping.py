"""Reasons to stop a run before it is done: a signal or a file asks, its time is up, or it learns nothing.

In the first cases it is saved and can go on. Everybody may be asked; the ranks agree on it at the end of a step.

Steps that teach nothing are skipped because their gradients are not finite, or have a loss that is not. A step now and
then that fp16's loss scale makes overflow is none of them. What counts is the row of such steps that has not ended:
after it began, checkpoints are marked, so that they push out none from before, and a run that ends in it has failed. A
run whose very first losses are not finite ends at once: there is nothing that more of them could mend.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain import early
from mpitrain.checkpoint import FRUITLESS
from mpitrain.errors import NothingLearned, refusal
from mpitrain.trainer.callback import Callback, Step
from mpitrain.trainer.engine import LossScale
from mpitrain.trainer.run import Run

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
        self.begin(trainer.config.run.stop_before)

    def begin(self, margin: float) -> None:
        """Install the handlers of SIGUSR1 and SIGTERM until `close`.

        margin: seconds before the end of the batch job's time at which to stop; more where steps or saves take long.
        """
        self._margin, self._longest, self._file, self._asked = margin, 0.0, None, ""
        self._handlers = {n: signal.signal(n, self._ask) for n in (signal.SIGUSR1, signal.SIGTERM)}
        self._asked = self._asked or early.asked()

    def watch(self, folder: Path) -> None:
        """Look at the folder's file and the clock from now on; one rank does."""
        self._file, self._end = folder / STOP_FILE, end_of_job(os.environ)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = signal.Signals(number).name  # nothing more in a handler

    def took(self, seconds: float) -> None:
        """A step, with a save where there was one, took so long."""
        self._longest = max(self._longest, seconds)

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

    def close(self) -> None:
        """Put the handlers of before back, and remove the file that was heeded."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._file is not None and self._asked:  # done as asked; the next start shall not stop at once
            self._file.unlink(missing_ok=True)
        self._handlers, self._file = {}, None

    def on_fit_start(self, trainer: Run) -> None:
        self._last = time.monotonic()
        if trainer.world.rank == 0:
            self.watch(trainer.folder.path)

    def on_update(self, trainer: Run, step: Step) -> None:
        now = time.monotonic()
        self.took(now - self._last)
        self._last = now
        if reason := self.reason():
            trainer.request_stop(reason)

    def teardown(self, trainer: Run) -> None:
        self.close()


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
        return Fruitless(since, finite and scale.explains(step - since + 1), skipped, loss)

    @property
    def bad(self) -> bool:
        return self.since > 0 and not self.expected

    def count(self, step: int) -> int:
        """Its length, the last step done being `step`."""
        return step - self.since + 1 if self.since else 0

    def hopeless(self, step: int, most: int) -> bool:
        """Return whether to give the run up after step `step`. most: steps of a row; 0: no limit."""
        from_the_start = self.since == 1 and not math.isfinite(self.loss)
        return 0 < (min(FIRST, most) if from_the_start else most) <= self.count(step)

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
