"""Tables, targets and the plot of the collectives benchmark, from its results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.bench.report import Report, ReportTable, ReportTarget
from mpitrain.bench.timing import geometric_mean, rank_correlation
from mpitrain.comm.collectives.tuning import describe

KIB, MIB = 1 << 10, 1 << 20
_LARGE = 256 * KIB  # the sizes that geometric means are over begin here
_EQUAL = 0.1  # times of algorithms that differ by less are no order
_NOISE = 0.95  # what is called "not slower": two runs of the same thing differ by as much

Result = dict[str, Any]  # of one rank count


def report(results: dict[int, Result], options: argparse.Namespace) -> Report:
    tables: list[ReportTable] = []
    for ranks, result in results.items():
        if "tuned" in result:
            tables.append(_tuned(ranks, result))
        else:
            tables += [_all_reduce(ranks, result), _halves(ranks, result), _others(ranks, result)]
        tables.append(_algorithms(ranks, result))
    if options.tune:
        print(_tuning_sentence(results))
        return Report("Collectives, tuned", tables, draw=lambda figure: _draw_algorithms(figure, results))
    targets = [target for ranks, result in results.items() for target in _targets(ranks, result)]
    return Report("Collectives", [_means(results), *tables], targets, lambda figure: _draw(figure, results))


# -- ratios ----------------------------------------------------------------------------------------------


def ratios(
    result: Result, operation: str, slower: str, faster: str, wanted: Callable[[int], bool] = lambda size: True
) -> dict[int, float]:
    """slower / faster by size, where both were measured and the size is wanted."""
    found = {}
    for text, times in result[operation].items():
        if wanted(int(text)) and slower in times and faster in times:
            found[int(text)] = times[slower]["median"] / times[faster]["median"]
    return found


def _large(size: int) -> bool:
    return size >= _LARGE


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

    def over(operation: str, slower: str, faster: str, least: int = _LARGE, most: int = 1 << 62) -> dict[int, float]:
        return ratios(result, operation, slower, faster, lambda size: least <= size <= most)

    arena, tensor = "all_reduce in an arena", "all_reduce of ordinary tensors"
    if result["nodes"] > 1:
        at = 16 * MIB
        return [
            every(f"{arena}, library / ours, 16 MiB", over("all_reduce", "library", "arena", at, at), 4),
            every(f"{arena}, gloo / ours, 16 MiB", over("all_reduce", "gloo", "arena", at, at), 2),
        ]
    copied = over("all_reduce", "arena", "memcpy", 4 * MIB)
    return [
        mean(f"{arena}, library / ours, from 256 KiB", over("all_reduce", "library", "arena"), 3),
        mean(f"{arena}, gloo / ours, from 256 KiB", over("all_reduce", "gloo", "arena"), 15),
        every(f"{arena}, ours / memcpy, from 4 MiB", copied, most=1.15 if ranks <= 2 else 1.4),
        mean(f"{tensor}, library / ours, from 1 MiB", over("all_reduce", "library", "tensor", MIB), 1.5),
        every(f"{tensor}, library / ours, from 64 KiB", over("all_reduce", "library", "tensor", 64 * KIB), _NOISE),
        _overhead(ranks, result),
        mean("fp16 in an arena, library's fp16 / ours, from 256 KiB", over("halves", "library", "fp16"), 10),
        mean("bf16 in an arena, library's fp16 / ours, from 256 KiB", over("halves", "library", "bf16"), 10),
        mean("reduce_scatter in an arena, library / ours, from 256 KiB", over("reduce_scatter", "library", "arena"), 2),
        mean("all_gather in an arena, library / ours, from 256 KiB", over("all_gather", "library", "arena"), 2),
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
    columns = (
        "ranks", "library / arena", "gloo / arena", "arena / memcpy", "library / tensor",
        "library fp16 / fp16", "library fp16 / bf16", "reduce_scatter: library / arena", "all_gather: library / arena",
    )  # fmt: skip
    rows = []
    for ranks, r in results.items():
        values = [
            ratios(r, "all_reduce", "library", "arena", _large),
            ratios(r, "all_reduce", "gloo", "arena", _large),
            ratios(r, "all_reduce", "arena", "memcpy", lambda size: size >= 4 * MIB),
            ratios(r, "all_reduce", "library", "tensor", lambda size: size >= MIB),
            ratios(r, "halves", "library", "fp16", _large),
            ratios(r, "halves", "library", "bf16", _large),
            ratios(r, "reduce_scatter", "library", "arena", _large),
            ratios(r, "all_gather", "library", "arena", _large),
        ]
        rows.append([ranks, *(geometric_mean(list(v.values())) if v else None for v in values)])
    note = "Geometric means of time ratios over the sizes from 256 KiB up (memcpy: 4 MiB, ordinary tensors: 1 MiB)."
    return ReportTable("Geometric means", columns, rows, note)


def _all_reduce(ranks: int, result: Result) -> ReportTable:
    columns = (
        "size", "arena µs", "tensor µs", "library µs", "gloo µs", "memcpy µs",
        "library / arena", "gloo / arena", "arena / memcpy", "library / tensor",
    )  # fmt: skip
    rows: list[list[Any]] = []
    for size, times in result["all_reduce"].items():
        us = {name: t["median"] * 1e6 for name, t in times.items()}
        rows.append(
            [
                size_text(int(size)),
                *(us[name] for name in ("arena", "tensor", "library", "gloo", "memcpy")),
                us["library"] / us["arena"],
                us["gloo"] / us["arena"],
                us["arena"] / us["memcpy"],
                us["library"] / us["tensor"],
            ]
        )
    return ReportTable(f"all_reduce, fp32, {ranks} ranks", columns, rows, "Medians over the repetitions.")


def _halves(ranks: int, result: Result) -> ReportTable:
    columns = ("size", "fp16 µs", "bf16 µs", "library fp16 µs", "library / fp16", "library / bf16")
    rows: list[list[Any]] = []
    for size, times in result["halves"].items():
        us = {name: t["median"] * 1e6 for name, t in times.items()}
        theirs = us.get("library")
        rows.append(
            [
                size_text(int(size)), us["fp16"], us["bf16"], theirs,
                theirs / us["fp16"] if theirs else None, theirs / us["bf16"] if theirs else None,
            ]
        )  # fmt: skip
    return ReportTable(f"all_reduce in an arena, 16-bit, {ranks} ranks", columns, rows)


def _others(ranks: int, result: Result) -> ReportTable:
    names = ("reduce_scatter", "all_gather")
    columns = ["size"]
    for name in names:
        columns += [f"{name} arena µs", f"{name} library µs", "library / arena"]
    rows: list[list[Any]] = []
    for size in result["reduce_scatter"]:
        row: list[Any] = [size_text(int(size))]
        for name in names:
            ours, theirs = (result[name][size][who]["median"] * 1e6 for who in ("arena", "library"))
            row += [ours, theirs, theirs / ours]
        rows.append(row)
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


def _tuned(ranks: int, result: Result) -> ReportTable:
    rules = result["tuned"]["rules"]
    rows = [[place.rpartition("/")[0], describe([(limit, name) for limit, name in rules[place]])] for place in rules]
    return ReportTable(f"Rules, {ranks} ranks", ("place", "algorithm"), rows)


def _tuning_sentence(results: dict[int, Result]) -> str:
    path = next(iter(results.values()))["tuned"]["path"]
    return (
        f"The rules are in {path}; jobs on this machine with this MPI use them from now on "
        "(python -m mpitrain.doctor shows them; delete the file to go back to the built-in ones)."
    )


def size_text(nbytes: int) -> str:
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
        for name in ("arena", "tensor", "library", "gloo", "memcpy"):
            points = [(int(size), by[name]["median"]) for size, by in result["all_reduce"].items()]
            times.loglog(*_columns([(x, y * 1e6) for x, y in points]), marker=".", label=name)
        for name in ("library", "gloo", "memcpy"):
            relative.loglog(
                *_columns(list(ratios(result, "all_reduce", name, "arena").items())), marker=".", label=name
            )
        relative.axhline(1, color="black", linewidth=0.8)
        times.set(title=f"all_reduce, fp32, {ranks} ranks", ylabel="µs")
        relative.set(xlabel="bytes", ylabel="times as long as ours in an arena")
        times.legend()
        relative.legend()


def _draw_algorithms(figure: Any, results: dict[int, Result]) -> None:
    figure.set_size_inches(5 * len(results), 4)
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (ranks, result) in zip(axes, results.items(), strict=True):
        for name in next(iter(result["algorithms"].values())):
            points = [(int(size), by[name]["median"] * 1e6) for size, by in result["algorithms"].items()]
            axis.loglog(*_columns(points), marker=".", label=name)
        axis.set(title=f"in an arena, {ranks} ranks", xlabel="bytes", ylabel="µs")
        axis.legend()


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
