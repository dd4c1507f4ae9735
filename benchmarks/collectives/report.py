"""Tables, targets and the plot of the collectives benchmark, from its results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.runner.report import Report, ReportTable, ReportTarget
from benchmarks.runner.statistics import geometric_mean, rank_correlation

KIB, MIB = 1 << 10, 1 << 20
_LARGE = 256 * KIB  # the sizes that geometric means are over begin here
_EQUAL = 0.1  # times of algorithms that differ by less are no order
_CONTENDERS = ("arena", "tensor", "library", "gloo", "memcpy")  # of all_reduce
_OTHERS = ("reduce_scatter", "all_gather")
_NOISE = 0.95  # what is called "not slower": two runs of the same thing differ by as much

Result = dict[str, Any]  # of one rank count


def report(results: dict[int, Result], options: argparse.Namespace) -> Report:
    """Tables, targets and the plot of the results by rank count."""
    tables: list[ReportTable] = []
    for ranks, result in results.items():
        tables += [_all_reduce(ranks, result), _halves(ranks, result), _others(ranks, result)]
        tables.append(_algorithms(ranks, result))
    targets = [target for ranks, result in results.items() for target in _targets(ranks, result)]
    return Report("Collectives", [_means(results), *tables], targets, lambda figure: _draw(figure, results))


# -- ratios ----------------------------------------------------------------------------------------------


def ratios(
    result: Result, operation: str, slower: str, faster: str, least: int = 0, most: float = math.inf
) -> dict[int, float]:
    """slower / faster by size, for sizes from least to most at which both were measured."""
    return {
        int(size): times[slower]["median"] / times[faster]["median"]
        for size, times in result[operation].items()
        if least <= int(size) <= most and slower in times and faster in times
    }


def _targets(ranks: int, result: Result) -> list[ReportTarget]:
    def mean(what: str, values: dict[int, float], least: float) -> ReportTarget:
        """A geometric mean that must reach `least`."""
        if not values:
            return ReportTarget(f"{ranks} ranks: {what}", f"≥ {least:g}", "not measured", None)
        reached = geometric_mean(list(values.values()))
        worst = min(values, key=values.__getitem__)
        text = f"{reached:.2f} (least {values[worst]:.2f} at {size_text(worst)})"
        return ReportTarget(f"{ranks} ranks: {what}", f"≥ {least:g}", text, reached >= least)

    def every(what: str, values: dict[int, float], least: float = -math.inf, most: float = math.inf) -> ReportTarget:
        """A ratio that must lie within bounds at every size."""
        wanted = f"≥ {least:g} at each size" if most == math.inf else f"≤ {most:g} at each size"
        if not values:
            return ReportTarget(f"{ranks} ranks: {what}", wanted, "not measured", None)
        worst = (min if most == math.inf else max)(values, key=values.__getitem__)
        text = f"{values[worst]:.2f} at {size_text(worst)} (mean {geometric_mean(list(values.values())):.2f})"
        return ReportTarget(f"{ranks} ranks: {what}", wanted, text, least <= values[worst] <= most)

    over = partial(ratios, result)
    arena, tensor = "all_reduce in an arena", "all_reduce of ordinary tensors"
    if result["nodes"] > 1:
        at = 16 * MIB
        return [
            every(f"{arena}, library / ours, 16 MiB", over("all_reduce", "library", "arena", at, at), 4),
            every(f"{arena}, gloo / ours, 16 MiB", over("all_reduce", "gloo", "arena", at, at), 2),
        ]
    copied = over("all_reduce", "arena", "memcpy", 4 * MIB)
    return [
        mean(f"{arena}, library / ours, from 256 KiB", over("all_reduce", "library", "arena", _LARGE), 3),
        mean(f"{arena}, gloo / ours, from 256 KiB", over("all_reduce", "gloo", "arena", _LARGE), 15),
        every(f"{arena}, ours / memcpy, from 4 MiB", copied, most=1.15 if ranks <= 2 else 1.4),
        mean(f"{tensor}, library / ours, from 1 MiB", over("all_reduce", "library", "tensor", MIB), 1.5),
        every(f"{tensor}, library / ours, from 64 KiB", over("all_reduce", "library", "tensor", 64 * KIB), _NOISE),
        _overhead(ranks, result),
        mean("fp16 in an arena, library's fp16 / ours, from 256 KiB", over("halves", "library", "fp16", _LARGE), 10),
        mean("bf16 in an arena, library's fp16 / ours, from 256 KiB", over("halves", "library", "bf16", _LARGE), 10),
        *(
            mean(f"{name} in an arena, library / ours, from 256 KiB", over(name, "library", "arena", _LARGE), 2)
            for name in _OTHERS
        ),
    ]


def _overhead(ranks: int, result: Result) -> ReportTarget:
    """Microseconds more than mpi4py's bare call, below 64 KiB; of best times, since the difference is small."""
    what, wanted = f"{ranks} ranks: all_reduce of ordinary tensors, ours - library, below 64 KiB", "≤ 10 µs"
    more = {
        int(size): (times["tensor"]["best"] - times["library"]["best"]) * 1e6
        for size, times in result["all_reduce"].items()
        if int(size) < 64 * KIB
    }
    if not more:
        return ReportTarget(what, wanted, "not measured", None)
    worst = max(more, key=more.__getitem__)
    return ReportTarget(what, wanted, f"{more[worst]:.1f} µs at {size_text(worst)}", more[worst] <= 10)


