"""What the lines of a run's files hold: metrics.jsonl, events.jsonl and ranks/rank-*.jsonl, each checked as it is read.

Readers of all three (`report`, its view of a run that goes on, `read_events`) see values of these types alone, and
numbers that can be added, divided and printed. Keys that are not named here may hold anything.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

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


class _Line(BaseModel):
    model_config = ConfigDict(extra="allow")


class MemoryFigures(BaseModel):
    """Rank 0's bytes by category."""

    parameters: Number
    gradients: Number
    states: Number
    activations: Number
    buffers: Number
    expected: dict[str, Number]


class StepLine(_Line):
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


class EventLine(_Line):
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
        coordinates: Along the axes data, pipeline, tensor.
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
