"""Files of JSON lines that a run writes: their writers and readers, and a run in a few lines of text.

RUN/events.jsonl: one JSON object for each start of a run, and for what happened in it beside its steps.

    {"time": 1767225600.25, "event": "start", "step": 0, "version": "0.1.0", "ranks": 8, "hosts": ["n1", "n2"], ...}
    {"time": 1767225701.5, "event": "save", "step": 100, "folder": "step-00000100", "seconds": 0.8}
    {"time": 1767225702.1, "event": "end", "step": 100, "outcome": "stopped", "message": "SIGTERM", ...}

`time` is in unix seconds, `step` counts the steps that were done by then. Every start appends, and nothing is taken
away but a last line that was torn by a kill. A start that no end follows is a job that was killed.

RUN/metrics.jsonl: one JSON object a line, one line a step, steps rising.

    {"step": 1, "time": 1767225600.25, "loss": 5.53, "lr": 0.00015, "grad_norm": 2.1, ..., "world_size": 8}
    {"step": 2, ...}

Each line is one write, so a reader that follows the file sees whole lines, and a killed run tears at most its last
one. A run resumed from step k first takes away what the killed one wrote after k: each step stands once. A figure
that is not finite is null, as JSON knows no NaN.

RUN/ranks/rank-00003.jsonl: what one rank did with its time and its memory. Every rank writes its own file.

    {"start": t, "rank": 3, "world_size": 8, "role": "worker", "host": "n0", "node": 0, "device": "cpu",
     "stage": 0, "coordinates": [3, 0, 0], "expected_memory": {...}, "expected_bytes": {...}, "step": 100}
                                                                                                    a start of the job
    {"step": 105, "steps": 5, "time": t, "seconds": {"data": s, ...}, "sent": [[...], ...], "memory": {...}}

A rank that takes no steps itself has the role server: readers do not compare it with others. A line of steps stands
for `steps` steps, the last of which is `step`. Times are unix seconds, all else is in seconds and bytes.
Where a start went back to an earlier step, what the file says of later ones is replaced by what follows.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median, median_high
from typing import Any, TypeVar

from pydantic import ValidationError

from mpitrain.errors import InputError
from mpitrain.monitor.json_lines import EventLine, FullStepLine, GrowingFile, LineWriter, parsed, read_lines
from mpitrain.storage.disk import free_name, open_plain, replacing
from mpitrain.storage.run_folder import CHECKPOINTS, EVENTS, METRICS, RANKS, rank_path, writing
from mpitrain.storage.text import aligned, counted, duration, number_text, rates_text, spoken


class EventLog(LineWriter):
    """The writer of a run's events: of rank 0, while it holds the run folder.

    Args:
        run_dir: The run folder.

    Raises:
        InputError: The file cannot be opened.
    """

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / EVENTS, "events")

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Append one line. Where that fails, nothing of it is left in the file.

        Args:
            event: What happened, in a word.
            step: Steps done by then.
            fields: What else the line says, in this order; whatever JSON can hold.

        Raises:
            InputError: The line cannot be written.
        """
        self.append({"time": time.time(), "event": event, "step": step} | fields)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a run, in order. A torn last line is left out; a run without the file has none.

    Args:
        path: A run folder, or its events.jsonl.

    Raises:
        InputError: The file cannot be read, or a line inside it is damaged.
    """
    path = Path(path)
    path = path / EVENTS if path.is_dir() else path
    try:
        return list(read_lines(path, "events", checked_event))
    except FileNotFoundError:
        return []


def checked_event(value: Any) -> dict[str, Any]:
    """Return an event as it is written. Raises ValueError for anything else."""
    try:
        EventLine.model_validate(value)
    except ValidationError:
        raise ValueError from None
    return dict(value)


def why_no_step(folder: Path) -> str:
    """What to say of a run folder without a finished step: by its events, why there is none.

    Args:
        folder: The run folder.
    """
    none = f"run folder {folder} has no finished step"
    try:
        last = (read_events(folder) or [{}])[-1]
    except InputError:
        last = {}
    if last.get("outcome") == "failed":
        return f"{none}: its job failed ({last.get('message') or 'without a message'}); mend that, and start it again"
    if last:
        return f"{none}; python -m mpitrain.report --watch {shlex.quote(str(folder))} shows what becomes of it"
    return f"{none}; give the folder of a run that took one"


HELD_OUT = "held_out_"  # before the name of a figure
T = TypeVar("T")


class MetricsWriter(LineWriter):
    """Rank 0's writer of the run's metrics.

    Args:
        run_dir: The run folder.
        resume_step: None for a run from the start (an earlier file is set aside as metrics.jsonl.1, .2, …); k to keep
            the lines up to step k and go on after them.

    Raises:
        InputError: The folder is not writable, or the disk is full.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        path = Path(run_dir) / METRICS
        self._last_step = -1
        with writing(f"metrics {path}"):
            if path.exists() and resume_step is not None:
                self._last_step = _cut_after(path, resume_step)
            elif path.exists() and path.stat().st_size:  # an earlier run's file gets the first free number
                os.rename(path, free_name(path))
        super().__init__(path, "metrics")

    def write(self, *, step: int, **figures: Any) -> None:
        """Append the line of one step, which is later than all before it.

        Args:
            step: Its number.
            figures: What else the line says, in this order; whatever JSON can hold. A run writes of each step time (in
                unix seconds, at its end), loss, lr, grad_norm (None where it was not taken), samples, tokens, step_s
                (seconds), tokens_per_s, memory_bytes (the peak per rank) and world_size (ranks); of some held_out_loss
                or ids (the samples' numbers).

        Raises:
            InputError: The line cannot be written.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}: each step stands once")
        self._last_step = step
        self.append({"step": step} | figures)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a run, in order. A torn last line is left out.

    Args:
        path: A run folder, or its metrics.jsonl.

    Raises:
        InputError: There is no such file, or a line inside it is damaged.
    """
    return list(_read(Path(path), _with_step))