def correlation(result: Result, size: str) -> float:
    """Spearman's, of predicted with measured seconds of the algorithms. nan where none is faster than another."""
    measured, predicted = result["algorithms"][size], result["predicted"][size]
    names = sorted(set(measured) & set(predicted))
    return rank_correlation([predicted[n] for n in names], [measured[n]["median"] for n in names], _EQUAL)


# -- tables ----------------------------------------------------------------------------------------------


def _means(results: dict[int, Result]) -> ReportTable:
    """One row per rank count."""
    columns = {
        "library / arena": ("all_reduce", "library", "arena", _LARGE),
        "gloo / arena": ("all_reduce", "gloo", "arena", _LARGE),
        "arena / memcpy": ("all_reduce", "arena", "memcpy", 4 * MIB),
        "library / tensor": ("all_reduce", "library", "tensor", MIB),
        "library fp16 / fp16": ("halves", "library", "fp16", _LARGE),
        "library fp16 / bf16": ("halves", "library", "bf16", _LARGE),
        **{f"{name}: library / arena": (name, "library", "arena", _LARGE) for name in _OTHERS},
    }
    rows = []
    for ranks, result in results.items():
        values = [list(ratios(result, *what).values()) for what in columns.values()]
        rows.append([ranks, *(geometric_mean(v) if v else None for v in values)])
    note = "Geometric means of time ratios over the sizes from 256 KiB up (memcpy: 4 MiB, ordinary tensors: 1 MiB)."
    return ReportTable("Geometric means", ("ranks", *columns), rows, note)


def _rows(measured: Result, shown: Sequence[str], compared: Sequence[tuple[str, str]]) -> list[list[Any]]:
    """A row a size: the microseconds of each contender that is shown, and the ratios of those that are compared."""
    rows: list[list[Any]] = []
    for size, times in measured.items():
        us = {name: t["median"] * 1e6 for name, t in times.items()}
        found = (us[a] / us[b] if a in us else None for a, b in compared)
        rows.append([size_text(int(size)), *map(us.get, shown), *found])
    return rows


def _all_reduce(ranks: int, result: Result) -> ReportTable:
    compared = (("library", "arena"), ("gloo", "arena"), ("arena", "memcpy"), ("library", "tensor"))
    columns = ("size", *(f"{name} µs" for name in _CONTENDERS), *(f"{a} / {b}" for a, b in compared))
    rows = _rows(result["all_reduce"], _CONTENDERS, compared)
    return ReportTable(f"all_reduce, fp32, {ranks} ranks", columns, rows, "Medians over the repetitions.")


def _halves(ranks: int, result: Result) -> ReportTable:
    columns = ("size", "fp16 µs", "bf16 µs", "library fp16 µs", "library / fp16", "library / bf16")
    rows = _rows(result["halves"], ("fp16", "bf16", "library"), (("library", "fp16"), ("library", "bf16")))
    return ReportTable(f"all_reduce in an arena, 16-bit, {ranks} ranks", columns, rows)


def _others(ranks: int, result: Result) -> ReportTable:
    columns = ["size"]
    for name in _OTHERS:
        columns += [f"{name} arena µs", f"{name} library µs", "library / arena"]
    each = (_rows(result[name], ("arena", "library"), (("library", "arena"),)) for name in _OTHERS)
    rows = [[*scattered, *gathered[1:]] for scattered, gathered in zip(*each, strict=True)]
    return ReportTable(f"reduce_scatter and all_gather, fp32, {ranks} ranks", columns, rows)


def _algorithms(ranks: int, result: Result) -> ReportTable:
    names = list(next(iter(result["algorithms"].values())))
    columns = ["size", *(f"{name} µs" for name in names), "measured order", "predicted order", "Spearman"]
    rows: list[list[Any]] = []
    for size, times in result["algorithms"].items():
        predicted = result["predicted"][size]
        measured_order = sorted(times, key=lambda name: times[name]["median"])
        rows.append(
            [
                size_text(int(size)),
                *(times[name]["median"] * 1e6 for name in names),
                " ".join(measured_order),
                " ".join(sorted(predicted, key=predicted.__getitem__)),
                correlation(result, size),
            ]
        )
    found = [value for value in (correlation(result, size) for size in result["algorithms"]) if not math.isnan(value)]
    mean = f"{sum(found) / len(found):.2f}" if found else "unknown"
    note = f"Fastest first; times within {_EQUAL:.0%} of each other count as equal. Mean rank correlation {mean}."
    return ReportTable(f"all_reduce algorithms in an arena, {ranks} ranks, measured and simulated", columns, rows, note)


def size_text(nbytes: int) -> str:
    """A number of bytes as people write it."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


# -- plots -----------------------------------------------------------------------------------------------


def _draw(figure: Any, results: dict[int, Result]) -> None:
    """Above: times. Below: how many times as long as ours the peers take."""
    figure.set_size_inches(5 * len(results), 8)
    axes = figure.subplots(2, len(results), squeeze=False)
    for column, (ranks, result) in enumerate(results.items()):
        times, relative = axes[0][column], axes[1][column]
        for name in _CONTENDERS:
            points = [(int(size), by[name]["median"] * 1e6) for size, by in result["all_reduce"].items()]
            times.loglog(*zip(*points, strict=True), marker=".", label=name)
        for name in ("library", "gloo", "memcpy"):
            found = ratios(result, "all_reduce", name, "arena")
            relative.loglog(list(found), list(found.values()), marker=".", label=name)
        relative.axhline(1, color="black", linewidth=0.8)
        times.set(title=f"all_reduce, fp32, {ranks} ranks", ylabel="µs")
        relative.set(xlabel="bytes", ylabel="times as long as ours in an arena")
        times.legend()
        relative.legend()
