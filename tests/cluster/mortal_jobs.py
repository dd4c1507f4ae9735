"""Training jobs, some of whose ranks are killed or stopped by process number."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import warm
from support import clean_environment, launcher, train_command

from mpitrain.monitor import read_metrics

LIMIT = 240.0  # seconds for what takes a few: on a busy machine ranks take minutes to import torch
GOING_ON = re.compile(
    r"mpitrain: ranks? ([\d, ]+) died; continuing from step (\d+) with (\d+) ranks?(?: \(\d+ waiting\))?, "
    r"step \d+ done (?:at most )?([\d.]+) s after the failure"
)


class Job:
    """A training job of `ranks` ranks, some of which are to be killed.

    Args:
        command: Words that start the ranks across hosts; by default they are forked on this machine, see warm.py.
    """

    def __init__(
        self, folder: Path, ranks: int, arguments: Sequence[object], command: Sequence[str] = (), **environment: str
    ) -> None:
        train = train_command("--run.dir", folder, *arguments)
        if not command:
            command, train = [*launcher(ranks), "--with-ft", "ulfm"], warm.shared().replace_python(train)
        command = [*command, *train]
        self.folder, self._step_before = folder, 0.0
        self._said, self._printed = (folder.parent / f"{folder.name}.{name}" for name in ("stderr", "stdout"))
        with open(self._said, "w") as err, open(self._printed, "w") as out:
            env = clean_environment(OMPI_MCA_mpi_yield_when_idle="1") | environment
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)

    @property
    def said(self) -> str:
        return self._said.read_text(errors="replace")

    @property
    def printed(self) -> str:
        return self._printed.read_text(errors="replace")

    def outcome(self) -> str:
        """Return exit code and output of a job that went wrong."""
        return f"exit code {self.process.poll()}\n{self.printed[-2000:]}\n{self.said[-3000:]}"

    def log(self, rank: int) -> str:
        path = self.folder / f"logs/rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def rows(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the job ended too early: {self.outcome()}"
            assert time.monotonic() < deadline, f"the job did not get there in time: {self.outcome()}"
            time.sleep(0.002)

    def signal(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        processes = [int(self.log(rank).splitlines()[0].rpartition("process ")[2]) for rank in ranks]
        for process in processes:
            os.kill(process, number)

    def recovered(self) -> list[float]:
        """Return, from the metrics, the seconds from each fault to the end of the first step without the lost ranks."""
        return [row["recovered_s"] for row in read_metrics(self.folder) if "recovered_s" in row]

    def time_to_recover(self, fault: Callable[[], None]) -> float:
        """Cause a fault, and return the seconds until the job has completed a step again."""
        before, began = len(self.recovered()), time.time()
        fault()
        self.until(lambda: len(self.recovered()) > before)
        rows = read_metrics(self.folder)
        self._step_before = began - max(row["time"] for row in rows if row["time"] < began)
        return [row["time"] for row in rows if "recovered_s" in row][before] - began

    def is_told(self, seconds: float, measured: float, *, at_most: bool = False) -> bool:
        """Return True where the time that a job reports agrees with the one that `time_to_recover` measured.

        Ranks that wait for a core notice late that another is gone. at_most: No rank saw the fault, so the job counts
        from the last completed step.
        """
        return measured - max(1, measured / 2) < seconds < measured + 0.1 + at_most * self._step_before

    def end(self, code: int = 0, seconds: float = LIMIT) -> None:
        try:
            assert self.process.wait(seconds) == code, self.outcome()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            print(self.said)  # shown where the test fails

    def recoveries(self) -> list[tuple[list[int], int, int, float]]:
        """Return (ranks that died, step, ranks that train on, seconds) for each recovery."""
        return [
            ([int(r) for r in lost.split(",")], int(step), int(left), float(seconds))
            for lost, step, left, seconds in GOING_ON.findall(self.said)
        ]
