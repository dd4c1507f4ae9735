"""All benchmarks in turn, each in a process of its own; the results are kept and written into README.md and docs.

Every benchmark runs by its own command, with a time limit. What it has measured becomes a result file in
benchmarks/results, which names the commit, and the tables and plots of the pages are written from these files
(docs/figures.py). At the end, each target is listed as met, missed or not measured, beside the commit at which it was
measured. A quick run keeps nothing and leaves the pages as they are.

Options that this command does not know are passed on: `python -m benchmarks all --only step --ranks 2,4`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.runner.report import CODE, ROOT, Values, git, keep, measured_at, read_results, target_line
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError

_PLANNED = ("growth", "plan")  # benchmarks that read a profile of this machine


def main(arguments: Sequence[str]) -> int:
    """Run benchmarks, write their results into the pages, print all targets, and return the exit code."""
    options, passed_on = _parser().parse_known_args(arguments)
    names = _selected(options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    fresh: dict[str, Values] = {}
    for name in names:
        if _measure(name, options, passed_on):
            fresh[name] = json.loads((options.out / f"BENCH-{name}.json").read_text(encoding="utf-8"))
            if not options.quick:
                keep(fresh[name], passed_on)
    if not options.quick:
        subprocess.run([sys.executable, ROOT / "docs/figures.py"], check=True)
    _print_targets(fresh if options.quick else read_results(), names if options.quick else _selected(None))
    failed = [name for name in names if name not in fresh]
    if failed:
        print(f"mpitrain: without a result: {', '.join(failed)}; see the messages above", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="A,B", help="only these benchmarks [all]")
    parser.add_argument("--quick", action="store_true", help="show that every benchmark works, and keep nothing")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds for each benchmark [3600]")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="[bench-results]")
    return parser


def _selected(only: str | None) -> list[str]:
    """Return the benchmarks that `--only` selects; by default all, without this command and the guard."""
    from benchmarks.__main__ import names

    known = [name for name in names() if name not in ("all", "guard")]
    selected = known if only is None else [name.strip() for name in only.split(",")]
    for name in selected:
        if name not in known:
            raise InputError(f"there is no benchmark {name!r}; use some of {', '.join(known)}")
    return selected


def _measure(name: str, options: argparse.Namespace, passed_on: Sequence[str]) -> bool:
    """Run a benchmark, and return True if it has measured everything.

    Args:
        name: Name of the benchmark.
        options: Options of this command.
        passed_on: Options of the benchmark.
    """
    print(f"== {name}", flush=True)
    quick = ["--quick"] if options.quick else []
    command = ["benchmarks", name, "--out", str(options.out), *quick, *passed_on]
    if name in _PLANNED and "--machine" not in passed_on:
        if not (machine := _machine(options.out, options.limit, *quick)):
            return False
        command += ["--machine", machine]
    return _run(command, options.limit)


@cache
def _machine(out: Path, limit: float, *quick: str) -> str:
    """Measure the profile of this machine once, and return its file; empty if that failed."""
    file = str(out / "machine.toml")
    return file if _run(["mpitrain.plan", "--measure", "--out", file, *quick], limit) else ""


def _run(command: Sequence[str], limit: float) -> bool:
    """Run `python -m COMMAND` and return True if it ended well within `limit` seconds; else end it and say so."""
    with subprocess.Popen([sys.executable, "-m", *command]) as job:
        try:
            if job.wait(limit):
                print(f"mpitrain: {' '.join(command)} ended with exit code {job.returncode}", file=sys.stderr)
        except subprocess.TimeoutExpired:
            print(f"mpitrain: {' '.join(command)} did not end within {limit:g} s (--limit)", file=sys.stderr)
        finally:
            if job.poll() is None:
                job.terminate()  # it ends its ranks first
    return job.returncode == 0


def _print_targets(results: Mapping[str, Values], names: Sequence[str]) -> None:
    """Print for each benchmark the commit of its result, how many commits have changed the code since, and targets."""
    for name in names:
        if name not in results:
            print(f"\n{name}: not measured")
            continue
        first = next(iter(results[name]["header"].values()))
        later = git("rev-list", "--count", f"{first['commit']}..HEAD", "--", *CODE) if first["commit"] else ""
        print(f"\n{name}: {measured_at(results[name])}, {later or 'unknown'} commits ago")
        print("\n".join(f"  {target_line(target)}" for target in results[name]["targets"]) or "  no targets")
