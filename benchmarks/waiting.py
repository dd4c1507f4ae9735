"""Training with one slow rank, by ways of training that wait for it at every step, now and then, or never.

The same small GPT is trained on the same batches from the same weights by the same schedule, one contender after the
other in the same processes, each by the trainer itself. Rank 1 is slow:

    sync                          all ranks take each step together, and wait for rank 1 in each
    server, staleness 0           a parameter server on all ranks, bulk-synchronous: the same steps as sync
    server, staleness 4           no worker is more than 4 steps ahead of the slowest
    server, asynchronous          there is no bound
    server, asynchronous, apart   likewise, with one more rank that only serves
    local, 16 steps               each rank takes 16 steps by itself, on its part of each batch; then they average
    local, 16 steps, overlapped   likewise, while the next 16 are taken

A server's workers ask for the next part of a batch when they are done with one, so that a slow one gets fewer where
it need not be waited for. In sync, bulk-synchronous and local training each rank has its own part of every batch.

Slow is a rank that sleeps, after the forward and backward pass of each of its parts and before its last gradient is
there for others, twice as long as these took it: they take three times the time, whatever that is on a machine with
more ranks than cores. Waiting for parameters or for other ranks is not in it. While it sleeps its core is free; with
fewer cores than ranks the others are then the faster for it, and what waits for the slow rank leaves cores idle.

All contenders train several times, in turns, each time from the start and in the reverse order; of each the run with
the median of tokens a second counts, loss and picture included. Tokens a second are those of complete steps by the
seconds of metrics.jsonl, without the first tenth of the steps; time to a loss is that of the first step at which the
mean of the last steps' losses is down to it.
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
from benchmarks.runner.report import Panel, Report, ReportTable, judged
from mpitrain.comm import Communicator
from mpitrain.data import Batch
from mpitrain.measuring.self_start import temporary_folder
from mpitrain.models.task import Task
from mpitrain.monitor.run_files import read_metrics
from mpitrain.trainer.run import Step
from mpitrain.trainer.trainer import STRATEGIES, Trainer

SYNC = "sync"
SLOW = 1  # the rank
SMOOTHED = 10  # steps whose mean loss counts
_WANTED = 1.8  # times sync's tokens a second
_BEFORE = 0.1  # of the steps, that do not count for tokens a second
_JUDGED = ("server, staleness 4", "server, asynchronous", "server, asynchronous, apart")
MODEL = {"layers": 2, "width": 128, "heads": 4, "sequence": 128}
QUICK_MODEL = {"layers": 1, "width": 32, "heads": 2, "sequence": 32}
SAMPLES = 4  # of a batch, for each worker
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


Found = dict[str, Any]  # of a contender, see `waiting`


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    return run(parser(), measure, report, arguments)


def parser() -> BenchmarkParser:
    """Return the options."""
    what = "Training with one slow rank, by ways that wait for it and ways that do not."
    few = "two workers and a rank that only serves are needed"
    made = BenchmarkParser("waiting", what, "5", too_few=few, least=3)
    made.number("slowed", 3.0, "times as long as else that rank 1 takes; 1: no rank", metavar="X")
    made.number("steps", 64, "of each contender", quick=12)
    made.number("repeats", 3, "runs of each", quick=1)
    made.names("only", CONTENDERS, "these contenders, and sync", by=";")
    made.add("dir", type=Path, metavar="DIR", help="where run folders are put meanwhile [--out]")
    return made


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What each contender's steps were like. Collective.

    The last rank works in no contender; it serves where a rank only does that.
    """
    workers = world.subgroup(range(world.size - 1), label="workers")
    wanted = {name: of for name, of in CONTENDERS.items() if not options.only or name in {*options.only, SYNC}}
    wanted = {name: of for name, of in wanted.items() if of.get("mode", SYNC) in STRATEGIES}
    found: dict[str, list[Any]] = {name: [] for name in wanted}
    with temporary_folder(world, options.dir or options.out) as folder:
        for turn in range(options.repeats):
            for name, parallel in list(wanted.items())[:: -1 if turn % 2 else 1]:
                config = _config(options, world.size - 1, parallel, folder / f"{turn} {name}")
                ranks = world if parallel.get("servers") else workers
                if ranks is not None:
                    with quiet():
                        _Slowed(config, world=ranks, slowed=options.slowed).fit()
                world.barrier()
                if world.rank == 0:
                    found[name].append(_steps(Path(config["run"]["dir"])))
                    print(f"  {name}: {sum(found[name][-1]['seconds']):.1f} s", flush=True)
    return {name: median_run(runs) for name, runs in found.items() if runs}


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
    """By step, of a run: its loss, its seconds, and its tokens; and the held-out loss at the end."""
    lines = read_metrics(folder)
    return {
        "loss": [math.nan if line["loss"] is None else line["loss"] for line in lines],
        "seconds": [line["step_s"] for line in lines],
        "tokens": lines[-1]["tokens"],
        "held_out_loss": lines[-1]["held_out_loss"],
        "staleness_max": max((line.get("staleness_max", 0.0) for line in lines), default=0.0),
    }


