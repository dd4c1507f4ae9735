"""Training with one slow rank, by ways of training that wait for it at every step, now and then, or never.

The trainer trains the same small GPT from the same weights on the same batches with the same schedule, with one
contender after the other in the same processes. Rank 1 is slow:

    sync                          all ranks take each step together, and wait for rank 1 in each
    server, staleness 0           a parameter server on all ranks, bulk-synchronous: the same steps as sync
    server, staleness 4           a worker may be up to 4 steps ahead of the slowest one
    server, asynchronous          no bound on the staleness
    server, asynchronous, apart   no bound on the staleness, with an additional rank that only serves
    local, 16 steps               each rank takes 16 steps alone, on its part of each batch; then all average
    local, 16 steps, overlapped   like the previous one, but the averaging overlaps with the next 16 steps

A server's workers ask for the next part of a batch when they have finished one, so a slow worker gets fewer parts if
no other worker has to wait for it. In sync, bulk-synchronous and local training each rank has a fixed part of every
batch.

Rank 1 is slowed by a sleep after the forward and backward pass of each part, before its last gradient is available to
others. The sleep is twice as long as the passes took, so they take three times as long, even on a machine with more
ranks than cores. Time spent waiting for parameters or for other ranks is not slowed. The core is free during the sleep:
with fewer cores than ranks, the other ranks get faster, while a contender that waits for rank 1 leaves cores idle.

All contenders train several times, in turns, each time from the start, and in reverse order in every second round. For
each contender, the run with the median number of tokens per second counts, also for loss and plot. Tokens per second
come from the times of complete steps in metrics.jsonl, without the first tenth of the steps. The time to a loss is that
of the first step at which the mean loss of the last steps is not above it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.runner.jobs import BenchmarkParser, quiet, run
from benchmarks.runner.report import Panel, Report, ReportTable, target_of
from mpitrain.comm import Communicator
from mpitrain.data import Batch
from mpitrain.measuring.self_start import temporary_folder
from mpitrain.models.task import Task
from mpitrain.monitor.run_files import read_metrics
from mpitrain.trainer.run import Step
from mpitrain.trainer.trainer import Trainer

SYNC = "sync"
SLOW = 1  # number of the slow rank
SMOOTHED = 10  # steps in a running mean of the loss
_TARGET = 1.8  # target: tokens per second over sync's
_BEFORE = 0.1  # share of the steps, at the start, that does not count for tokens per second
_JUDGED = ("server, staleness 4", "server, asynchronous", "server, asynchronous, apart")
MODEL = {"layers": 2, "width": 128, "heads": 4, "sequence": 128}
QUICK_MODEL = {"layers": 1, "width": 32, "heads": 2, "sequence": 32}
SAMPLES = 4  # per worker and batch
_ASYNCHRONOUS = {"mode": "server", "staleness": "none"}
_LOCAL = {"mode": "local", "local_steps": 16}
CONTENDERS: dict[str, Mapping[str, Any]] = {  # [parallel]
    SYNC: {},
    "server, staleness 0": {"mode": "server"},
    "server, staleness 4": {"mode": "server", "staleness": 4},
    "server, asynchronous": _ASYNCHRONOUS,
    "server, asynchronous, apart": _ASYNCHRONOUS | {"servers": 1},
    "local, 16 steps": _LOCAL,
    "local, 16 steps, overlapped": _LOCAL | {"overlap": True},
}


Stats = dict[str, Any]  # values of one contender's run, see `_steps`


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    return run(parser(), measure, report, arguments)


def parser() -> BenchmarkParser:
    """Return the options of the benchmark."""
    what = "Compare modes that wait for a slow rank with modes that do not."
    few = "two workers and a server are needed"
    options_parser = BenchmarkParser("waiting", what, "5", too_few=few, least=3)
    options_parser.number("slowed", 3.0, "factor by which rank 1 is slowed down; 1: no slow rank", metavar="X")
    options_parser.number("steps", 64, "steps of each contender", quick=12)
    options_parser.number("repeats", 3, "runs of each contender", quick=1)
    options_parser.names("only", CONTENDERS, "only these contenders, and sync", by=";")
    return options_parser


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Train with each contender and return the values of its median run. Collective.

    The last rank trains in no contender; it is the server of contenders with a rank that only serves.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        On rank 0, the values of `_steps` by contender.
    """
    workers = world.subgroup(range(world.size - 1), label="workers")
    selected = {name: of for name, of in CONTENDERS.items() if not options.only or name in {*options.only, SYNC}}
    runs_of: dict[str, list[Any]] = {name: [] for name in selected}
    with temporary_folder(world, options.out) as folder:
        for turn in range(options.repeats):
            for name, parallel in list(selected.items())[:: -1 if turn % 2 else 1]:
                config = _config(options, world.size - 1, parallel, folder / f"{turn} {name}")
                ranks = world if parallel.get("servers") else workers
                if ranks is not None:
                    with quiet():
                        _Slowed(config, world=ranks, slowed=options.slowed).fit()
                world.barrier()
                if world.rank == 0:
                    runs_of[name].append(_steps(Path(config["run"]["dir"])))
                    print(f"  {name}: {sum(runs_of[name][-1]['seconds']):.1f} s", flush=True)
    return {name: median_run(runs) for name, runs in runs_of.items() if runs}


