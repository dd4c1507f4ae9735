"""Starts a benchmark at each rank count, times its contenders in turns, and brings the results together.

See the rules in `benchmarks`.
"""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.runner.report import Report, facts, write
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.inference.commands import parse
from mpitrain.measuring import self_start
from mpitrain.speeds.timing import Contender, Times, interleaved

_GPT = {"layers": (4, 2), "width": (256, 64), "heads": (4, 4), "sequence": (64, 32)}  # and in a quick run
_BUSY = 0.5  # load per core from which figures are not to be trusted

Measure = Callable[[Communicator, argparse.Namespace], Any]
MakeReport = Callable[[dict[int, Any], argparse.Namespace], Report]


class BenchmarkParser:
    """The options of a benchmark: those that all have, and its own.

    Args:
        name: Its name on the command line.
        description: What it measures.
        ranks: The rank counts at which it starts itself.
        repeats: Repetitions of each measurement; None: there is no such option.
        seconds: How long the repetitions may take; None: there is no such option.
        of: What may take so long.
        quick: The repetitions and seconds of a quick run.
        too_few: Why fewer ranks than `least` will not do; empty: they will.
        least: How many ranks it needs.
    """

    def __init__(
        self,
        name: str,
        description: str,
        ranks: str = "2,4,8",
        *,
        repeats: int | None = None,
        seconds: float | None = None,
        of: str = "",
        quick: tuple[int, float] = (3, 20.0),
        too_few: str = "",
        least: int = 2,
    ) -> None:
        self.name, self.too_few, self.least = name, too_few, least
        self.arguments = self_start.parser(f"benchmarks {name}", description, ranks, 1800)
        self.add("out", type=Path, default=Path("bench-results"), metavar="DIR", help="results [bench-results]")
        self._quick: dict[str, float] = {}
        if repeats is not None:
            self.number("repeats", repeats, "repetitions; the median counts", quick=quick[0])
        if seconds is not None:
            self.number("seconds", seconds, f"for {of}", quick=quick[1], metavar="S")

    def add(self, name: str, **settings: Any) -> None:
        """Add an option, as `ArgumentParser.add_argument` does."""
        self.arguments.add_argument(f"--{name}", **settings)

    def number(self, name: str, usual: float, text: str, *, quick: float | None = None, metavar: str = "N") -> None:
        """Add an option that is a number.

        Args:
            name: Its name.
            usual: Its value where it is not given.
            text: What it says.
            quick: Its value in a quick run, where it is not given.
            metavar: What stands for the value in the help.
        """
        self.add(name, type=type(usual), default=usual, metavar=metavar, help=f"{text} [{usual:g}]")
        if quick is not None:
            self._quick[name] = quick

    def names(self, name: str, known: Collection[str], text: str, *, noun: str = "contender", by: str = ",") -> None:
        """Add an option that is a list of known names.

        Args:
            name: Its name.
            known: What there is.
            text: What it says.
            noun: What is named.
            by: What stands between two of them.
        """

        def read(line: str) -> list[str]:
            asked = [each.strip() for each in line.split(by)]
            for each in asked:
                if each not in known:
                    there = f"{by} ".join(known)
                    raise argparse.ArgumentTypeError(f"there is no {noun} {each!r}; there are {there}")
            return asked

        self.add(name, type=read, metavar=f"A{by}B", help=text)

    def model(self) -> None:
        """Add the sizes of a GPT; `gpt` makes the section of a configuration of them."""
        for key, (value, quick) in _GPT.items():
            self.number(key, value, f"model.{key}", quick=quick)

    def device(self, text: str) -> None:
        """Add the option of a device, which the text introduces; see `asked_for_device`."""
        kinds = "auto (an accelerator, where there is one), cpu, cuda, xpu and so on [cpu]"
        self.add("device", default="cpu", metavar="KIND", help=f"{text}: {kinds}")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options; of the ranks of a job, rank 0 alone says what is wrong with them."""
        options = parse(self.arguments, arguments)
        if options.quick:
            self.arguments.set_defaults(**self._quick)
            options = parse(self.arguments, arguments)
        return options


def asked_for_device(options: argparse.Namespace) -> bool:
    """Return True if --device names an accelerator, or is "auto" and there is one."""
    kind: str = options.device
    return kind != "cpu" and (kind != "auto" or bool(hardware.accelerator()))


def gpt(options: argparse.Namespace) -> dict[str, Any]:
    """Return the section [model] of the sizes that `BenchmarkParser.model` has read."""
    return {"name": "gpt", **{key: getattr(options, key) for key in _GPT}}


def run(parser: BenchmarkParser, measure: Measure, report: MakeReport, arguments: Sequence[str]) -> int:
    """Measure at each rank count and write the report.

    Args:
        parser: The benchmark's name and options.
        measure: Measures at one rank count, given the world and the options. Collective; what rank 0 returns, JSON can
            hold.
        report: Makes the report of the results by rank counts and the options.
        arguments: The command line.

    Returns:
        The exit code.
    """
    options, name = parser.parse(arguments), parser.name
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if not self_start.launched() and load > _BUSY * cores:
        print(
            f"mpitrain: other work keeps this machine busy (load {load:.1f}, {cores} cores); the figures will mislead"
        )

    def part(world: Communicator) -> dict[str, Any]:
        if parser.too_few and world.size < parser.least:
            raise InputError(f"{parser.too_few}; start {parser.least} ranks or more", agreed=True)
        return {"facts": facts(world), "result": measure(world, options)}

    def keep(parts: dict[int, Any]) -> None:
        results = {ranks: each["result"] for ranks, each in parts.items()}
        header = {ranks: each["facts"] for ranks, each in parts.items()}
        written = write(name, report(results, options), header, results, options.out, options.quick)
        print("written: " + ", ".join(map(str, written)))

    return self_start.measured(["-m", "benchmarks", name, *arguments], options, name, part, keep)


def timed(
    world: Communicator,
    what: str,
    contenders: Mapping[str, Contender | Callable[[], object]],
    options: argparse.Namespace,
    *,
    begins: bool = True,
) -> dict[str, Times]:
    """Time contenders in turns, and have rank 0 say what they took. Collective.

    Args:
        world: The ranks.
        what: What people are told was measured; empty: nothing.
        contenders: By name; a call by itself is one that is never repeated within a measurement.
        options: Of them, `repeats` and, where there is such an option, `seconds`.
        begins: See `interleaved`.
    """
    made = {n: one if isinstance(one, Contender) else Contender(one, single=True) for n, one in contenders.items()}
    budget = getattr(options, "seconds", math.inf)
    found = interleaved(world, made, options.repeats, budget, begins=begins)
    if what:
        say(world, f"{what}: " + ", ".join(f"{name} {of.median * 1e3:.3g} ms" for name, of in found.items()))
    return found


def summaries(times: Mapping[str, Times]) -> dict[str, dict[str, float]]:
    """Return median and best seconds of each contender, as a result, which is JSON, holds them."""
    return {name: {"median": of.median, "best": of.best} for name, of in times.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what a run tells people."""
    with redirect_stdout(io.StringIO()):
        yield


def say(world: Communicator, text: str) -> None:
    """Have rank 0 tell people how far the benchmark has come."""
    if world.rank == 0:
        print(f"  {world.size} ranks, {text}", flush=True)
