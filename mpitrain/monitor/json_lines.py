"""Files of JSON lines that a job appends to, one whole line at a time, and that readers follow as they grow.

A killed job may leave an incomplete last line. Readers hold one line in memory at a time, whatever the size of the
file; a line longer than `LONGEST` is treated as damage, because no job writes one.

The lines of metrics.jsonl, events.jsonl and ranks/rank-*.jsonl are validated as they are read. Their readers (`report`,
its live view, `read_events`) therefore see only values of the types below, and numbers that can be added, divided and
printed. Keys that have no field here may hold any value.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from mpitrain.errors import InputError, first_problem
from mpitrain.storage.disk import open_plain, reason
from mpitrain.storage.run_folder import report_unwritable

LONGEST = 16 << 20  # maximum bytes of a line
T = TypeVar("T")


class GrowingFile:
    """Reader of a file that another process appends to; returns each whole line once, also on a shared file system.

    Args:
        path: Path of the file, which does not have to exist yet.
        last_bytes: Number of bytes before the end of the file at which to start reading; None starts at the beginning.

    Attributes:
        replacements: Number of times the file was replaced, or was shorter than the part already read.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self.replacements = 0
        self._last_bytes = last_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._read = 0  # bytes, up to the end of a line
        self._skipping = False  # whether `_read` is inside a line whose rest is to be skipped

    def lines(self) -> Iterator[bytes | None]:
        """Yield the lines added since the last call; None in place of a line of more than `LONGEST` bytes.

        If the file was replaced or truncated, `replacements` is increased and then all lines are yielded again. An
        incomplete last line is left for the next call.

        Raises:
            OSError: The file cannot be read.
        """
        with open_plain(self.path) as file:  # opened each time, so that a network file system asks its server
            status = os.fstat(file.fileno())
            before, self._file = self._file, (status.st_dev, status.st_ino)
            if before is None:
                if self._last_bytes is not None and status.st_size > self._last_bytes:
                    self._read, self._skipping = status.st_size - self._last_bytes, True
            elif before != self._file or status.st_size < self._read:
                self.replacements += 1
                self._read, self._skipping = 0, False
            file.seek(self._read)
            while line := file.readline(LONGEST + 1):
                whole = line.endswith(b"\n")
                if not (whole or self._skipping or len(line) > LONGEST):
                    return
                self._read += len(line)
                passing, self._skipping = self._skipping, not whole
                if not passing:
                    yield line if len(line) <= LONGEST else None

    def new_lines(self) -> Iterator[bytes]:
        """Yield `lines`, with an empty line in place of one that is too long; nothing if the file cannot be read."""
        with suppress(OSError):
            yield from (line or b"\n" for line in self.lines())


def parse_line(line: bytes, kind: Callable[[Any], T]) -> T | None:
    """Return `kind(value)` for the JSON value of a line, or None if the line is no JSON or `kind` raises ValueError.

    Args:
        line: Bytes of the line.
        kind: Function that checks and converts the JSON value.
    """
    try:
        return kind(json.loads(line))
    except (ValueError, RecursionError):
        return None


def read_lines(
    path: Path, what: str, kind: Callable[[Any], T], after_torn: Callable[[T], bool] = lambda line: False
) -> Iterator[T]:
    """Yield the checked lines of a file, without an incomplete last line.

    Args:
        path: Path of the file.
        what: Name of the file in error messages.
        kind: Function that converts a JSON value to the yielded value; raises ValueError for a damaged one.
        after_torn: Predicate that accepts the lines which may follow an incomplete line of a killed job, namely the
            first line of the next job.

    Raises:
        InputError: The file cannot be read, or a line before the last one is damaged.
        FileNotFoundError: The file does not exist.
    """
    torn: InputError | None = None
    try:
        for number, line in enumerate(GrowingFile(path).lines(), 1):
            if line is None:
                raise InputError(f"{what} {path}: line {number} is longer than {LONGEST >> 20} MiB; remove it")
            try:
                value = kind(json.loads(line))
            except ValidationError as error:
                raise InputError(f"{what} {path}, line {number}: {first_problem(error)}; fix that line") from None
            except (ValueError, RecursionError):
                if torn is not None:
                    raise torn from None
                torn = InputError(f"{what} {path}: line {number} is damaged; remove it")
                continue
            if torn is not None and not after_torn(value):
                raise torn
            torn = None
            yield value
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(
            f"{what} {path} cannot be read ({reason(error)}); use a run folder that you may read"
        ) from None
    if torn is not None:
        raise torn


class LineWriter:
    """Writer that appends JSON objects to a file, one a line; they are in the file when `append` returns.

    Opening the file removes an incomplete last line of a killed job.

    Args:
        path: Path of the file.
        what: Name of the file in error messages.

    Raises:
        InputError: The file cannot be written.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = f"{what} {path}"
        with report_unwritable(self._what):
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - it stays open as long as the writer
            self._cut_incomplete_line()

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Append lines. Numbers that are not finite are written as null, because JSON has no NaN or infinity.

        Raises:
            InputError: The lines cannot be written; the file is then left as it was before.
        """
        data = "".join(_text(line) + "\n" for line in lines).encode()
        with report_unwritable(self._what):
            size, written = os.fstat(self._file.fileno()).st_size, 0
            try:
                while written < len(data):
                    written += self._file.write(data[written:])
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(size)
                raise OSError(0, reason(error) + (": only a part of the line was written" if written else "")) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_incomplete_line(self) -> None:
        """Remove the bytes after the last whole line."""
        end = size = self._file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - (1 << 16))
            self._file.seek(begin)
            if newline := (self._file.read(end - begin) or b"").rfind(b"\n") + 1:
                end = begin + newline
                break
            end = begin
        if end < size:
            self._file.truncate(end)


