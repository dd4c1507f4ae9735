"""Pipeline schedules as data: the order of each rank's compute steps.

A model is divided into stages 0 .. stages-1, each on one rank; a rank has `chunks` of them. A batch is divided into
microbatches. A schedule lists the compute steps of every rank, in order. The functions below create schedules. Other
modules use them: `simulate` computes their timing, adds the messages and proves the result correct, `draw` draws them,
and `executor` runs them. The order is defined only here.

                 stage     0 1 2 3      one chunk a rank, and interleaved: stage s is on rank s mod p
    rank of it             0 1 0 1      p = 2, chunks = 2, round-robin
                           0 1 1 0      p = 2, chunks = 2, V-shaped

The schedules, as functions of (ranks p, microbatches m, chunks v):

    gpipe         F0 F1 F2 F3 B0 B1 B2 B3      Huang et al. 2019; keeps the activations of all microbatches. m = 1 is
                                               plain model parallelism.
    1f1b          F0 F1 F2 B0 F3 B1 B2 B3      Narayanan et al. 2019 (PipeDream-Flush); keeps at most p - rank
                                               microbatches
    interleaved   v stages a rank, 1f1b over   Narayanan et al. 2021, "Efficient Large-Scale Language Model
                  groups of p microbatches     Training on GPU Clusters"; v times less idle time, more messages
    zero_bubble   backward in two steps, I     Qi et al. 2023, "Zero Bubble Pipeline Parallelism": ZB-H1 with one
                  (input) and W (weights);     stage a rank, ZB-V with two, placed as a V
                  W steps fill the gaps
    terapipe      gpipe over slices of the     Li et al. 2021, for causal models, where a slice needs only earlier
                  sequence                     slices; `in_slices` slices 1f1b and interleaved too

Idle fraction with F = I = W = 1 and free communication, and the largest number of microbatches in flight on a rank:

    gpipe, 1f1b   (p-1) / (m+p-1)              gpipe: m;  1f1b: min(m, p)
    interleaved   (p-1) / (vm+p-1)             p + (p-1)/v for m = n p, n > 1
    zero_bubble   (p-1) / (3m+p-1), v = 1      p for m >= p
                  (p-1) / (6m+p-1), v = 2      p for m >= 2p

A schedule that is not exact: the pipeline does not drain between batches, and the gradients of a batch are those of
weights that are one step old (see `versions`):

    2bw           B0 F2 B1 F3 B2 F0 B3 F1      Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
                  the next batch begins while  Training" (PipeDream-2BW), with a meeting of all ranks after each
                  this one ends                batch; not idle for m >= 2p - 2; 2 (p - rank) - 1 microbatches in flight
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

from mpitrain.choices import DelayedSchedule, PipelineSchedule
from mpitrain.config.named import find
from mpitrain.errors import MpitrainError, refusal


@dataclass(frozen=True)
class Compute:
    """Compute step of one stage for one microbatch."""

    stage: int
    microbatch: int


class Forward(Compute):
    """Forward step: computes the stage's output, or the loss on the last stage."""


class Backward(Compute):
    """Backward step: computes the gradients of the stage's input and of its parameters."""


class BackwardInput(Compute):
    """First half of a backward step: the gradient of the stage's input, which the previous stage waits for."""


class BackwardWeight(Compute):
    """Second half of a backward step: the gradients of the stage's parameters, which no stage waits for."""


