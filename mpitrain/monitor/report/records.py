"""What a run folder tells, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.monitor.line_kinds import RankStart
from mpitrain.monitor.parts import PARTS as PARTS
from mpitrain.monitor.rank_file import SERVER, rank_name

Column = NDArray[np.float64]
OWN = ("data", "forward", "backward", "optimizer")  # what a rank does by itself, waiting for nobody
CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "other")
EVENTS = ("start", "save", "evaluate", "lost", "stop", "end")


@dataclass(frozen=True)
class StepColumns:
    """The figures of all steps, one value a step; NaN where a step has none.

    Attributes:
        step: Numbers of the steps, rising.
        loss: Mean over the global batch, in the unit that the start of the job names.
        held_out_loss: Mean over the held-out samples, in the same unit.
        lr: The learning rate.
        grad_norm: Before clipping.
        seconds: Of the step.
        samples: Of the global batch.
        tokens: Of the global batch; 0 where samples are not tokens.
        world_size: Ranks.
        time: At the end of the step, in unix seconds.
        skipped: 1 where the step made no update.
    """

    step: Column
    loss: Column
    held_out_loss: Column
    lr: Column
    grad_norm: Column
    seconds: Column
    samples: Column
    tokens: Column
    world_size: Column
    time: Column
    skipped: Column

    def rate(self, amounts: Column) -> float:
        """Return amounts a second of the time that the steps took."""
        return float(amounts.sum() / self.seconds.sum())


@dataclass(frozen=True)
class Moment:
    """A line of events.jsonl.

    Attributes:
        time: In unix seconds.
        kind: One of `EVENTS`.
        step: Steps done.
        told: What else the line says.
    """

    time: float
    kind: str
    step: int
    told: Mapping[str, Any]


@dataclass(frozen=True)
class StartRecord:
    """One job that worked in the folder.

    Attributes:
        number: From 1.
        begin: In unix seconds.
        end: Likewise; for a job without an end the last time at which it gave a sign.
        ranks: Of the job, as it began.
        first_step: Steps done as it began.
        last_step: Steps done as it ended, as far as known.
        outcome: done, stopped, failed, killed or running.
        message: How it ended.
        facts: The line of its start.
    """

    number: int
    begin: float
    end: float
    ranks: int
    first_step: int
    last_step: int
    outcome: str
    message: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class SentRecord:
    """What a rank sent by one algorithm, since its job began: calls, bytes to its own node and to others, seconds."""

    operation: str
    axis: str
    algorithm: str
    calls: float
    inside: float
    between: float
    seconds: float


@dataclass(frozen=True)
class MeasuredRank:
    """What a rank measured in its last job, by groups of consecutive steps.

    Attributes:
        rank: Its number.
        header: Of that job.
        step: The last step of each group.
        steps: How many steps each group has.
        seconds: Sums of each group by part of a step, see `PARTS`.
        memory: Bytes by category at the end of each group, also host and device; NaN where not taken.
        sent: By all groups together.
        signs: Of each job that the rank took part in: when it began, when it last wrote (unix seconds), steps done.
    """

    rank: int
    header: RankStart
    step: Column
    steps: Column
    seconds: Mapping[str, Column]
    memory: Mapping[str, Column]
    sent: tuple[SentRecord, ...]
    signs: tuple[tuple[float, float, int], ...]

    @property
    def serves(self) -> bool:
        """Whether it takes no steps itself, so that how long it takes is not to be compared with others."""
        return self.header.role == SERVER

    @property
    def name(self) -> str:
        """What it is called."""
        return rank_name(self.rank, self.header.role)


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run folder tells.

    Attributes:
        folder: The run folder.
        columns: The figures of its steps.
        moments: Its events; none of a run that wrote none.
        starts: The jobs that worked in it, by the events.
        ranks: What each rank of the last job measured.
        config: Its resolved settings, nested; empty where they cannot be read.
        facts: What the last start said of the machine, versions and the model.
    """

    folder: Path
    columns: StepColumns
    moments: tuple[Moment, ...]
    starts: tuple[StartRecord, ...]
    ranks: tuple[MeasuredRank, ...]
    config: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def workers(self) -> tuple[MeasuredRank, ...]:
        """The measured ranks that take steps."""
        return tuple(rank for rank in self.ranks if not rank.serves)
