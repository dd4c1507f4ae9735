"""A run folder, read. Files that are not there are left out, for older runs have metrics alone."""

from __future__ import annotations

import math
import time
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.config.toml_file import read_toml
from mpitrain.errors import InputError
from mpitrain.monitor.events import read_events
from mpitrain.monitor.json_lines import read_lines
from mpitrain.monitor.line_kinds import RankLine, RankStart, rank_line
from mpitrain.monitor.metrics import step_lines
from mpitrain.monitor.report.records import (
    CATEGORIES,
    EVENTS,
    PARTS,
    MeasuredRank,
    Moment,
    RunRecord,
    SentRecord,
    StartRecord,
    StepColumns,
)
from mpitrain.storage.disk import reason
from mpitrain.storage.run_folder import CONFIG, RANKS, rank_paths

MOST_ROWS = 300  # of a rank; further ones are summed up
MEMORY = (*CATEGORIES, "host", "device")
_RUNNING = 60.0  # seconds without a sign, after which a job without an end counts as killed


def read_run(folder: Path) -> RunRecord:
    """Everything that a run folder tells.

    Args:
        folder: The run folder.

    Raises:
        InputError: No step of it is finished, or a file of it is damaged.
    """
    columns = _read_columns(folder)
    moments = _read_moments(folder)
    ranks = _read_ranks(folder / RANKS)
    starts = _starts(moments, columns, ranks, time.time())
    facts = starts[-1].facts if starts else {}
    return RunRecord(folder, columns, moments, starts, ranks, _read_config(folder, facts), facts)


def _read_columns(folder: Path) -> StepColumns:
    names = ("step", "loss", "held_out_loss", "lr", "grad_norm", "step_s", "samples", "tokens", "world_size", "time")
    values = array("d")  # a million steps are read, too
    for line in step_lines(folder):
        found = [getattr(line, name) for name in (*names, "skipped")]
        values.extend(math.nan if value is None else float(value) for value in found)
    table = np.frombuffer(values, dtype=np.float64).reshape(-1, len(names) + 1)
    rising = np.argsort(table[:, 0], kind="stable")
    return StepColumns(*table[rising].T)


def _read_moments(folder: Path) -> tuple[Moment, ...]:
    return tuple(
        Moment(line.pop("time"), line.pop("event"), line.pop("step"), line)
        for line in read_events(folder)
        if line["event"] in EVENTS
    )


def _read_ranks(folder: Path) -> tuple[MeasuredRank, ...]:
    try:
        paths = rank_paths(folder, "jsonl")
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({reason(error)}); give a run folder you may read") from None
    ranks = [rank for path in paths if (rank := _read_rank(path)) is not None]
    if not ranks:
        return ()
    newest = max(ranks, key=lambda r: r.header.start).header
    return tuple(sorted((r for r in ranks if r.rank < newest.world_size), key=lambda r: r.rank))


def _read_rank(path: Path) -> MeasuredRank | None:
    """Return what a rank measured in its last job that took a step; None for a rank that measured no step."""
    jobs: list[tuple[RankStart, list[RankLine]]] = []
    for line in read_lines(path, "rank file", rank_line, lambda line: isinstance(line, RankStart)):
        if isinstance(line, RankStart):
            jobs.append((line, []))
        elif jobs:
            rows = jobs[-1][1]
            while rows and rows[-1].step >= line.step:  # written again
                rows.pop()
            rows.append(line)
    measured = [job for job in jobs if job[1]]
    if not measured:
        return None
    signs = tuple((first.start, rows[-1].time, rows[-1].step) for first, rows in measured)
    return _reduced(*measured[-1], signs)


def _reduced(header: RankStart, rows: list[RankLine], signs: tuple[tuple[float, float, int], ...]) -> MeasuredRank:
    """The rows as columns, at most `MOST_ROWS`: sums of seconds, the most of memory."""
    cuts = np.linspace(0, len(rows), min(len(rows), MOST_ROWS) + 1).astype(int)[:-1]
    steps = np.add.reduceat(np.array([row.steps for row in rows], dtype=np.float64), cuts)
    last = np.array([row.step for row in rows], dtype=np.float64)[np.append(cuts[1:], len(rows)) - 1]
    seconds = {part: np.add.reduceat(np.array([row.seconds.get(part, 0.0) for row in rows]), cuts) for part in PARTS}
    memory = {
        name: np.fmax.reduceat(np.array([(row.memory or {}).get(name, math.nan) for row in rows]), cuts)
        for name in MEMORY
    }
    sent: dict[tuple[str, str, str], np.ndarray[Any, Any]] = {}
    for row in rows:
        for operation, axis, algorithm, *figures in row.sent:
            key = (operation, axis, algorithm)
            sent[key] = sent.get(key, np.zeros(4)) + figures
    records = tuple(SentRecord(*key, *(float(v) for v in figures)) for key, figures in sorted(sent.items()))
    return MeasuredRank(header.rank, header, last, steps, seconds, memory, records, signs)


def _read_config(folder: Path, facts: Any) -> dict[str, Any]:
    try:
        return read_toml(str(folder / CONFIG))
    except InputError:
        config = facts.get("config")
        return config if isinstance(config, dict) else {}


def _starts(
    moments: tuple[Moment, ...], columns: StepColumns, ranks: tuple[MeasuredRank, ...], now: float
) -> tuple[StartRecord, ...]:
    """Jobs, from their starts and ends. One without an end was killed, unless it gave a sign just now."""
    begins = [i for i, moment in enumerate(moments) if moment.kind == "start"]
    starts = []
    for number, (i, after) in enumerate(pairwise([*begins, len(moments)]), 1):
        begin, told = moments[i], moments[i + 1 : after]
        limit = moments[after].time if after < len(moments) else math.inf
        ends = [m for m in told if m.kind == "end"]
        steps = (columns.time >= begin.time) & (columns.time <= limit)  # NaN is neither
        signs = [begin.time, *(m.time for m in told), *columns.time[steps][-1:].tolist()]
        done = [begin.step, *(m.step for m in told), *columns.step[steps][-1:].astype(int).tolist()]
        for _, seen, step in (sign for rank in ranks for sign in rank.signs):
            if begin.time <= seen <= limit:
                signs.append(seen)
                done.append(step)
        outcome, message = "killed", "the job ended without a word"
        if ends:
            outcome = str(ends[-1].told.get("outcome", "done"))
            message = str(ends[-1].told.get("message") or "")
        elif limit == math.inf and now - max(signs) < _RUNNING:
            outcome, message = "running", "still at work as this was read"
        end = ends[-1].time if ends else max(signs)
        ranks_then = begin.told.get("ranks") or 0
        starts.append(
            StartRecord(number, begin.time, end, ranks_then, begin.step, max(done), outcome, message, begin.told)
        )
    return tuple(starts)
