"""Which rows and files are held out: a function of their order alone, the same on every machine.

Rows are taken one from each stretch of about 1/fraction rows, at a place inside the stretch that is drawn from
the stretch's number. So the held-out rows are spread evenly (input sorted by class keeps its mix of classes) and
yet in step with no period of the input (classes that come in turn are not held out one-sidedly):

    rows       0 ....... 19 | 20 ....... 39 | 40 ...      fraction 0.05: stretches of 20 rows
    held out   *            |      *        |

The first stretch gives its first row (mix64(0) is 0), so that even a few rows have one held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.order import mix64
from mpitrain.data.writer import Block, Columns
from mpitrain.errors import InputError

T = TypeVar("T")
_FINEST = 10**6  # fractions are rounded to this denominator at most, so that row numbers times it fit 64 bits


def held_out_mask(start: int, count: int, fraction: float) -> npt.NDArray[np.bool_]:
    """True for the held-out ones of the rows start ... start+count-1; bool [count]. fraction: 0 to 0.5."""
    exact = Fraction(fraction).limit_denominator(_FINEST)
    if not exact:
        return np.zeros(count, np.bool_)
    p, q = exact.numerator, exact.denominator
    rows = np.arange(start, start + count, dtype=np.int64)
    stretch = rows * p // q
    first = -(-stretch * q // p)
    length = -(-(stretch + 1) * q // p) - first
    place = mix64(stretch.astype(np.uint64)) % length.astype(np.uint64)
    held: npt.NDArray[np.bool_] = rows - first == place.astype(np.int64)
    return held


def partition(
    rows: Callable[[T], Iterator[Columns]], train: T, test: T | None = None
) -> Callable[[float], Iterator[Block]]:
    """How a source's rows come to the splits.

    Args:
        rows: Reads rows, in blocks.
        train: What it reads them from.
        test: The same of the input's own test set; without one, some rows of `train` are held out.

    Returns:
        The `blocks` of a `Source`.
    """

    def blocks(held_out: float) -> Iterator[Block]:
        start = 0
        for columns in rows(train):
            held = held_out_mask(start, len(columns[0]), 0.0 if test else held_out)
            start += len(held)
            if held.any():
                yield HELD_OUT, tuple(column[held] for column in columns)
                columns = tuple(column[~held] for column in columns)
            if len(columns[0]):
                yield TRAIN, columns
        yield from ((HELD_OUT, columns) for columns in (rows(test) if test else ()))

    return blocks


def stream_rows(
    file: IO[bytes], dtype: np.dtype[Any], shape: Sequence[int], step: int, cut_off: str
) -> Iterator[npt.NDArray[Any]]:
    """Read the array that follows in a stream.

    Args:
        file: The stream.
        dtype: The array's dtype.
        shape: The array's shape.
        step: How many rows are read at a time.
        cut_off: The message of the InputError that is raised where the stream ends too early.

    Yields:
        Its rows in order, in blocks of `step` rows.
    """
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    for start in range(0, shape[0], step):
        rows = min(step, shape[0] - start)
        raw = file.read(rows * row_bytes)
        if len(raw) != rows * row_bytes:
            raise InputError(cut_off)
        yield np.frombuffer(raw, dtype).reshape(rows, *shape[1:])


def held_out_files(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Which of several files are held out whole, so that their bytes come nearest to the fraction all along."""
    held, owed = [], 0.0
    for size in sizes:
        owed += size * fraction
        held.append(owed >= size / 2 and fraction > 0)
        if held[-1]:
            owed -= size
    return held