@dataclass(frozen=True, slots=True)
class Send:
    """Start of a send: a stage's output to the next stage, or its input's gradient to the previous stage.

    Attributes:
        stage: Stage that computed the tensor.
        microbatch: Number of the microbatch.
        gradient: True for a gradient, False for an output.
        to: Rank that receives it.
    """

    stage: int
    microbatch: int
    gradient: bool
    to: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Start of a receive; the step that uses the tensor waits for it.

    `stage`, `microbatch` and `gradient` are those of the matching Send.

    Attributes:
        stage: Stage that computed the tensor.
        microbatch: Number of the microbatch.
        gradient: True for a gradient, False for an output.
        source: Rank that sends it.
    """

    stage: int
    microbatch: int
    gradient: bool
    source: int


Step: TypeAlias = "Compute | Send | Receive"


class ScheduleError(MpitrainError):
    """A schedule is wrong. The message names the rank and the step."""


@dataclass(frozen=True)
class Schedule:
    """Compute steps of every rank.

    Attributes:
        name: Name in `parallel.schedule`.
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches that the steps count; with slices, the number of all slices.
        rank_of: Rank of each stage: rank_of[s] has stage s.
        steps: Compute steps of each rank, in order: steps[r] for rank r.
        slices: Number of slices along the sequence that each of the caller's microbatches is divided into. The
            `microbatch` of a step then counts slices; the slices of one microbatch have consecutive numbers. A stage
            takes them in order forward and in reverse order backward.
        before: Numbers of forward and backward steps of this batch that each stage has taken before; empty for none.
        after: Numbers of forward and backward steps of the next batch that each stage takes; empty for none. Their
            microbatches are numbered from `microbatches` on.
    """

    name: str
    ranks: int
    microbatches: int
    rank_of: tuple[int, ...]
    steps: tuple[tuple[Compute, ...], ...]
    slices: int = 1
    before: tuple[tuple[int, int], ...] = ()
    after: tuple[tuple[int, int], ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages of the whole model."""
        return len(self.rank_of)

    @property
    def chunks(self) -> int:
        """Number of stages on each rank."""
        return self.stages // self.ranks

    @property
    def most_ahead(self) -> int:
        """Number of microbatches of the next batch that begin in this one."""
        return max((forward for forward, _ in self.after), default=0)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [s for s, r in enumerate(self.rank_of) if r == rank]


@dataclass(frozen=True)
class PipelineProgram:
    """Schedule with its messages: steps[r] lists the compute, send and receive steps of rank r, in order."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]


_PER_STAGE = 2  # microbatches for each rank of a pipeline
Kind: TypeAlias = "type[Compute]"
Entry: TypeAlias = "tuple[Kind, int]"  # a kind of step and its stage
Maker: TypeAlias = "Callable[[int, int, int], Schedule]"


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the GPipe schedule: all forward steps, then all backward steps.

    Args:
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches of a batch.
        chunks: Stages a rank; must be 1.

    Raises:
        InputError: `ranks` or `microbatches` is below 1, or `chunks` is not allowed.

    Reference:
        Huang et al. 2019, "GPipe".
    """
    _check("gpipe", ranks, microbatches, chunks, (1,))

    def order(rank: int) -> list[Entry]:
        f, b = _entries(rank, Forward, Backward)
        return [f] * microbatches + [b] * microbatches

    return _scheduled("gpipe", microbatches, range(ranks), map(order, range(ranks)))


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the 1F1B schedule: a warm-up of one forward step for each later stage, then forward and backward in turns.

    Args:
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches of a batch.
        chunks: Stages a rank; must be 1.

    Raises:
        InputError: `ranks` or `microbatches` is below 1, or `chunks` is not allowed.

    Reference:
        Narayanan et al. 2019, "PipeDream" (PipeDream-Flush).
    """
    _check("1f1b", ranks, microbatches, chunks, (1,))

    def order(rank: int) -> list[Entry]:
        f, b = _entries(rank, Forward, Backward)
        ahead = min(ranks - 1 - rank, microbatches)
        return [f] * ahead + [f, b] * (microbatches - ahead) + [b] * ahead

    return _scheduled("1f1b", microbatches, range(ranks), map(order, range(ranks)))


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule, in which a rank has several stages.

    A rank takes p microbatches (p = `ranks`) through one of its stages before it continues with the next stage. The
    schedule is built for a multiple of p microbatches; steps beyond the last microbatch are left out.

    Args:
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches of a batch.
        chunks: Stages a rank, 1 or more.

    Raises:
        InputError: `ranks` or `microbatches` is below 1, or `chunks` is not allowed.

    Reference:
        Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
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
    """Return the zero-bubble schedule: `zb_h1` for one stage a rank, `zb_v` for two.

    Args:
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches of a batch.
        chunks: Stages a rank, 1 or 2.

    Raises:
        InputError: `ranks` or `microbatches` is below 1, or `chunks` is not allowed.

    Reference:
        Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
    """
    _check("zero-bubble", ranks, microbatches, chunks, (1, 2))
    return zb_h1(ranks, microbatches) if chunks == 1 else zb_v(ranks, microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: 1F1B with the weight gradients delayed by `rank` steps.

    Every rank then has p microbatches in flight.

    Args:
        ranks: Number of pipeline ranks p.
        microbatches: Number of microbatches of a batch.
    """

    def order(rank: int) -> list[Entry]:
        f, i, w = _entries(rank, Forward, BackwardInput, BackwardWeight)
        ahead = min(ranks - 1 - rank, microbatches)
        late = min(rank, microbatches - ahead)
        steady = [f, i] * late + [f, i, w] * (microbatches - ahead - late)
        return [f] * ahead + steady + [i, w] * ahead + [w] * late

    return _scheduled("zero-bubble", microbatches, range(ranks), map(order, range(ranks)))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Return the ZB-V schedule, whose stages go down the ranks and up again.

    The first rank therefore has the loss too, and starts backward at once. The schedule is built for at least 2p - 1
    microbatches; steps beyond the last microbatch are left out.

    Args:
        ranks: Number of pipeline ranks p, with two stages each.
        microbatches: Number of microbatches of a batch.
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


