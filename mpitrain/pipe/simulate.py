"""What a schedule costs: when every step runs, the idle fraction and the memory held, without MPI; its messages.

A rank computes its steps in order, each as soon as what it needs is there; a message takes
`Costs.message` from the end of the step that made it, and delays nobody else.

Messages are put into one order for all ranks: that in which the steps that make them end. A rank's program is its
part of that order, with each of its own steps at its end:

    rank 0   F0 | send F0 .  F1 | send F1
    rank 1        recv F0    .    recv F1    F0          (F0 of rank 1 ends after F1 of rank 0 does)

So even if every send waited for its receive, all ranks would get through the one order together: no costs and no
MPI can make them deadlock. A receive comes before the step that is under way when its message arrives.

The proof (`verify`) needs no MPI. Every rank's steps are run symbolically. Each microbatch must go once through every
stage, forward and then backward, each step on its stage's rank and with its input there; slices of one sequence in
order. Sends are synchronous (a Send ends only together with its Receive, and a Receive blocks), so a program that
passes cannot deadlock on any MPI, whatever the steps cost; the runtime, whose sends and receives only begin, waits for
less.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby

from mpitrain.pipe.schedule import (
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    PipelineProgram,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    Step,
    make_schedule,
)

Cost = float | Sequence[float]  # of every stage, or of each
_KINDS = (Forward, Backward, BackwardInput, BackwardWeight)
_EPSILON = 1e-12  # time: less is left of a step on shared cores by rounding alone


@dataclass(frozen=True)
class Costs:
    """What steps cost, per microbatch and stage; a number stands for all stages alike.

    Attributes:
        forward: Time of a forward step, in any one unit.
        input: Time of the gradients of a stage's input.
        weight: Time of the gradients of its parameters.
        message: Time between the end of a step and the arrival of what it sends.
    """

    forward: Cost = 1
    input: Cost = 1
    weight: Cost = 1
    message: float = 0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of one rank, and when it began and ended."""

    step: Compute
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule did or would do.

    Attributes:
        schedule: The schedule.
        runs: runs[r] is rank r's steps and their times.
        peaks: Stage-microbatches that each rank holds at most.
    """

    schedule: Schedule
    runs: tuple[tuple[TimedStep, ...], ...]
    peaks: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Time from the beginning to the end of the last step."""
        return max((run.end for runs in self.runs for run in runs), default=0)

    @property
    def busy(self) -> float:
        """Time in steps, of all ranks together."""
        return sum(run.end - run.begin for runs in self.runs for run in runs)

    @property
    def idle(self) -> float:
        """Fraction of the ranks' time in which they compute nothing."""
        whole = self.makespan * self.schedule.ranks
        return (whole - self.busy) / whole if whole else 0.0

    @property
    def in_flight(self) -> float:
        """Microbatches a rank holds at most; a slice of a stage's part of one counts as 1 / chunks / slices."""
        return max(self.peaks) / self.schedule.chunks / self.schedule.slices


