"""Contents of a run folder as plain values. Only metrics are required, because older runs have no other files."""

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
from mpitrain.monitor.parts import TIME_CATEGORIES
from mpitrain.monitor.run_files import SERVER, rank_name, read_events, step_lines
from mpitrain.storage.disk import reporting
from mpitrain.storage.run_folder import CONFIG, RANKS, rank_paths

Column = NDArray[np.float64]
BUSY = ("data", "forward", "backward", "optimizer")  # time categories without waiting for other ranks
CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "other")
EVENTS = ("start", "save", "evaluate", "lost", "stop", "end")


@dataclass(frozen=True)
class StepColumns:
    """Values of all steps, one array element per step; NaN where a step has no value.

    Attributes:
        step: Step numbers, rising.
        loss: Mean loss over the global batch, in the unit that the start event names.
        held_out_loss: Mean loss over the held-out samples, in the same unit.
        lr: Learning rate.
        grad_norm: L2 norm of the gradients before clipping.
        seconds: Time of the step in seconds.
        samples: Number of samples of the global batch.
        tokens: Number of tokens of the global batch; 0 if samples are not tokens.
        world_size: Number of ranks.
        time: End of the step in unix seconds.
        skipped: 1 if the step made no update, else 0.
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
        """Return the sum of `amounts` per second of step time."""
        return float(amounts.sum() / self.seconds.sum())


@dataclass(frozen=True)
class RunEvent:
    """Event of a run, from a line of events.jsonl.

    Attributes:
        time: Time in unix seconds.
        kind: Kind of event, one of `EVENTS`.
        step: Number of steps done.
        details: Further values of the line.
    """

    time: float
    kind: str
    step: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class StartRecord:
    """Record of one job that worked in the run folder.

    Attributes:
        number: Number of the start, from 1.
        begin: Begin in unix seconds.
        end: End in unix seconds; for a job without an end event, the time of its last line in any file.
        ranks: Number of ranks when the job began.
        first_step: Steps done when the job began.
        last_step: Steps done when the job ended, as far as known.
        outcome: done, stopped, failed, killed or running.
        message: Message of the end event, or an explanation if there is none.
        facts: Values of the start event.
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
    """Measurements of a rank in its last job, by groups of consecutive steps.

    Attributes:
        rank: Number of the rank.
        header: First line of that job in the rank's file.
        step: Last step of each group.
        steps: Number of steps in each group.
        seconds: Sum over each group, by time category; see `TIME_CATEGORIES`.
        memory: Bytes at the end of each group, by category and for host and device; NaN if not measured.
        sent: Calls, bytes to the same node and bytes to other nodes, by operation, axis and algorithm.
        signs: For each job of the rank: begin and last line in unix seconds, and steps done.
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
        """True if the rank takes no steps itself, so that its times cannot be compared with those of other ranks."""
        return self.header.role == SERVER

    @property
    def name(self) -> str:
        """Name of the rank in charts."""
        return rank_name(self.rank, self.header.role)


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder.

    Attributes:
        folder: Path of the run folder.
        columns: Values of the steps.
        events: Events; empty if the run wrote none.
        starts: Jobs that worked in the folder, according to the events.
        ranks: Measurements of each rank of the last job.
        config: Resolved settings, nested; empty if they cannot be read.
        facts: Machine, versions and model, from the last start event.
    """

    folder: Path
    columns: StepColumns
    events: tuple[RunEvent, ...]
    starts: tuple[StartRecord, ...]
    ranks: tuple[MeasuredRank, ...]
    config: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def workers(self) -> tuple[MeasuredRank, ...]:
        """Measured ranks that take steps."""
        return tuple(rank for rank in self.ranks if not rank.serves)


MOST_ROWS = 300  # largest number of groups of a rank; more rows are combined
MEMORY = (*CATEGORIES, "host", "device")
_SILENCE = 60.0  # seconds without a sign, after which a job without an end counts as killed


def read_run(folder: Path) -> RunRecord:
    """Return the contents of a run folder.

    Args:
        folder: Path of the run folder.

    Raises:
        InputError: The run has no finished step, or a file is damaged.
    """
    columns = _read_columns(folder)
    lines = (line for line in read_events(folder) if line["event"] in EVENTS)
    events = tuple(RunEvent(line.pop("time"), line.pop("event"), line.pop("step"), line) for line in lines)
    ranks = _read_ranks(folder / RANKS)
    starts = _starts(events, columns, ranks, time.time())
    facts = starts[-1].facts if starts else {}
    try:
        config = read_toml(str(folder / CONFIG))
    except InputError:
        config = facts.get("config") or {}
    return RunRecord(folder, columns, events, starts, ranks, config, facts)


