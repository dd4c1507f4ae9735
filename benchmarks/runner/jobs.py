"""Starts a benchmark at each rank count and brings the results together. See the rules in `benchmarks`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runner.report import Report, facts, write
from mpitrain.errors import EXIT_DONE
from mpitrain.measuring import self_start
from mpitrain.measuring.self_start import launched

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_BUSY = 0.5  # load per core from which figures are not to be trusted


@dataclass(frozen=True)
class Benchmark:
    """What `run` needs of a benchmark.

    Attributes:
        name: Its name on the command line.
        parser: Its options.
        measure: Measures at one rank count, given the world and the options. Collective; what rank 0 returns, JSON can
            hold.
        report: Makes the report of the results by rank counts and the options.
    """

    name: str
    parser: argparse.ArgumentParser
    measure: Callable[[Communicator, argparse.Namespace], Any]
    report: Callable[[dict[int, Any], argparse.Namespace], Report]


def parser(name: str, description: str, *, ranks: str = "2,4,8", limit: float = 1800) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have; a benchmark adds its own."""
    made = self_start.parser(f"benchmarks {name}", description, ranks, limit)
    made.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="results [bench-results]")
    return made


def repeated(made: argparse.ArgumentParser, repeats: int, seconds: float, of: str) -> None:
    """Give a parser the options of a benchmark that measures in turns.

    Args:
        made: The parser.
        repeats: How many repetitions there are without the option.
        seconds: How long they may take without the option.
        of: What may take so long.
    """
    made.add_argument(
        "--repeats", type=int, default=repeats, metavar="N", help=f"repetitions; the median counts [{repeats}]"
    )
    made.add_argument("--seconds", type=float, default=seconds, metavar="S", help=f"for {of} [{seconds:g}]")


def run(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """Measure and write the report; the exit code."""
    options = self_start.parsed(benchmark.parser, arguments)
    if launched():
        return _measure(benchmark, options)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cores:
        print(
            f"mpitrain: other work keeps this machine busy (load {load:.1f}, {cores} cores); the figures will mislead"
        )
    parts, code = self_start.at_each(["-m", "benchmarks", benchmark.name, *arguments], options, benchmark.name)
    if parts:  # also where a later rank count has failed
        _write(benchmark, parts, options)
    return code


def _measure(benchmark: Benchmark, options: argparse.Namespace) -> int:
    from mpitrain.comm import init

    world = init()
    part = {"facts": facts(world), "result": benchmark.measure(world, options)}
    if world.rank == 0 and self_start.started_here():
        self_start.leave(part)
    elif world.rank == 0:
        _write(benchmark, {world.size: part}, options)
    return EXIT_DONE


def _write(benchmark: Benchmark, parts: dict[int, Any], options: argparse.Namespace) -> None:
    results = {ranks: part["result"] for ranks, part in parts.items()}
    header = {ranks: part["facts"] for ranks, part in parts.items()}
    written = write(benchmark.name, benchmark.report(results, options), header, results, options.out, options.quick)
    print("written: " + ", ".join(map(str, written)))
