"""Results derived from a run's files: time categories of a step, stragglers, memory, bytes sent, thinned series."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.config.settings import Config
from mpitrain.errors import printable
from mpitrain.monitor.report.reading import BUSY, CATEGORIES, TIME_CATEGORIES, Column, MeasuredRank, RunRecord
from mpitrain.monitor.run_files import axis_of
from mpitrain.storage.text import short, with_spaces

LARGEST = 1e300  # largest metric that can be drawn
PERCENTILES = (50, 90, 99, 100)


def metric_columns(run: RunRecord) -> dict[str, Column]:
    """Return the values of each held-out metric, one per step; NaN where it was not measured.

    Values measured by a killed job at steps that were later repeated or do not exist are left out.
    """
    steps, columns = run.columns.step, dict[str, Column]()
    for moment in run.events:
        metrics = moment.details.get("metrics")
        at = int(np.searchsorted(steps, moment.step))
        if moment.kind != "evaluate" or not isinstance(metrics, dict) or at == len(steps) or steps[at] != moment.step:
            continue
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST:
                columns.setdefault(name, np.full(len(steps), np.nan))[at] = value
    return columns


def points_to_draw(values: Column, most: int = 1500) -> NDArray[np.int64]:
    """Return the points of a series to draw: smallest and largest of each interval, and the first and the last.

    Args:
        values: Values, shape (n,); NaN is no point.
        most: Approximate number of points to keep.

    Returns:
        Rising indices into `values`.
    """
    (finite,) = np.nonzero(np.isfinite(values))
    if len(finite) <= most:
        return finite
    points = {int(finite[0]), int(finite[-1])}
    for interval in np.array_split(finite, most // 2):
        points.add(int(interval[np.argmin(values[interval])]))
        points.add(int(interval[np.argmax(values[interval])]))
    return np.array(sorted(points))


def trend(x: Column, values: Column, points: int = 120) -> tuple[Column, Column]:
    """Return the median of each of `points` intervals, at the median of its x values.

    Args:
        x: Positions, shape (n,).
        values: Values, shape (n,); NaN is no point.
        points: Number of intervals.

    Returns:
        Positions and medians, at most `points` values each.
    """
    (finite,) = np.nonzero(np.isfinite(values))
    intervals = [s for s in np.array_split(finite, points) if len(s)]
    middles, medians = (np.array([float(np.median(of[s])) for s in intervals]) for of in (x, values))
    return middles, medians


def histogram(values: Column, bins: int = 40, among: Sequence[Column] = ()) -> tuple[Column, Column, int]:
    """Return a histogram of values up to the 99.5th percentile, or up to five times the median if that is less.

    Args:
        values: Finite values, shape (n,).
        bins: Largest number of bins.
        among: All columns drawn in the same chart, including this one, so that they get the same edges.

    Returns:
        Shares of all values, shape (bins,); edges, shape (bins + 1,); and the number of values above the last edge.
    """
    columns = list(among) or [values]
    low = min(float(c.min()) for c in columns)
    high = max(min(float(np.percentile(c, 99.5)), 5 * float(np.median(c))) for c in columns)
    if high <= low:
        low, high = low * 0.95, low * 1.05 or 1.0
    counts, edges = np.histogram(values, bins=max(5, min(bins, max(map(len, columns)) // 3)), range=(low, high))
    return counts / len(values), edges, int(np.sum(values > high))


def percentiles(values: Column) -> dict[int, float]:
    """Return the percentiles `PERCENTILES` of the values; the 100th is the largest value."""
    return {p: float(np.percentile(values, p)) for p in PERCENTILES}


def ranks_to_show(values: Sequence[float], most: int = 16) -> list[int]:
    """Return which ranks to show: all of them if there are few, else those with the least, median and largest value.

    Args:
        values: One value per rank.
        most: Largest number of ranks for which all are shown.

    Returns:
        Rising indices into `values`.
    """
    if len(values) <= most:
        return list(range(len(values)))
    order = np.argsort(values, kind="stable")
    return sorted({int(order[0]), int(order[(len(order) - 1) // 2]), int(order[-1])})


def median_finite(values: Column) -> float:
    """Return the median of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def last_finite(values: Column) -> float:
    """Return the last finite value, or NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def thin_out(values: Column, most: int) -> Column:
    """Return at most `most` of some rising values, evenly spaced, with the first and the last.

    Args:
        values: Rising values, shape (n,).
        most: Largest number of values to return.
    """
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(int))]


def means_between(rank: MeasuredRank, category: str, steps: Column) -> Column:
    """Return the seconds per step of a time category, averaged between consecutive elements of `steps`.

    Args:
        rank: Measurements of a rank.
        category: Time category.
        steps: Rising step numbers, shape (n,). The ranks of a job may have measured different groups of steps.

    Returns:
        Means over the steps after the previous element, up to and including this one, shape (n,). The first element
        counts from the rank's first measured step.
    """
    begin = rank.step[0] - rank.steps[0]
    sums = np.append(0.0, np.cumsum(np.nan_to_num(rank.seconds[category])))
    edges = np.append(min(begin, steps[0] - 1), steps)
    return np.diff(np.interp(edges, np.append(begin, rank.step), sums)) / np.diff(edges)


def bytes_at(rank: MeasuredRank, category: str, steps: Column) -> Column:
    """Return the bytes that a rank held at given steps, from its last measurement before each, or else its first.

    Args:
        rank: Measurements of a rank.
        category: Category of memory.
        steps: Rising step numbers, shape (n,).

    Returns:
        Bytes, shape (n,); NaN if the rank has no measurement.
    """
    (rows,) = np.nonzero(np.isfinite(rank.memory[category]))
    if not len(rows):
        return np.full(len(steps), np.nan)
    return rank.memory[category][rows[np.maximum(np.searchsorted(rank.step[rows], steps, side="right") - 1, 0)]]


SLOWER = 1.1  # a rank whose compute time exceeds this multiple of the median is a straggler
STATES = ("parameters", "gradients", "states")  # categories for which there is a formula


@dataclass(frozen=True)
class MemoryUse:
    """Peak memory of a rank, and the memory predicted by formula."""

    rank: MeasuredRank
    peak: dict[str, float]  # bytes by category at the time when their sum was largest
    expected: dict[str, float]  # bytes by category, predicted by formula
    resident: float  # peak resident host memory of the process in bytes
    device: float  # peak memory on the device in bytes; 0 without a device

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class SentRow:
    """Traffic of one operation along one axis, per step and rank, as the mean over ranks."""

    # operation, axis, algorithm: names of the operation, its communicator and its algorithm
    operation: str
    axis: str
    algorithm: str
    calls: float
    # inside, between: bytes to ranks of the same node, and of other nodes
    inside: float
    between: float
    most: float  # bytes of the rank that sends most


def seconds_per_step(rank: MeasuredRank) -> dict[str, float]:
    """Return the mean seconds per step that a rank spent in each of `TIME_CATEGORIES`."""
    steps = float(rank.steps.sum())
    return {name: float(np.nansum(rank.seconds[name])) / steps for name in TIME_CATEGORIES}


def busy_seconds(rank: MeasuredRank) -> float:
    """Return the seconds per step in which a rank does not wait for others: data, forward, backward, optimizer."""
    times = seconds_per_step(rank)
    return sum(times[name] for name in BUSY)


def stage(rank: MeasuredRank) -> int:
    """Return the pipeline stage of a rank; ranks of different stages do different work."""
    header = rank.header
    return header.stage if header.stage is not None else ([*header.coordinates, 0, 0])[1]


def stragglers(run: RunRecord) -> dict[int, str]:
    """Return the ranks that compute longer than the median of their pipeline stage, the slowest first.

    Returns:
        Sentence about each straggler, by rank.
    """
    entries: list[tuple[float, int, str]] = []
    for number in {stage(rank) for rank in run.workers}:
        ranks = [rank for rank in run.workers if stage(rank) == number]
        if len(ranks) < 2:
            continue
        times = [seconds_per_step(rank) for rank in ranks]
        own_times = [sum(each[name] for name in BUSY) for each in times]
        usual = median_low(own_times)  # the lower median, so that one of two ranks can be a straggler
        typical = {name: median(each[name] for each in times) for name in TIME_CATEGORIES}
        for rank, mine, seconds in zip(ranks, times, own_times, strict=True):
            if seconds > SLOWER * usual > 0:
                worst = max(BUSY, key=lambda name, mine=mine, typical=typical: mine[name] - typical[name])  # type: ignore[misc]
                host = f" on {rank.header.host}" if rank.header.host else ""
                sentence = (
                    f"Rank {rank.rank}{host} is a straggler: it computes {seconds * 1e3:.1f} ms per step, "
                    f"{seconds / usual - 1:.0%} longer than the median rank ({usual * 1e3:.1f} ms). The largest "
                    f"difference is in {worst} ({(mine[worst] - typical[worst]) * 1e3:+.1f} ms). "
                    f"It waits {mine['communication'] * 1e3:.1f} ms for communication, "
                    f"the median rank {typical['communication'] * 1e3:.1f} ms."
                )
                entries.append((seconds / usual, rank.rank, sentence))
    return {rank: sentence for _, rank, sentence in sorted(entries, reverse=True)}


def memory_use(run: RunRecord) -> list[MemoryUse]:
    """Return the peak memory of each rank of the last job that measured it."""
    uses = []
    for rank in run.ranks:
        table = np.array([np.nan_to_num(rank.memory[name]) for name in CATEGORIES])
        if not table.any():
            continue
        at = int(np.argmax(table.sum(axis=0)))
        peak_bytes = {name: float(table[row, at]) for row, name in enumerate(CATEGORIES)}
        host, device = (float(np.nanmax(np.append(rank.memory[name], 0.0))) for name in ("host", "device"))
        expected = {name: float(rank.header.expected_memory.get(name, math.nan)) for name in STATES}
        uses.append(MemoryUse(rank, peak_bytes, expected, host, device))
    return uses


def traffic(run: RunRecord) -> list[SentRow]:
    """Return the traffic of each operation, the largest first."""
    by_kind: dict[tuple[str, str, str], list[list[float]]] = {}
    for rank in run.ranks:
        steps = float(rank.steps.sum())
        for kind, figures in rank.sent.items():
            by_kind.setdefault(kind, []).append((figures / steps).tolist())
    rows = []
    for kind, per_rank in by_kind.items():
        calls, inside, between = (sum(column) / len(run.ranks) for column in zip(*per_rank, strict=True))
        rows.append(SentRow(*kind, calls, inside, between, max(f[1] + f[2] for f in per_rank)))
    return sorted(rows, key=lambda t: -(t.inside + t.between))


def sent_along(run: RunRecord, axis: str) -> tuple[float, float]:
    """Return the bytes a rank sends per step along a mesh axis, to its own node and to others, as means over the ranks.

    Args:
        run, axis: Contents of a run folder, and name of the axis.
    """
    rows = [row for row in traffic(run) if axis_of(row.axis) == axis]
    return sum(row.inside for row in rows), sum(row.between for row in rows)


def expected_traffic(run: RunRecord) -> dict[str, float]:
    """Return the bytes a rank sends per step by axis, predicted by formula, as the mean over ranks."""
    axes = {axis for rank in run.ranks for axis in rank.header.expected_bytes}
    return {axis: sum(r.header.expected_bytes.get(axis, 0.0) for r in run.ranks) / len(run.ranks) for axis in axes}


def findings(run: RunRecord) -> list[str]:
    """Return sentences about a run that its user should know."""
    sentences = _course_sentences(run) + _time_sentences(run) + _arithmetic_sentences(run)
    return sentences + _memory_sentences(run) + _traffic_sentences(run)


def _course_sentences(run: RunRecord) -> list[str]:
    sentences = []
    for start, after in zip_longest(run.starts, run.starts[1:]):
        if start.outcome in ("killed", "failed"):
            redone = f"; the next start resumed from step {after.first_step:,}" if after is not None else ""
            cause = start.message if start.outcome == "failed" else after and after.facts.get("message")
            message = f" ({cause})" if cause else ""
            # the last steps of a killed job may be missing from its files
            ended = "was killed, at step {} or later" if start.outcome == "killed" else "failed after step {}"
            sentences.append(f"Start {start.number} {ended.format(f'{start.last_step:,}')}{message}{redone}.")
    for moment in run.events:
        if moment.kind == "lost":
            ranks = moment.details.get("ranks")
            names = ", ".join(map(str, ranks)) if isinstance(ranks, list) else "unknown"
            seconds = moment.details.get("recovered_s")
            after_s = f"; the run continued after {seconds:.1f} s" if isinstance(seconds, (int, float)) else ""
            sentences.append(f"Ranks were lost at step {moment.step:,}: {names}{after_s}.")
    skipped = int(run.columns.skipped.sum())
    if skipped:
        sentences.append(f"{skipped:,} of {len(run.columns.step):,} steps did not update the parameters.")
    return sentences


def _arithmetic_sentences(run: RunRecord) -> list[str]:
    """Compare the counted operations of the last step with the formula 6 N D."""
    flops, tokens = run.columns.flops[-1], run.columns.tokens[-1]
    formula = 6 * float(run.facts.get("parameters") or 0) * tokens
    if not flops > 0 or not formula > 0:
        return []
    return [
        f"A step needs {short(flops)}FLOP of useful arithmetic, as counted; 6 x parameters x tokens is "
        f"{short(formula)}FLOP ({flops / formula - 1:+.1%}), without attention's products."
    ]


def _time_sentences(run: RunRecord) -> list[str]:
    if not run.ranks:
        return []
    all_stragglers = list(stragglers(run).values())
    sentences = all_stragglers[:5]
    if len(all_stragglers) > 5:
        sentences.append(f"{len(all_stragglers) - 5} more ranks compute at least 10 % longer than the median rank.")
    if not sentences and len(run.workers) > 1:
        sentences.append("No rank is a straggler: none computes more than 10 % longer than the median rank.")
    servers = [rank.rank for rank in run.ranks if rank.serves]
    if servers:
        which = "Rank {} is a server and is" if len(servers) == 1 else "Ranks {} are servers and are"
        sentences.append(f"{which.format(', '.join(map(str, servers)))} not compared with the ranks that train.")
    times = [seconds_per_step(rank) for rank in run.workers]
    total = sum(sum(each.values()) for each in times)
    if total > 0:
        share = sum(each["communication"] for each in times) / total
        sentences.append(
            f"Ranks spend {share:.0%} of their time waiting for communication that computation does not hide."
        )
    return sentences


def _memory_sentences(run: RunRecord) -> list[str]:
    uses = memory_use(run)
    if not uses:
        return []
    largest = max(uses, key=lambda use: use.total)
    sentence = f"Rank {largest.rank.rank} uses the most memory: {largest.total / 1e6:,.1f} MB at its peak"
    by_formula = sum(v for v in largest.expected.values() if math.isfinite(v))
    if by_formula <= 0:
        return [sentence + "."]
    states = sum(largest.peak[name] for name in STATES)
    return [
        f"{sentence}. Parameters, gradients and optimizer states take {states / 1e6:,.1f} MB of it; "
        f"the formula predicts {by_formula / 1e6:,.1f} MB ({states / by_formula - 1:+.1%})."
    ]


def _traffic_sentences(run: RunRecord) -> list[str]:
    sentences, expected = [], expected_traffic(run)
    for axis, formula in sorted(expected.items()):
        sent = sum(sent_along(run, axis))
        if formula > 0:
            sentences.append(
                f"A rank sends {sent / 1e6:,.4g} MB per step along {axis}; "
                f"the formula predicts {formula / 1e6:,.4g} MB ({sent / formula - 1:+.1%})."
            )
    return sentences


# -- Comparison of several runs: short names, differences of their configurations, key figures with ratios


LONGEST_NAME = 28  # characters
_MISSING, _NONE = "-", np.empty(0)


@dataclass(frozen=True)
class NamedRun:
    """Run with its name in charts and tables."""

    name: str
    run: RunRecord


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a unique short name for each folder: the last part of its path, or more; equal paths are numbered."""
    paths = [folder.resolve().parts for folder in folders]
    names: list[str] = []
    for mine in paths:
        ends = (mine[-n:] for n in range(1, len(mine) + 1))
        end = next((end for end in ends if sum(other[-len(end) :] == end for other in paths) == 1), mine)
        name = "/".join(end) if len(set(paths)) == len(paths) else mine[-1]
        names.append(name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :])
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def loss_label(runs: Sequence[NamedRun]) -> str:
    """Return "loss" with its unit if all runs recorded the same unit."""
    units = {str(named.run.facts.get("loss_unit") or "") for named in runs}
    return f"loss ({units.pop() if len(units) == 1 and units != {''} else 'unit of the model'})"


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings as one table: {"train": {"steps": 10}} becomes {"train.steps": 10}.

    Args:
        values: Nested settings.
        above: Prefix of the keys, which ends with a dot unless it is empty.
    """
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            settings.update(flatten(value, f"{above}{name}."))
        else:
            settings[f"{above}{name}"] = value
    return settings


def changed_settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of a run that differ from their defaults, as pairs (value, default) by section.key.

    The default of an unknown setting is None.
    """
    defaults = flatten(Config().model_dump(mode="json"))
    return {
        name: (value, defaults.get(name))
        for name, value in flatten(config).items()
        if name not in defaults or defaults[name] != value
    }


