"""The report of the benchmark `waiting`: tokens a second, seconds to a loss, and losses over time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from benchmarks.runner.report import Report, ReportTable, ReportTarget

SYNC = "sync"
SMOOTHED = 10  # steps whose mean loss counts
_WANTED = 1.8  # times sync's tokens a second
_BEFORE = 0.1  # of the steps, that do not count for tokens a second
_JUDGED = ("server, staleness 4", "server, asynchronous", "server, asynchronous, apart")

Found = dict[str, Any]  # of a contender, see `waiting`


def report(results: dict[int, dict[str, Found]], options: argparse.Namespace) -> Report:
    """Tables, targets and the plot of the results by rank count."""
    tables, targets = [], []
    for ranks, found in results.items():
        given, base = given_loss(found), tokens_per_second(found[SYNC])
        rows = []
        for name, of in found.items():
            rate = tokens_per_second(of)
            to = seconds_to(of, given)
            losses = (smoothed(of["loss"])[-1], of["held_out_loss"])
            rows.append((name, rate, rate / base, to, *losses, of["staleness_max"]))
            if name in _JUDGED and options.slowed == 3.0:
                what = f"{ranks - 1} workers, one slowed 3 times, {name}: tokens a second against sync"
                told = f"{rate / base:.2f} times"
                targets.append(ReportTarget(what, f"at least {_WANTED} times", told, rate / base >= _WANTED))
        columns = ["contender", "tokens/s", "/ sync", f"s to a loss of {given:.2f}", "last loss", "held-out loss"]
        columns.append("most staleness, steps")
        slow = f"rank 1 slowed {options.slowed:g} times" if options.slowed > 1 else "no rank is slow"
        note = (
            f"{ranks - 1} workers, {slow}, {len(found[SYNC]['loss'])} steps of {found[SYNC]['tokens']} tokens each. "
            f"Losses are means of {SMOOTHED} steps; the given one is the lowest that all contenders reach."
        )
        tables.append(ReportTable(f"{ranks - 1} workers", columns, rows, note))
    return Report("Training with a slow rank", tables, targets, partial(_draw, results=results))


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


def given_loss(found: dict[str, Found]) -> float:
    """The loss whose time is measured: the lowest that all contenders reach."""
    return max(min(smoothed(of["loss"])) for of in found.values())


def seconds_to(of: Found, loss: float) -> float | None:
    """Seconds until a loss was reached; None where it was not."""
    times = accumulate(of["seconds"])
    reached = (at for at, found in zip(times, smoothed(of["loss"]), strict=True) if found <= loss)
    return next(reached, None)


def _draw(figure: Any, results: dict[int, dict[str, Found]]) -> None:
    """Loss over seconds of each contender, and the loss that is to be reached."""
    figure.set_size_inches(7 * len(results), 5)
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (ranks, found) in zip(axes, results.items(), strict=True):
        for name, of in found.items():
            axis.plot(list(accumulate(of["seconds"])), smoothed(of["loss"]), label=name)
        axis.axhline(given_loss(found), color="black", linewidth=0.8)
        axis.set(title=f"{ranks - 1} workers", xlabel="seconds", ylabel="loss, nats a token")
        axis.legend()
