"""Times of the start of a job, from its command until its first step is done.

Rank 0 writes them as `start_s` into the line of that step in metrics.jsonl, and `python -m mpitrain.report RUN` shows
them. In the order of time, the parts are

    launcher     from the start of mpirun to that of this process; with jobs/local.sh also what the script does before
    packages     imports of torch and the other packages, and the first operation, which waits for the other ranks
    mpi          MPI_Init, in which ranks wait for the slowest one
    setup        settings, data, model, optimizer, and the newest checkpoint
    first_step   the step, which touches all memory for the first time

The first two have the resolution of the kernel's clock of processes, a hundredth of a second. A process that makes a
second `Trainer` has only the last two parts.
"""

from __future__ import annotations

import os
import time

from mpitrain.comm.job.launcher import find_mpirun
from mpitrain.comm.job.mpi import BEGAN, RUNNING
from mpitrain.storage import proc
from mpitrain.trainer.run import Callback, Run, Step


class StartTimes(Callback):
    """Adds the times of the start to the first step of a job. Make it before anything else of the run."""

    _of_process = True  # false once this process has made a trainer

    def __init__(self) -> None:
        self._began, self._prepared, self._is_done = time.monotonic(), 0.0, False
        self._parts = _before(self._began) if StartTimes._of_process else {}
        StartTimes._of_process = False

    def on_fit_start(self, trainer: Run) -> None:
        self._prepared = time.monotonic()

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if self._is_done:
            return
        self._is_done = True
        last = {"setup": self._prepared - self._began, "first_step": step.met - self._prepared}
        step.extras["start_s"] = {name: round(seconds, 3) for name, seconds in (self._parts | last).items()}


def _before(now: float) -> dict[str, float]:
    """Return the seconds of the parts before `now`, which is a time of `time.monotonic()`."""
    age, age_of_launcher = proc.age_of(os.getpid()), proc.age_of(find_mpirun())
    parts = {"launcher": age_of_launcher - age} if age_of_launcher else {}
    return parts | {"packages": age - (now - BEGAN) + now - RUNNING, "mpi": RUNNING - BEGAN}
