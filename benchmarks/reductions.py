"""Reductions of gradients: sizes of buckets, passes between two reductions, and communicators for buckets in turn.

The measurements follow figures 7 to 12 of Li et al. 2020 (PyTorch Distributed). All train the same GPT:

    buckets    seconds of a step by `comm.bucket_mb`, of DDP and ZeRO-2, and by torch DDP's `bucket_cap_mb`
    no_sync    gradients of 1, 2, 4 or 8 passes are added before they are reduced and the model is updated, by
               `mpitrain.DistributedDataParallel` and torch DDP: mean seconds of a pass, and the loss of each pass
    rings      seconds of a step by `comm.rings`, of DDP

Buckets and rings hide the reduction behind backward, which needs a core to spare. Where there is none, mpitrain reduces
after backward, and neither has an effect on DDP. torch DDP has threads of its own, which then share the cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from benchmarks.runner.jobs import BenchmarkParser, gpt, quiet, run, say
from benchmarks.runner.peers import gloo, require_equal, torch_training
from benchmarks.runner.report import Panel, Report, ReportTable
from benchmarks.runner.training_runs import (
    UNENDING,
    PeerRun,
    TrainerRun,
    TrainingRun,
    measured_runs,
    merged,
    step_seconds,
)
from benchmarks.strategies import AGREE
from benchmarks.waiting import smoothed
from mpitrain.comm import Communicator
from mpitrain.shard.ddp import DistributedDataParallel

BUCKETS = (1, 2, 5, 10, 25, 100)  # MiB
EVERY = (1, 2, 4, 8)  # passes
RINGS = (1, 2, 3)
TORCH, OURS = "torch DDP", "DistributedDataParallel"
Make = Callable[[], TrainingRun]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what, few = "Compare sizes of buckets, no_sync, and rings.", "one rank reduces no gradients"
    parser = BenchmarkParser("reductions", what, "2", too_few=few)
    for key, (value, quick) in {"layers": (4, 1), "width": (512, 32), "heads": (8, 2), "sequence": (64, 16)}.items():
        parser.number(key, value, f"model.{key}", quick=quick)
    parser.number("samples", 1, "samples for each rank and pass")
    parser.number("rounds", 2, "measurements of each step", quick=1)
    parser.number("steps", 6, "steps of a measurement", quick=3)
    parser.number("passes", 64, "passes with no_sync", quick=16)
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure steps by size of buckets and number of rings, and passes with no_sync. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        "overlaps": true if a core is free for reductions. "buckets" and "rings": seconds of a step by contender, then
        by size or number. "no_sync": seconds of a pass and losses by contender, then by number of passes.
    """
    train = {"batch": options.samples * world.size, "clip": 0.0}
    optim = {"schedule": "constant", "warmup": 0, "lr": 1e-3}
    base = merged(UNENDING, {"model": gpt(options), "train": train, "optim": optim})

    def ours(zero: int, key: str, value: float) -> Make:
        return partial(TrainerRun, world, merged(base, {"parallel": {"zero": zero}, "comm": {key: value}}))

    def theirs(wrap: Any, **keywords: Any) -> Make:
        return partial(PeerRun, world, base, partial(torch_training, wrap=wrap, **keywords))

    def torch_ddp(module: nn.Module, size: float = 25) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=size, gradient_as_bucket_view=True)

    buckets: dict[tuple[str, float], Make] = {}
    for size in BUCKETS[::3] if options.quick else BUCKETS:
        buckets |= {("DDP", size): ours(0, "bucket_mb", size), ("ZeRO-2", size): ours(2, "bucket_mb", size)}
        buckets[TORCH, size] = theirs(partial(torch_ddp, size=size))
    rings: dict[tuple[str, float], Make] = {("DDP", number): ours(0, "rings", number) for number in RINGS}
    wraps = {OURS: DistributedDataParallel, TORCH: torch_ddp}
    with gloo(world):
        result: dict[str, Any] = {"buckets": _steps(world, buckets, options), "rings": _steps(world, rings, options)}
        result["no_sync"] = {
            name: {str(n): _passes(world, f"{name}, {n}", theirs(wrap, every=n), options) for n in EVERY}
            for name, wrap in wraps.items()
        }
    for every in map(str, EVERY):
        require_equal({name: of[every]["losses"][:3] for name, of in result["no_sync"].items()}, AGREE)
    return result | {"overlaps": world.overlaps}


def _steps(
    world: Communicator, makes: Mapping[tuple[str, float], Make], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by contender, then by size or number. Collective."""
    named = {f"{name} {value:g}": make for (name, value), make in makes.items()}
    results = measured_runs(world, named, options.rounds, options.steps, 3.0)
    require_equal({name: of["losses"] for name, of in results.items()}, AGREE)
    seconds: dict[str, dict[str, float]] = {}
    for (name, value), of in zip(makes, results.values(), strict=True):
        seconds.setdefault(name, {})[f"{value:g}"] = step_seconds(of)
    return seconds


def _passes(world: Communicator, name: str, make: Make, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the mean seconds of a pass in the second half, and the loss of each. Collective."""
    with quiet():
        training = make()
        training.prepare()
        losses, half = list[float](), options.passes // 2
        for number in range(options.passes):
            if number == half:
                world.barrier()
                began = time.perf_counter()
            losses.append(training.step())
        world.barrier()
        seconds = (time.perf_counter() - began) / (options.passes - half)
        training.close()
    say(world, f"no_sync, {name}: {seconds:.4f} s")
    return {"seconds": seconds, "losses": losses}


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Return the report with tables and plots.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, panels = list[ReportTable](), list[Panel]()
    for ranks, result in results.items():
        cores = "A core is" if result["overlaps"] else "No core is"
        note = f"Milliseconds. {cores} free to reduce gradients during backward."
        passes = {name: {every: of["seconds"] for every, of in by.items()} for name, by in result["no_sync"].items()}
        for what, label, of in (
            ("step by MiB of a bucket", "MiB of a bucket", result["buckets"]),
            ("step by number of rings", "rings", result["rings"]),
            ("pass by passes between two reductions", "passes", passes),
        ):
            columns = ("contender", *next(iter(of.values())))
            rows = [(name, *(1e3 * each for each in by.values())) for name, by in of.items()]
            tables.append(ReportTable(f"{ranks} ranks: {what}", columns, rows, note))
            lines = {name: ([*map(float, by)], [1e3 * each for each in by.values()]) for name, by in of.items()}
            top = 1.1 * max(max(y) for _, y in lines.values())
            panels.append(
                Panel(f"ms of a {what.split()[0]}", label, lines, title=f"{ranks} ranks", doubling=True, top=top)
            )
        counts, by = list(range(1, options.passes + 1)), result["no_sync"][OURS]
        curves = {f"reduced every {n}": (counts, smoothed(of["losses"])) for n, of in by.items()}
        panels.append(Panel("loss, nats per token", "passes", curves, title=f"{ranks} ranks, {OURS}"))
    return Report("Reductions of gradients", tables, panels=panels)
