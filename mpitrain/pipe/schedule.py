"""Pipeline schedules as data: which rank computes what, in which order.

A model is divided into stages 0 .. stages-1, each on one rank; a rank holds `chunks` of them. A batch is divided into
microbatches. A schedule lists for each rank the compute steps of its stages. Functions in `schedules` make them,
`simulate` runs it without MPI, adds the messages and proves the result right, `draw` shows it, `executor` runs it.
Nothing else knows an order.

                 stage     0 1 2 3      one chunk a rank, and interleaved: stage s is on rank s mod p
    rank of it             0 1 0 1      p = 2, chunks = 2, round
                           0 1 1 0      p = 2, chunks = 2, V-shaped
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mpitrain.errors import MpitrainError


@dataclass(frozen=True)
class Compute:
    """A step in which a rank computes something of one microbatch in one of its stages."""

    stage: int
    microbatch: int


class Forward(Compute):
    """The stage's output of a microbatch from its input, or on the last stage the loss."""


class Backward(Compute):
    """The gradients of the stage's input and of its parameters."""


class BackwardInput(Compute):
    """The gradient of the stage's input alone, which is what the stage before waits for."""


class BackwardWeight(Compute):
    """The gradients of the stage's parameters, which nobody waits for."""


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send a stage's output to the stage after it, or (gradient) its input's gradient to the one before."""

    stage: int
    microbatch: int
    gradient: bool
    to: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Begin to receive what rank `source` sends from its stage `stage`; the step that uses it waits for it.

    A Send and its Receive carry the same numbers.
    """

    stage: int
    microbatch: int
    gradient: bool
    source: int


Step: TypeAlias = "Compute | Send | Receive"


class ScheduleError(MpitrainError):
    """A schedule is wrong: says at which rank and step."""


@dataclass(frozen=True)
class Schedule:
    """The compute steps of every rank.

    Attributes:
        name: As the user names it.
        ranks: Of the pipeline.
        microbatches: That the steps count; slices of them, where there are slices.
        rank_of: rank_of[s] is the rank of stage s.
        steps: steps[r] is what rank r computes, in order.
        slices: Pieces along the sequence that each microbatch of the caller is divided into. `microbatch` of a step
            then counts slices, those of one microbatch one after the other, and a stage sees them in order forward
            and in reverse order backward.
    """

    name: str
    ranks: int
    microbatches: int
    rank_of: tuple[int, ...]
    steps: tuple[tuple[Compute, ...], ...]
    slices: int = 1

    @property
    def stages(self) -> int:
        """Stages of the whole model."""
        return len(self.rank_of)

    @property
    def chunks(self) -> int:
        """Stages a rank holds."""
        return self.stages // self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [s for s, r in enumerate(self.rank_of) if r == rank]


@dataclass(frozen=True)
class PipelineProgram:
    """A schedule with its messages: steps[r] is what rank r does, in order."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]
