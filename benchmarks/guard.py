"""A short form of every important ratio to a peer, for the guard of speed in the campaign.

Each case times a few contenders in turns, as its own benchmark does, at 2 ranks: collectives beside MPI's own calls,
training steps beside no communication and torch DDP, pipelines and the backend beside torch's, checkpoints beside DCP.
The repetitions of a case form five rounds. The ratio of a round is that of the medians of our time and the peer's, and
the result is the median of the five, so a smaller ratio is better.

tests/benchmarks/test_bench_guard.py compares the ratios with those recorded for this kind of machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from benchmarks import backend, checkpoint, collectives, pipeline, step
from benchmarks.runner.jobs import BenchmarkParser, run, say, timed
from benchmarks.runner.peers import OUR_DDP, SINGLE, PlainCollectives, gloo
from benchmarks.runner.report import MIB, Report, ReportTable
from mpitrain.comm import Communicator
from mpitrain.speeds.timing import Contender

ROUNDS = 5
OURS = ("ZeRO-0", "ZeRO-1", "ZeRO-3", OUR_DDP)  # contenders of a training step
SIZES = {8: "8 B", MIB: "1 MiB", 16 * MIB: "16 MiB"}  # of a collective's vector
Pairs = Mapping[str, tuple[str, str]]  # (our contender, peer) by name of the ratio
# ratios, repetitions in a round, and function that creates the contenders
Case = tuple[Pairs, int, Callable[[], AbstractContextManager[Mapping[str, Contender]]]]


def main(arguments: Sequence[str]) -> int:
    """Measure the ratios and return the exit code."""
    parser = BenchmarkParser("guard", "Measure each ratio to a peer in a short form.", "2", too_few="peers need ranks")
    parser.add("only", metavar="A;B", help="only cases whose names have one of these texts")
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the ratios of all cases. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Ratio of each round, by name of the ratio.
    """
    mpi, rounds, began = PlainCollectives(world), dict[str, list[float]](), time.perf_counter()
    with gloo(world):
        for name, (pairs, repeats, create) in _cases(world, mpi, options).items():
            if options.only and not any(part in name for part in options.only.split(";")):
                continue
            turns = argparse.Namespace(repeats=ROUNDS * (1 if options.quick else repeats))
            with create() as contenders:
                times = timed(world, "", contenders, turns)
            parts = {who: np.array_split(np.array(of.all), ROUNDS) for who, of in times.items()}
            for what, pair in pairs.items():
                ours, peer = ([float(np.median(part)) for part in parts[who]] for who in pair)
                rounds[f"{name}: {what}"] = [a / b for a, b in zip(ours, peer, strict=True)]
            say(world, f"{name}, {time.perf_counter() - began:.0f} s")
    mpi.free()
    return rounds


def _cases(world: Communicator, mpi: PlainCollectives, options: argparse.Namespace) -> dict[str, Case]:
    """Return all cases by name."""
    cases: dict[str, Case] = {}
    both = {"arena / MPI": ("arena", "library"), "tensor / MPI": ("tensor", "library")}
    for size, at in SIZES.items():
        more = {"persistent / MPI": ("persistent", "library")}
        cases[f"all_reduce, {at}"] = both | more, 15, partial(collectives.all_reduces, world, mpi, size)
        for name in ("reduce_scatter", "all_gather"):
            cases[f"{name}, {at}"] = both, 15, partial(collectives.of_blocks, world, mpi, name, size)
    relative = {f"{name} / {peer}": (name, peer) for name in OURS for peer in (SINGLE, "torch DDP")}
    cases["step"] = relative, 2, partial(_steps, world, [SINGLE, *OURS, "torch DDP"])
    for size_name, shape in pipeline.SIZES.items():
        create = partial(_pipeline, world, shape)
        cases[f"pipeline, {size_name}"] = {"1f1b / torch": ("mpitrain", "torch")}, 2, create
    cases["backend"] = {"DDP / gloo": ("mpitrain", "gloo")}, 2, _backend
    ours, dcp = checkpoint.OURS, checkpoint.DCP
    stored = {"save / DCP": (ours, dcp), "load / DCP": (f"load {ours}", f"load {dcp}")}
    cases["checkpoint"] = stored, 2, partial(checkpoint.contenders, world, 64, options.out)
    return cases


@contextmanager
def _steps(world: Communicator, names: Sequence[str]) -> Iterator[dict[str, Contender]]:
    with step.created(world, step.SHAPE, 1, names) as trainees:
        yield {name: Contender(of.step, of.prepare, single=True) for name, of in trainees.items()}


def _pipeline(world: Communicator, shape: tuple[int, int]) -> AbstractContextManager[dict[str, Contender]]:
    sizes = argparse.Namespace(layers=14, microbatches=8)
    return nullcontext(pipeline.Case(world, "1f1b", sizes, shape).contenders())


def _backend() -> AbstractContextManager[dict[str, Contender]]:
    steps = backend.steps(backend.both_groups(), "DDP", 1, 128)
    return nullcontext({name: Contender(call, single=True) for name, call in steps.items()})


def report(results: dict[int, dict[str, list[float]]], options: argparse.Namespace) -> Report:
    """Return the report with a table; `results` are by number of ranks."""
    [(ranks, rounds)] = results.items()
    rows = [(name, float(np.median(of)), min(of), max(of)) for name, of in rounds.items()]
    columns = ("our time / the peer's", "median of five rounds", "least", "most")
    return Report("Ratios to peers", [ReportTable(f"{ranks} ranks", columns, rows)])
