"""The guard of speed: ratios to peers, beside those recorded for this kind of machine.

    python tests/benchmarks/guarding.py             print each ratio beside the recorded one
    python tests/benchmarks/guarding.py --record    and record those of this kind of machine

A kind of machine is the model of its processor, the number of cores and the MPI library. A ratio is our time over that
of a peer in the same run, so a larger one is worse. Ratios are recorded on an otherwise idle machine, after a change
that is meant to change them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded_ratios.json")
RECORD = "python tests/benchmarks/guarding.py --record"
WORSE = 4 / 3  # a ratio that is larger than the recorded one by this factor is too large
LEAST = (
    0.2  # smaller recorded ratios count as this one: some of MPI's operations take two or three times as long at times
)
STEADY = 4  # rounds, of five, that must be too large
BUSY = 0.1  # share of the cores that other programs may use

Rounds = Mapping[str, Sequence[float]]  # the ratio of each round, by name of the ratio


@dataclass(frozen=True)
class Run:
    """A run of the benchmark `guard`.

    Attributes:
        kind: Kind of machine.
        rounds: The ratio of each round, by name.
        others: Share of the cores that other programs used meanwhile.
        seconds: Duration.
    """

    kind: str
    rounds: Rounds
    others: float
    seconds: float = 0.0


def measure(names: Sequence[str] = ()) -> Run:
    """Run the benchmark on a case for each of these names of ratios; by default on all cases."""
    cases = sorted({name.partition(":")[0] for name in names})
    began, busy, used = time.monotonic(), _busy_seconds(), _children_seconds()
    parent = ROOT / "bench-results"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="guard-", dir=parent) as folder:
        command = [sys.executable, "-m", "benchmarks", "guard", "--out", folder]
        command += ["--only", ";".join(cases)] if cases else []
        # Each run measures the algorithms itself. Memory that this frees makes MPI's reduce_scatter twice as fast, so a
        # run with a table that exists already has other ratios.
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        values = json.loads(Path(folder, "BENCH-guard.json").read_text())
    [facts], [rounds] = values["header"].values(), values["results"].values()
    others = _busy_seconds() - busy - (_children_seconds() - used)
    took = time.monotonic() - began
    kind = f"{facts['machine']} {_generation()}, {facts['cores']} cores, {facts['MPI']}"
    return Run(kind, rounds, others / took / (os.cpu_count() or 1), took)


def recorded(kind: str) -> dict[str, float]:
    """Return the ratios recorded for a kind of machine, by name; empty if there are none."""
    return json.loads(RECORDED.read_text()).get(kind, {}) if RECORDED.exists() else {}


def limit(expected: Mapping[str, float], name: str) -> float:
    """Return the largest ratio that is not too large; infinity if none is recorded."""
    return WORSE * max(LEAST, expected.get(name, float("inf")))


def too_large(expected: Mapping[str, float], rounds: Rounds) -> list[str]:
    """Return the names of ratios whose median is a third larger than recorded."""
    return [name for name, of in rounds.items() if median(of) > limit(expected, name)]


def slower(expected: Mapping[str, float], runs: Sequence[Rounds]) -> tuple[list[str], list[str]]:
    """Return the names of ratios that are too large in all runs, (certainly, with rounds that disagree).

    Args:
        expected: Recorded ratios by name.
        runs: Rounds of a first run, and of a second one with the ratios that were too large in the first.
    """
    names = [name for name in runs[-1] if all(name in too_large(expected, rounds) for rounds in runs)]
    certain = [
        name
        for name in names
        if all(sum(ratio > limit(expected, name) for ratio in rounds[name]) >= STEADY for rounds in runs)
    ]
    return certain, [name for name in names if name not in certain]


def lines(expected: Mapping[str, float], rounds: Rounds) -> str:
    """Return one line for each ratio: median, least and most of its rounds, and the recorded one."""
    width = max(map(len, rounds), default=0)
    rows = []
    for name, of in rounds.items():
        known = f"recorded {expected[name]:.2f}" if name in expected else "not recorded"
        rows.append(f"{name:{width}}  {median(of):6.2f}  ({min(of):.2f} to {max(of):.2f})  {known}")
    return "\n".join(rows)


def record(runs: Sequence[Run]) -> None:
    """Record the worse ratio of some runs for their kind of machine."""
    every = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    names = runs[0].rounds
    every[runs[0].kind] = {name: round(max(median(run.rounds[name]) for run in runs), 3) for name in names}
    RECORDED.write_text(json.dumps(every, indent=1, ensure_ascii=False) + "\n")


def _generation() -> str:
    """Return family, model and cache of the processor, because one name may stand for processors of several years."""
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    known = {name.strip(): value.strip() for name, _, value in pairs}
    return "/".join(known.get(name, "?") for name in ("cpu family", "model", "cache size"))


def _busy_seconds() -> float:
    """Return the seconds that all cores of this machine have worked since it was started; see proc_stat(5)."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print the ratios; with --record, record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs, of which the worse ratio counts [1]")
    options = parser.parse_args()
    runs = [measure() for _ in range(options.runs)]
    for run in runs:
        print(f"{run.kind}; other programs used {run.others:.0%} of the cores, in {run.seconds:.0f} s")
        print(lines(recorded(run.kind), run.rounds))
    if options.record:
        record(runs)
        print(f"recorded in {RECORDED.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
