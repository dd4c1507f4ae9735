"""Means, deviations and medians of columns, of blocks of rows in which some numbers are missing (nan)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Of each column, the numbers that are not missing.

    Attributes:
        count: How many there are.
        mean: Their mean; 0 where there are none.
        deviation: The root of the mean squared distance from it.
    """

    count: Doubles
    mean: Doubles
    deviation: Doubles


def moments(blocks: Iterable[Floats], columns: int) -> Moments:
    """The moments of all rows together, in float64.

    Blocks are joined as in the pairwise algorithm of Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample
    Variance": sums of squares would lose the deviation of columns whose mean is large beside it.

    Args:
        blocks: Each [rows, columns].
        columns: How many there are.
    """
    count, mean, squares = np.zeros(columns), np.zeros(columns), np.zeros(columns)
    for block in blocks:
        known = np.isfinite(block)
        here, x = known.sum(0), block.astype(np.float64)
        own = np.where(known, x, 0).sum(0) / np.maximum(here, 1)
        off, both = own - mean, np.maximum(count + here, 1)
        squares += (np.where(known, x - own, 0) ** 2).sum(0) + off**2 * count * here / both
        mean += off * here / both
        count += here
    return Moments(count, mean, np.sqrt(squares / np.maximum(count, 1)))


def medians(blocks: Iterable[Floats], columns: int) -> tuple[Doubles, Doubles]:
    """How many numbers each column has, and their median (0 where there are none). All are held in memory."""
    x = np.concatenate([np.zeros((0, columns), np.float32), *blocks])
    found = [column[np.isfinite(column)] for column in x.T]
    counts = np.array([len(column) for column in found], np.float64)
    return counts, np.array([np.median(column) if len(column) else 0.0 for column in found], np.float64)
