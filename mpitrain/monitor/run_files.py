"""Writers and readers of a run's JSON-lines files, and a summary of a run in a few lines of text.

RUN/events.jsonl: one JSON object for each start of a run, and for each event other than a step.

    {"time": 1767225600.25, "event": "start", "step": 0, "version": "0.1.0", "ranks": 8, "hosts": ["n1", "n2"], ...}
    {"time": 1767225701.5, "event": "save", "step": 100, "folder": "step-00000100", "seconds": 0.8}
    {"time": 1767225702.1, "event": "end", "step": 100, "outcome": "stopped", "message": "SIGTERM", ...}

`time` is in unix seconds, `step` is the number of steps done by then. Every start appends to the file; only an
incomplete last line of a killed job is removed. A start without an end means that the job was killed.

RUN/metrics.jsonl: one JSON object per line, one line per step, in rising order of steps.

    {"step": 1, "time": 1767225600.25, "loss": 5.53, "lr": 0.00015, "grad_norm": 2.1, ..., "world_size": 8}
    {"step": 2, ...}

Each line is written at once, so a reader that follows the file sees whole lines, and a killed run can leave at most its
last line incomplete. A run resumed from step k first removes the lines after k, so that each step occurs once. A number
that is not finite is written as null, because JSON has no NaN.

RUN/ranks/rank-00003.jsonl: how one rank used its time and memory. Every rank writes its own file.

    {"start": t, "rank": 3, "world_size": 8, "role": "worker", "host": "n0", "node": 0, "device": "cpu",
     "stage": 0, "coordinates": [3, 0, 0], "expected_memory": {...}, "expected_bytes": {...}, "step": 100}
                                                                                                    a start of the job
    {"step": 105, "steps": 5, "time": t, "seconds": {"data": s, ...}, "sent": [[...], ...], "memory": {...}}

A rank that takes no steps itself has the role server, and readers do not compare it with the others. A line of steps
covers `steps` steps, the last of which is `step`. `time` and `start` are unix seconds; all other values are in seconds
and bytes. If a start resumes from an earlier step, the lines that follow it replace those of the later steps.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import takewhile
from pathlib import Path
from statistics import median, median_high
from typing import Any, TypeVar

from pydantic import ValidationError

from mpitrain.errors import InputError
from mpitrain.monitor.energy import add_energy, energy_text
from mpitrain.monitor.json_lines import (
    EventLine,
    FullStepLine,
    GrowingFile,
    LineWriter,
    StepTimes,
    parse_line,
    read_lines,
)
from mpitrain.monitor.report.goodput import Goodput
from mpitrain.storage.disk import free_name, open_plain, replacing
from mpitrain.storage.run_folder import CHECKPOINTS, EVENTS, METRICS, RANKS, rank_path, report_unwritable
from mpitrain.storage.text import align_rows, arithmetic_text, counted, duration, number_text, rates_text, with_spaces


class EventLog(LineWriter):
    """Writer of a run folder's events, used by rank 0 while it holds the folder's lock.

    Raises InputError if the file cannot be opened.
    """

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / EVENTS, "events")

    def write(self, event: str, step: int, **fields: Any) -> dict[str, Any]:
        """Append one line, and return it. If that fails, no part of it is left in the file.

        Args:
            event: Kind of event, one word.
            step: Number of steps done so far.
            fields: Further values of the line, in this order; anything that JSON can represent.

        Raises:
            InputError: The line cannot be written.
        """
        line = {"time": time.time(), "event": event, "step": step} | fields
        self.append(line)
        return line


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a run in order, without an incomplete last line; an empty list if the file does not exist.

    Args:
        path: Path of a run folder, or of its events.jsonl.

    Raises:
        InputError: The file cannot be read, or a line before the last one is damaged.
    """
    path = Path(path)
    path = path / EVENTS if path.is_dir() else path
    try:
        return list(read_lines(path, "events", check_event))
    except FileNotFoundError:
        return []


def check_event(value: Any) -> dict[str, Any]:
    """Return a JSON value unchanged if it is a valid event. Raises ValueError otherwise."""
    try:
        EventLine.model_validate(value)
    except ValidationError:
        raise ValueError from None
    return dict(value)


def explain_missing_steps(folder: Path) -> str:
    """Return a message that explains, from the events, why a run folder has no finished step."""
    none = f"run folder {folder} has no finished step"
    try:
        last = (read_events(folder) or [{}])[-1]
    except InputError:
        last = {}
    if last.get("outcome") == "failed":
        return f"{none}: its job failed ({last.get('message') or 'without a message'}); fix it and start the job again"
    if last:
        return f"{none}; python -m mpitrain.report --watch {shlex.quote(str(folder))} shows its progress"
    return f"{none}; use the folder of a run that finished a step"


