"""Times of the start of a job, from its command until its first step is done.

Rank 0 writes them as `start_s` into the line of that step in metrics.jsonl, and `python -m mpitrain.report RUN` shows
them. The event `start` has them, too, without the first step, which may be lost. In the order of time, the parts are

    launcher     from the start of mpirun (under srun: of Slurm's daemon) to that of this process; with jobs/local.sh
                 also what the script does before
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

from mpitrain.comm.job.mpi import BEGAN, RUNNING
from mpitrain.storage import proc
from mpitrain.trainer.run import Callback, Run, Step

SUBMITTED = "MPITRAIN_SUBMITTED"  # environment variable: time of the job's submission in unix seconds


class StartTimes(Callback):
    """Adds the times of the start to the first step of a job. Make it before anything else of the run.

    Attributes:
        parts: Seconds of each part but the first step, from `on_fit_start` on.
    """

    _of_process = True  # false once this process has made a trainer

    def __init__(self) -> None:
        self._began, self._prepared, self._is_done = time.monotonic(), 0.0, False
        self.parts = _before(self._began) if StartTimes._of_process else {}
        StartTimes._of_process = False

    def on_fit_start(self, trainer: Run) -> None:
        self._prepared = time.monotonic()
        self.parts["setup"] = self._prepared - self._began

    def on_step_end(self, trainer: Run, step: Step) -> None:
        if self._is_done:
            return
        self._is_done = True
        parts = self.parts | {"first_step": step.met - self._prepared}
        step.extras["start_s"] = {name: round(seconds, 3) for name, seconds in parts.items()}


def _before(now: float) -> dict[str, float]:
    """Return the seconds of the parts before `now`, which is a time of `time.monotonic()`."""
    age, age_of_launcher = proc.age_of(os.getpid()), proc.age_of(proc.find_launcher())
    parts = {"launcher": age_of_launcher - age} if age_of_launcher else {}
    return parts | {"packages": age - (now - BEGAN) + now - RUNNING, "mpi": RUNNING - BEGAN}


def queue_times() -> dict[str, float]:
    """Return when this job was submitted, or queued again, and when the batch system started it, in unix seconds.

    jobs/train.sbatch sets the first variable, Slurm the second one. A time whose variable is missing is left out.
    """
    times = {"submitted": os.environ.get(SUBMITTED, ""), "allocated": os.environ.get("SLURM_JOB_START_TIME", "")}
    return {name: float(text) for name, text in times.items() if text.isdecimal()}