def _config(options: argparse.Namespace, workers: int, parallel: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "device": "cpu"},
        "model": QUICK_MODEL if options.quick else MODEL,
        "train": {"steps": options.steps, "batch": SAMPLES * workers, "evaluate_every": 0, "evaluate_samples": 128},
        "optim": {"warmup": min(20, options.steps // 4)},
        "monitor": {"every": options.steps},
        "checkpoint": {"every": 0, "resume": "never"},
        "parallel": dict(parallel),
    }


def _steps(folder: Path) -> dict[str, Any]:
    """Return the values of a run from its metrics: loss and seconds of each step, tokens per step, held-out loss."""
    lines = read_metrics(folder)
    return {
        "loss": [math.nan if line["loss"] is None else line["loss"] for line in lines],
        "seconds": [line["step_s"] for line in lines],
        "tokens": lines[-1]["tokens"],
        "held_out_loss": lines[-1]["held_out_loss"],
        "staleness_max": max((line.get("staleness_max", 0.0) for line in lines), default=0.0),
    }


class _Slowed(Trainer):
    """A trainer with an artificially slow rank 1.

    Args:
        config: Configuration, see `Trainer`.
        world: Communicator of the ranks that train.
        slowed: Factor by which rank 1's forward and backward passes take longer; 1: not at all.
    """

    def __init__(self, config: Mapping[str, Any], *, world: Communicator, slowed: float) -> None:
        super().__init__(config, world=world)
        self._sleeps = slowed - 1.0 if world.rank == SLOW else 0.0
        self._missing: set[nn.Parameter] = set()  # parameters without a gradient in this step so far
        self._began = 0.0

    def make_model(self) -> Task:
        task = super().make_model()
        if self._sleeps > 0:
            for parameter in task.module.parameters():  # register before the hooks that send gradients
                parameter.register_post_accumulate_grad_hook(self._came)
        return task

    def train_step(self, batch: Batch) -> Step:
        if self._sleeps > 0:
            with self.engine.sharding.parameters.unshard_all():  # wait for parameters from a server
                pass
            self._missing = {p for p in self.engine.module.parameters() if p.requires_grad}
            self._began = time.perf_counter()
        return super().train_step(batch)

    def _came(self, parameter: torch.Tensor) -> None:
        """Record that a gradient is complete, and sleep if it is the last one of the step."""
        assert isinstance(parameter, nn.Parameter)
        self._missing.discard(parameter)
        if not self._missing:
            time.sleep(self._sleeps * (time.perf_counter() - self._began))


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, dict[str, Stats]], options: argparse.Namespace) -> Report:
    """Return the report with tables, targets and plots.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, targets, panels = [], [], []
    for ranks, runs in results.items():
        goal = max(min(smoothed(of["loss"])) for of in runs.values())  # the lowest that all contenders reach
        rows, base = [], tokens_per_second(runs[SYNC])
        for name, of in runs.items():
            rate, to = tokens_per_second(of), seconds_to(of, goal)
            losses = (smoothed(of["loss"])[-1], of["held_out_loss"])
            rows.append((name, rate, rate / base, to, *losses, of["staleness_max"]))
            if name in _JUDGED and options.slowed == 3.0:
                what = f"{ranks - 1} workers, one slowed 3 times, {name}: tokens per second, relative to sync"
                targets.append(target_of(what, rate / base, least=_TARGET, where=" times"))
        columns = ["contender", "tokens/s", "/ sync", f"s to a loss of {goal:.2f}", "last loss", "held-out loss"]
        columns.append("most staleness, steps")
        slow = f"rank 1 slowed {options.slowed:g} times" if options.slowed > 1 else "no rank is slow"
        note = (
            f"{ranks - 1} workers, {slow}, {len(runs[SYNC]['loss'])} steps of {runs[SYNC]['tokens']} tokens each. "
            f"Losses are means of {SMOOTHED} steps; the loss in the table is the lowest that all contenders reach."
        )
        tables.append(ReportTable(f"{ranks - 1} workers", columns, rows, note))
        lines = {name: (list(accumulate(of["seconds"])), smoothed(of["loss"])) for name, of in runs.items()}
        panels.append(Panel("loss, nats per token", "seconds", lines, title=f"{ranks - 1} workers"))
    return Report("Training with a slow rank", tables, targets, panels)


def tokens_per_second(of: Stats) -> float:
    """Return the tokens per second of a run, without the first tenth of its steps."""
    seconds = of["seconds"][int(_BEFORE * len(of["seconds"])) :]
    return float(of["tokens"] * len(seconds) / sum(seconds))


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return for each step the mean loss of the last `SMOOTHED` steps up to it."""
    recent = (losses[max(0, end - SMOOTHED) : end] for end in range(1, len(losses) + 1))
    return [sum(part) / len(part) for part in recent]


def median_run(runs: Sequence[Stats]) -> Stats:
    """Return the run with the median tokens per second; for an even number, the slower one of the middle two."""
    return sorted(runs, key=tokens_per_second)[(len(runs) - 1) // 2]


def seconds_to(of: Stats, loss: float) -> float | None:
    """Return the seconds until a run reached a loss; None if it did not.

    Args:
        of: Values of the run, from `_steps`.
        loss: Smoothed loss to reach, in nats per token.
    """
    times = accumulate(of["seconds"])
    return next((at for at, smooth_loss in zip(times, smoothed(of["loss"]), strict=True) if smooth_loss <= loss), None)
