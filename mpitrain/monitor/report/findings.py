"""Figures that follow from a run's files: time by part of a step, stragglers, memory, bytes sent; series made short."""

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
from mpitrain.monitor.report.reading import CATEGORIES, OWN, PARTS, Column, MeasuredRank, RunRecord
from mpitrain.monitor.run_files import axis_of
from mpitrain.storage.text import short, spoken

LARGEST = 1e300  # of a metric that can be drawn
PERCENTILES = (50, 90, 99, 100)


def metric_columns(run: RunRecord) -> dict[str, Column]:
    """Of each metric of held-out samples the values, one a step; NaN where it was not measured.

    What was measured by a job that was killed, at steps that are not there any more or again, is left out.
    """
    steps, found = run.columns.step, dict[str, Column]()
    for moment in run.moments:
        told = moment.told.get("metrics")
        at = int(np.searchsorted(steps, moment.step))
        if moment.kind != "evaluate" or not isinstance(told, dict) or at == len(steps) or steps[at] != moment.step:
            continue
        for name, value in told.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST:
                found.setdefault(name, np.full(len(steps), np.nan))[at] = value
    return found


def kept(values: Column, most: int = 1500) -> NDArray[np.int64]:
    """Which points to draw of a series: the smallest and the largest of each stretch, the first and the last.

    Args:
        values: Shape (n,); NaN is no point.
        most: About how many points to keep.

    Returns:
        Rising indices.
    """
    (finite,) = np.nonzero(np.isfinite(values))
    if len(finite) <= most:
        return finite
    found = {int(finite[0]), int(finite[-1])}
    for stretch in np.array_split(finite, most // 2):
        found.add(int(stretch[np.argmin(values[stretch])]))
        found.add(int(stretch[np.argmax(values[stretch])]))
    return np.array(sorted(found))


def trend(x: Column, values: Column, points: int = 120) -> tuple[Column, Column]:
    """The median of each of so many stretches, at the middle of its x.

    Args:
        x: Shape (n,).
        values: Shape (n,); NaN is no point.
        points: How many stretches.

    Returns:
        Two columns of at most `points` values.
    """
    (finite,) = np.nonzero(np.isfinite(values))
    stretches = [s for s in np.array_split(finite, points) if len(s)]
    middles, medians = (np.array([float(np.median(of[s])) for s in stretches]) for of in (x, values))
    return middles, medians


def histogram(values: Column, bins: int = 40, among: Sequence[Column] = ()) -> tuple[Column, Column, int]:
    """How often which values came, up to the 99.5th percentile, or five times the median where that is less.

    Args:
        values: Shape (n,), finite.
        bins: At most so many.
        among: All columns that are drawn beside each other, this one too: they get the same edges.

    Returns:
        Shares of all values (bins,), edges (bins + 1,), and how many values lie above the last edge.
    """
    columns = list(among) or [values]
    low = min(float(c.min()) for c in columns)
    high = max(min(float(np.percentile(c, 99.5)), 5 * float(np.median(c))) for c in columns)
    if high <= low:
        low, high = low * 0.95, low * 1.05 or 1.0
    counts, edges = np.histogram(values, bins=max(5, min(bins, max(map(len, columns)) // 3)), range=(low, high))
    return counts / len(values), edges, int(np.sum(values > high))


def percentiles(values: Column) -> dict[int, float]:
    """The values below which so many of a hundred lie; of 100 the largest."""
    return {p: float(np.percentile(values, p)) for p in PERCENTILES}


def chosen(values: Sequence[float], most: int = 16) -> list[int]:
    """Which of many ranks to show: all of few; else that with the least, the median and the most.

    Args:
        values: Of each rank.
        most: Up to so many all are shown.

    Returns:
        Rising indices into `values`.
    """
    if len(values) <= most:
        return list(range(len(values)))
    order = np.argsort(values, kind="stable")
    return sorted({int(order[0]), int(order[(len(order) - 1) // 2]), int(order[-1])})


def last_finite(values: Column) -> float:
    """Return the last value that is a number; NaN where none is."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def thinned(values: Column, most: int) -> Column:
    """At most so many of some rising values, evenly, with the first and the last."""
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(int))]


def means_between(rank: MeasuredRank, part: str, steps: Column) -> Column:
    """Seconds a step of a part, from each of some steps (but the first, which ends what is before it) to the next.

    Args:
        rank: What a rank measured.
        part: Of a step.
        steps: Rising, shape (n,); the ranks of a job have measured different groups of steps.

    Returns:
        Shape (n,): the mean over the steps up to each.
    """
    begin = rank.step[0] - rank.steps[0]
    sums = np.append(0.0, np.cumsum(np.nan_to_num(rank.seconds[part])))
    edges = np.append(min(begin, steps[0] - 1), steps)
    return np.diff(np.interp(edges, np.append(begin, rank.step), sums)) / np.diff(edges)


def held_at(rank: MeasuredRank, category: str, steps: Column) -> Column:
    """Bytes that a rank held at some steps: what it told last, or first of all.

    Args:
        rank: What a rank measured.
        category: Of memory.
        steps: Rising, shape (n,).

    Returns:
        Shape (n,); NaN where the rank told nothing.
    """
    (told,) = np.nonzero(np.isfinite(rank.memory[category]))
    if not len(told):
        return np.full(len(steps), np.nan)
    return rank.memory[category][told[np.maximum(np.searchsorted(rank.step[told], steps, side="right") - 1, 0)]]


SLOWER = 1.1  # a rank that computes so many times as long as the median one is a straggler
STATES = ("parameters", "gradients", "states")  # the categories that have a formula


@dataclass(frozen=True)
class MemoryUse:
    """What a rank held at most, and what it should hold.

    Attributes:
        rank: The rank.
        held: Bytes by category, where their sum was the largest.
        expected: Bytes by category, by formula.
        resident: Most bytes of the process in host memory.
        device: Most bytes on its device; 0 without one.
    """

    rank: MeasuredRank
    held: dict[str, float]
    expected: dict[str, float]
    resident: float
    device: float

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return sum(self.held.values())


@dataclass(frozen=True)
class SentRow:
    """What one operation sends along one axis, a step and rank, as the mean over ranks.

    Attributes:
        operation, axis, algorithm: Names of the operation, of its communicator, and of the algorithm.
        calls: Calls of the operation.
        inside, between: Bytes to ranks of the same node, and of others.
        most: Bytes of the rank that sends most.
    """

    operation: str
    axis: str
    algorithm: str
    calls: float
    inside: float
    between: float
    most: float


def parts_a_step(rank: MeasuredRank) -> dict[str, float]:
    """Seconds a step by part, as the mean over the steps that a rank measured."""
    steps = float(rank.steps.sum())
    return {part: float(np.nansum(rank.seconds[part])) / steps for part in PARTS}


def own_seconds(rank: MeasuredRank) -> float:
    """Seconds a step in which a rank waits for nobody: data, forward, backward, optimizer."""
    parts = parts_a_step(rank)
    return sum(parts[part] for part in OWN)


def stage(rank: MeasuredRank) -> int:
    """A rank's pipeline stage: ranks of different stages have different things to do."""
    header = rank.header
    return header.stage if header.stage is not None else ([*header.coordinates, 0, 0])[1]


def stragglers(run: RunRecord) -> dict[int, str]:
    """Ranks that compute longer than the median of those with the same part of the model, the slowest first.

    Returns:
        What there is to say, by the number of the rank.
    """
    found: list[tuple[float, int, str]] = []
    for number in {stage(rank) for rank in run.workers}:
        ranks = [rank for rank in run.workers if stage(rank) == number]
        if len(ranks) < 2:
            continue
        parts = [parts_a_step(rank) for rank in ranks]
        own = [sum(p[name] for name in OWN) for p in parts]
        usual = median_low(own)  # of two ranks, one can be the straggler
        typical = {name: median(p[name] for p in parts) for name in PARTS}
        for rank, mine, seconds in zip(ranks, parts, own, strict=True):
            if seconds > SLOWER * usual > 0:
                part = max(OWN, key=lambda name, mine=mine, typical=typical: mine[name] - typical[name])  # type: ignore[misc]
                host = f" on {rank.header.host}" if rank.header.host else ""
                sentence = (
                    f"Rank {rank.rank}{host} is a straggler: it computes {seconds * 1e3:.1f} ms a step, "
                    f"{seconds / usual - 1:.0%} longer than the median rank ({usual * 1e3:.1f} ms). It loses most in "
                    f"{part} ({(mine[part] - typical[part]) * 1e3:+.1f} ms). "
                    f"It waits {mine['communication'] * 1e3:.1f} ms for communication, "
                    f"the median rank {typical['communication'] * 1e3:.1f} ms."
                )
                found.append((seconds / usual, rank.rank, sentence))
    return {rank: sentence for _, rank, sentence in sorted(found, reverse=True)}


def memory_use(run: RunRecord) -> list[MemoryUse]:
    """What each rank of the last job held at most, of those that told."""
    found = []
    for rank in run.ranks:
        table = np.array([np.nan_to_num(rank.memory[name]) for name in CATEGORIES])
        if not table.any():
            continue
        at = int(np.argmax(table.sum(axis=0)))
        held = {name: float(table[row, at]) for row, name in enumerate(CATEGORIES)}
        host, device = (float(np.nanmax(np.append(rank.memory[name], 0.0))) for name in ("host", "device"))
        expected = {name: float(rank.header.expected_memory.get(name, math.nan)) for name in STATES}
        found.append(MemoryUse(rank, held, expected, host, device))
    return found


def traffic(run: RunRecord) -> list[SentRow]:
    """What each operation sends, the largest first."""
    by_kind: dict[tuple[str, str, str], list[list[float]]] = {}
    for rank in run.ranks:
        steps = float(rank.steps.sum())
        for kind, figures in rank.sent.items():
            by_kind.setdefault(kind, []).append((figures / steps).tolist())
    found = []
    for kind, of in by_kind.items():
        calls, inside, between = (sum(column) / len(run.ranks) for column in zip(*of, strict=True))
        found.append(SentRow(*kind, calls, inside, between, max(f[1] + f[2] for f in of)))
    return sorted(found, key=lambda t: -(t.inside + t.between))


def sent_along(run: RunRecord, axis: str) -> tuple[float, float]:
    """Bytes a rank sends a step along an axis of the mesh, inside nodes and between them, as means over the ranks."""
    rows = [row for row in traffic(run) if axis_of(row.axis) == axis]
    return sum(row.inside for row in rows), sum(row.between for row in rows)


def expected_traffic(run: RunRecord) -> dict[str, float]:
    """Bytes a rank sends a step by formula, by axis, as the mean over ranks."""
    axes = {axis for rank in run.ranks for axis in rank.header.expected_bytes}
    return {axis: sum(r.header.expected_bytes.get(axis, 0.0) for r in run.ranks) / len(run.ranks) for axis in axes}


def findings(run: RunRecord) -> list[str]:
    """What a person should know of a run, in sentences."""
    return [*_course(run), *_times(run), *_memory(run), *_bytes(run)]


def _course(run: RunRecord) -> list[str]:
    told = []
    for start, after in zip_longest(run.starts, run.starts[1:]):
        if start.outcome in ("killed", "failed"):
            redone = f"; the next start went on from step {after.first_step:,}" if after is not None else ""
            message = f" ({start.message})" if start.outcome == "failed" and start.message else ""
            # what a killed one did last may not have reached its files
            ended = "was killed, at step {} or later" if start.outcome == "killed" else "failed after step {}"
            told.append(f"Start {start.number} {ended.format(f'{start.last_step:,}')}{message}{redone}.")
    for moment in run.moments:
        if moment.kind == "lost":
            ranks = moment.told.get("ranks")
            names = ", ".join(map(str, ranks)) if isinstance(ranks, list) else "unknown"
            seconds = moment.told.get("recovered_s")
            after_s = f"; the run went on after {seconds:.1f} s" if isinstance(seconds, (int, float)) else ""
            told.append(f"Ranks were lost at step {moment.step:,}: {names}{after_s}.")
    skipped = int(run.columns.skipped.sum())
    if skipped:
        told.append(f"{skipped:,} of {len(run.columns.step):,} steps made no update.")
    return told


def _times(run: RunRecord) -> list[str]:
    if not run.ranks:
        return []
    late = list(stragglers(run).values())
    told = late[:5]
    if len(late) > 5:
        told.append(f"{len(late) - 5} more ranks are slower than the median by a tenth or more.")
    if not told and len(run.workers) > 1:
        told.append("No rank is a straggler: none computes a tenth longer than the median rank.")
    servers = [rank.rank for rank in run.ranks if rank.serves]
    if servers:
        which = "Rank {} only serves, and is" if len(servers) == 1 else "Ranks {} only serve, and are"
        told.append(f"{which.format(', '.join(map(str, servers)))} not compared with those that train.")
    parts = [parts_a_step(rank) for rank in run.workers]
    whole = sum(sum(p.values()) for p in parts)
    if whole > 0:
        share = sum(p["communication"] for p in parts) / whole
        told.append(f"Ranks wait {share:.0%} of their time for communication that nothing hides.")
    return told


def _memory(run: RunRecord) -> list[str]:
    uses = memory_use(run)
    if not uses:
        return []
    largest = max(uses, key=lambda use: use.total)
    told = f"Rank {largest.rank.rank} holds most memory: {largest.total / 1e6:,.1f} MB at its peak"
    by_formula = sum(v for v in largest.expected.values() if math.isfinite(v))
    if by_formula <= 0:
        return [told + "."]
    states = sum(largest.held[name] for name in STATES)
    return [
        f"{told}, {states / 1e6:,.1f} MB of it parameters, gradients and optimizer states; "
        f"the formula says {by_formula / 1e6:,.1f} MB ({states / by_formula - 1:+.1%})."
    ]


def _bytes(run: RunRecord) -> list[str]:
    told, expected = [], expected_traffic(run)
    for axis, formula in sorted(expected.items()):
        sent = sum(sent_along(run, axis))
        if formula > 0:
            told.append(
                f"A rank sends {sent / 1e6:,.4g} MB a step along {axis}; "
                f"the formula says {formula / 1e6:,.4g} MB ({sent / formula - 1:+.1%})."
            )
    return told


# -- Several runs side by side: short names, what their configurations differ in, key figures with ratios


LONGEST_NAME = 28  # characters
_MISSING, _NONE = "-", np.empty(0)


@dataclass(frozen=True)
class Named:
    """A run and its name in charts and tables."""

    name: str
    run: RunRecord


def short_names(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder, no two the same.

    Args:
        folders: Folders of runs.

    Returns:
        The last part of each path; more of it where that does not tell them apart, and a number where nothing does.
    """
    paths = [folder.resolve().parts for folder in folders]
    names: list[str] = []
    for mine in paths:
        ends = (mine[-n:] for n in range(1, len(mine) + 1))
        end = next((end for end in ends if sum(other[-len(end) :] == end for other in paths) == 1), mine)
        name = "/".join(end) if len(set(paths)) == len(paths) else mine[-1]
        names.append(name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :])
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def loss_label(runs: Sequence[Named]) -> str:
    """Return "loss" with its unit, where all runs recorded the same one."""
    units = {str(named.run.facts.get("loss_unit") or "") for named in runs}
    return f"loss ({units.pop() if len(units) == 1 and units != {''} else 'unit of the model'})"


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings as one table: {"train": {"steps": 10}} becomes {"train.steps": 10}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{above}{name}."))
        else:
            found[f"{above}{name}"] = value
    return found


def changed_settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings of a run that are not at their defaults.

    Returns:
        The run's value and the default by section.key; of a setting that is known no more the default is None.
    """
    defaults = flat(Config().model_dump(mode="json"))
    return {
        name: (value, defaults.get(name))
        for name, value in flat(config).items()
        if name not in defaults or defaults[name] != value
    }


def differing_settings(runs: Sequence[Named]) -> list[list[str]]:
    """Return the settings that are not the same in all runs, but for run.dir: section.key, then a text for each run."""
    tables = [flat(named.run.config) for named in runs]
    names = [n for n in dict.fromkeys(name for table in tables for name in table) if n != "run.dir"]
    rows = [[name, *(spelled(table.get(name, _MISSING)) for table in tables)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def spelled(value: Any) -> str:
    """A setting as TOML writes it, nearly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(spelled(v) for v in value) + "]"
    return '""' if value == "" else str(value)


def key_figures(runs: Sequence[Named]) -> list[list[str]]:
    """Return a table of what runs are compared by: losses, metrics, speed, memory of the fullest rank, bytes sent.

    Returns:
        Rows of a name, then each run's figure with its ratio to the first one's; none of what no run tells.
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
            (f"held-out {spoken(name)}", [last_finite(m.get(name, _NONE)) for m in measured], "{:.4g}".format)
            for name in dict.fromkeys(name for metrics in measured for name in metrics)
        ),
        ("median step (ms)", [float(np.median(c.seconds)) * 1e3 for c in columns], "{:,.1f}".format),
        ("samples/s in steps", [c.rate(c.samples) for c in columns], short),
        ("tokens/s in steps", [c.rate(c.tokens) or math.nan for c in columns], short),
        ("ranks", [float(c.world_size[-1]) for c in columns], "{:,.0f}".format),
        *(
            (f"{name} (MB)", [use.held[name] / 1e6 if use else math.nan for use in uses], "{:,.2f}".format)
            for name in CATEGORIES
        ),
        ("bytes sent a step and rank (MB)", sent, "{:,.3f}".format),
    ]
    return [
        [name, *(_beside(value, values[0] if number else math.nan, text) for number, value in enumerate(values))]
        for name, values, text in figures
        if any(map(math.isfinite, values))
    ]


def _beside(value: float, first: float, text: Callable[[float], str]) -> str:
    """Return a figure as text, with its ratio to another one."""
    if not math.isfinite(value):
        return _MISSING
    return text(value) + (f" ({value / first:.2f}x)" if math.isfinite(first) and first else "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, one under the other."""
    header, *rows = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    padded = ([f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in (header, *rows))
    return "\n".join("  " + "   ".join(row).rstrip() for row in padded)


def comparison(runs: Sequence[Named]) -> str:
    """The text of several runs: what their configurations differ in, then their key figures, a column a run."""
    names = [named.name for named in runs]
    different = differing_settings(runs)
    settings = table(["settings", *names], different) if different else "  their configurations are the same"
    return "\n\n".join([f"{len(runs)} runs", settings, table(["figures", *names], key_figures(runs))])