def differing_settings(runs: Sequence[NamedRun]) -> list[list[str]]:
    """Return the settings other than run.dir that differ between runs: section.key, then one text per run."""
    tables = [flatten(named.run.config) for named in runs]
    names = [n for n in dict.fromkeys(name for table in tables for name in table) if n != "run.dir"]
    rows = [[name, *(toml_text(table.get(name, _MISSING)) for table in tables)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def toml_text(value: Any) -> str:
    """Return a setting approximately as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_text(v) for v in value) + "]"
    return '""' if value == "" else str(value)


def key_figures(runs: Sequence[NamedRun]) -> list[list[str]]:
    """Return a table to compare runs by: losses, metrics, speed, memory of the rank that uses most, bytes sent.

    Returns:
        Rows of a name and each run's value with its ratio to the first run's; rows without any value are left out.
    """
    columns = [named.run.columns for named in runs]
    measured = [metric_columns(named.run) for named in runs]
    uses = [max(memory_use(named.run), key=lambda use: use.total, default=None) for named in runs]
    sent = [sum(t.inside + t.between for t in traffic(n.run)) / 1e6 if n.run.ranks else math.nan for n in runs]
    figures: list[tuple[str, list[float], Callable[[float], str]]] = [
        ("steps", [float(c.step[-1]) for c in columns], "{:,.0f}".format),
        (f"final {loss_label(runs)}", [last_finite(c.loss) for c in columns], "{:.4f}".format),
        (f"held-out {loss_label(runs)}", [last_finite(c.held_out_loss) for c in columns], "{:.4f}".format),
        *(
            (f"held-out {with_spaces(name)}", [last_finite(m.get(name, _NONE)) for m in measured], "{:.4g}".format)
            for name in dict.fromkeys(name for metrics in measured for name in metrics)
        ),
        ("median step (ms)", [float(np.median(c.seconds)) * 1e3 for c in columns], "{:,.1f}".format),
        ("samples/s in steps", [c.rate(c.samples) for c in columns], short),
        ("tokens/s in steps", [c.rate(c.tokens) or math.nan for c in columns], short),
        ("median J per sample", [median_finite(c.j_per_sample) for c in columns], short),
        ("useful TFLOP/s per rank", [c.mean(c.tflops_per_rank) for c in columns], "{:.3g}".format),
        ("share of the peak (MFU)", [c.mean(c.mfu) for c in columns], "{:.1%}".format),
        ("ranks", [float(c.world_size[-1]) for c in columns], "{:,.0f}".format),
        *(
            (f"{name} (MB)", [use.peak[name] / 1e6 if use else math.nan for use in uses], "{:,.2f}".format)
            for name in CATEGORIES
        ),
        ("bytes sent per step and rank (MB)", sent, "{:,.3f}".format),
    ]
    return [
        [name, *(_with_ratio(value, values[0] if number else math.nan, text) for number, value in enumerate(values))]
        for name, values, text in figures
        if any(map(math.isfinite, values))
    ]


def _with_ratio(value: float, first: float, text: Callable[[float], str]) -> str:
    """Return a value as text, with its ratio to `first`."""
    if not math.isfinite(value):
        return _MISSING
    return text(value) + (f" ({value / first:.2f}x)" if math.isfinite(first) and first else "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with aligned columns.

    Args:
        header, rows: Titles of the columns, and cells of each row.
    """
    header, *rows = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    padded = ([f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in (header, *rows))
    return "\n".join("  " + "   ".join(row).rstrip() for row in padded)


def comparison(runs: Sequence[NamedRun]) -> str:
    """Return a text that compares runs: differences of their configurations, then key figures, one column per run."""
    names = [named.name for named in runs]
    different = differing_settings(runs)
    settings = table(["settings", *names], different) if different else "  the configurations are the same"
    return "\n\n".join([f"{len(runs)} runs", settings, table(["figures", *names], key_figures(runs))])