HELD_OUT = "held_out_"  # prefix of the names of held-out metrics
T = TypeVar("T")


class MetricsWriter(LineWriter):
    """Writer of the run's metrics, used by rank 0.

    Args:
        run_dir: Path of the run folder.
        resume_step: Last step to keep; new lines follow after it. None for a run from the start: an earlier file is
            renamed to metrics.jsonl.1, .2, ….

    Attributes:
        discarded: Steps whose lines were removed or renamed, which are done again: their number `steps`, the sum of
            their `seconds`, and the end of the last one in unix seconds, `until`. Empty if there are none.

    Raises:
        InputError: The folder is not writable, or the disk is full.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        path = Path(run_dir) / METRICS
        self._last_step = -1
        with report_unwritable(f"metrics {path}"):
            self.discarded: dict[str, Any] = {}
            if path.exists() and resume_step is not None:
                self._last_step, self.discarded = _cut_after(path, resume_step)
            elif path.exists() and path.stat().st_size:  # an earlier run's file gets the first free number
                self.discarded = _sum_up(GrowingFile(path).new_lines())
                os.rename(path, free_name(path))
        super().__init__(path, "metrics")

    def write(self, *, step: int, **figures: Any) -> None:
        """Append the line of one step, which must be later than all steps before it.

        Args:
            step: Number of the step.
            figures: Further values of the line, in this order; anything that JSON can represent. A run writes for each
                step time (unix seconds, at its end), loss, lr, grad_norm (None if not computed), samples, tokens,
                step_s (seconds), tokens_per_s, memory_bytes (peak per rank) and world_size (number of ranks); where
                they are known also flops (useful floating-point operations of all ranks), tflops_per_rank (useful
                TFLOP/s) and mfu (their share of the peak); for some steps also held_out_loss,
                ids (sample numbers) or energy.

        Raises:
            InputError: The line cannot be written.
        """
        if step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} cannot follow those of step {self._last_step}; each step has one line"
            )
        self._last_step = step
        self.append({"step": step} | figures)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the metrics lines of a run in order, without an incomplete last line.

    Args:
        path: Path of a run folder, or of its metrics.jsonl.

    Raises:
        InputError: The file does not exist, or a line before the last one is damaged.
    """
    return list(_read(Path(path), _with_step))


def step_lines(path: Path) -> Iterator[FullStepLine]:
    """Yield the checked metrics lines of a run folder, or of a metrics.jsonl, without an incomplete last line.

    Raises InputError if no step is finished, or a line is damaged.
    """
    none = True
    if not path.is_dir() or (path / METRICS).exists():
        for line in _read(path, FullStepLine.model_validate):
            none = False
            yield line
    if none:
        raise InputError(explain_missing_steps(path))


def _read(path: Path, kind: Callable[[Any], T]) -> Iterator[T]:
    path = path / METRICS if path.is_dir() else path
    try:
        yield from read_lines(path, "metrics", kind)
    except FileNotFoundError:
        raise InputError(f"metrics {path} do not exist; use the folder of a run that finished a step") from None


def read_goodput(folder: Path) -> Goodput:
    """Return the account of the wall clock of a run folder until the run's last sign.

    Raises:
        InputError: A file cannot be read, or a line is damaged.
    """
    lines = _read(folder, StepTimes.model_validate) if (folder / METRICS).exists() else ()
    return Goodput.of(read_events(folder), lines)


def _with_step(value: Any) -> dict[str, Any]:
    """Return the value if it is an object with an integer `step`, of any version. Raises ValueError otherwise."""
    if isinstance(value, dict) and type(value.get("step")) is int:
        return value
    raise ValueError


def _cut_after(path: Path, resume_step: int) -> tuple[int, dict[str, Any]]:
    """Rewrite the file without the lines after `resume_step`.

    Returns the last step in the file, -1 if none, and a summary of the lines that were removed (`_sum_up`).
    """
    last, lost = -1, list[bytes]()
    with open_plain(path), replacing(path) as aside, open(aside, "wb") as file:  # refuses a pipe, which could block
        for line in GrowingFile(path).lines():
            value = parse_line(line or b"", _with_step)
            if line is not None and value is not None and last < value["step"] <= resume_step:
                last = value["step"]
                file.write(line)
            else:
                lost.append(line or b"")
    return last, _sum_up(lost)


