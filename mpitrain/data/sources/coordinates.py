"""Coordinates of files that are joined: pairs of states need the order of time, and other axes one direction.

    jan.nc   time 0, 6, ..., 738 "hours since 2000-01-01"     lat 90, 89, ..., -90
    feb.nc   time 0, 6, ..., 690 "hours since 2000-02-01"     lat 90, 89, ..., -90

Each file may count its time from another date, as xarray writes them, so times are compared as CF defines them (section
4.4): by unit, date and calendar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.sources.file_reader import FileReader
from mpitrain.data.sources.variables import Variable
from mpitrain.errors import InputError

_SINCE = re.compile(
    r"(s|secs?|seconds?|mins?|minutes?|h|hrs?|hours?|d|days?) since (\d{1,4})-(\d{1,2})-(\d{1,2})"
    r"(?:[T ](\d{1,2})(?::(\d{1,2})(?::(\d{1,2}(?:\.\d*)?))?)?)?(?: *(?:Z|UTC|[-+]?0{1,2}:?0{0,2}))?"
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)  # each month of a year without a leap day
_GREGORIAN = 1583  # first whole year of the calendar
Coordinates = list[npt.NDArray[np.float64]]


def time_notes(
    reader: FileReader, listed: Sequence[dict[str, Variable]], name: str, rows: Sequence[int]
) -> Iterator[str]:
    """Check the coordinates of the axis of pairs, and yield a note if they are unevenly spaced or cannot be compared.

    Args:
        reader: Reader of the files.
        listed: Variables of each file, in the order in which the files are joined.
        name: Name of the axis.
        rows: Rows of each file.

    Raises:
        InputError: The coordinates do not increase.
    """
    times = _coordinates(reader, listed, name, rows)
    if times is None:
        yield f"{name} has no coordinates, so the spacing of the pairs was not checked"
        return
    joined = _in_one_unit(times, [there[name] for there in listed])
    if joined is None:
        yield f"{name} has units that cannot be compared between files, so the order of the files was not checked"
    steps = np.concatenate([np.diff(each) for each in joined or times])
    if len(steps) and not (steps > 0).all():
        raise InputError(
            f"source {listed[0][name].path}: the coordinates {name} do not increase over all files, so pairs of states "
            "would be wrong; name the files so that their order is that of time, and remove overlaps"
        )
    if len(steps) and not math.isclose(steps.min(), steps.max(), rel_tol=1e-6):
        yield f"{name} has steps of {steps.min():g} to {steps.max():g}"


def direction_notes(reader: FileReader, listed: Sequence[dict[str, Variable]], names: Iterable[str]) -> Iterator[str]:
    """Compare the coordinates of other axes between files, and yield a note for each axis in which they differ.

    Args:
        reader: Reader of the files.
        listed: Variables of each file.
        names: Names of the axes.

    Raises:
        InputError: An axis runs in opposite directions in two files.
    """
    for name in names:
        lengths = [
            next((v.shape[v.dimensions.index(name)] for v in there.values() if name in v.dimensions), 0)
            for there in listed
        ]
        values = _coordinates(reader, listed, name, lengths) or []
        paths = [next(iter(there.values())).path for there in listed]
        different = [number for number, each in enumerate(values) if not _close(each, values[0])]
        for number in different:
            if _close(values[number][::-1], values[0]):
                raise InputError(
                    f"source {paths[number]}: its coordinates {name} run in the opposite direction to those of "
                    f"{paths[0]}; reverse that axis in one of them"
                )
        if different:
            yield f"the coordinates {name} of {paths[different[0]]} differ from those of {paths[0]}"


def _close(some: npt.NDArray[Any], others: npt.NDArray[Any]) -> bool:
    return some.shape == others.shape and np.allclose(some, others)


def _coordinates(
    reader: FileReader, listed: Sequence[dict[str, Variable]], name: str, lengths: Sequence[int]
) -> Coordinates | None:
    """Return the coordinates of an axis in each file; None if a file has none."""
    variables = [v for there, n in zip(listed, lengths, strict=True) if (v := there.get(name)) and v.shape == (n,)]
    if len(variables) < len(listed) or any(v.dtype.kind not in "iuf" or v.problem for v in variables):
        return None
    return [reader.rows(v, 0, 0, v.shape[0]).astype(np.float64) for v in variables]


def _in_one_unit(times: Coordinates, variables: Sequence[Variable]) -> Coordinates | None:
    """Return the times of all files, joined, in the unit of the first file; None if their units cannot be compared."""
    units = [tuple(str(v.attributes.get(key, "")) for key in ("units", "calendar")) for v in variables]
    if len(set(units)) == 1:
        return [np.concatenate(times)]
    clocks = [_seconds(*each) for each in units]
    if None in clocks or len({calendar for _, calendar in units}) > 1:
        return None
    (unit, origin), *_ = known = [each for each in clocks if each]
    return [np.concatenate([(t * of + (start - origin)) / unit for t, (of, start) in zip(times, known, strict=True)])]


def _seconds(units: str, calendar: str) -> tuple[float, float] | None:
    """Return the length of a unit of time, and the date from which it counts, both in seconds; None if unknown."""
    match = _SINCE.fullmatch(units.strip())
    if not match:
        return None
    year, month, day, hour, minute = (int(part or 0) for part in match.groups()[1:6])
    if not 1 <= month <= 12:
        return None
    if calendar == "360_day":
        days = 360 * year + 30 * month + day
    elif calendar in ("noleap", "365_day"):
        days = 365 * year + _DAYS_BEFORE[month - 1] + day
    elif calendar in ("", "standard", "gregorian", "proleptic_gregorian") and year >= _GREGORIAN:
        days = date(year, month, 1).toordinal() + day
    else:
        return None
    return _SECONDS[units.strip()[0]], days * 86400 + hour * 3600 + minute * 60 + float(match[7] or 0)
