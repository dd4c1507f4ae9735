"""What one rank did while a timeline was recorded, and the file it is kept in.

RUN/timeline/steps-A-B/rank-00003.json, times in seconds of the rank's own clock:

    {"token": of the recording, "rank": 3, "world_size": 8, "role": "worker", "host": "n0", "node": 0, "device": "cpu",
     "unix": t,
     "offsets": [[at, seconds, within], ...]   what is to be added at a time to have rank 0's, how far off that may be
     "steps": [[number, begin, end, {part: seconds}], ...],
     "spans": [[kind, name, begin, end, {...}], ...],
     "communication": [[operation, axis, algorithm, inside, between, begin, end, background, key, sequence], ...],
     "waited": {part: seconds that the main thread waited for other ranks in it},
     "memory": [[at, {category: bytes}], ...]}

The kinds of spans are part, forward and backward (of a module), and action (of a pipeline).
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
from mpitrain.storage.run_folder import TIMELINE, rank_path, rank_paths, writing

_NOTHING: dict[str, Any] = {}
_LARGEST = 4 << 30  # bytes of a rank's file
_MOST = 2_000_000  # spans that are kept
_MOST_RANKS = 1 << 24

Span = tuple[str, str, float, float, dict[str, Any]]


class Spans:
    """Collects spans; it is the listener of a `StepClock`, and is told of modules.

    Attributes:
        waited: Seconds that the main thread waited for other ranks, by the part in which it did.
        left_out: How many there were no room for.
        after_backward: Is called with the end of each backward part.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._modules: list[str] = []  # name and direction in turns: objects for each would wake the garbage collector
        self._times = array("d")  # begin and end in turns
        self.waited: dict[str, float] = {}
        self.left_out = 0
        self.after_backward: Callable[[float], None] = lambda end: None

    def part(self, name: str, begin: float, end: float, waited: float) -> None:
        """A part is over. begin, end: seconds of `time.perf_counter()`. waited: with nested parts."""
        if name == "backward":
            self.after_backward(end)
        self.waited[name] = self.waited.get(name, 0.0) + waited
        self._keep(("part", name, begin, end, {"waited": waited}))

    def action(self, kind: str, stage: int, microbatch: int, begin: float, end: float) -> None:
        """An action of a pipeline is over. kind: of the action. begin, end: as above, on the host."""
        self._keep(("action", kind, begin, end, {"stage": stage, "microbatch": microbatch}))

    def module(self, name: str, direction: str, begin: float, end: float) -> None:
        """A module was called, or its backward is over. direction: forward or backward."""
        if len(self._modules) < 2 * _MOST:
            self._modules += direction, name
            self._times.append(begin)
            self._times.append(end)
        else:
            self.left_out += 1

    def all(self) -> list[Span]:
        """All of them, those of modules last."""
        names, times = self._modules, self._times
        modules = [(names[n], names[n + 1], times[n], times[n + 1], _NOTHING) for n in range(0, len(names), 2)]
        return self._spans + modules

    def _keep(self, span: Span) -> None:
        if len(self._spans) < _MOST:
            self._spans.append(span)
        else:
            self.left_out += 1


@dataclass(frozen=True)
class TimedSpan:
    """Something that a rank did. kind: part, forward, backward or action. begin, end: seconds of rank 0's clock."""

    kind: str
    name: str
    begin: float
    end: float
    arguments: dict[str, Any]


@dataclass(frozen=True)
class TimedOperation:
    """A communication of a rank.

    Attributes:
        operation, axis, algorithm: What it was.
        inside, between: Bytes that this rank sent to ranks of its node, and of others.
        begin, end: Seconds of rank 0's clock.
        background: Whether the main thread went on meanwhile.
        wait: Seconds of it until the last rank that took part had begun.
        last: That rank.
    """

    operation: str
    axis: str
    algorithm: str
    inside: int
    between: int
    begin: float
    end: float
    background: bool
    wait: float
    last: int


@dataclass(frozen=True)
class RankTimeline:
    """All that a rank did, in seconds of rank 0's clock.

    Attributes:
        recorded: As in its file.
        steps: Number, begin, end and seconds by part of each step.
        spans: What it computed.
        operations: What it communicated.
        memory: When, and bytes by category.
    """

    recorded: dict[str, Any]
    steps: list[tuple[int, float, float, dict[str, float]]]
    spans: list[TimedSpan]
    operations: list[TimedOperation]
    memory: list[tuple[float, dict[str, int]]]

    @property
    def rank(self) -> int:
        """Its number."""
        return int(self.recorded["rank"])

    @property
    def serves(self) -> bool:
        """Whether it takes no steps itself, so that how long it takes is not to be compared with others."""
        return bool(self.recorded.get("role") == SERVER)

    @property
    def name(self) -> str:
        """What it is called."""
        return rank_name(self.rank, self.recorded.get("role"))


def recording_folder(run: Path, steps: tuple[int, int]) -> Path:
    """Where what is recorded of these steps is kept."""
    return run / TIMELINE / f"steps-{steps[0]}-{steps[1]}"


def write_rank(folder: Path, recording: dict[str, Any]) -> None:
    """Write what a rank has recorded. Raises InputError where that fails."""
    path = rank_path(folder, recording["rank"], "json")
    with writing(str(path)):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(recording, separators=(",", ":")))


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """What the ranks have recorded, in the order of the ranks; of several recordings, the one that rank 0 has.

    Raises:
        InputError: There is nothing, or a file is none of these.
    """
    found: list[dict[str, Any]] = []
    for path in rank_paths(folder, "json"):
        try:
            recording = json.loads(read_plain(path, _LARGEST))
            if not _whole(recording):
                raise ValueError
        except OSError as error:
            raise InputError(f"{path} cannot be read ({reason(error)})") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path} is no recording of a rank; remove it, and record the steps again") from None
        if not found or recording["token"] == found[0]["token"]:
            found.append(recording)
    if not found:
        raise InputError(f"{folder} has no recording of a rank; give a folder that monitor.timeline made")
    return found


_KEYS = {
    str: ("token", "host", "device"),
    int: ("rank", "world_size"),
    (int, float): ("unix",),
    list: ("offsets", "steps", "spans", "communication", "memory"),
    dict: ("waited",),
}
_ROWS: Sequence[tuple[str, int]] = (("offsets", 3), ("steps", 4), ("spans", 5), ("communication", 10), ("memory", 2))


def _whole(recording: Any) -> bool:
    if not isinstance(recording, dict):
        return False
    if any(not isinstance(recording.get(key), kind) for kind, keys in _KEYS.items() for key in keys):  # type: ignore[arg-type]
        return False
    if not 0 < recording["world_size"] <= _MOST_RANKS:
        return False
    rows = [(row, length) for key, length in _ROWS for row in recording[key]]
    return bool(recording["offsets"]) and all(isinstance(row, list) and len(row) == length for row, length in rows)
