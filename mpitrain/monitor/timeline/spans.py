"""Recording of one rank for a timeline, and the file that stores it.

RUN/timeline/steps-A-B/rank-00003.json, with times in seconds of the rank's own clock:

    {"token": of the recording, "rank": 3, "world_size": 8, "role": "worker", "host": "n0", "node": 0, "device": "cpu",
     "unix": t,
     "offsets": [[at, seconds, within], ...]   seconds to add to the rank's time to get rank 0's, with largest error
     "steps": [[number, begin, end, {time category: seconds}], ...],
     "spans": [[kind, name, begin, end, {...}], ...],
     "communication": [[operation, axis, algorithm, inside, between, begin, end, background, key, sequence], ...],
     "waited": {time category: seconds that the main thread waited for other ranks in it},
     "memory": [[at, {category: bytes}], ...]}   where modules and time categories begin and end

The kinds of spans are part (a time category), forward and backward (of a module), and action (of a pipeline).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.monitor.run_files import SERVER, rank_name
from mpitrain.storage.disk import read_plain, reason, write_whole
from mpitrain.storage.run_folder import TIMELINE, rank_path, rank_paths, report_unwritable

_NO_ARGUMENTS: dict[str, Any] = {}
_LARGEST = 4 << 30  # largest size in bytes of a rank's file
_MOST = 2_000_000  # largest number of spans that are recorded
_MOST_RANKS = 1 << 24

Span = tuple[str, str, float, float, dict[str, Any]]


class Spans:
    """Recorder of spans: the listener of a `StepClock`, which also records modules and pipeline actions.

    Attributes:
        waited: Seconds that the main thread waited for other ranks, by time category.
        dropped: Number of spans that were dropped because the recording was full.
        after_backward: Function that is called with the end of each backward.
        at_boundary: Function that is called when a time category begins or ends; on an accelerator when it is launched.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        # alternating direction and name: an object per span would trigger the garbage collector
        self._modules: list[str] = []
        self._times = array("d")  # alternating begin and end
        self.waited: dict[str, float] = {}
        self.dropped = 0
        self.after_backward: Callable[[float], None] = lambda end: None
        self.at_boundary: Callable[[], None] = lambda: None

    def add_category(self, name: str, begin: float, end: float, waited: float) -> None:
        """Record time of a category that has ended.

        Args:
            name: Name of the time category.
            begin, end: Begin and end in seconds of `time.perf_counter()`.
            waited: Seconds waited for other ranks, including nested categories.
        """
        if name == "backward":
            self.after_backward(end)
        self.waited[name] = self.waited.get(name, 0.0) + waited
        self._add(("part", name, begin, end, {"waited": waited}))

    def action(self, kind: str, stage: int, microbatch: int, begin: float, end: float) -> None:
        """Record a pipeline action that has ended.

        Args:
            kind, stage, microbatch: Kind of action, its pipeline stage and microbatch.
            begin, end: Begin and end on the host, in seconds of `time.perf_counter()`.
        """
        self._add(("action", kind, begin, end, {"stage": stage, "microbatch": microbatch}))

    def module(self, name: str, direction: str, begin: float, end: float) -> None:
        """Record a call of a module, or its backward, that has ended.

        Args:
            name: Name of the module.
            direction: "forward" or "backward".
            begin, end: Begin and end on the host, in seconds of `time.perf_counter()`.
        """
        if len(self._modules) < 2 * _MOST:
            self._modules += direction, name
            self._times.append(begin)
            self._times.append(end)
        else:
            self.dropped += 1

    def all(self) -> list[Span]:
        """Return all spans, with those of modules last."""
        names, times = self._modules, self._times
        modules = [(names[n], names[n + 1], times[n], times[n + 1], _NO_ARGUMENTS) for n in range(0, len(names), 2)]
        return self._spans + modules

    def _add(self, span: Span) -> None:
        if len(self._spans) < _MOST:
            self._spans.append(span)
        else:
            self.dropped += 1


