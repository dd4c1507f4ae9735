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
import contextlib
import io
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.runner.jobs import Benchmark, parser, run
from benchmarks.servers.waiting_report import SYNC, median_run, report
from mpitrain.comm import Communicator
from mpitrain.data import Batch
from mpitrain.errors import InputError
from mpitrain.measuring.self_start import temporary_folder
from mpitrain.models.task import Task
from mpitrain.monitor.run_files import read_metrics
from mpitrain.trainer.callback import Step
from mpitrain.trainer.trainer import STRATEGIES, Trainer

SLOW = 1  # the rank
STEPS, QUICK_STEPS = 64, 12
REPEATS = 3
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


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    return run(Benchmark("waiting", _parser(), measure, report), arguments)


def _parser() -> argparse.ArgumentParser:
    made = parser("waiting", "Training with one slow rank, by ways that wait for it and ways that do not.", ranks="5")
    made.add_argument(
        "--slowed", type=float, default=3.0, metavar="X", help="times as long as else that rank 1 takes [3]; 1: no rank"
    )
    made.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each contender [{STEPS}]")
    made.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"runs of each [{REPEATS}]")
    made.add_argument("--only", type=_names, metavar="A;B", help="these contenders, and sync")
    made.add_argument("--dir", type=Path, metavar="DIR", help="where run folders are put meanwhile [--out]")
    return made


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What each contender's steps were like. Collective.

    The last rank works in no contender; it serves where a rank only does that.
    """
    if world.size < 3:
        raise InputError("two workers and a rank that only serves are needed; use 3 ranks or more", agreed=True)
    workers = world.subgroup(range(world.size - 1), label="workers")
    wanted = {name: of for name, of in CONTENDERS.items() if not options.only or name in {*options.only, SYNC}}
    wanted = {name: of for name, of in wanted.items() if of.get("mode", SYNC) in STRATEGIES}
    found: dict[str, list[Any]] = {name: [] for name in wanted}
    with temporary_folder(world, options.dir or options.out) as folder:
        for turn in range(1 if options.quick else options.repeats):
            for name, parallel in list(wanted.items())[:: -1 if turn % 2 else 1]:
                config = _config(options, world.size - 1, parallel, folder / f"{turn} {name}")
                ranks = world if parallel.get("servers") else workers
                if ranks is not None:
                    with contextlib.redirect_stdout(io.StringIO()):  # what a run tells people
                        _Slowed(config, world=ranks, slowed=options.slowed).fit()
                world.barrier()
                if world.rank == 0:
                    found[name].append(_steps(Path(config["run"]["dir"])))
                    print(f"  {name}: {sum(found[name][-1]['seconds']):.1f} s", flush=True)
    return {name: median_run(runs) for name, runs in found.items() if runs}


def _config(options: argparse.Namespace, workers: int, parallel: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    steps = QUICK_STEPS if options.quick else options.steps
    return {
        "run": {"dir": str(folder), "device": "cpu"},
        "model": QUICK_MODEL if options.quick else MODEL,
        "train": {"steps": steps, "batch": SAMPLES * workers, "evaluate_every": 0, "evaluate_samples": 128},
        "optim": {"warmup": min(20, steps // 4)},
        "monitor": {"every": steps},
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


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    for name in names:
        if name not in CONTENDERS:
            raise argparse.ArgumentTypeError(f"there is no contender {name!r}; there are {'; '.join(CONTENDERS)}")
    return names
