"""A rank's file RUN/ranks/rank-00003.jsonl: what it measured in its last job, in few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from mpitrain.monitor.report.records import CATEGORIES, PARTS, MeasuredRank, RankHeader, SentRecord

MOST_ROWS = 300  # of a rank; further ones are summed up
MEMORY = (*CATEGORIES, "host", "device")
_Number = Annotated[float, Field(strict=True)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]


class _AnyLine(BaseModel):
    """A header or a line of steps."""

    rank: _Count | None = None
    start: _Number | None = None
    world_size: _Count = 1
    role: str = ""
    host: str = ""
    coordinates: list[_Count] = []
    expected_memory: dict[str, _Number | None] = {}
    expected_bytes: dict[str, _Number | None] = {}
    step: _Count = 0
    time: _Number = 0.0
    steps: Annotated[_Count, Field(ge=1)] = 1
    seconds: dict[str, _Number | None] = {}
    sent: list[tuple[str, str, str, _Number, _Number, _Number, _Number]] = []
    memory: dict[str, _Number | None] | None = None


def read_rank(path: Path, lines_of: Callable[[Path, type[_AnyLine]], Iterator[_AnyLine]]) -> MeasuredRank | None:
    """What a rank measured in its last job that took a step.

    Args:
        path: Its file.
        lines_of: Reads and checks a file's lines.

    Returns:
        None for a rank that measured no step.

    Raises:
        InputError: The file is damaged.
    """
    jobs: list[tuple[RankHeader, int, list[_AnyLine]]] = []
    for line in lines_of(path, _AnyLine):
        if line.start is not None and line.rank is not None:
            expected = _finite(line.expected_memory), _finite(line.expected_bytes)
            coordinates = tuple(line.coordinates)
            header = RankHeader(line.start, line.world_size, line.host, coordinates, *expected, line.step, line.role)
            jobs.append((header, line.rank, []))
        elif jobs:
            rows = jobs[-1][2]
            while rows and rows[-1].step >= line.step:  # written again
                rows.pop()
            rows.append(line)
    measured = [job for job in jobs if job[2]]
    if not measured:
        return None
    header, rank, rows = measured[-1]
    signs = tuple((first.start, rows[-1].time, rows[-1].step) for first, _, rows in measured)
    return _reduced(rank, header, rows, signs)


def _reduced(
    rank: int, header: RankHeader, rows: list[_AnyLine], signs: tuple[tuple[float, float, int], ...]
) -> MeasuredRank:
    """The rows as columns, at most `MOST_ROWS`: sums of seconds, the most of memory."""
    cuts = np.linspace(0, len(rows), min(len(rows), MOST_ROWS) + 1).astype(int)[:-1]
    steps = np.add.reduceat(np.array([row.steps for row in rows], dtype=np.float64), cuts)
    last = np.array([row.step for row in rows], dtype=np.float64)[np.append(cuts[1:], len(rows)) - 1]
    seconds = {
        part: np.add.reduceat(np.array([_number(row.seconds, part, 0.0) for row in rows]), cuts) for part in PARTS
    }
    memory = {
        name: np.fmax.reduceat(np.array([_number(row.memory or {}, name, math.nan) for row in rows]), cuts)
        for name in MEMORY
    }
    sent: dict[tuple[str, str, str], np.ndarray[Any, Any]] = {}
    for row in rows:
        for operation, axis, algorithm, *figures in row.sent:
            key = (operation, axis, algorithm)
            sent[key] = sent.get(key, np.zeros(4)) + figures
    records = tuple(SentRecord(*key, *(float(v) for v in figures)) for key, figures in sorted(sent.items()))
    return MeasuredRank(rank, header, last, steps, seconds, memory, records, signs)


def _number(values: dict[str, float | None], name: str, otherwise: float) -> float:
    value = values.get(name)
    return otherwise if value is None else float(value)


def _finite(values: dict[str, float | None]) -> dict[str, float]:
    return {name: float(v) for name, v in values.items() if v is not None and math.isfinite(v)}
