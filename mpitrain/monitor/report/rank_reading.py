"""A rank's file RUN/ranks/rank-00003.jsonl: what it measured in its last job, in few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.monitor.line_kinds import RankLine
from mpitrain.monitor.report.records import CATEGORIES, PARTS, MeasuredRank, RankHeader, SentRecord

MOST_ROWS = 300  # of a rank; further ones are summed up
MEMORY = (*CATEGORIES, "host", "device")


def read_rank(path: Path, lines_of: Callable[[Path, type[RankLine]], Iterator[RankLine]]) -> MeasuredRank | None:
    """What a rank measured in its last job that took a step.

    Args:
        path: Its file.
        lines_of: Reads and checks a file's lines.

    Returns:
        None for a rank that measured no step.

    Raises:
        InputError: The file is damaged.
    """
    jobs: list[tuple[RankHeader, int, list[RankLine]]] = []
    for line in lines_of(path, RankLine):
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
    rank: int, header: RankHeader, rows: list[RankLine], signs: tuple[tuple[float, float, int], ...]
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