def _read_columns(folder: Path) -> StepColumns:
    names = ["step_s" if field.name == "seconds" else field.name for field in fields(StepColumns)]
    values = array("d")  # compact, because a run may have a million steps
    for line in step_lines(folder):
        row = [getattr(line, name) for name in names]
        values.extend(math.nan if value is None else float(value) for value in row)
    table = np.frombuffer(values, dtype=np.float64).reshape(-1, len(names))
    return StepColumns(*table[np.argsort(table[:, 0], kind="stable")].T)


def _read_ranks(folder: Path) -> tuple[MeasuredRank, ...]:
    with reporting(f"{folder} cannot be read", "use a run folder that you may read"):
        paths = rank_paths(folder, "jsonl")
    ranks = [rank for path in paths if (rank := _read_rank(path)) is not None]
    if not ranks:
        return ()
    newest = max(ranks, key=lambda r: r.header.start).header
    return tuple(sorted((r for r in ranks if r.rank < newest.world_size), key=lambda r: r.rank))


def _read_rank(path: Path) -> MeasuredRank | None:
    """Return a rank's measurements in its last job that took a step; None if the rank measured no step."""
    jobs: list[tuple[RankStart, list[RankLine]]] = []
    for line in read_lines(path, "rank file", rank_line, lambda line: isinstance(line, RankStart)):
        if isinstance(line, RankStart):
            jobs.append((line, []))
        elif jobs:
            rows = jobs[-1][1]
            while rows and rows[-1].step >= line.step:  # replaced by this line after a resume
                rows.pop()
            rows.append(line)
    measured = [job for job in jobs if job[1]]
    if not measured:
        return None
    signs = tuple((first.start, rows[-1].time, rows[-1].step) for first, rows in measured)
    return _combine_rows(*measured[-1], signs)


def _combine_rows(header: RankStart, rows: list[RankLine], signs: tuple[tuple[float, float, int], ...]) -> MeasuredRank:
    """Return the rows as at most `MOST_ROWS` groups, each with summed seconds and the largest memory."""
    cuts = np.linspace(0, len(rows), min(len(rows), MOST_ROWS) + 1).astype(int)[:-1]
    steps = np.add.reduceat(np.array([row.steps for row in rows], dtype=np.float64), cuts)
    last = np.array([row.step for row in rows], dtype=np.float64)[np.append(cuts[1:], len(rows)) - 1]
    seconds = {
        name: np.add.reduceat(np.array([row.seconds.get(name, 0.0) for row in rows]), cuts) for name in TIME_CATEGORIES
    }
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
    events: tuple[RunEvent, ...], columns: StepColumns, ranks: tuple[MeasuredRank, ...], now: float
) -> tuple[StartRecord, ...]:
    """Return the jobs of a run from their start and end events.

    A job without an end event counts as running if it wrote a line within the last minute, and as killed otherwise.
    """
    begins = [i for i, moment in enumerate(events) if moment.kind == "start"]
    starts = []
    for number, (i, after) in enumerate(pairwise([*begins, len(events)]), 1):
        begin, others = events[i], events[i + 1 : after]
        limit = events[after].time if after < len(events) else math.inf
        ends = [m for m in others if m.kind == "end"]
        steps = (columns.time >= begin.time) & (columns.time <= limit)  # NaN satisfies neither comparison
        signs = [begin.time, *(m.time for m in others), *columns.time[steps][-1:].tolist()]
        steps_done = [begin.step, *(m.step for m in others), *columns.step[steps][-1:].astype(int).tolist()]
        for _, sign_time, step in (sign for rank in ranks for sign in rank.signs):
            if begin.time <= sign_time <= limit:
                signs.append(sign_time)
                steps_done.append(step)
        outcome, message = "killed", "the job ended without an end event"
        if ends:
            outcome = str(ends[-1].details.get("outcome", "done"))
            message = str(ends[-1].details.get("message") or "")
        elif limit == math.inf and now - max(signs) < _SILENCE:
            outcome, message = "running", "the job was still running when this report was made"
        end = ends[-1].time if ends else max(signs)
        size = begin.details.get("ranks") or 0
        starts.append(
            StartRecord(number, begin.time, end, size, begin.step, max(steps_done), outcome, message, begin.details)
        )
    return tuple(starts)
