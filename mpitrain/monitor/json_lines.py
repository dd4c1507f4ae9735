"""Files of JSON lines that a job appends to: read as they grow, written a whole line at a time.

A kill may leave the last line torn. Memory is that of one line, whatever the size of the file; a line that is longer
than any that a job writes is damage.

The lines of metrics.jsonl, events.jsonl and ranks/rank-*.jsonl are checked as they are read. Readers of all three
(`report`, its view of a run that goes on, `read_events`) see values of the types below alone, and numbers that can be
added, divided and printed. Keys that are not named here may hold anything.
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
from mpitrain.storage.run_folder import writing

LONGEST = 16 << 20  # bytes of a line
T = TypeVar("T")


class GrowingFile:
    """Whole lines of a file that another process appends to, once each, on a shared file system, too.

    Args:
        path: The file, which need not be there yet.
        last_bytes: Begin at most so many bytes before its end; None: at its beginning.

    Attributes:
        begun_anew: How often the file was found replaced, or shorter than what had been read of it.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self.begun_anew = 0
        self._last_bytes = last_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._read = 0  # bytes, up to the end of a line
        self._passing = False  # whether that is the middle of a line, the rest of which is not given

    def lines(self) -> Iterator[bytes | None]:
        """Yield the lines that came since the last call; None in place of one that has more than `LONGEST` bytes.

        Where the file was begun anew, all of them come again, and `begun_anew` tells before the first. What a last line
        without an end has is read again by the next call. Raises OSError.
        """
        with open_plain(self.path) as file:  # opened each time, so that a network file system asks its server
            status = os.fstat(file.fileno())
            before, self._file = self._file, (status.st_dev, status.st_ino)
            if before is None:
                if self._last_bytes is not None and status.st_size > self._last_bytes:
                    self._read, self._passing = status.st_size - self._last_bytes, True
            elif before != self._file or status.st_size < self._read:
                self.begun_anew += 1
                self._read, self._passing = 0, False
            file.seek(self._read)
            while line := file.readline(LONGEST + 1):
                whole = line.endswith(b"\n")
                if not (whole or self._passing or len(line) > LONGEST):
                    return
                self._read += len(line)
                passing, self._passing = self._passing, not whole
                if not passing:
                    yield line if len(line) <= LONGEST else None

    def new_lines(self) -> Iterator[bytes]:
        """Yield `lines`, an empty one for one that is too long; none of a file that is not there, or unreadable now."""
        with suppress(OSError):
            yield from (line or b"\n" for line in self.lines())


def parsed(line: bytes, kind: Callable[[Any], T]) -> T | None:
    """Return what `kind` makes of a line's JSON value; None where it raises ValueError."""
    try:
        return kind(json.loads(line))
    except (ValueError, RecursionError):
        return None


def read_lines(
    path: Path, what: str, kind: Callable[[Any], T], after_torn: Callable[[T], bool] = lambda line: False
) -> Iterator[T]:
    """Yield the lines of a file, checked. A torn last line is left out.

    Args:
        path: The file.
        what: A message's name for it.
        kind: Makes of a JSON value what is given. Raises ValueError for a damaged one.
        after_torn: Whether a line can follow one that a killed job left torn: the first of the next job.

    Raises:
        InputError: The file cannot be read, or a line inside it is damaged.
        FileNotFoundError: It is not there.
    """
    torn: InputError | None = None
    try:
        for number, line in enumerate(GrowingFile(path).lines(), 1):
            if line is None:
                raise InputError(f"{what} {path}: line {number} has more than {LONGEST >> 20} MiB; remove it")
            try:
                value = kind(json.loads(line))
            except ValidationError as error:
                raise InputError(f"{what} {path}, line {number}: {first_problem(error)}; mend that line") from None
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
        raise InputError(f"{what} {path} cannot be read ({reason(error)}); give a run folder you may read") from None
    if torn is not None:
        raise torn