def step_lines(path: Path) -> Iterator[FullStepLine]:
    """Yield the lines of a run, checked. A torn last line is left out.

    Args:
        path: A run folder, or its metrics.jsonl.

    Raises:
        InputError: No step is finished, or a line is damaged.
    """
    none = True
    if not path.is_dir() or (path / METRICS).exists():
        for line in _read(path, FullStepLine.model_validate):
            none = False
            yield line
    if none:
        raise InputError(why_no_step(path))


def _read(path: Path, kind: Callable[[Any], T]) -> Iterator[T]:
    path = path / METRICS if path.is_dir() else path
    try:
        yield from read_lines(path, "metrics", kind)
    except FileNotFoundError:
        raise InputError(f"metrics {path} do not exist; give the folder of a run that took a step") from None


def _with_step(value: Any) -> dict[str, Any]:
    """Return an object of any version that has a step. Raises ValueError for anything else."""
    if isinstance(value, dict) and type(value.get("step")) is int:
        return value
    raise ValueError


def _cut_after(path: Path, resume_step: int) -> int:
    """Rewrites the file without what came after resume_step; returns the last step in it (-1: none)."""
    last = -1
    with open_plain(path), replacing(path) as aside, open(aside, "wb") as file:  # no pipe, whose opening may never end
        for line in GrowingFile(path).lines():
            value = parsed(line or b"", _with_step)
            if line is not None and value is not None and last < value["step"] <= resume_step:
                last = value["step"]
                file.write(line)
    return last


SERVER = "server"  # the role of a rank that takes no steps itself
_FLUSH = 5.0  # seconds that a line is kept in memory at most, and ...
_YOUNG = 0.5  # ... of the time since the start: a job that is killed early leaves its first lines, too
_LEAST = 0.5  # seconds between two lines
_PART = 1e-3  # of the time since the start: the same for long runs, whose files would grow


def rank_name(rank: int, role: object) -> str:
    """What readers call a rank: "rank 3", or "rank 3 (server)"."""
    return f"rank {rank} ({SERVER})" if role == SERVER else f"rank {rank}"


def axis_of(label: str) -> str:
    """The axis that a communicator belongs to, by its label: "data" of "data/shard", "pipeline" of its tied ranks."""
    return label.partition("/")[0].partition(" tied ")[0]


