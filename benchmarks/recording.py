"""Cost of a step that `monitor.timeline` records: steps with and without it, in turns, of one run.

The trainer trains its own GPT, and every second step is recorded as the timeline does it: parts, modules, single
operations. Each recorded step is compared with the step before or after it, so that other load on the machine affects
both. The comparison of the ranks' clocks and the writing of files happen between steps and are not timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.runner.jobs import BenchmarkParser, gpt, quiet, run, timed
from benchmarks.runner.report import Report, ReportTable, target_of
from benchmarks.runner.training_runs import UNENDING, TrainerRun, merged
from mpitrain.comm import Communicator
from mpitrain.speeds.timing import Contender
from mpitrain.trainer.recording.timeline import Recording

MOST = 1.03  # target: largest ratio of a recorded step to another
_BATCH = 4  # samples for each rank
_SECONDS = ("seconds", "recorded_seconds")


class _RecordedRun(TrainerRun):
    """A training run in which single steps can be recorded.

    Attributes:
        entries: Number of entries of each recorded step.
    """

    def __init__(self, world: Communicator, config: Mapping[str, Any]) -> None:
        super().__init__(world, config)
        self.entries: list[int] = []
        self._recording: Recording | None = None

    def begin(self, *, recorded: bool) -> None:
        """End the recording of the step before, and record the next step if `recorded`. Collective."""
        trainer, totals = self._trainer, self._trainer.engine.clock.totals()
        if self._recording is not None:
            record = self._recording.stop()
            self.entries.append(len(record["spans"]) + len(record["communication"]))
        spent = (totals["forward"] + totals["backward"]) / max(1, trainer.step)
        self._recording = Recording(trainer, lambda at: at, spent) if recorded else None
        gc.collect()

    def step(self) -> float:
        """Take the next step, with the calls that the timeline makes at its begin and end. Collective."""
        clock = self._trainer.engine.clock
        clock.step(self._trainer.step + 1)
        loss = super().step()
        clock.settle()
        return loss


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what = "Compare recorded steps with other steps, in turns."
    parser = BenchmarkParser("recording", what, "2", repeats=60, quick=(4, 60.0))
    parser.model()
    return run(parser, measure, _report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time steps in turns, one recorded and one not. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Seconds of each step, not recorded and recorded, and the mean number of entries.
    """
    config = merged(UNENDING, {"model": gpt(options), "train": {"batch": _BATCH * world.size}})
    with quiet():
        training = _RecordedRun(world, config)
        training.prepare()
        world.journal.start()
        begins = {name: partial(training.begin, recorded=name == "recorded_seconds") for name in _SECONDS}
        steps = {name: Contender(training.step, begin, single=True) for name, begin in begins.items()}
        times = timed(world, "", steps, options)
        training.begin(recorded=False)
        world.journal.stop()
        training.close()
    return {name: list(of.all) for name, of in times.items()} | {"entries": statistics.mean(training.entries)}


def _report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    rows, targets = [], []
    for ranks, result in results.items():
        plain, recorded = result["seconds"], result["recorded_seconds"]
        ratio = statistics.median(b / a for a, b in zip(plain, recorded, strict=True))
        rows.append([ranks, statistics.median(plain) * 1e3, ratio, result["entries"]])
        targets.append(target_of(f"recorded / not, {ranks} ranks", ratio, most=MOST, text=f"{ratio:.3f}"))
    columns = ["ranks", "step [ms]", "recorded / not", "entries"]
    note = "The ratio is the median over pairs of steps; entries are the spans that a rank records in a step."
    return Report("Cost of a recorded step", [ReportTable("Recorded steps", columns, rows, note)], targets)
