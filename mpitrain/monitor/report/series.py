"""Long series made short enough to draw, and what sums them up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpitrain.monitor.report.records import Column, MeasuredRank, RunRecord

MOST_POINTS = 1500  # of a line
TREND = 120  # points of the line that shows where a noisy one goes
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


def kept(values: Column, most: int = MOST_POINTS) -> NDArray[np.int64]:
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


def trend(x: Column, values: Column, points: int = TREND) -> tuple[Column, Column]:
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
    return (
        np.array([float(np.median(x[s])) for s in stretches]),
        np.array([float(np.median(values[s])) for s in stretches]),
    )


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
    number = max(5, min(bins, max(map(len, columns)) // 3))
    counts, edges = np.histogram(values, bins=number, range=(low, high))
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
    ends = np.append(begin, rank.step)
    sums = np.append(0.0, np.cumsum(np.nan_to_num(rank.seconds[part])))
    edges = np.append(min(begin, steps[0] - 1), steps)
    return np.diff(np.interp(edges, ends, sums)) / np.diff(edges)


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
    at = np.searchsorted(rank.step[told], steps, side="right") - 1
    return rank.memory[category][told[np.maximum(at, 0)]]
