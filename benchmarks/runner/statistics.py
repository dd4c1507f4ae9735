"""Statistics of times: means, correlations, and what a result tells of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mpitrain.speeds.timing import Times


def summaries(times: Mapping[str, Times]) -> dict[str, dict[str, float]]:
    """Return median and best seconds of each contender, as a result, which is JSON, holds them."""
    return {name: {"median": of.median, "best": of.best} for name, of in times.items()}


def geometric_mean(values: Sequence[float]) -> float:
    """nan for no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def rank_correlation(a: Sequence[float], b: Sequence[float], tolerance: float = 0.0) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing the mean of theirs. nan where one is constant.

    Args:
        a: Values.
        b: As many other values.
        tolerance: Positive values that differ by less than this fraction count as equal.
    """
    x, y = _ranks(a, tolerance), _ranks(b, tolerance)
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / norm if norm else math.nan


def _ranks(values: Sequence[float], tolerance: float) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    below = (array[None, :] * (1 + tolerance) < array[:, None]).sum(1)
    above = (array[None, :] > array[:, None] * (1 + tolerance)).sum(1)
    return (below + len(array) - above + 1) / 2
