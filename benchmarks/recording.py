"""Cost of a step that `monitor.timeline` records: steps with and without it, in turns, of one run.

The trainer trains its own GPT, and every second step is recorded as the timeline does it: parts, modules, single
operations. Each recorded step is compared with the step before or after it, so that other load on the machine affects
both. The comparison of the ranks' clocks and the writing of files happen between steps and are not timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.runner.jobs import BenchmarkParser, gpt, quiet, run
from benchmarks.runner.report import Report, ReportTable, target_of
from benchmarks.runner.training_runs import WARM, TrainerRun
from mpitrain.comm import Communicator
from mpitrain.trainer.recording.timeline import Recording

MOST = 1.03  # target: largest ratio of a recorded step to another
_BATCH = 4  # samples for each rank


class _RecordedRun(TrainerRun):
    """A training run in which single steps can be recorded."""

    def timed(self, *, recorded: bool) -> tuple[float, int]:
        """Take a step and return (its seconds, number of recorded entries). Collective.

        Args:
            recorded: If true, record the step as the timeline does.
        """
        trainer, clock = self._trainer, self._trainer.engine.clock
        totals = clock.totals()
        spent = (totals["forward"] + totals["backward"]) / max(1, trainer.step)
        recording = Recording(trainer, lambda at: at, spent) if recorded else None
        gc.collect()
        trainer.world.barrier()
        begin = time.perf_counter()
        clock.step(trainer.step + 1)
        with clock.data:
            batch = next(self._coming)
        trainer.step = trainer.train_step(batch).number
        clock.settle()
        seconds = time.perf_counter() - begin
        if recording is None:
            return seconds, 0
        record = recording.stop()
        return seconds, len(record["spans"]) + len(record["communication"])


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    parser = BenchmarkParser("recording", "Compare recorded steps with other steps, in turns.", "2")
    parser.number("pairs", 60, "steps of each kind", quick=4)
    parser.model()
    return run(parser, measure, _report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time pairs of steps, one recorded and one not. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Seconds of each step on the slowest rank, not recorded and recorded, and the mean number of entries.
    """
    pairs = options.pairs
    config = {
        "run": {"device": "cpu", "dir": "unused"},
        "model": gpt(options),
        "train": {"batch": _BATCH * world.size, "steps": 2 * pairs + WARM + 2, "evaluate_every": 0},
    }
    with quiet():
        training = _RecordedRun(world, config)
        training.prepare()
        world.journal.start()
        for number in range(WARM + 2):
            training.timed(recorded=number % 2 == 1)
        rows = []
        for pair in range(pairs):  # alternate which of the two comes first
            both = {recorded: training.timed(recorded=recorded) for recorded in (pair % 2 == 0, pair % 2 != 0)}
            rows.append([*both[False], *both[True]])
        world.journal.stop()
        training.close()
    everyone = world.all_gather_object(rows)
    return {
        "seconds": [max(of[pair][0] for of in everyone) for pair in range(pairs)],  # of the slowest rank
        "recorded_seconds": [max(of[pair][2] for of in everyone) for pair in range(pairs)],
        "entries": statistics.mean(row[3] for row in rows),
    }


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
