"""A run folder, read as plain values. Files that are not there are left out, for older runs have metrics alone."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.config.toml_file import read_toml
from mpitrain.errors import InputError
from mpitrain.monitor.json_lines import RankLine, RankStart, rank_line, read_lines
from mpitrain.monitor.parts import PARTS
from mpitrain.monitor.run_files import SERVER, rank_name, read_events, step_lines
from mpitrain.storage.disk import reporting
from mpitrain.storage.run_folder import CONFIG, RANKS, rank_paths

Column = NDArray[np.float64]
OWN = ("data", "forward", "backward", "optimizer")  # what a rank does by itself, waiting for nobody
CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "other")
EVENTS = ("start", "save", "evaluate", "lost", "stop", "end")


@dataclass(frozen=True)
class StepColumns:
    """The figures of all steps, one value a step; NaN where a step has none.

    Attributes:
        step: Numbers of the steps, rising.
        loss: Mean over the global batch, in the unit that the start of the job names.
        held_out_loss: Mean over the held-out samples, in the same unit.
        lr: The learning rate.
        grad_norm: Before clipping.
        seconds: Of the step.
        samples: Of the global batch.
        tokens: Of the global batch; 0 where samples are not tokens.
        world_size: Ranks.
        time: At the end of the step, in unix seconds.
        skipped: 1 where the step made no update.
    """

    step: Column
    loss: Column
    held_out_loss: Column
    lr: Column
    grad_norm: Column
    seconds: Column
    samples: Column
    tokens: Column
    world_size: Column
    time: Column
    skipped: Column

    def rate(self, amounts: Column) -> float:
        """Return amounts a second of the time that the steps took."""
        return float(amounts.sum() / self.seconds.sum())


@dataclass(frozen=True)
class Moment:
    """A line of events.jsonl.

    Attributes:
        time: In unix seconds.
        kind: One of `EVENTS`.
        step: Steps done.
        told: What else the line says.
    """

    time: float
    kind: str
    step: int
    told: Mapping[str, Any]


@dataclass(frozen=True)
class StartRecord:
    """One job that worked in the folder.

    Attributes:
        number: From 1.
        begin: In unix seconds.
        end: Likewise; for a job without an end the last time at which it gave a sign.
        ranks: Of the job, as it began.
        first_step: Steps done as it began.
        last_step: Steps done as it ended, as far as known.
        outcome: done, stopped, failed, killed or running.
        message: How it ended.
        facts: The line of its start.
    """

    number: int
    begin: float
    end: float
    ranks: int
    first_step: int
    last_step: int
    outcome: str
    message: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredRank:
    """What a rank measured in its last job, by groups of consecutive steps.

    Attributes:
        rank: Its number.
        header: Of that job.
        step: The last step of each group.
        steps: How many steps each group has.
        seconds: Sums of each group by part of a step, see `PARTS`.
        memory: Bytes by category at the end of each group, also host and device; NaN where not taken.
        sent: Calls, bytes to its own node and bytes to others, by operation, axis and algorithm.
        signs: Of each job that the rank took part in: when it began, when it last wrote (unix seconds), steps done.
    """

    rank: int
    header: RankStart
    step: Column
    steps: Column
    seconds: Mapping[str, Column]
    memory: Mapping[str, Column]
    sent: Mapping[tuple[str, str, str], Column]
    signs: tuple[tuple[float, float, int], ...]

    @property
    def serves(self) -> bool:
        """Whether it takes no steps itself, so that how long it takes is not to be compared with others."""
        return self.header.role == SERVER

    @property
    def name(self) -> str:
        """What it is called."""
        return rank_name(self.rank, self.header.role)


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run folder tells.

    Attributes:
        folder: The run folder.
        columns: The figures of its steps.
        moments: Its events; none of a run that wrote none.
        starts: The jobs that worked in it, by the events.
        ranks: What each rank of the last job measured.
        config: Its resolved settings, nested; empty where they cannot be read.
        facts: What the last start said of the machine, versions and the model.
    """

    folder: Path
    columns: StepColumns
    moments: tuple[Moment, ...]
    starts: tuple[StartRecord, ...]
    ranks: tuple[MeasuredRank, ...]
    config: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def workers(self) -> tuple[MeasuredRank, ...]:
        """The measured ranks that take steps."""
        return tuple(rank for rank in self.ranks if not rank.serves)


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
    events = (line for line in read_events(folder) if line["event"] in EVENTS)
    moments = tuple(Moment(line.pop("time"), line.pop("event"), line.pop("step"), line) for line in events)
    ranks = _read_ranks(folder / RANKS)
    starts = _starts(moments, columns, ranks, time.time())
    facts = starts[-1].facts if starts else {}
    try:
        config = read_toml(str(folder / CONFIG))
    except InputError:
        config = facts.get("config") or {}
    return RunRecord(folder, columns, moments, starts, ranks, config, facts)


def _read_columns(folder: Path) -> StepColumns:
    names = ["step_s" if field.name == "seconds" else field.name for field in fields(StepColumns)]
    values = array("d")  # a million steps are read, too
    for line in step_lines(folder):
        found = [getattr(line, name) for name in names]
        values.extend(math.nan if value is None else float(value) for value in found)
    table = np.frombuffer(values, dtype=np.float64).reshape(-1, len(names))
    return StepColumns(*table[np.argsort(table[:, 0], kind="stable")].T)


def _read_ranks(folder: Path) -> tuple[MeasuredRank, ...]:
    with reporting(f"{folder} cannot be read", "give a run folder you may read"):
        paths = rank_paths(folder, "jsonl")
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
    sent: dict[tuple[str, str, str], Column] = {}
    for row in rows:
        for operation, axis, algorithm, *figures, _ in row.sent:
            key = (operation, axis, algorithm)
            sent[key] = sent.get(key, np.zeros(3)) + figures
    return MeasuredRank(header.rank, header, last, steps, seconds, memory, dict(sorted(sent.items())), signs)


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
        size = begin.told.get("ranks") or 0
        starts.append(StartRecord(number, begin.time, end, size, begin.step, max(done), outcome, message, begin.told))
    return tuple(starts)
