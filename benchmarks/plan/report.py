"""The report of the benchmark `plan`: predicted beside measured, and how far apart they are."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks.runner.report import Report, ReportTable, ReportTarget

MIB = 1 << 20
_TIME, _MEMORY, _RANKS, _CHOICE = 0.15, 0.10, 0.90, 1.05  # what is wanted
Row = dict[str, Any]


def report(results: dict[int, dict[str, list[Row]]], options: argparse.Namespace) -> Report:
    """Tables, targets and the plot of the results by rank count."""
    tables = [table(ranks, model, rows) for ranks, found in results.items() for model, rows in found.items()]
    every = [row for found in results.values() for rows in found.values() for row in rows]
    groups = [rows for found in results.values() for rows in found.values()]
    times = [abs(row["seconds"] / seconds(row) - 1) for row in every]
    memory = [abs(predicted_bytes(row) / row["measured"]["memory"] - 1) for row in every]
    models = dict.fromkeys(model for found in results.values() for model in found)
    of_models = [[row for found in results.values() for row in found.get(model, [])] for model in models]
    order = [_order(rows) for rows in of_models]
    agreed = [_agreement(rows) for rows in of_models if len(rows[0]["measured"]["seconds"]) > 1]
    chosen = [seconds(rows[0]) / min(map(seconds, rows)) for rows in groups]
    targets = [
        _target(f"step time of {len(every)} layouts, median distance", _TIME, statistics.median(times)),
        _target("memory, median distance", _MEMORY, statistics.median(memory)),
        ReportTarget(
            f"rank correlation of predicted and measured step times, of {', '.join(models)} at all numbers of ranks",
            f"at least {_RANKS}",
            _told(order) + (f" (two rounds of measuring agree by {_told(agreed)})" if agreed else ""),
            min(order) >= _RANKS,
        ),
        ReportTarget(
            "the plan's first choice against the best measured",
            f"at most {_CHOICE}",
            _told(chosen),
            max(chosen) <= _CHOICE,
        ),
    ]
    return Report("Predicted and measured steps", tables, targets, partial(_draw, results=results))


def _told(figures: Sequence[float]) -> str:
    """The worst first seen by eye, and all of them."""
    return ", ".join(f"{figure:.2f}" for figure in figures)


def _target(what: str, wanted: float, found: float) -> ReportTarget:
    return ReportTarget(what, f"at most {wanted:.0%}", f"{found:.1%}", found <= wanted)


def seconds(row: Row) -> float:
    """The measured time of a step: the median of the round in which the machine had least else to do."""
    return float(min(map(statistics.median, row["measured"]["seconds"])))


def _order(rows: Sequence[Row]) -> float:
    return correlation([row["seconds"] for row in rows], [seconds(row) for row in rows])


def predicted_bytes(row: Row) -> float:
    """The predicted bytes in use of a rank, above those it had before there was a model."""
    return float(sum(nbytes for kind, nbytes in row["memory"].items() if kind not in ("process", "allocator")))


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of two lists of figures without ties that matter."""
    places = [np.argsort(np.argsort(np.asarray(figures))) for figures in (first, second)]
    if len(first) < 3:
        return 1.0
    return float(np.corrcoef(places[0], places[1])[0, 1])


def _agreement(rows: Sequence[Row]) -> float:
    """How well two rounds of measuring have the same order, on average: no prediction can be expected to do better."""
    rounds = zip(*([statistics.median(each) for each in row["measured"]["seconds"]] for row in rows), strict=True)
    return statistics.mean(correlation(one, other) for one, other in combinations(map(list, rounds), 2))


def table(ranks: int, model: str, rows: Sequence[Row]) -> ReportTable:
    """Of one model at one number of ranks."""
    columns = ["layout", "choice", "predicted, ms", "measured, ms", "ratio", "predicted, MiB", "measured, MiB", "ratio"]
    columns += ["account, MiB"]
    cells = []
    for row in sorted(rows, key=seconds):
        nbytes, own = predicted_bytes(row), row["measured"]["memory"]
        choice = row["choice"] + 1 if row["choice"] >= 0 else None
        time = (1e3 * row["seconds"], 1e3 * seconds(row), row["seconds"] / seconds(row))
        account = sum(row["measured"]["account"].values()) / MIB
        cells.append((row["layout"], choice, *time, nbytes / MIB, own / MIB, nbytes / own, account))
    note = f"Rank correlation {_order(rows):.2f}. Memory is what is in use above that of a process without a model."
    return ReportTable(f"{model}, {ranks} ranks", columns, cells, note)


def _draw(figure: Any, results: dict[int, dict[str, list[Row]]]) -> None:
    """Predicted over measured times, and bytes, by model."""
    from matplotlib.ticker import LogLocator

    figure.set_size_inches(11, 5)
    left, right = figure.subplots(1, 2)
    models = list(dict.fromkeys(model for found in results.values() for model in found))
    markers = dict(zip(results, "osD^v<>", strict=False))
    for number, model in enumerate(models):
        for ranks, found in results.items():
            rows = found.get(model, [])
            style = {"color": f"C{number}", "marker": markers[ranks], "linestyle": "", "alpha": 0.7}
            label = f"{model}, {ranks} ranks"
            left.plot([1e3 * seconds(r) for r in rows], [1e3 * r["seconds"] for r in rows], label=label, **style)
            right.plot([r["measured"]["memory"] / MIB for r in rows], [predicted_bytes(r) / MIB for r in rows], **style)
    for axis, unit, band in ((left, "ms a step", _TIME), (right, "MiB a rank", _MEMORY)):
        low, high = min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])
        ends = [max(low, high / 1e3), high]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.fill_between(ends, [e * (1 - band) for e in ends], [e * (1 + band) for e in ends], color="grey", alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
            scale.set_major_formatter("{x:g}")
            scale.set_minor_formatter("")
    left.legend(fontsize=7)