class PreparedSchedule:
    """A schedule in plain numbers, to be simulated with many costs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._stages, self._count = schedule.stages, schedule.microbatches
        # of each rank's steps: kind x stages + stage; what it waits for, or -1; whether that comes from another rank;
        # what it makes, or -1
        self._steps = [[self._numbers(step, rank) for step in steps] for rank, steps in enumerate(schedule.steps)]

    def _numbers(self, step: Compute, rank: int) -> tuple[int, int, bool, int]:
        kind, need = _KINDS.index(type(step)), needs(step, self._stages - 1)
        made = ((kind > 0) * self._stages + step.stage) * self._count + step.microbatch
        wanted = -1
        if need is not None:
            wanted = ((need[0] is not Forward) * self._stages + need[1]) * self._count + step.microbatch
        apart = need is not None and self.schedule.rank_of[need[1]] != rank
        return kind * self._stages + step.stage, wanted, apart, -1 if isinstance(step, BackwardWeight) else made

    def ends(self, costs: Costs, runs: Sequence[list[tuple[float, float]]] | None = None) -> list[float]:
        """Return when each rank is done with its last step.

        Args:
            costs: Of the steps, and of a message between any two ranks.
            runs: Lists, one of each rank, that the beginning and the end of its steps are appended to; None: of none.

        Raises:
            ScheduleError: Steps wait for each other in a circle.
        """
        seconds, message = self._seconds(costs), costs.message
        done, waiting = [-1.0] * (2 * self._stages * self._count), dict[int, int]()
        clock, at = [0.0] * len(self._steps), [0] * len(self._steps)
        ready = list(range(len(self._steps)))
        while ready:
            rank = ready.pop()
            steps, now = self._steps[rank], clock[rank]
            number = at[rank]
            while number < len(steps):
                which, wanted, apart, made = steps[number]
                if wanted >= 0:
                    there = done[wanted]
                    if there < 0.0:
                        waiting[wanted] = rank
                        break
                    if apart:
                        there += message
                    if there > now:
                        now = there
                if runs is not None:
                    runs[rank].append((now, now + seconds[which]))
                now += seconds[which]
                number += 1
                if made >= 0:
                    done[made] = now
                    if made in waiting:
                        ready.append(waiting.pop(made))
            clock[rank], at[rank] = now, number
        self._require_done(at)
        return clock

    def ends_on_shared_cores(
        self, costs: Costs, nodes: Sequence[int], cores: float, message: Callable[[int, int], float]
    ) -> list[float]:
        """Return when each rank is done with its last step, where the ranks of a node share its cores.

        The ranks of a node that compute at the same time share its cores evenly (processor sharing); one alone never
        gets more than its own speed. A rank that waits uses none.

        Args:
            costs: What steps cost a rank that has a core for itself; its `message` is not used.
            nodes: The node of each rank of the pipeline.
            cores: How many of the pipeline's ranks on one node can compute at full speed at the same time.
            message: message(stage, to): time between the end of a step of `stage` and the arrival of what it sends to
                the rank of stage `to`; it keeps no core busy.

        Raises:
            ScheduleError: Steps wait for each other in a circle.
        """
        seconds, now = self._seconds(costs), 0.0
        done, waiting = [-1.0] * (2 * self._stages * self._count), dict[int, int]()
        ends, at = [0.0] * len(self._steps), [0] * len(self._steps)
        running: dict[int, float] = {}  # by rank what is left of its step, at full speed
        coming: list[tuple[float, int]] = []  # when what a rank waits for arrives
        ready = list(range(len(self._steps)))
        while ready or running or coming:
            for rank in ready:
                if at[rank] == len(self._steps[rank]):
                    continue
                which, wanted, apart, _ = self._steps[rank][at[rank]]
                arrives = 0.0
                if wanted >= 0:
                    if done[wanted] < 0.0:
                        waiting[wanted] = rank
                        continue
                    stage = wanted // self._count % self._stages
                    arrives = done[wanted] + (message(stage, which % self._stages) if apart else 0.0)
                if arrives > now + _EPSILON:
                    heapq.heappush(coming, (arrives, rank))
                else:
                    running[rank] = max(seconds[which], 2 * _EPSILON)
            ready = []
            active = Counter(nodes[rank] for rank in running)
            pace = {rank: min(1.0, cores / active[nodes[rank]]) for rank in running}
            passed = min((left / pace[rank] for rank, left in running.items()), default=math.inf)
            passed = min(passed, max(0.0, coming[0][0] - now)) if coming else passed
            now += passed
            for rank in list(running):
                running[rank] -= passed * pace[rank]
                if running[rank] <= _EPSILON:
                    del running[rank]
                    made, ends[rank] = self._steps[rank][at[rank]][3], now
                    at[rank] += 1
                    ready.append(rank)
                    if made >= 0:
                        done[made] = now
                        ready += [waiting.pop(made)] if made in waiting else []
            while coming and coming[0][0] <= now + _EPSILON:
                ready.append(heapq.heappop(coming)[1])
        self._require_done(at)
        return ends

    def held(self, activations: Sequence[float]) -> list[float]:
        """Return the bytes of activations that each rank holds at most. activations: of each stage's microbatch."""
        nothing, less = [0.0] * self._stages, [-each for each in activations]
        change = [*activations, *less, *nothing, *less]
        return [max(accumulate((change[step[0]] for step in steps), initial=0.0)) for steps in self._steps]

    def _seconds(self, costs: Costs) -> list[float]:
        """Return the time of a step by kind x stages + stage."""
        forward, input_, weight = (_each(cost, self._stages) for cost in (costs.forward, costs.input, costs.weight))
        return [*forward, *(a + b for a, b in zip(input_, weight, strict=True)), *input_, *weight]

    def _require_done(self, at: Sequence[int]) -> None:
        """Raise ScheduleError unless each rank has come to its end. at: how many of its steps each one has done."""
        for steps, number, rank in zip(self.schedule.steps, at, range(len(at)), strict=True):
            if number < len(steps):
                raise ScheduleError(f"{self.schedule.name}: rank {rank} waits for ever at {steps[number]}")


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Simulation:
    """Return when every step runs, and what is held meanwhile.

    Raises:
        ScheduleError: Steps wait for each other in a circle.
    """
    prepared, times = PreparedSchedule(schedule), [list[tuple[float, float]]() for _ in schedule.steps]
    prepared.ends(costs, times)
    runs = tuple(
        tuple(TimedStep(step, *time) for step, time in zip(steps, own, strict=True))
        for steps, own in zip(schedule.steps, times, strict=True)
    )
    return Simulation(schedule, runs, tuple(map(int, prepared.held([1] * schedule.stages))))


