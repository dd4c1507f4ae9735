"""Pipeline schedules as data: which rank computes what, in which order.

A model is divided into stages 0 .. stages-1, each on one rank; a rank holds `chunks` of them. A batch is divided into
microbatches. A schedule lists for each rank the compute steps of its stages. Functions below make them,
`simulate` runs it without MPI, adds the messages and proves the result right, `draw` shows it, `executor` runs it.
Nothing else knows an order.

                 stage     0 1 2 3      one chunk a rank, and interleaved: stage s is on rank s mod p
    rank of it             0 1 0 1      p = 2, chunks = 2, round
                           0 1 1 0      p = 2, chunks = 2, V-shaped

The schedules, as functions of (ranks p, microbatches m, chunks v): each says an order and nothing else.

    gpipe         F0 F1 F2 F3 B0 B1 B2 B3      Huang et al. 2019; all activations are held. m = 1 is plain model
                                               parallelism.
    1f1b          F0 F1 F2 B0 F3 B1 B2 B3      Narayanan et al. 2019 (PipeDream-Flush): at most p - rank held
    interleaved   v stages a rank, 1f1b over   Narayanan et al. 2021, "Efficient Large-Scale Language Model
                  groups of p microbatches     Training on GPU Clusters"; v times less idle, more messages
    zero_bubble   backward in two: I (input)   Qi et al. 2023, "Zero Bubble Pipeline Parallelism": ZB-H1 with one
                  and W (weights) fill gaps    stage a rank, ZB-V with two, placed as a V
    terapipe      gpipe over slices of the     Li et al. 2021, for causal models: a slice needs earlier slices only;
                  sequence                     1f1b and interleaved can be sliced too (`in_slices`)

Idle fraction with F = I = W = 1 and no communication, and microbatches held at most:

    gpipe, 1f1b   (p-1) / (m+p-1)              m;  min(m, p)
    interleaved   (p-1) / (vm+p-1)             p + (p-1)/v for m = n p, n > 1
    zero_bubble   (p-1) / (3m+p-1), v = 1      p for m >= p
                  (p-1) / (6m+p-1), v = 2      p for m >= 2p
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from mpitrain.choices import PipelineSchedule
from mpitrain.config.named import find
from mpitrain.errors import MpitrainError, refusal


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


_PER_STAGE = 2  # microbatches
Kind: TypeAlias = "type[Compute]"
Entry: TypeAlias = "tuple[Kind, int]"  # a kind of step and its stage
Maker: TypeAlias = "Callable[[int, int, int], Schedule]"


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forward, then all backward."""
    _check("gpipe", ranks, microbatches, chunks, (1,))

    def order(rank: int) -> list[Entry]:
        f, b = _entries(rank, Forward, Backward)
        return [f] * microbatches + [b] * microbatches

    return _scheduled("gpipe", microbatches, range(ranks), map(order, range(ranks)))


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """As many forwards as there are stages behind, then one backward for each forward."""
    _check("1f1b", ranks, microbatches, chunks, (1,))

    def order(rank: int) -> list[Entry]:
        f, b = _entries(rank, Forward, Backward)
        ahead = min(ranks - 1 - rank, microbatches)
        return [f] * ahead + [f, b] * (microbatches - ahead) + [b] * ahead

    return _scheduled("1f1b", microbatches, range(ranks), map(order, range(ranks)))


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over v stages a rank; a rank takes p microbatches through one stage before it turns to the next.

    Made for a multiple of p microbatches; those beyond m are then left out.
    """
    _check("interleaved", ranks, microbatches, chunks, range(1, 1 << 20))
    groups = -(-microbatches // ranks)
    units = [(c, g * ranks + j) for g in range(groups) for c in range(chunks) for j in range(ranks)]

    def order(rank: int) -> tuple[Compute, ...]:
        forward: list[Compute] = [Forward(c * ranks + rank, j) for c, j in units]
        backward: list[Compute] = [Backward((chunks - 1 - c) * ranks + rank, j) for c, j in units]
        ahead = (chunks - 1) * ranks + (ranks - 1 - rank) * (2 if chunks > 1 else 1)
        ahead = min(ahead, len(units))
        steady = [s for pair in zip(forward[ahead:], backward, strict=False) for s in pair]
        steps = forward[:ahead] + steady + backward[len(units) - ahead :]
        return tuple(s for s in steps if s.microbatch < microbatches)

    rank_of = tuple(range(ranks)) * chunks
    return Schedule("interleaved", ranks, microbatches, rank_of, tuple(order(r) for r in range(ranks)))


def zero_bubble(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB-H1 with one stage a rank, ZB-V with two."""
    _check("zero-bubble", ranks, microbatches, chunks, (1, 2))
    return zb_h1(ranks, microbatches) if chunks == 1 else zb_v(ranks, microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose weight gradients come `rank` steps late, so that every rank holds p microbatches."""

    def order(rank: int) -> list[Entry]:
        f, i, w = _entries(rank, Forward, BackwardInput, BackwardWeight)
        ahead = min(ranks - 1 - rank, microbatches)
        late = min(rank, microbatches - ahead)
        steady = [f, i] * late + [f, i, w] * (microbatches - ahead - late)
        return [f] * ahead + steady + [i, w] * ahead + [w] * late

    return _scheduled("zero-bubble", microbatches, range(ranks), map(order, range(ranks)))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Stages down the ranks and up again, so that the first rank has the loss and starts backward at once.

    Made for at least 2p - 1 microbatches; those beyond m are then left out.
    """
    m = max(microbatches, 2 * ranks - 1)

    def order(rank: int) -> list[Entry]:
        back = 2 * ranks - 1 - rank  # the second stage of this rank
        f0, i0, w0 = _entries(rank, Forward, BackwardInput, BackwardWeight)
        f1, i1, w1 = _entries(back, Forward, BackwardInput, BackwardWeight)
        below = ranks - rank
        warm = [f0] * (2 * below - 1) + [f1, f0] * rank + [f1, i1, w1] * below
        steady = [f0, i0, w0, f1, i1, w1] * (m - 2 * ranks + 1 + rank) + [i0, w0, f1, i1, w1] * (below - 1)
        cool = [i0, i1] * rank + [i0, w0] * below + [w1] * rank + [w0] * rank
        return warm + steady + cool

    rank_of = (*range(ranks), *reversed(range(ranks)))
    return _scheduled("zero-bubble", microbatches, rank_of, map(order, range(ranks)))


def terapipe(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """GPipe over the slices of all microbatches."""
    return replace(in_slices(gpipe(ranks, microbatches), slices), name="terapipe")


def in_slices(schedule: Schedule, slices: int) -> Schedule:
    """The schedule with each step taken slice by slice: forward from the first one on, backward from the last.

    So the ranks behind begin after one slice, not after a whole microbatch; as many microbatches are held as before.
    """
    if slices < 1:
        raise refusal(f"{schedule.name}: {slices} slices of the sequence are not possible; give 1 or more")
    if any(isinstance(step, BackwardInput) for steps in schedule.steps for step in steps):
        raise refusal(
            f"{schedule.name} leaves gradients of weights for later, but an earlier slice needs those of its states "
            "at once; set parallel.slices to 1, or parallel.schedule to gpipe, 1f1b or interleaved"
        )

    def taken(step: Compute) -> list[Compute]:
        order = range(slices) if isinstance(step, Forward) else reversed(range(slices))
        return [type(step)(step.stage, step.microbatch * slices + number) for number in order]

    steps = tuple(tuple(part for step in of_rank for part in taken(step)) for of_rank in schedule.steps)
    return replace(schedule, microbatches=schedule.microbatches * slices, steps=steps, slices=slices)


SCHEDULES: dict[PipelineSchedule, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Schedule:
    """The schedule that a user names.

    Args:
        name: A key of SCHEDULES, terapipe, or package.module:function of a function of one's own that takes the ranks,
            the microbatches and the chunks, and returns a `Schedule`.
        ranks: Of the pipeline.
        microbatches: Of a batch.
        chunks: Stages a rank.
        slices: Of the sequence.

    Raises:
        InputError: There is no such schedule, or not with these numbers.
    """
    if name == "terapipe":
        return terapipe(ranks, microbatches, slices)
    maker = find("parallel.schedule", name) if ":" in name else SCHEDULES.get(name)  # type: ignore[call-overload]
    if maker is None:
        raise refusal(f"there is no schedule {name!r}; choose one of {', '.join([*SCHEDULES, 'terapipe'])}")
    schedule: Schedule = maker(ranks, microbatches, chunks)
    return schedule if slices == 1 else in_slices(schedule, slices)


def default_microbatches(ranks: int) -> int:
    """Microbatches that a rank's share of a batch has where nobody says how many: two a stage of a pipeline."""
    return _PER_STAGE * ranks if ranks > 1 else 1


def _entries(stage: int, *kinds: Kind) -> list[Entry]:
    """Kinds of steps, each on this stage."""
    return [(kind, stage) for kind in kinds]


def _scheduled(name: str, microbatches: int, rank_of: Iterable[int], orders: Iterable[Sequence[Entry]]) -> Schedule:
    """Return the schedule in which each kind of step on each stage takes the microbatches in turn.

    Steps beyond the last microbatch are left out.

    Args:
        name: The schedule's name.
        microbatches: How many there are.
        rank_of: The rank of each stage.
        orders: The kinds of steps of each rank, in order.
    """
    steps: list[tuple[Compute, ...]] = []
    for order in orders:
        taken: Counter[Entry] = Counter()
        own: list[Compute] = []
        for kind, stage in order:
            if taken[kind, stage] < microbatches:
                own.append(kind(stage, taken[kind, stage]))
            taken[kind, stage] += 1
        steps.append(tuple(own))
    return Schedule(name, len(steps), microbatches, tuple(rank_of), tuple(steps))


def _check(name: str, ranks: int, microbatches: int, chunks: int, possible: Iterable[int]) -> None:
    """Raise InputError for numbers that a schedule cannot be made with. possible: chunks a rank may have."""
    if ranks < 1 or microbatches < 1:
        raise refusal(f"{name}: {ranks} ranks and {microbatches} microbatches; give at least one of each")
    if chunks not in possible:
        choices = ", ".join(map(str, possible)) if not isinstance(possible, range) else "1 or more"
        raise refusal(f"{name}: {chunks} chunks a rank are not possible; set parallel.chunks to {choices}")
