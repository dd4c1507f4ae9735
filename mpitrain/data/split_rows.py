"""Samples of a split as rows of an input, by arithmetic: no list of rows is stored, whatever the size of the input.

    rows       first ........... 19 | 20 ........... 39 | 40 ...    fraction 1/20: intervals of 20 rows, as in `sources`
    held out   *  sample 0          |      *  sample 1  |
    training      0 1 2 ......... 18| 19 20   21 ... 37 | 38 ...

The held-out sample j is the one row that interval j holds out. Interval k begins at row ceil(k q / p) for the fraction
p/q, and ceil(k q / p) - k training samples come before it; so training sample i lies in interval floor(i p / (q - p)).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import HELD_OUT, TRAIN, SplitRows
from mpitrain.data.order import mix64
from mpitrain.data.sources import FINEST, held_out_mask

Rows = npt.NDArray[np.int64]


def count(split: SplitRows) -> int:
    """Return the number of samples of a split."""
    p, q = split.fraction
    rows = max(0, split.stop - split.first)
    if not p:
        return rows
    interval = rows * p // q
    begin, place = _intervals(np.array([interval], np.int64), p, q)
    others = interval + int(begin[0] + place[0] < rows)
    return others if split.held_out else rows - others


def rows_of(split: SplitRows, samples: Rows) -> Rows:
    """Return the row of each sample.

    Args:
        split: Rows of the split.
        samples: Sample ids, int64 [n].

    Returns:
        Rows of the input, int64 [n].
    """
    p, q = split.fraction
    if not p:
        return samples + split.first
    if split.held_out:
        begin, place = _intervals(samples, p, q)
        return split.first + begin + place
    interval = samples * p // (q - p)
    begin, place = _intervals(interval, p, q)
    within = samples - (begin - interval)
    return split.first + begin + within + (within >= place)


def sample_mask(split: SplitRows, first: int, stop: int) -> npt.NDArray[np.bool_]:
    """Return which rows of a range are samples of the split, bool [stop - first].

    Args:
        split: Rows of the split.
        first: First row of the range, within those of the split.
        stop: Row after the last one.
    """
    mask = held_out_mask(first - split.first, stop - first, Fraction(*split.fraction))
    return mask if split.held_out else ~mask


def divide_rows(rows: int, test: int, held_out: float, ahead: int) -> dict[str, SplitRows]:
    """Return the rows of each split of an input.

    Pairs of states (`ahead` above 0) hold out the end of the time axis, after a gap of `ahead` rows: no state of it is
    in a training pair.

    Args:
        rows: Rows for training, at the beginning of the input.
        test: Rows of the input's own test set, after them.
        held_out: Fraction of the samples to hold out if there is no such test set.
        ahead: Rows by which y lies after x.
    """
    samples = max(0, rows - ahead)
    if test or not held_out:
        splits = {TRAIN: SplitRows(first=0, stop=samples)}
        return splits | ({HELD_OUT: SplitRows(first=rows, stop=max(rows, rows + test - ahead))} if test else {})
    if ahead:
        border = samples - max(1, round(samples * held_out))
        train, others = SplitRows(first=0, stop=max(0, border - ahead)), SplitRows(first=max(0, border), stop=samples)
        return {TRAIN: train, HELD_OUT: others}
    exact = Fraction(held_out).limit_denominator(FINEST)
    fraction = (exact.numerator, exact.denominator)
    return {
        TRAIN: SplitRows(first=0, stop=rows, fraction=fraction),
        HELD_OUT: SplitRows(first=0, stop=rows, fraction=fraction, held_out=True),
    }


def _intervals(numbers: Rows, p: int, q: int) -> tuple[Rows, Rows]:
    """Return, of each interval, its first row and the place of its held-out row after that, int64 [n] each."""
    begin = -(-numbers * q // p)
    length = -(-(numbers + 1) * q // p) - begin
    place = mix64(numbers.astype(np.uint64)) % length.astype(np.uint64)
    return begin, place.astype(np.int64)