def two_bw(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the 2BW schedule of one batch among others, in which every rank takes forward and backward steps in turns.

    In turn j, stage s of p takes the forward step of microbatch j + 2 (p-1) - s and the backward step of j + s. Their
    inputs are results of the turn before, so no rank waits, although all of them begin and end the batch together.

    Args:
        ranks: Number of pipeline ranks p.
        microbatches: Number of microbatches of a batch; with fewer than 2 (p-1), ranks wait.
        chunks: Stages a rank; must be 1.

    Raises:
        InputError: `ranks` or `microbatches` is below 1, or `chunks` is not allowed.

    Reference:
        Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training".
    """
    _check("2bw", ranks, microbatches, chunks, (1,))
    begun = tuple((min(2 * (ranks - 1) - s, microbatches), min(s, microbatches)) for s in range(ranks))

    def order(s: int) -> tuple[Compute, ...]:
        forward, backward = begun[s]
        return tuple(step for j in range(microbatches) for step in (Forward(s, forward + j), Backward(s, backward + j)))

    return Schedule("2bw", ranks, microbatches, tuple(range(ranks)), tuple(map(order, range(ranks))), 1, begun, begun)


def separate(schedule: Schedule, *, begins: bool, ends: bool) -> Schedule:
    """Return the schedule of a batch that the pipeline is empty before, or after, or both.

    Args:
        schedule: Schedule of a batch among others, with one stage a rank.
        begins: If true, the batch takes all its steps itself.
        ends: If true, it takes no steps of the next batch.
    """
    if not schedule.before:
        return schedule

    def steps_of(s: int) -> tuple[Compute, ...]:
        forward, backward = schedule.before[s] if begins else (0, 0)
        ahead = forward - backward
        turns = [step for j in range(backward) for step in (Forward(s, ahead + j), Backward(s, j))]
        rest = [step for step in schedule.steps[s] if not ends or step.microbatch < schedule.microbatches]
        return (*(Forward(s, j) for j in range(ahead)), *turns, *rest)

    steps = tuple(steps_of(s) for s in range(schedule.stages))
    before, after = () if begins else schedule.before, () if ends else schedule.after
    return replace(schedule, steps=steps, before=before, after=after)


def taken_before(
    schedule: Schedule, begun: Sequence[tuple[int, int]], first: int
) -> tuple[set[tuple[type, int, int]], list[set[tuple[int, int, bool]]]]:
    """Return what the batch before has done of a batch.

    Args:
        schedule: Schedule of the batch, with one stage a rank unless `begun` is empty.
        begun: Numbers of forward and backward steps of each stage, `before` or `after` of the schedule.
        first: Number of the batch's first microbatch.

    Returns:
        The steps (kind, stage, microbatch), with both halves of a backward step; and for each rank, the results (stage,
        microbatch, whether it is a gradient) that it has and has not used.
    """
    halves: dict[type, int] = {Forward: 0, BackwardInput: 1, BackwardWeight: 1}
    done = {(k, s, first + j) for s, counts in enumerate(begun) for k, n in halves.items() for j in range(counts[n])}
    here: list[set[tuple[int, int, bool]]] = [set() for _ in range(schedule.ranks)]
    for s, (lower, upper) in enumerate(pairwise(begun)):
        here[s + 1].update((s, first + j, False) for j in range(upper[0], lower[0]))
        here[s].update((s + 1, first + j, True) for j in range(lower[1], upper[1]))
    return done, here


def terapipe(ranks: int, microbatches: int, slices: int = 4) -> Schedule:
    """Return the GPipe schedule over the slices of all microbatches.

    Args:
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches of a batch.
        slices: Number of slices of each sequence.

    Reference:
        Li et al. 2021, "TeraPipe".
    """
    return replace(in_slices(gpipe(ranks, microbatches), slices), name="terapipe")


def in_slices(schedule: Schedule, slices: int) -> Schedule:
    """Return the schedule with each step divided into slices of the sequence.

    A forward step starts with the first slice, a backward step with the last. The later ranks can therefore start after
    one slice instead of a whole microbatch, and no more microbatches are in flight than before.

    Args:
        schedule: Schedule without slices.
        slices: Number of slices of each sequence, 1 or more.

    Raises:
        InputError: `slices` is below 1, or the schedule computes weight gradients in separate steps.
    """
    if slices < 1:
        raise refusal(f"{schedule.name}: {slices} slices of the sequence are not possible; give 1 or more")
    if any(isinstance(step, BackwardInput) for steps in schedule.steps for step in steps):
        raise refusal(
            f"{schedule.name} delays the gradients of weights, but an earlier slice needs the gradients of its "
            "states at once; set parallel.slices to 1, or parallel.schedule to gpipe, 1f1b or interleaved"
        )

    if schedule.before and slices > 1:
        name = schedule.name
        raise refusal(f"{name} does not slice sequences; set parallel.slices to 1, or parallel.schedule to 1f1b")

    def slices_of(step: Compute) -> list[Compute]:
        order = range(slices) if isinstance(step, Forward) else reversed(range(slices))
        return [type(step)(step.stage, step.microbatch * slices + number) for number in order]

    steps = tuple(tuple(part for step in of_rank for part in slices_of(step)) for of_rank in schedule.steps)
    return replace(schedule, microbatches=schedule.microbatches * slices, steps=steps, slices=slices)


SCHEDULES: dict[PipelineSchedule, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
DELAYED: dict[DelayedSchedule, Maker] = {"2bw": two_bw}  # not exact: never chosen for the user


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Schedule:
    """Return the schedule with this name.

    Args:
        name: Key of SCHEDULES or DELAYED, terapipe, or package.module:function. Such a function takes the numbers of
            ranks, microbatches and chunks, and returns a `Schedule`.
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches of a batch.
        chunks: Stages a rank.
        slices: Number of slices of each sequence.

    Raises:
        InputError: There is no such schedule, or not with these numbers.
    """
    if name == "terapipe":
        return terapipe(ranks, microbatches, slices)
    makers: dict[Any, Maker] = {**SCHEDULES, **DELAYED}
    maker = find("parallel.schedule", name) if ":" in name else makers.get(name)
    if maker is None:
        raise refusal(f"there is no schedule {name!r}; choose one of {', '.join([*makers, 'terapipe'])}")
    schedule: Schedule = maker(ranks, microbatches, chunks)
    return schedule if slices == 1 else in_slices(schedule, slices)


def default_microbatches(ranks: int) -> int:
    """Return the default number of microbatches in a rank's share of a batch: two for each pipeline rank, else one."""
    return _PER_STAGE * ranks if ranks > 1 else 1


def _entries(stage: int, *kinds: Kind) -> list[Entry]:
    """Return the kinds of steps, each paired with this stage."""
    return [(kind, stage) for kind in kinds]


def _scheduled(name: str, microbatches: int, rank_of: Iterable[int], orders: Iterable[Sequence[Entry]]) -> Schedule:
    """Return the schedule in which each kind of step on each stage takes the microbatches in turn.

    Steps beyond the last microbatch are left out.

    Args:
        name: Name of the schedule.
        microbatches: Number of microbatches.
        rank_of: Rank of each stage.
        orders: Kinds of steps of each rank, in order.
    """
    steps: list[tuple[Compute, ...]] = []
    for order in orders:
        counts: Counter[Entry] = Counter()
        rank_steps: list[Compute] = []
        for kind, stage in order:
            if counts[kind, stage] < microbatches:
                rank_steps.append(kind(stage, counts[kind, stage]))
            counts[kind, stage] += 1
        steps.append(tuple(rank_steps))
    return Schedule(name, len(steps), microbatches, tuple(rank_of), tuple(steps))


def _check(name: str, ranks: int, microbatches: int, chunks: int, possible: Iterable[int]) -> None:
    """Raise InputError if a schedule cannot be made with these numbers. possible: allowed numbers of chunks a rank."""
    if ranks < 1 or microbatches < 1:
        raise refusal(f"{name}: {ranks} ranks and {microbatches} microbatches; give at least one of each")
    if chunks not in possible:
        choices = ", ".join(map(str, possible)) if not isinstance(possible, range) else "1 or more"
        raise refusal(f"{name}: {chunks} chunks a rank are not possible; set parallel.chunks to {choices}")