class _Slowed(Trainer):
    """A trainer whose rank 1 is slow.

    Args:
        config: As of `Trainer`.
        world: The ranks.
        slowed: Times as long as else its forward and backward pass take.
    """

    def __init__(self, config: Mapping[str, Any], *, world: Communicator, slowed: float) -> None:
        super().__init__(config, world=world)
        self._sleeps = slowed - 1.0 if world.rank == SLOW else 0.0
        self._missing: set[nn.Parameter] = set()  # without a gradient yet
        self._began = 0.0

    def make_model(self) -> Task:
        task = super().make_model()
        if self._sleeps > 0:
            for parameter in task.module.parameters():  # before the hooks that let others have gradients
                parameter.register_post_accumulate_grad_hook(self._came)
        return task

    def train_step(self, batch: Batch) -> Step:
        if self._sleeps > 0:
            with self.engine.sharding.parameters.whole():  # those of a server have come
                pass
            self._missing = {p for p in self.engine.module.parameters() if p.requires_grad}
            self._began = time.perf_counter()
        return super().train_step(batch)

    def _came(self, parameter: torch.Tensor) -> None:
        """A gradient has come; sleep if it was the last one."""
        assert isinstance(parameter, nn.Parameter)
        self._missing.discard(parameter)
        if not self._missing:
            time.sleep(self._sleeps * (time.perf_counter() - self._began))


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, dict[str, Found]], options: argparse.Namespace) -> Report:
    """Tables, targets and the plot of the results by rank count."""
    tables, targets, panels = [], [], []
    for ranks, found in results.items():
        given = max(min(smoothed(of["loss"])) for of in found.values())  # the lowest that all contenders reach
        rows, base = [], tokens_per_second(found[SYNC])
        for name, of in found.items():
            rate, to = tokens_per_second(of), seconds_to(of, given)
            losses = (smoothed(of["loss"])[-1], of["held_out_loss"])
            rows.append((name, rate, rate / base, to, *losses, of["staleness_max"]))
            if name in _JUDGED and options.slowed == 3.0:
                what = f"{ranks - 1} workers, one slowed 3 times, {name}: tokens a second against sync"
                targets.append(judged(what, rate / base, least=_WANTED, where=" times"))
        columns = ["contender", "tokens/s", "/ sync", f"s to a loss of {given:.2f}", "last loss", "held-out loss"]
        columns.append("most staleness, steps")
        slow = f"rank 1 slowed {options.slowed:g} times" if options.slowed > 1 else "no rank is slow"
        note = (
            f"{ranks - 1} workers, {slow}, {len(found[SYNC]['loss'])} steps of {found[SYNC]['tokens']} tokens each. "
            f"Losses are means of {SMOOTHED} steps; the given one is the lowest that all contenders reach."
        )
        tables.append(ReportTable(f"{ranks - 1} workers", columns, rows, note))
        lines = {name: (list(accumulate(of["seconds"])), smoothed(of["loss"])) for name, of in found.items()}
        panels.append(Panel(f"{ranks - 1} workers", "loss, nats a token", lines=lines, across="seconds", mark=given))
    return Report("Training with a slow rank", tables, targets, [panels])


def tokens_per_second(of: Found) -> float:
    """Of the complete steps after the first ones."""
    seconds = of["seconds"][int(_BEFORE * len(of["seconds"])) :]
    return float(of["tokens"] * len(seconds) / sum(seconds))


def smoothed(losses: Sequence[float]) -> list[float]:
    """Of each step the mean loss of the last steps up to it."""
    recent = (losses[max(0, end - SMOOTHED) : end] for end in range(1, len(losses) + 1))
    return [sum(part) / len(part) for part in recent]


def median_run(runs: Sequence[Found]) -> Found:
    """The run with the median of tokens a second; of an even number the slower one in the middle."""
    return sorted(runs, key=tokens_per_second)[(len(runs) - 1) // 2]


def seconds_to(of: Found, loss: float) -> float | None:
    """Seconds until a loss was reached; None where it was not."""
    times = accumulate(of["seconds"])
    return next((at for at, found in zip(times, smoothed(of["loss"]), strict=True) if found <= loss), None)
