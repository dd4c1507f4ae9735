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
from mpitrain.monitor.report.goodput import Goodput
from mpitrain.monitor.run_files import SERVER, rank_name, read_events, read_goodput, step_lines
from mpitrain.storage.disk import reporting
from mpitrain.storage.run_folder import CONFIG, RANKS, rank_paths

Column = NDArray[np.float64]
BUSY = ("data", "forward", "backward", "optimizer")  # time categories without waiting for other ranks
CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "other")
EVENTS = ("start", "save", "evaluate", "lost", "stop", "end")


@dataclass(frozen=True)
class StepColumns:
    """Values of all steps, one array element per step; NaN where a step has no value."""

    step: Column  # step numbers, rising
    loss: Column  # mean loss over the global batch, in the unit that the start event names
    held_out_loss: Column  # mean loss over the held-out samples, in the same unit
    lr: Column
    grad_norm: Column  # L2 norm of the gradients before clipping
    seconds: Column  # time of the step in seconds
    samples: Column  # number of samples of the global batch
    tokens: Column  # number of tokens of the global batch; 0 if samples are not tokens
    world_size: Column
    flops: Column  # useful floating-point operations of all ranks
    tflops_per_rank: Column  # useful TFLOP/s of a rank
    mfu: Column  # share of the peak of the hardware that these are (model FLOP utilization)
    time: Column  # end of the step in unix seconds
    skipped: Column  # 1 if the step made no update, else 0
    j_per_sample: Column  # joules per sample since the reading before, at steps with a reading

    def rate(self, amounts: Column) -> float:
        """Return the sum of `amounts` per second of step time."""
        return float(amounts.sum() / self.seconds.sum())

    def mean(self, values: Column) -> float:
        """Return the mean of `values` over the time of the steps that have one; NaN if none has."""
        known = np.isfinite(values)
        return float(np.average(values[known], weights=self.seconds[known])) if known.any() else math.nan


@dataclass(frozen=True)
class RunEvent:
    """Event of a run, from a line of events.jsonl."""

    time: float
    kind: str
    step: int
    details: Mapping[str, Any]  # further values of the line


@dataclass(frozen=True)
class StartRecord:
    """Record of one job that worked in the run folder."""

    number: int  # number of the start, from 1
    begin: float  # in unix seconds
    end: float  # the same; for a job without an end event, the time of its last line in any file
    ranks: int  # number of ranks when the job began
    first_step: int  # steps done when the job began
    last_step: int  # steps done when the job ended, as far as known
    outcome: str  # done, stopped, failed, killed or running
    message: str  # message of the end event, or an explanation if there is none
    facts: Mapping[str, Any]  # values of the start event


@dataclass(frozen=True)
class MeasuredRank:
    """Measurements of a rank in its last job, by groups of consecutive steps."""

    rank: int
    header: RankStart  # first line of that job in the rank's file
    step: Column  # last step of each group
    steps: Column  # number of steps in each group
    seconds: Mapping[str, Column]  # sum over each group, by time category; see `TIME_CATEGORIES`
    # bytes at the end of each group, by category and for host and device; NaN if not measured
    memory: Mapping[str, Column]
    # calls, bytes to the same node and bytes to other nodes, by operation, axis and algorithm
    sent: Mapping[tuple[str, str, str], Column]
    # for each job of the rank: begin and last line in unix seconds, and steps done
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
    """Contents of a run folder."""

    folder: Path
    columns: StepColumns
    events: tuple[RunEvent, ...]  # empty if the run wrote none
    starts: tuple[StartRecord, ...]  # jobs that worked in the folder, according to the events
    ranks: tuple[MeasuredRank, ...]  # measurements of each rank of the last job
    config: Mapping[str, Any]  # resolved settings, nested; empty if they cannot be read
    facts: Mapping[str, Any]  # machine, versions and model, from the last start event
    goodput: Goodput  # account of the wall clock over all starts

    @property
    def workers(self) -> tuple[MeasuredRank, ...]:
        """Measured ranks that take steps."""
        return tuple(rank for rank in self.ranks if not rank.serves)


MOST_ROWS = 300  # largest number of groups of a rank; more rows are combined
MEMORY = (*CATEGORIES, "host", "device")
_SILENCE = 60.0  # seconds without a sign, after which a job without an end counts as killed


def read_run(folder: Path) -> RunRecord:
    """Return the contents of a run folder. Raises InputError if no step is finished, or a file is damaged."""
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
    return RunRecord(folder, columns, events, starts, ranks, config, facts, read_goodput(folder))


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
        if after < len(events):  # which may have found out why
            message = str(events[after].details.get("message") or message)
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
