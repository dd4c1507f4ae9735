"""State of a run that is read from its files while it goes on; see `mpitrain.monitor.watch`."""

from __future__ import annotations

import math
import re
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mpitrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE
from mpitrain.monitor.json_lines import GrowingFile, RankLine, RankStart, StepLine, parse_line, rank_line
from mpitrain.monitor.run_files import SERVER, check_event
from mpitrain.storage import locks
from mpitrain.storage.run_folder import EVENTS, LOGS, METRICS, RANKS, rank_paths

RECENT = 512  # last steps whose times are used
_POINTS = 1024  # largest number of points of a curve
_RANK_LINES = 20  # last lines of a rank whose times are added up
_MOST_RANKS = 64  # number of ranks whose logs and times are read
_LAST_BYTES = 256 << 20  # bytes at the end of metrics.jsonl and events.jsonl that are read
_LOG_BYTES = 1 << 16  # bytes at the end of a log that are read first
_WARNINGS = 5
_QUIET = 60.0  # seconds without a line after which a run counts as silent, or ...
_QUIET_STEPS = 20  # ... the time of this number of steps, if that is longer
_TAKEOVER = 5.0  # seconds that another rank may need to take over the lock of a rank that died
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+) rank (\d{1,9}) (\w+) (.*)")


class RunStatus(Enum):
    """Status of a run; the value is the word that is shown."""

    WAITING = "waiting"
    RUNNING = "running"
    SILENT = "silent"
    KILLED = "killed"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


EXIT_CODES = {RunStatus.DONE: EXIT_DONE, RunStatus.STOPPED: EXIT_REQUEUE, RunStatus.FAILED: EXIT_FAILED}


@dataclass
class Curve:
    """Values of a metric over the steps, with a bounded number of points.

    When the limit is reached, every second point is removed.
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    last: tuple[int, float] | None = None
    _stride: int = 1
    _count: int = 0

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a step, unless it is None.

        Args:
            step, value: Number of the step, and value of the metric.
        """
        if value is None:
            return
        self.last = (step, value)
        if self._count % self._stride == 0:
            self.points.append(self.last)
            if len(self.points) >= _POINTS:
                self.points, self._stride = self.points[::2], self._stride * 2
        self._count += 1


@dataclass
class Steps:
    """Values read from the lines of metrics.jsonl."""

    line: StepLine | None = None  # the last one
    loss: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    skipped: int = 0
    damaged: int = 0  # lines

    def add(self, line: bytes) -> None:
        """Add one line of metrics.jsonl."""
        step_line = parse_line(line, StepLine.model_validate)
        if step_line is None:
            self.damaged += 1
            return
        self.line = step_line
        self.loss.add(step_line.step, step_line.loss)
        self.held_out.add(step_line.step, step_line.held_out_loss)
        self.skipped += step_line.skipped
        if step_line.step_s is not None:
            self.seconds.append(step_line.step_s)
        if step_line.time is not None:
            self.times.append((step_line.step, step_line.time))


