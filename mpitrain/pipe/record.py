"""What a pipeline did and when, step by step; as a JSON file that `python -m mpitrain.report schedule` draws.

    {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "chunks": 1, "slices": 1,
     "runs": [[["Forward", stage, microbatch, begin, end], ...] of every rank]}         seconds

Times count from a barrier before the batch. Waiting for a step's input is no part of its time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.pipe.schedule import Backward, BackwardInput, BackwardWeight, Forward, Receive, Schedule, Send, Step
from mpitrain.pipe.schedules import make_schedule
from mpitrain.pipe.simulate import Costs, Simulation, TimedStep, held
from mpitrain.storage.disk import read_plain

_LARGEST = 1 << 30  # bytes of a recording
_KINDS = {kind.__name__: kind for kind in (Forward, Backward, BackwardInput, BackwardWeight)}
Row = list[Any]  # kind, stage, microbatch, begin, end


class Recorder:
    """Notes when the compute steps of one rank ran in the last batch."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._begin = 0.0
        self._settle: Callable[[], object] = lambda: None

    def start(self, settle: Callable[[], object]) -> None:
        """Begin a batch; times count from here. settle: returns when the device has done what it was asked."""
        self.rows, self._settle = [], settle
        self._begin = time.perf_counter()

    def timed(self, step: Step, call: Callable[[], None]) -> Callable[[], None]:
        """A call that carries a step out and notes when it ran."""
        if isinstance(step, Send | Receive):
            return call

        def run() -> None:
            self._settle()
            begin = time.perf_counter()
            call()
            self._settle()
            times = begin - self._begin, time.perf_counter() - self._begin
            self.rows.append([type(step).__name__, step.stage, step.microbatch, *times])

        return run


def to_json(schedule: Schedule, rows: list[list[Row]]) -> dict[str, Any]:
    """The recording of all ranks, as it is kept in a file. rows: of each rank."""
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches // schedule.slices,
        "chunks": schedule.chunks,
        "slices": schedule.slices,
        "runs": rows,
    }


def from_json(recording: dict[str, Any]) -> Simulation:
    """A recording in the form of a simulation. Raises KeyError, TypeError or ValueError where it is none."""
    counts = [int(recording[name]) for name in ("ranks", "microbatches", "chunks", "slices")]
    if len(recording["runs"]) != counts[0] or not 0 < prod(counts) <= sum(map(len, recording["runs"])):
        raise ValueError("it has other runs than it says")
    schedule = make_schedule(recording["schedule"], *counts)
    runs = tuple(
        tuple(
            TimedStep(_KINDS[kind](int(stage), int(microbatch)), begin, end)
            for kind, stage, microbatch, begin, end in rows
        )
        for rows in recording["runs"]
    )
    peaks, memory = zip(*(held([run.step for run in rows], Costs()) for rows in runs), strict=True)
    return Simulation(schedule, runs, peaks, memory)


def load(path: Path) -> Simulation:
    """A recording from its file. Raises InputError when it is none."""
    try:
        return from_json(json.loads(read_plain(path, _LARGEST)))
    except OSError as error:
        raise InputError(f"recording {path} cannot be read: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{path} is no recording of a pipeline ({error!r:.200}); give a file that write_recording made"
        ) from None