def needs(step: Compute, last: int) -> tuple[type, int] | None:
    """(kind, stage) of the step on another stage that a step waits for, of the same microbatch; None if there is none.

    last: the last stage.
    """
    if isinstance(step, Forward):
        return (Forward, step.stage - 1) if step.stage > 0 else None
    if isinstance(step, Backward | BackwardInput):
        return (Backward, step.stage + 1) if step.stage < last else None
    return None


def _each(cost: Cost, stages: int) -> list[float]:
    """Return the cost of each stage."""
    return [float(cost)] * stages if isinstance(cost, int | float) else list(cost)


# -- microbatches through the stages of a pipeline: when its ranks are done and what they hold, for many costs
#
# Of a built-in schedule with more than 8 microbatches a rank of the pipeline, two shorter ones are simulated, which
# differ by as many microbatches as ranks, and the difference is added for each further so many: by then every round
# takes as long as the one before it. (With stages of very different lengths that takes a little longer to come; the
# error stays below 1 %.)

ROUNDS = 8  # microbatches for each rank of the pipeline from which on rounds take equally long
_FULL = 4  # the same from which on ranks hold as many as ever, or as many more in each round


class Flow:
    """A schedule's numbers of microbatches, whole or extrapolated. The arguments are those of `make_schedule`.

    Attributes:
        microbatches: That the steps of the whole schedule count (slices of them, where there are slices).
        held: Bytes of activations that each rank holds at most, of those that each stage keeps of a microbatch.
    """

    def __init__(self, name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> None:
        self._count, self._ranks, self._built_in = microbatches, ranks, name in SCHEDULES
        self.microbatches = microbatches * slices
        self._prepared: Callable[[int], PreparedSchedule] = lambda count: _prepared(name, ranks, count, chunks, slices)
        self.held = lru_cache(maxsize=64)(lambda kept: self._extended(_FULL, lambda prepared: prepared.held(kept)))

    @property
    def shape(self) -> Schedule:
        """A schedule with the same ranks and stages, of as many or fewer microbatches."""
        return self._rounds(_FULL)[0].schedule

    def ends(self, costs: Costs) -> list[float]:
        """When each rank of the pipeline is done with its last step, in the unit of the costs.

        Raises:
            ScheduleError: Steps wait for each other in a circle.
        """
        return self._extended(ROUNDS, lambda prepared: prepared.ends(costs))

    def ends_on_shared_cores(
        self, costs: Costs, nodes: Sequence[int], cores: float, message: Callable[[int, int], float]
    ) -> list[float]:
        """Return when each rank is done, as `PreparedSchedule.ends_on_shared_cores` says; nothing is extrapolated."""
        return self._prepared(self._count).ends_on_shared_cores(costs, nodes, cores, message)

    def _rounds(self, most: int) -> tuple[PreparedSchedule, PreparedSchedule, int]:
        """The schedule with fewer microbatches, with a round more, and how many more rounds the whole one has."""
        few, ranks = self._count, self._ranks
        if self._built_in and few > most * ranks:
            few = (most - 1) * ranks + few % ranks
        more = (self._count - few) // ranks
        return self._prepared(few), self._prepared(few + (more > 0) * ranks), more

    def _extended(self, most: int, of: Callable[[PreparedSchedule], list[float]]) -> list[float]:
        short, long, more = self._rounds(most)
        return [a + (b - a) * more for a, b in zip(of(short), of(long), strict=True)] if more else of(short)


@lru_cache(maxsize=512)
def _prepared(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> PreparedSchedule:
    return PreparedSchedule(make_schedule(name, ranks, microbatches, chunks, slices))


def estimate(
    name: str, ranks: int, count: int, chunks: int, spread: Sequence[float], slowest: float, message: float
) -> float:
    """About the end of a schedule, in closed form: its microbatches on the slowest rank, and what fills and drains it.

    With equal stages and no messages it is what `Flow.ends` simulates, as far as `pipe.schedule` says how long its
    ranks are idle; a schedule of the user's is taken for 1f1b.

    Args:
        name: The schedule.
        ranks: Of the pipeline.
        count: Microbatches.
        chunks: Stages of a rank.
        spread: Seconds of a microbatch's forward, input and weight passes through a rank, if all ranks were equal.
        slowest: Seconds of a microbatch on the slowest rank.
        message: Seconds of a message between two stages.
    """
    forward, input_, weight = spread
    short = max(0, ranks - count)  # microbatches that a rank lacks to be busy while the others fill
    idle, sent = (ranks - 1) * (forward + input_ + weight), 2 * (ranks - 1)
    if name == "interleaved":
        idle = (idle + short * (forward + input_ + weight) * (chunks - 1)) / chunks
        sent = 2 * (ranks * chunks - 1)
    elif name == "zero-bubble" and chunks == 1:
        idle, sent = (ranks - 1) * max(0.0, forward + input_ - weight) + short * weight, 4 * (ranks - 1)
    elif name == "zero-bubble":
        idle = (ranks - 1) * max(spread) + (short + max(0, 2 * ranks - 1 - count)) * weight
        idle, sent = idle / chunks, 2 * ranks * chunks
    elif name != "gpipe":
        sent += 2 * (ranks - 1) * count // ranks  # each rank sends and waits in turns
    return count * slowest + idle + sent * message


# -- passes over schedules: adding the messages, leaving out the backward half, and the proof


def with_messages(schedule: Schedule, costs: Costs = Costs()) -> PipelineProgram:
    """The schedule with a Send and a Receive wherever a stage and its neighbour are on different ranks.

    Args:
        schedule: The schedule.
        costs: Of the steps, to say in which order they end; every choice gives a right program.
    """
    ends = [(run.end, rank, run.step) for rank, runs in enumerate(simulate(schedule, costs).runs) for run in runs]
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    for _, together in groupby(sorted(ends, key=lambda e: e[:2]), key=lambda e: e[0]):  # a rank's stay in order
        messages: list[tuple[Send, int]] = []  # after all steps that end at the same time
        for _, rank, step in together:
            steps[rank].append(step)
            gradient = not isinstance(step, Forward)
            to = step.stage - 1 if gradient else step.stage + 1
            if not isinstance(step, BackwardWeight) and 0 <= to < schedule.stages and schedule.rank_of[to] != rank:
                messages.append((Send(step.stage, step.microbatch, gradient, schedule.rank_of[to]), rank))
        for send, rank in messages:
            steps[rank].append(send)
            steps[send.to].append(Receive(send.stage, send.microbatch, send.gradient, rank))
    return PipelineProgram(schedule, tuple(tuple(s) for s in steps))


def forward_only(schedule: Schedule) -> Schedule:
    """The forward steps of a schedule alone, for an evaluation."""
    steps = tuple(tuple(s for s in steps if isinstance(s, Forward)) for steps in schedule.steps)
    return replace(schedule, name=f"{schedule.name} forward", steps=steps)


def verify(program: PipelineProgram, training: bool = True) -> None:
    """Raise ScheduleError, with the rank and the step, unless a program is right.

    training: whether backward steps belong to it.
    """
    _Check(program, training).run()


class _Check:
    """The state of all ranks while their steps are run symbolically."""

    def __init__(self, program: PipelineProgram, training: bool) -> None:
        self.program, self.schedule, self.training = program, program.schedule, training
        ranks = self.schedule.ranks
        self.at = [0] * ranks
        self.done: set[tuple[type, int, int]] = set()  # a Backward counts as both of its halves
        self.here: list[set[tuple[int, int, bool]]] = [set() for _ in range(ranks)]  # received or made, not used
        self.sent: set[tuple[int, int, bool]] = set()

    def run(self) -> None:
        """Let every rank go on as far as it can, until nobody can."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.schedule.ranks):
                while self._advance(rank):
                    moved = True
        for rank, steps in enumerate(self.program.steps):
            if self.at[rank] < len(steps):
                raise self._error(rank, "waits for ever")
        self._check_complete()

    def _advance(self, rank: int) -> bool:
        """Run a rank's next step, if what it waits for is there; returns whether it ran."""
        steps = self.program.steps[rank]
        if self.at[rank] == len(steps):
            return False
        step = steps[self.at[rank]]
        if isinstance(step, Receive):
            return False  # taken together with its Send
        if isinstance(step, Send):
            return self._send(rank, step)
        self._compute(rank, step)
        self.at[rank] += 1
        return True

    def _send(self, rank: int, step: Send) -> bool:
        """Run a Send together with its Receive, if the other rank has come to that."""
        theirs = self.program.steps[step.to]
        at = self.at[step.to]
        if at == len(theirs):
            raise self._error(rank, f"sends to rank {step.to}, which is done")
        wanted = theirs[at]
        if not isinstance(wanted, Receive) or wanted.source != rank:
            return False
        what = step.stage, step.microbatch, step.gradient
        if (wanted.stage, wanted.microbatch, wanted.gradient) != what:
            raise self._error(rank, f"sends what rank {step.to} does not expect: {wanted}")
        if what in self.sent:
            raise self._error(rank, "sends it twice")
        if what not in self.here[rank]:
            raise self._error(rank, "sends what it has not made")
        self.here[rank].discard(what)
        self.sent.add(what)
        self.here[step.to].add(what)
        self.at[rank] += 1
        self.at[step.to] += 1
        return True

    def _compute(self, rank: int, step: Compute) -> None:
        """Run a compute step, which must be the rank's, not done yet, and have its input there."""
        schedule = self.schedule
        stage, microbatch = step.stage, step.microbatch
        if not 0 <= stage < schedule.stages or schedule.rank_of[stage] != rank:
            raise self._error(rank, "computes a stage it does not hold")
        if not 0 <= microbatch < schedule.microbatches:
            raise self._error(rank, "computes a microbatch that does not exist")
        halves = (BackwardInput, BackwardWeight) if isinstance(step, Backward) else (type(step),)
        for half in halves:
            if (half, stage, microbatch) in self.done:
                raise self._error(rank, "computes it twice")
        before = BackwardInput if isinstance(step, BackwardWeight) else Forward
        if not isinstance(step, Forward) and (before, stage, microbatch) not in self.done:
            raise self._error(rank, f"comes before its {before.__name__}")
        need = needs(step, schedule.stages - 1)
        if need is not None:
            what = need[1], microbatch, need[0] is not Forward
            if what not in self.here[rank]:
                raise self._error(rank, "lacks its input")
            self.here[rank].discard(what)
        self._check_slices(rank, step)
        self.done.update((half, stage, microbatch) for half in halves)
        if isinstance(step, Forward) and stage < schedule.stages - 1:
            self.here[rank].add((stage, microbatch, False))
        if isinstance(step, Backward | BackwardInput) and stage > 0:
            self.here[rank].add((stage, microbatch, True))

    def _check_slices(self, rank: int, step: Compute) -> None:
        """A slice comes after the one before it forward, and after the one behind it backward."""
        slices = self.schedule.slices
        number = step.microbatch % slices
        if isinstance(step, Forward):
            if number > 0 and (Forward, step.stage, step.microbatch - 1) not in self.done:
                raise self._error(rank, "comes before an earlier slice")
        elif number < slices - 1 and (BackwardInput, step.stage, step.microbatch + 1) not in self.done:
            raise self._error(rank, "comes before the backward step of a later slice")

    def _check_complete(self) -> None:
        """Every step of every stage and microbatch must have run, and every message been used."""
        kinds = (Forward, BackwardInput, BackwardWeight) if self.training else (Forward,)
        schedule = self.schedule
        wanted = {(k, s, j) for k in kinds for s in range(schedule.stages) for j in range(schedule.microbatches)}
        if self.done != wanted:
            some = next(iter(wanted ^ self.done))
            raise ScheduleError(
                f"{schedule.name}: {some[0].__name__} of microbatch {some[2]}, stage {some[1]} is amiss"
            )
        for rank, left in enumerate(self.here):
            if left:
                raise ScheduleError(f"{schedule.name}: rank {rank} ends with {sorted(left)} that nobody used")

    def _error(self, rank: int, what: str) -> ScheduleError:
        """An error at the step that a rank has come to."""
        at = self.at[rank]
        return ScheduleError(f"{self.schedule.name}: rank {rank}, step {at} ({self.program.steps[rank][at]}) {what}")