class WatchedRun:
    """State of a run, read from the files of its folder, which does not have to exist yet; `read` reads new lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = Steps()  # without steps that a resumed job has removed
        self.start: dict[str, Any] = {}  # event of the last start; empty if there was none
        self.end: dict[str, Any] = {}  # event of the run's end; empty while it goes on
        self.save: dict[str, Any] = {}  # event of the last checkpoint
        self.starts = 0  # number of starts
        self.lost: list[int] = []  # ranks that died since the last start
        self.new_events: list[dict[str, Any]] = []  # until the caller empties the list
        self.warnings: list[tuple[str, int, str, str]] = []  # time, rank, level, text of the last ones in the logs
        self.recent_times: dict[int, deque[dict[str, float]]] = {}  # by rank, seconds by category of its last lines
        self.servers: set[int] = set()  # ranks that take no steps themselves
        self._metrics, self._events = (GrowingFile(folder / name, _LAST_BYTES) for name in (METRICS, EVENTS))
        self._rank_files: dict[Path, GrowingFile] = {}
        self._metrics_version = 0  # value of `replacements` of the metrics when `steps` was created
        self._last_line_time: float | None = None  # time.monotonic() at the last new line
        self._lock: bool | None = None

    def read(self, *, more: bool = True) -> None:
        """Read the new lines of the files; with `more`, also of the ranks' logs and times, which are many files."""
        # before the events, because a job writes its end while it still holds the lock
        self._lock = locks.is_held(self.folder / locks.LOCK)
        has_news = False
        for line in self._events.new_lines():
            has_news = True
            self._add_event(parse_line(line, check_event))
        for line in self._metrics.new_lines():
            has_news = True
            self._current_steps().add(line)
        self._current_steps()
        if more:
            for path in rank_paths(self.folder / LOGS, "log")[:_MOST_RANKS]:
                self._add_log(self._rank_files.setdefault(path, GrowingFile(path, _LOG_BYTES)).new_lines())
            for path in rank_paths(self.folder / RANKS, "jsonl")[:_MOST_RANKS]:
                for line in self._rank_files.setdefault(path, GrowingFile(path, _LOG_BYTES)).new_lines():
                    self._add_rank_line(int(re.sub(r"\D", "", path.stem) or 0), parse_line(line, rank_line))
        if has_news:
            # at the first read, count from the last step or event that has a time
            times = [event["time"] for event in (self.start, self.save, self.end) if event]
            times += [self.steps.times[-1][1]] if self.steps.times else []
            since = time.time() - max(times, default=math.inf) if self._last_line_time is None else 0.0
            self._last_line_time = time.monotonic() - max(0.0, since)

    # -- derived values

    @property
    def step(self) -> int:
        """Number of steps done."""
        return (self.steps.line.step if self.steps.line else 0) or int(self.start.get("step", 0))

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run, or None if unknown."""
        steps = self.start.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last new line."""
        return time.monotonic() - self._last_line_time if self._last_line_time is not None else 0.0

    @property
    def median_seconds(self) -> float | None:
        """Median time of the last steps in seconds, or None if there is none."""
        return statistics.median(self.steps.seconds) if self.steps.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end, at the pace of this start's last steps, including evaluation and saving."""
        if self.total_steps is None:
            return None
        began = self.start.get("time", 0.0)
        times = [(step, when) for step, when in self.steps.times if when >= began]
        each = self.median_seconds
        if len(times) > 1 and times[-1][0] > times[0][0]:
            each = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
        return None if each is None else max(0.0, each * (self.total_steps - self.step))

    def status(self) -> RunStatus:
        """Return the status of the run, as far as it can be determined from this machine."""
        if self.end:
            return next((s for s in EXIT_CODES if s.value == self.end.get("outcome")), RunStatus.FAILED)
        if not self.start and not self.steps.line:
            return RunStatus.WAITING
        if self._lock is False and self._started_here() and self.quiet_seconds > _TAKEOVER:
            return RunStatus.KILLED
        median = self.median_seconds or 0.0
        return RunStatus.SILENT if self.quiet_seconds > max(_QUIET, _QUIET_STEPS * median) else RunStatus.RUNNING

    def lock_text(self) -> str:
        """Return a sentence that says whether a job still holds the lock of the run folder."""
        if self._lock:
            return "a process on this machine holds its lock"
        if self._lock is False and self._started_here():
            return "no process holds its lock"
        return "this machine cannot see whether a process holds its lock"

    def _started_here(self) -> bool:
        """Return whether rank 0, which held the lock when the job began, was on this machine."""
        return list(self.start.get("hosts") or [])[:1] == [socket.gethostname()]

    # -- reading

    def _current_steps(self) -> Steps:
        """Return the steps of the current metrics file, starting again if a resumed job has rewritten it."""
        if self._metrics.replacements != self._metrics_version:
            self._metrics_version, self.steps = self._metrics.replacements, Steps()
        return self.steps

    def _add_event(self, event: dict[str, Any] | None) -> None:
        if event is None:
            return
        self.new_events.append(event)
        kind = event["event"]
        if kind == "start":
            self.start, self.end, self.lost, self.starts = event, {}, [], self.starts + 1
            self.steps.seconds.clear()
        elif kind == "end":
            self.end = event
        elif kind == "save":
            self.save = event
        elif kind == "lost":
            self.lost += [rank for rank in event.get("ranks") or [] if isinstance(rank, int)]

    def _add_log(self, lines: Iterable[bytes]) -> None:
        """Keep warnings and errors. If one has several lines, such as a traceback, its last line becomes its text."""
        records: list[tuple[str, int, str, str]] = []
        relevant = False
        for raw in lines:
            text = raw.decode(errors="replace").rstrip()
            if match := _LINE.fullmatch(text):
                when, rank, level, message = match.groups()
                if relevant := level in ("WARNING", "ERROR", "CRITICAL"):
                    records.append((when, int(rank), level, message))
            elif relevant and text:
                records[-1] = (*records[-1][:3], text)
        self.warnings = sorted([*self.warnings, *records])[-_WARNINGS:]

    def _add_rank_line(self, rank: int, line: RankStart | RankLine | None) -> None:
        if isinstance(line, RankStart):
            self.recent_times[rank] = deque(maxlen=_RANK_LINES)
            (self.servers.add if line.role == SERVER else self.servers.discard)(rank)
        elif line is not None and line.seconds:
            self.recent_times.setdefault(rank, deque(maxlen=_RANK_LINES)).append(line.seconds)
