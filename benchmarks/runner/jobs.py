"""Runner of benchmarks: starts one at each rank count, times its contenders in turns, and collects the results.

The rules for benchmarks are in the docstring of the package `benchmarks`.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner.report import ROOT, Report, Values, facts, values_of, write
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.inference.commands import parse
from mpitrain.measuring import self_start
from mpitrain.speeds.timing import Contender, Times, measure_in_turns

# options of `BenchmarkParser.model`: (default, default in a quick run)
_GPT = {"layers": (4, 2), "width": (256, 64), "heads": (4, 4), "sequence": (64, 32)}
_BUSY = 0.5  # load per core above which the results are not reliable

Measure = Callable[[Communicator, argparse.Namespace], Any]
MakeReport = Callable[[dict[int, Any], argparse.Namespace], Report]


class BenchmarkParser:
    """The command line options of a benchmark: those common to all benchmarks, and its own.

    Args:
        name: Name of the benchmark on the command line.
        description: Description for `--help`.
        ranks: Default of `--ranks`, the rank counts at which the benchmark starts itself, separated by commas.
        repeats: Default of `--repeats`, the repetitions of each measurement; None: the option does not exist.
        seconds: Default of `--seconds`, the most seconds for the repetitions; None: the option does not exist.
        of: Name of the part of the benchmark to which `--seconds` applies, for `--help`.
        quick: (repetitions, seconds) of a quick run.
        too_few: Reason why the benchmark needs `least` ranks, for the error; empty: any number is enough.
        least: Smallest number of ranks, used if `too_few` is not empty; default 2.
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
        self.arguments = self_start.make_parser(f"benchmarks {name}", description, ranks, 1800)
        self.add("out", type=Path, default=Path("bench-results"), metavar="DIR", help="for results [bench-results]")
        self._quick: dict[str, float] = {}
        if repeats is not None:
            self.number("repeats", repeats, "number of repetitions; the median is reported", quick=quick[0])
        if seconds is not None:
            self.number("seconds", seconds, f"seconds for {of}", quick=quick[1], metavar="S")

    def add(self, name: str, **settings: Any) -> None:
        """Add an option.

        Args:
            name: Name of the option without dashes.
            **settings: Keyword arguments of `ArgumentParser.add_argument`.
        """
        self.arguments.add_argument(f"--{name}", **settings)

    def number(self, name: str, usual: float, text: str, *, quick: float | None = None, metavar: str = "N") -> None:
        """Add an option that is a number.

        Args:
            name: Name of the option without dashes.
            usual: Default; its type is that of the option.
            text: Description for `--help`.
            quick: Default in a quick run; None: `usual`.
            metavar: Placeholder of the value in `--help`.
        """
        self.add(name, type=type(usual), default=usual, metavar=metavar, help=f"{text} [{usual:g}]")
        if quick is not None:
            self._quick[name] = quick

    def names(self, name: str, known: Collection[str], text: str, *, noun: str = "contender", by: str = ",") -> None:
        """Add an option that is a list of known names.

        Args:
            name: Name of the option without dashes.
            known: Valid names.
            text: Description for `--help`.
            noun: Noun for a name in errors, default "contender".
            by: Separator of the names, default a comma.
        """

        def read(line: str) -> list[str]:
            asked = [each.strip() for each in line.split(by)]
            for each in asked:
                if each not in known:
                    there = f"{by} ".join(known)
                    raise argparse.ArgumentTypeError(f"there is no {noun} {each!r}; use one of {there}")
            return asked

        self.add(name, type=read, metavar=f"A{by}B", help=text)

    def model(self) -> None:
        """Add the options for the sizes of a GPT; the function `gpt` converts them to a section [model]."""
        for key, (value, quick) in _GPT.items():
            self.number(key, value, f"model.{key}", quick=quick)

    def device(self, text: str) -> None:
        """Add the option `--device`, with `text` at the start of its description; see `asked_for_device`."""
        kinds = "auto (an accelerator if there is one), cpu, cuda, xpu or another kind [cpu]"
        self.add("device", default="cpu", metavar="KIND", help=f"{text}: {kinds}")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the command line and return the options; only rank 0 prints an error."""
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
    """Return the section [model] with the sizes from the options of `BenchmarkParser.model`."""
    return {"name": "gpt", **{key: getattr(options, key) for key in _GPT}}


def run(parser: BenchmarkParser, measure: Measure, report: MakeReport, arguments: Sequence[str]) -> int:
    """Measure at each rank count, write the report, and return the exit code.

    Args:
        parser: Name and options of the benchmark.
        measure: Function (world, options) that measures at one rank count. Collective; the result on rank 0 consists of
            JSON values.
        report: Function (results by number of ranks, options) that returns the report.
        arguments: Arguments of the command line.
    """
    options, name = parser.parse(arguments), parser.name
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if not self_start.is_launched() and load > _BUSY * cores:
        print(f"mpitrain: other programs keep this machine busy (load {load:.1f}, {cores} cores); expect wrong results")

    def part(world: Communicator) -> dict[str, Any]:
        if parser.too_few and world.size < parser.least:
            raise InputError(f"{parser.too_few}; use at least {parser.least} ranks", agreed=True)
        return {"facts": facts(world), "result": measure(world, options)}

    def keep(parts: dict[int, Any]) -> None:
        results = {ranks: each["result"] for ranks, each in parts.items()}
        header = {ranks: each["facts"] for ranks, each in parts.items()}
        values = values_of(name, report(results, options), header, options.quick)
        print("written: " + ", ".join(map(str, write(values, results, options.out))))

    return self_start.run_measurement(["-m", "benchmarks", name, *arguments], options, name, part, keep)


def run_on_hosts(name: str, arguments: Sequence[str], limit: float, *settings: str) -> tuple[int, Values]:
    """Run a benchmark on hosts of this machine, and return (exit code, content of its JSON file, empty if it failed).

    The hosts are network namespaces, which need root; see tests/cluster/namespace_hosts.py.

    Args:
        name: Name of the benchmark.
        arguments: Arguments of the benchmark.
        limit: Seconds after which the ranks are terminated.
        settings: Options of namespace_hosts.py, such as the ranks of each host; by default three hosts with two ranks.
    """
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as folder:
        job = [sys.executable, "tests/cluster/namespace_hosts.py", *settings, "env", "-u", "MPI4PY_RC_INITIALIZE"]
        job += [sys.executable, "-m", "benchmarks", name, *arguments, "--out", folder]
        environment = os.environ | {"MPIEXEC_TIMEOUT": f"{limit:.0f}"}
        code = subprocess.run(job, cwd=ROOT, env=environment, check=False).returncode
        return code, {} if code else json.loads(Path(folder, f"BENCH-{name}.json").read_text(encoding="utf-8"))


def timed(
    world: Communicator, what: str, contenders: Mapping[str, Any], options: argparse.Namespace, *, begins: bool = True
) -> dict[str, Times]:
    """Time contenders in turns, and print the medians on rank 0. Collective.

    Args:
        world: Communicator of all ranks.
        what: Name of the measurement in the printed line; empty: print nothing.
        contenders: `Contender` by name; a plain function is called once per measurement.
        options: Options of the command, with `repeats` and optionally `seconds`.
        begins: If false, this rank only waits for what others begin; see `measure_in_turns`.

    Returns:
        Times of each contender, by name.
    """
    every = {n: one if isinstance(one, Contender) else Contender(one, single=True) for n, one in contenders.items()}
    budget = getattr(options, "seconds", math.inf)
    times = measure_in_turns(world, every, options.repeats, budget, begins=begins)
    if what:
        say(world, f"{what}: " + ", ".join(f"{name} {of.median * 1e3:.3g} ms" for name, of in times.items()))
    return times


def summaries(times: Mapping[str, Times]) -> dict[str, dict[str, float]]:
    """Return the median and best seconds of each contender, as JSON values."""
    return {name: {"median": of.median, "best": of.best} for name, of in times.items()}


def maxima(world: Communicator, values: Iterable[float]) -> list[float]:
    """Return the maximum of each value over the ranks. Collective.

    Args:
        world: Communicator of all ranks.
        values: Values of this rank.
    """
    largest = np.array([*values], dtype=float)
    world.all_reduce(largest, "max")
    return list(largest.tolist())


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress standard output in the `with` block."""
    with redirect_stdout(io.StringIO()):
        yield


def say(world: Communicator, text: str) -> None:
    """Print a line about the progress of the benchmark, on rank 0 only.

    Args:
        world: Communicator of all ranks.
        text: Text of the line, after the number of ranks.
    """
    if world.rank == 0:
        print(f"  {world.size} ranks, {text}", flush=True)