def _sum_up(lines: Iterable[bytes]) -> dict[str, Any]:
    """Return the values of `MetricsWriter.discarded` for these lines of metrics."""
    steps = [step for line in lines if (step := parse_line(line, StepTimes.model_validate)) is not None]
    if not steps:
        return {}
    seconds, until = sum(step.step_s or 0.0 for step in steps), max(step.time or 0.0 for step in steps)
    return {"steps": len(steps), "seconds": seconds, "until": until}


SERVER = "server"  # the role of a rank that takes no steps itself
_FLUSH = 5.0  # longest time in seconds that a line stays in memory, and ...
_EARLY_FLUSH = 0.5  # ... as a share of the time since the start, so that a job killed early leaves its first lines
_LINE_INTERVAL = 0.5  # least time in seconds between two lines, and ...
_LINE_SHARE = 1e-3  # ... as a share of the time since the start, so that files of long runs stay small


def rank_name(rank: int, role: object) -> str:
    """Return the name of a rank in messages and charts: "rank 3", or "rank 3 (server)".

    Args:
        rank, role: Number and role of the rank; the roles are "worker" and "server".
    """
    return f"rank {rank} ({SERVER})" if role == SERVER else f"rank {rank}"


def axis_of(label: str) -> str:
    """Return the axis in a communicator's label: "data" for "data/shard", "pipeline" for the pipeline's tied ranks."""
    return label.partition("/")[0].partition(" tied ")[0]


class RankWriter(LineWriter):
    """Writer of one rank's file, which buffers lines for a few seconds.

    Args:
        folder: Path of the run folder.
        rank: Number of the rank.
        started: Start time of the job in unix seconds.
        header: Further values of the start line; anything that JSON can represent.

    Raises:
        InputError: The file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, started: float, header: dict[str, Any]) -> None:
        path = rank_path(folder / RANKS, rank, "jsonl")
        self._began = self._written = self._flushed = time.monotonic()
        with report_unwritable(f"rank file {path}"):
            path.parent.mkdir(exist_ok=True)
        super().__init__(path, "rank file")
        self._lines: list[dict[str, Any]] = [{"start": started, "rank": rank} | header]
        self.flush()

    def due(self) -> bool:
        """Return whether to write a line after a step that ends now."""
        now = time.monotonic()
        return self._written == self._began or now - self._written >= max(
            _LINE_INTERVAL, _LINE_SHARE * (now - self._began)
        )

    def write(self, step: int, steps: int, **values: Any) -> None:
        """Append a line, which is buffered at first.

        Args:
            step, steps: Last step that the line covers, and their number.
            values: Further values of the line.

        Raises:
            InputError: The buffered lines cannot be written.
        """
        self._lines.append({"step": step, "steps": steps, "time": time.time()} | values)
        first, self._written = self._written == self._began, time.monotonic()
        if first or self._written - self._flushed >= min(_FLUSH, _EARLY_FLUSH * (self._written - self._began)):
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines. Raises InputError if that fails."""
        self._flushed = time.monotonic()
        lines, self._lines = self._lines, []
        self.append(*lines)

    def close(self) -> None:
        """Write the buffered lines and close the file. Errors are ignored because the run is over."""
        with suppress(InputError):
            self.flush()
        super().close()


_loss = partial(number_text, form=".4f")


