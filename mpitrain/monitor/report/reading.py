"""A run folder, read. Files that are not there are left out, for older runs have metrics alone."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, StrictInt, ValidationError

from mpitrain.config.toml_file import read_toml
from mpitrain.errors import InputError, first_problem
from mpitrain.monitor.events import EVENTS as EVENTS_FILE
from mpitrain.monitor.events import why_no_step
from mpitrain.monitor.metrics import METRICS
from mpitrain.monitor.rank_file import RANKS
from mpitrain.monitor.report.rank_reading import read_rank
from mpitrain.monitor.report.records import EVENTS, Column, MeasuredRank, Moment, RunRecord, StartRecord, StepColumns
from mpitrain.storage.disk import open_plain, reason

CONFIG = "config.toml"
_RUNNING = 60.0  # seconds without a sign, after which a job without an end counts as killed
Number = Annotated[float, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
M = TypeVar("M", bound=BaseModel)


class _StepLine(BaseModel):
    step: Count
    loss: Number | None
    held_out_loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    step_s: Annotated[Number, Field(gt=0)]
    samples: Number
    tokens: Number
    world_size: StrictInt
    time: Number | None = None
    skipped: bool = False


class _EventLine(BaseModel, extra="allow"):
    time: Number
    event: str
    step: Count = 0


def read_run(folder: Path) -> RunRecord:
    """Everything that a run folder tells.

    Args:
        folder: The run folder.

    Raises:
        InputError: No step of it is finished, or a file of it is damaged.
    """
    there = not folder.is_dir() or (folder / METRICS).exists()
    columns = _read_columns(folder / METRICS) if there else None
    if columns is None or not len(columns.step):
        raise InputError(why_no_step(folder))
    moments = _read_moments(folder / EVENTS_FILE)
    ranks = _read_ranks(folder / RANKS)
    starts = _starts(moments, columns, ranks, time.time())
    facts = starts[-1].facts if starts else {}
    return RunRecord(folder, columns, moments, starts, ranks, _read_config(folder, facts), facts)


def _never(line: Any) -> bool:
    return False


def lines_of(path: Path, what: str, kind: type[M], after_torn: Callable[[M], bool] = _never) -> Iterator[M]:
    """The lines of a file of JSON lines, checked. A torn last line is left out.

    Args:
        path: The file.
        what: What a message calls it.
        kind: What each line must be.
        after_torn: Whether a line can follow one that a killed job left torn: the first of the next job.

    Raises:
        InputError: The file cannot be read, or a line inside it is damaged.
        FileNotFoundError: It is not there.
    """
    torn: InputError | None = None
    try:
        with open_plain(path) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    value = kind.model_validate(json.loads(line))
                except ValidationError as error:
                    problem = first_problem(error)
                    raise InputError(f"{what} {path}, line {number}: {problem}; mend that line") from None
                except (ValueError, RecursionError):
                    if torn is not None:
                        raise torn from None
                    torn = InputError(f"{what} {path}: line {number} is damaged; remove it")
                    continue
                if torn is not None and not after_torn(value):
                    raise torn
                torn = None
                yield value
            if torn is not None:
                raise torn
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read ({reason(error)}); give a run folder you may read") from None


def _read_columns(path: Path) -> StepColumns:
    names = ("step", "loss", "held_out_loss", "lr", "grad_norm", "step_s", "samples", "tokens", "world_size", "time")
    values = array("d")  # a million steps are read, too
    try:
        for line in lines_of(path, "metrics", _StepLine):
            found = [getattr(line, name) for name in (*names, "skipped")]
            values.extend(math.nan if value is None else _float(value) for value in found)
    except FileNotFoundError:
        raise InputError(f"metrics {path} do not exist; give the folder of a run that took a step") from None
    table = np.frombuffer(values, dtype=np.float64).reshape(-1, len(names) + 1)
    rising = np.argsort(table[:, 0], kind="stable")
    return StepColumns(*table[rising].T)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_moments(path: Path) -> tuple[Moment, ...]:
    try:
        lines = list(lines_of(path, "events", _EventLine))
    except FileNotFoundError:
        return ()
    return tuple(Moment(m.time, m.event, m.step, m.model_extra or {}) for m in lines if m.event in EVENTS)


def _read_ranks(folder: Path) -> tuple[MeasuredRank, ...]:
    try:
        paths = sorted(folder.glob("rank-*.jsonl"))
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({reason(error)}); give a run folder you may read") from None
    read = [
        read_rank(path, lambda p, kind: lines_of(p, "rank file", kind, lambda line: line.start is not None))
        for path in paths
    ]
    ranks = [rank for rank in read if rank is not None]
    if not ranks:
        return ()
    newest = max(ranks, key=lambda r: r.header.start).header
    return tuple(sorted((r for r in ranks if r.rank < newest.world_size), key=lambda r: r.rank))


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
        signs = [begin.time, *(m.time for m in told), *_last(columns.time[steps])]
        done = [begin.step, *(m.step for m in told), *(int(s) for s in _last(columns.step[steps]))]
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
        size = begin.told.get("ranks")
        starts.append(
            StartRecord(
                number,
                begin.time,
                end,
                size if isinstance(size, int) else 0,
                begin.step,
                max(done),
                outcome,
                message,
                dict(begin.told),
            )
        )
    return tuple(starts)


def _last(column: Column) -> list[float]:
    return [float(column[-1])] if len(column) else []