def _text(line: Mapping[str, Any]) -> str:
    try:
        return json.dumps(line, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(line), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


Number = Annotated[float, Field(strict=True, ge=-1e40, le=1e40, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, gt=1e-12, le=1e12, allow_inf_nan=False)]
Time = Annotated[float, Field(strict=True, ge=0, lt=2.5e11, allow_inf_nan=False)]  # unix seconds before the year 9892
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Ranks = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]
KnownNumbers = Annotated[
    dict[str, Number],
    BeforeValidator(
        lambda value: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
    ),
]


class MemoryFigures(BaseModel):
    """Memory of rank 0 in bytes, by category."""

    parameters: Number
    gradients: Number
    states: Number
    activations: Number
    buffers: Number
    expected: dict[str, Number]


class EnergyFigures(BaseModel):
    """Joules of all machines since the reading before, with the steps and samples of that time."""

    cpu: Number | None = None
    device: Number | None = None
    steps: Count
    samples: Count


class StepTimes(BaseModel):
    """Times in a line of metrics.jsonl, of any version; quick to read, because a restart reads those of all steps."""

    step: Count
    time: Time | None = None
    step_s: Seconds | None = None
    data_s: Number | None = None
    wait_s: Number | None = None
    skipped: bool = False


class StepLine(StepTimes, extra="allow"):
    """Line of metrics.jsonl, of any version: only the step number is required."""

    loss: Number | None = None
    held_out_loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    samples: Number | None = None
    tokens: Number | None = None
    world_size: Ranks | None = None
    flops: Number | None = None
    tflops_per_rank: Number | None = None
    mfu: Number | None = None
    memory_bytes: Number | None = None
    memory: MemoryFigures | None = None
    energy: EnergyFigures | None = None
    j_per_sample: Number | None = None
    between_groups_bytes: Number | None = None
    staleness_mean: Number | None = None
    staleness_max: Number | None = None
    ahead_max: Count | None = None
    recovered_s: Number | None = None
    start_s: dict[str, Number] | None = None
    goodput: Number | None = None


class FullStepLine(StepLine):
    """Line of metrics.jsonl that has all values a report needs."""

    loss: Number | None
    step_s: Seconds
    samples: Number
    tokens: Number
    world_size: Ranks


class EventLine(BaseModel, extra="allow"):
    """Line of events.jsonl; `event` determines which of the other keys it has."""

    time: Time
    event: Text
    step: Count
    # start
    version: Text | None = None
    ranks: Ranks | list[Ranks] | None = None
    nodes: Count | None = None
    hosts: list[Text] | None = None
    threads: Count | None = None
    device: Text | None = None
    mpi: Text | None = None
    torch: Text | None = None
    python: Text | None = None
    cpu: Text | None = None
    cores: Count | None = None
    model: Text | None = None
    parameters: Count | None = None
    precision: Text | None = None
    parallel: Text | None = None
    steps: Count | None = None
    resumed_step: Count | None = None
    config: dict[str, Any] | None = None
    start_s: dict[str, Number] | None = None
    submitted: Time | None = None
    allocated: Time | None = None
    oom_kills: dict[str, dict[str, Count]] | None = None
    # discard, save, evaluate, lost, stop, end
    until: Time | None = None
    folder: Text | None = None
    seconds: Number | None = None
    loss: Number | None = None
    recovered_s: Number | None = None
    reason: Text | None = None
    outcome: Text | None = None
    message: Text | None = None
    peak_memory_bytes: Number | None = None

    @model_validator(mode="after")
    def _ranks_are_lost_by_number(self) -> EventLine:
        if self.ranks is not None and isinstance(self.ranks, list) != (self.event == "lost"):
            raise ValueError(
                f"ranks: expected {'a list of rank numbers' if self.event == 'lost' else 'the number of ranks'}"
            )
        return self


class RankStart(BaseModel):
    """First line that a rank writes in a job."""

    rank: Ranks
    start: Time  # start time of the job in unix seconds
    world_size: Ranks = 1
    role: Text = ""  # "worker" or "server"; empty in files of older versions
    host: Text = ""
    coordinates: list[Ranks] = []  # coordinates of the rank along the axes of the mesh, outermost first
    stage: Ranks | None = None  # pipeline stage; None in files of older versions, where it is the second coordinate
    expected_memory: KnownNumbers = {}  # bytes by category, predicted by formula
    expected_bytes: KnownNumbers = {}  # bytes that the rank sends in a step, by axis, predicted by formula
    step: Count = 0  # number of steps done before the job


class RankLine(BaseModel):
    """Line of a rank's file about one step or several consecutive ones."""

    step: Count = 0
    time: Time = 0.0
    steps: Annotated[int, Field(strict=True, ge=1, lt=2**53)] = 1
    seconds: KnownNumbers = {}
    sent: list[tuple[Text, Text, Text, Number, Number, Number, Number]] = []
    memory: KnownNumbers | None = None


def rank_line(value: Any) -> RankStart | RankLine:
    """Return a validated line of a rank's file. Raises ValidationError if `value` is no such line."""
    begins = isinstance(value, dict) and "start" in value
    return RankStart.model_validate(value) if begins else RankLine.model_validate(value)