def summary(folder: Path) -> str:
    """Return a summary of a run in a few lines. Raises InputError if no step is finished, or a line is damaged."""
    lines = list(step_lines(folder))
    first, last, took = lines[0], lines[-1], sum(line.step_s for line in lines)
    held_out = [(line.step, line.held_out_loss) for line in lines if line.held_out_loss is not None]
    lost = [line for line in lines if line.recovered_s is not None]  # the first step after ranks were lost
    checkpoints = sorted(p.name for p in (folder / CHECKPOINTS).glob("step-*") if ".tmp-" not in p.name)
    rows = [
        ("steps", f"{first.step} to {last.step} ({len(lines)} recorded)"),
        ("loss", f"{_loss(first.loss)} -> {_loss(last.loss)}"),
        ("skipped", _skipped(lines)),
        ("held-out loss", " -> ".join(f"{_loss(v)} (step {s})" for s, v in held_out[:: max(1, len(held_out) // 4)])),
        *_metrics(lines),
        ("speed", rates_text(sum(line.samples for line in lines) / took, sum(line.tokens for line in lines) / took)),
        ("arithmetic", _arithmetic(lines)),
        ("step time", f"median {median(line.step_s for line in lines) * 1e3:.1f} ms, total {duration(took)}"),
        ("between groups", _between_groups(lines)),
        ("staleness", _staleness(lines)),
        ("memory", _memory(lines)),
        ("energy", _energy(lines)),
        ("recovered", ", ".join(f"{n.recovered_s:.1f} s from the loss of ranks to step {n.step}" for n in lost)),
        ("start", _start(lines)),
        ("goodput", Goodput.of(read_events(folder), lines).describe()),
        ("ranks", ", ".join(str(size) for size in dict.fromkeys(line.world_size for line in lines))),
        ("checkpoints", ", ".join(checkpoints) or "none"),
    ]
    return f"run {folder}\n{align_rows([row for row in rows if row[1]])}"


def _arithmetic(lines: Sequence[FullStepLine]) -> str:
    """Return a text with the useful arithmetic of a rank, as a mean over the time of the steps where it is known."""
    rows = [(line.step_s, line.tflops_per_rank, line.mfu or 0.0) for line in lines if line.tflops_per_rank is not None]
    took = sum(seconds for seconds, _, _ in rows)
    if not rows:
        return ""
    return arithmetic_text(
        sum(s * tflops for s, tflops, _ in rows) / took, sum(s * share for s, _, share in rows) / took
    )


def _metrics(lines: Sequence[FullStepLine]) -> list[tuple[str, str]]:
    """Return a row for each metric of held-out samples, with its first and last value."""
    measured: dict[str, list[float]] = {}
    for line in lines:
        for name, value in (line.model_extra or {}).items():
            if name.startswith(HELD_OUT) and isinstance(value, float):
                measured.setdefault(name.removeprefix(HELD_OUT), []).append(value)
    return [(f"held-out {with_spaces(n)}", f"{v[0]:.4g} -> {v[-1]:.4g}") for n, v in measured.items()]


def _between_groups(lines: Sequence[FullStepLine]) -> str:
    """Return a text with the bytes that rank 0 sends for averaging between groups of ranks in parallel.mode local."""
    sent = [line.between_groups_bytes for line in lines if line.between_groups_bytes is not None]
    if not sent:
        return ""
    return f"{median_high(sent) / 1e6:.4g} MB sent by rank 0 per averaging step, {len(sent)} of {len(lines)} steps"


def _staleness(lines: Sequence[FullStepLine]) -> str:
    """Return a text with the age of the parameters used for updates, if a server does not wait for all workers."""
    means = [line.staleness_mean for line in lines if line.staleness_mean is not None]
    if not means:
        return ""
    most, ahead = max(line.staleness_max or 0 for line in lines), max(line.ahead_max or 0 for line in lines)
    text = f"mean {sum(means) / len(means):.2g} steps, at most {most:.3g}"
    return f"{text}; workers at most {counted(ahead, 'step')} ahead of the slowest"


def _skipped(lines: Sequence[FullStepLine]) -> str:
    """Return a text with the number of steps without an update, and the step since which nothing was learned."""
    skipped = sum(line.skipped for line in lines)
    useless = list(takewhile(lambda line: line.skipped or line.loss is None, reversed(lines)))
    parts = [f"{skipped} of {len(lines)} steps" if skipped else ""]
    parts.append(f"nothing learned since step {useless[-1].step}" if useless else "")
    return ", ".join(filter(None, parts))


def _start(lines: Sequence[FullStepLine]) -> str:
    """Return a text with the parts of the last start until its first step was done."""
    parts = next((line.start_s for line in reversed(lines) if line.start_s), {})
    shown = ", ".join(f"{with_spaces(name)} {seconds:.1f}" for name, seconds in parts.items())
    return f"{sum(parts.values()):.1f} s to the end of the first step: {shown}" if parts else ""


def _energy(lines: Sequence[FullStepLine]) -> str:
    """Return a text with the joules of all machines in the steps for which they are known."""
    records = [line.energy.model_dump(exclude_none=True) for line in lines if line.energy is not None]
    return energy_text(reduce(add_energy, records, {}))


def _memory(lines: Sequence[FullStepLine]) -> str:
    """Return a text with rank 0's bytes by category in the last start, beside the values predicted by formula."""
    memory = next((line.memory for line in reversed(lines) if line.memory is not None), None)
    if memory is None:
        return ""
    bytes_in_use, parts = memory.model_dump(exclude={"expected"}), []
    for name, count in bytes_in_use.items():
        formula = f" ({memory.expected[name] / 1e6:.4g})" if name in memory.expected else ""
        parts.append(f"{name} {count / 1e6:.4g}{formula}")
    return ", ".join(parts) + " MB on rank 0 (in brackets: predicted by formula)"