class RankWriter(LineWriter):
    """Appends to the file of one rank.

    Args:
        folder: The run folder.
        rank: The rank's number.
        started: When the job started, in unix seconds.
        header: What is to be known of this start, as JSON can hold it.

    Raises:
        InputError: The file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, started: float, header: dict[str, Any]) -> None:
        path = rank_path(folder / RANKS, rank, "jsonl")
        self._began = self._written = self._flushed = time.monotonic()
        with writing(f"rank file {path}"):
            path.parent.mkdir(exist_ok=True)
        super().__init__(path, "rank file")
        self._lines: list[dict[str, Any]] = [{"start": started, "rank": rank} | header]
        self.flush()

    def due(self) -> bool:
        """Whether a step that ends now is to be followed by a line."""
        now = time.monotonic()
        return self._written == self._began or now - self._written >= max(_LEAST, _PART * (now - self._began))

    def write(self, step: int, steps: int, **told: Any) -> None:
        """Append a line.

        Args:
            step: The last step that it stands for.
            steps: How many it stands for.
            told: What else it says.
        """
        self._lines.append({"step": step, "steps": steps, "time": time.time()} | told)
        first, self._written = self._written == self._began, time.monotonic()
        if first or self._written - self._flushed >= min(_FLUSH, _YOUNG * (self._written - self._began)):
            self.flush()

    def flush(self) -> None:
        """Write what is kept in memory. Raises InputError where that fails."""
        self._flushed = time.monotonic()
        lines, self._lines = self._lines, []
        self.append(*lines)

    def close(self) -> None:
        """Write what is kept in memory, and close the file. Nothing is raised: the run is over."""
        with suppress(InputError):
            self.flush()
        super().close()


_loss = partial(number_text, form=".4f")


def summary(folder: Path) -> str:
    """A few lines of what a run did: steps, losses, speed, checkpoints.

    Args:
        folder: The run folder.

    Raises:
        InputError: No step of it is finished, or a line of its metrics is damaged.
    """
    lines = list(step_lines(folder))
    first, last, took = lines[0], lines[-1], sum(line.step_s for line in lines)
    held_out = [(line.step, line.held_out_loss) for line in lines if line.held_out_loss is not None]
    lost = [line for line in lines if line.recovered_s is not None]  # the first step without ranks that were lost
    checkpoints = sorted(p.name for p in (folder / CHECKPOINTS).glob("step-*") if ".tmp-" not in p.name)
    rows = [
        ("steps", f"{first.step} to {last.step} ({len(lines)} recorded)"),
        ("loss", f"{_loss(first.loss)} -> {_loss(last.loss)}"),
        ("skipped", _skipped(lines)),
        ("held-out loss", " -> ".join(f"{_loss(v)} (step {s})" for s, v in held_out[:: max(1, len(held_out) // 4)])),
        *_metrics(lines),
        ("speed", rates_text(sum(line.samples for line in lines) / took, sum(line.tokens for line in lines) / took)),
        ("step time", f"median {median(line.step_s for line in lines) * 1e3:.1f} ms, in all {duration(took)}"),
        ("between groups", _between_groups(lines)),
        ("staleness", _staleness(lines)),
        ("memory", _memory(lines)),
        ("recovered", ", ".join(f"{n.recovered_s:.1f} s from the loss of ranks to step {n.step}" for n in lost)),
        ("ranks", ", ".join(str(size) for size in dict.fromkeys(line.world_size for line in lines))),
        ("checkpoints", ", ".join(checkpoints) or "none"),
    ]
    return f"run {folder}\n{aligned([row for row in rows if row[1]])}"


def _metrics(lines: Sequence[FullStepLine]) -> list[tuple[str, str]]:
    """Return a row for each metric of held-out samples: the first and the last value."""
    measured: dict[str, list[float]] = {}
    for line in lines:
        for name, value in (line.model_extra or {}).items():
            if name.startswith(HELD_OUT) and isinstance(value, float):
                measured.setdefault(name.removeprefix(HELD_OUT), []).append(value)
    return [(f"held-out {spoken(n)}", f"{v[0]:.4g} -> {v[-1]:.4g}") for n, v in measured.items()]


def _between_groups(lines: Sequence[FullStepLine]) -> str:
    """Return what averages cost in parallel.mode local, where groups of ranks met."""
    sent = [line.between_groups_bytes for line in lines if line.between_groups_bytes is not None]
    if not sent:
        return ""
    return f"{median_high(sent) / 1e6:.4g} MB sent by rank 0 a step, {len(sent)} meetings in {len(lines)} steps"


def _staleness(lines: Sequence[FullStepLine]) -> str:
    """Return how old the parameters were that updates were computed with, where a server did not wait for all."""
    means = [line.staleness_mean for line in lines if line.staleness_mean is not None]
    if not means:
        return ""
    most, ahead = max(line.staleness_max or 0 for line in lines), max(line.ahead_max or 0 for line in lines)
    told = f"mean {sum(means) / len(means):.2g} steps, at most {most:.3g}"
    return f"{told}; workers at most {counted(ahead, 'step')} ahead of the slowest"


def _skipped(lines: Sequence[FullStepLine]) -> str:
    """Return the steps without an update, and those at the end that taught nothing."""
    skipped = sum(line.skipped for line in lines)
    useless = list(takewhile(lambda line: line.skipped or line.loss is None, reversed(lines)))
    told = [f"{skipped} of {len(lines)} steps" if skipped else ""]
    told.append(f"nothing learned since step {useless[-1].step}" if useless else "")
    return ", ".join(filter(None, told))


def _memory(lines: Sequence[FullStepLine]) -> str:
    """Return rank 0's bytes by category, as the last start of the run had them, with what the formula says."""
    memory = next((line.memory for line in reversed(lines) if line.memory is not None), None)
    if memory is None:
        return ""
    held, parts = memory.model_dump(exclude={"expected"}), []
    for name, count in held.items():
        formula = f" ({memory.expected[name] / 1e6:.4g})" if name in memory.expected else ""
        parts.append(f"{name} {count / 1e6:.4g}{formula}")
    return ", ".join(parts) + " MB on rank 0 (in brackets: by formula)"