class LineWriter:
    """Appends JSON objects to a file, a line each, which are in the file when `append` returns.

    A line that a killed job has left torn is cut off before.

    Args:
        path: The file.
        what: A message's name for it.

    Raises:
        InputError: The file cannot be written.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = f"{what} {path}"
        with writing(self._what):
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - it is open as long as the writer
            self._cut_torn()

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Append lines, with null for numbers that are not finite, which JSON does not know.

        Args:
            lines: What JSON can hold.

        Raises:
            InputError: They cannot be written; nothing of them is left in the file then.
        """
        data = "".join(_text(line) + "\n" for line in lines).encode()
        with writing(self._what):
            size, written = os.fstat(self._file.fileno()).st_size, 0
            try:
                while written < len(data):
                    written += self._file.write(data[written:])
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(size)
                raise OSError(0, reason(error) + (": only a part of a line was written" if written else "")) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_torn(self) -> None:
        """Take away what stands after the last whole line."""
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
    BeforeValidator(lambda told: {k: v for k, v in told.items() if v is not None} if isinstance(told, dict) else told),
]


class MemoryFigures(BaseModel):
    """Rank 0's bytes by category."""

    parameters: Number
    gradients: Number
    states: Number
    activations: Number
    buffers: Number
    expected: dict[str, Number]


class StepLine(BaseModel, extra="allow"):
    """A line of metrics.jsonl, of any version: only the step's number is certain."""

    step: Count
    loss: Number | None = None
    held_out_loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    step_s: Seconds | None = None
    samples: Number | None = None
    tokens: Number | None = None
    world_size: Ranks | None = None
    time: Time | None = None
    skipped: bool = False
    memory_bytes: Number | None = None
    memory: MemoryFigures | None = None
    between_groups_bytes: Number | None = None
    staleness_mean: Number | None = None
    staleness_max: Number | None = None
    ahead_max: Count | None = None
    recovered_s: Number | None = None


class FullStepLine(StepLine):
    """A line of metrics.jsonl that a report can be made of."""

    loss: Number | None
    step_s: Seconds
    samples: Number
    tokens: Number
    world_size: Ranks


class EventLine(BaseModel, extra="allow"):
    """A line of events.jsonl; which of the keys it has is told by `event`."""

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
    # save, evaluate, lost, stop, end
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
            raise ValueError(f"ranks: expected {'their numbers' if self.event == 'lost' else 'how many there are'}")
        return self


class RankStart(BaseModel):
    """The line by which a rank begins a job.

    Attributes:
        rank: Number of the rank.
        start: In unix seconds.
        world_size: Ranks of the job.
        role: worker or server; empty in files of older versions.
        host: Name of the rank's machine.
        coordinates: Along the axes of the mesh, outermost first.
        stage: Of the pipeline; None in files of older versions, where it is the second of the coordinates.
        expected_memory: Bytes by category, by formula.
        expected_bytes: Bytes that the rank sends a step, by axis, by formula.
        step: Steps done.
    """

    rank: Ranks
    start: Time
    world_size: Ranks = 1
    role: Text = ""
    host: Text = ""
    coordinates: list[Ranks] = []
    stage: Ranks | None = None
    expected_memory: KnownNumbers = {}
    expected_bytes: KnownNumbers = {}
    step: Count = 0


class RankLine(BaseModel):
    """A line of a rank's steps."""

    step: Count = 0
    time: Time = 0.0
    steps: Annotated[int, Field(strict=True, ge=1, lt=2**53)] = 1
    seconds: KnownNumbers = {}
    sent: list[tuple[Text, Text, Text, Number, Number, Number, Number]] = []
    memory: KnownNumbers | None = None


def rank_line(value: Any) -> RankStart | RankLine:
    """Return a line of a rank's file, checked. Raises ValidationError for anything else."""
    begins = isinstance(value, dict) and "start" in value
    return RankStart.model_validate(value) if begins else RankLine.model_validate(value)