@dataclass(frozen=True)
class TimedSpan:
    """Span of a rank's work. kind: part, forward, backward or action. begin, end: seconds of rank 0's clock."""

    kind: str
    name: str
    begin: float
    end: float
    arguments: dict[str, Any]


@dataclass(frozen=True)
class TimedOperation:
    """Communication operation of a rank."""

    # operation, axis, algorithm: names of the operation, its communicator and its algorithm
    operation: str
    axis: str
    algorithm: str
    # inside, between: bytes that this rank sent to ranks of its node, and of other nodes
    inside: int
    between: int
    # begin, end: begin and end in seconds of rank 0's clock
    begin: float
    end: float
    background: bool  # true if the main thread continued meanwhile
    wait: float  # seconds until the last participating rank had begun
    last: int  # number of that rank


@dataclass(frozen=True)
class RankTimeline:
    """Timeline of a rank, in seconds of rank 0's clock."""

    recorded: dict[str, Any]  # content of the rank's file
    # number, begin, end and seconds by time category of each step
    steps: list[tuple[int, float, float, dict[str, float]]]
    spans: list[TimedSpan]  # time categories, modules and pipeline actions
    operations: list[TimedOperation]
    # time and bytes by category, where modules and time categories begin and end
    memory: list[tuple[float, dict[str, int]]]

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return int(self.recorded["rank"])

    @property
    def serves(self) -> bool:
        """True if the rank takes no steps itself, so that its times cannot be compared with those of other ranks."""
        return bool(self.recorded.get("role") == SERVER)

    @property
    def name(self) -> str:
        """Name of the rank in charts."""
        return rank_name(self.rank, self.recorded.get("role"))


def recording_folder(run: Path, steps: tuple[int, int]) -> Path:
    """Return the folder for the recording of a range of steps.

    Args:
        run, steps: Path of the run folder, and first and last recorded step.
    """
    return run / TIMELINE / f"steps-{steps[0]}-{steps[1]}"


def write_rank(folder: Path, recording: dict[str, Any]) -> None:
    """Write a rank's recording to its file.

    Args:
        folder, recording: Folder of the recording, and content of the file; see the module.

    Raises:
        InputError: The file cannot be written.
    """
    path = rank_path(folder, recording["rank"], "json")
    with report_unwritable(str(path)):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(recording, separators=(",", ":")))


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """Return the recordings of the ranks in order of rank; files of an earlier recording are left out.

    Raises:
        InputError: There is no recording, or a file is not a valid one.
    """
    recordings: list[dict[str, Any]] = []
    for path in rank_paths(folder, "json"):
        try:
            recording = json.loads(read_plain(path, _LARGEST))
            if not _is_valid(recording):
                raise ValueError
        except OSError as error:
            raise InputError(f"{path} cannot be read ({reason(error)})") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path} is not a recording of a rank; remove it and record the steps again") from None
        if not recordings or recording["token"] == recordings[0]["token"]:
            recordings.append(recording)
    if not recordings:
        raise InputError(f"{folder} has no recording of a rank; use a folder written by monitor.timeline")
    return recordings


_KEYS = {
    str: ("token", "host", "device"),
    int: ("rank", "world_size"),
    (int, float): ("unix",),
    list: ("offsets", "steps", "spans", "communication", "memory"),
    dict: ("waited",),
}
_ROWS: Sequence[tuple[str, int]] = (("offsets", 3), ("steps", 4), ("spans", 5), ("communication", 10), ("memory", 2))


def _is_valid(recording: Any) -> bool:
    if not isinstance(recording, dict):
        return False
    if any(not isinstance(recording.get(key), kind) for kind, keys in _KEYS.items() for key in keys):  # type: ignore[arg-type]
        return False
    if not 0 < recording["world_size"] <= _MOST_RANKS:
        return False
    rows = [(row, length) for key, length in _ROWS for row in recording[key]]
    return bool(recording["offsets"]) and all(isinstance(row, list) and len(row) == length for row, length in rows)
