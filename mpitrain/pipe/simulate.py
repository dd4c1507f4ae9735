"""Simulation of a schedule without MPI: times of the steps, idle fraction, memory, messages, and a correctness proof.

A rank computes its steps in order, each as soon as its input is there. A message arrives `Costs.message` after the end
of the step that computed it, and delays no other step.

All messages have one global order: the order in which the steps that compute them end. A rank's program is its part of
that order, with each of its own steps placed at the step's end:

    rank 0   F0 | send F0 .  F1 | send F1
    rank 1        recv F0    .    recv F1    F0          (F0 of rank 1 ends after F1 of rank 0)

Even if every send waited for its receive, all ranks could go through this order together. The program therefore cannot
deadlock, with any costs and any MPI. A receive comes before the step that is running when its message arrives.

The proof (`verify`) needs no MPI. It runs the steps of every rank symbolically. Each microbatch must go through every
stage exactly once forward and then backward, each step on its stage's rank and with its input there; slices of one
sequence must be in order. Sends are treated as synchronous (a Send ends only together with its Receive, and a Receive
blocks). A program that passes therefore cannot deadlock on any MPI, for any costs of the steps. The executor waits for
less than that, because its sends and receives only start.
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
    taken_before,
)

Cost = float | Sequence[float]  # one number for every stage, or one for each
_KINDS = (Forward, Backward, BackwardInput, BackwardWeight)
_EPSILON = 1e-12  # time; a smaller rest of a step on shared cores is a rounding error


@dataclass(frozen=True)
class Costs:
    """Costs of steps, per microbatch and stage. A single number applies to all stages.

    Attributes:
        forward: Time of a forward step, in any unit; default 1.
        input: Time of the gradients of a stage's input; default 1.
        weight: Time of the gradients of a stage's parameters; default 1.
        message: Time from the end of a step to the arrival of its message; default 0.
    """

    forward: Cost = 1
    input: Cost = 1
    weight: Cost = 1
    message: float = 0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of one rank with its times.

    Attributes:
        step: Compute step.
        begin: Time when it starts.
        end: Time when it ends.
    """

    step: Compute
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Times of a schedule's steps, simulated or measured.

    Attributes:
        schedule: Schedule that was run.
        runs: Steps of each rank with their times: runs[r] for rank r.
        peaks: Largest number of (stage, microbatch) pairs in flight on each rank.
    """

    schedule: Schedule
    runs: tuple[tuple[TimedStep, ...], ...]
    peaks: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Time until the end of the last step."""
        return max((run.end for runs in self.runs for run in runs), default=0)

    @property
    def busy(self) -> float:
        """Time in steps, summed over all ranks."""
        return sum(run.end - run.begin for runs in self.runs for run in runs)

    @property
    def idle(self) -> float:
        """Fraction of the ranks' time in which they compute nothing."""
        whole = self.makespan * self.schedule.ranks
        return (whole - self.busy) / whole if whole else 0.0

    @property
    def in_flight(self) -> float:
        """Largest number of microbatches in flight on a rank; a slice in one stage counts as 1 / chunks / slices."""
        return max(self.peaks) / self.schedule.chunks / self.schedule.slices


class PreparedSchedule:
    """Schedule encoded as integers, for fast simulation with many different costs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._stages, self._count = schedule.stages, schedule.microbatches + schedule.most_ahead
        # for each step of each rank: kind x stages + stage; the result it waits for, or -1; whether that comes from
        # another rank; the result it makes, or -1
        self._steps = [[self._numbers(step, rank) for step in steps] for rank, steps in enumerate(schedule.steps)]

    def _numbers(self, step: Compute, rank: int) -> tuple[int, int, bool, int]:
        """Return a step as integers; see `_steps`."""
        kind, need = _KINDS.index(type(step)), needs(step, self._stages - 1)
        result = ((kind > 0) * self._stages + step.stage) * self._count + step.microbatch
        source = -1
        if need is not None:
            source = ((need[0] is not Forward) * self._stages + need[1]) * self._count + step.microbatch
        remote = need is not None and self.schedule.rank_of[need[1]] != rank
        return kind * self._stages + step.stage, source, remote, -1 if isinstance(step, BackwardWeight) else result

    def ends(self, costs: Costs, runs: Sequence[list[tuple[float, float]]] | None = None) -> list[float]:
        """Return the time at which each rank ends its last step.

        Args:
            costs: Costs of the steps, and of a message between any two ranks.
            runs: One list for each rank, to which (begin, end) of its steps is appended; None to record nothing.

        Raises:
            ScheduleError: Steps wait for each other in a cycle.
        """
        seconds, message = self._seconds(costs), costs.message
        done, waiting = self._not_done(), dict[int, int]()
        clock, at = [0.0] * len(self._steps), [0] * len(self._steps)
        ready = list(range(len(self._steps)))
        while ready:
            rank = ready.pop()
            steps, now = self._steps[rank], clock[rank]
            number = at[rank]
            while number < len(steps):
                which, source, remote, result = steps[number]
                if source >= 0:
                    there = done[source]
                    if there < 0.0:
                        waiting[source] = rank
                        break
                    if remote:
                        there += message
                    if there > now:
                        now = there
                if runs is not None:
                    runs[rank].append((now, now + seconds[which]))
                now += seconds[which]
                number += 1
                if result >= 0:
                    done[result] = now
                    if result in waiting:
                        ready.append(waiting.pop(result))
            clock[rank], at[rank] = now, number
        self._require_done(at)
        return clock

    def ends_on_shared_cores(
        self, costs: Costs, nodes: Sequence[int], cores: float, message: Callable[[int, int], float]
    ) -> list[float]:
        """Return the time at which each rank ends its last step, if the ranks of a node share its cores.

        Ranks of a node that compute at the same time share its cores evenly (processor sharing). A rank alone runs at
        its own full speed at most, and a waiting rank uses no core.

        Args:
            costs: Costs of the steps on a rank with its own core; `costs.message` is not used.
            nodes: Node of each rank of the pipeline.
            cores: Number of the pipeline's ranks on one node that can compute at full speed at the same time.
            message: message(stage, to) is the time from the end of a step of `stage` to the arrival of its message on
                the rank of stage `to`. Messages use no core.

        Raises:
            ScheduleError: Steps wait for each other in a cycle.
        """
        seconds, now = self._seconds(costs), 0.0
        done, waiting = self._not_done(), dict[int, int]()
        ends, at = [0.0] * len(self._steps), [0] * len(self._steps)
        running: dict[int, float] = {}  # time left of each rank's step, at full speed
        coming: list[tuple[float, int]] = []  # (arrival time, rank) of messages that ranks wait for
        ready = list(range(len(self._steps)))
        while ready or running or coming:
            for rank in ready:
                if at[rank] == len(self._steps[rank]):
                    continue
                which, source, remote, _ = self._steps[rank][at[rank]]
                arrives = 0.0
                if source >= 0:
                    if done[source] < 0.0:
                        waiting[source] = rank
                        continue
                    stage = source // self._count % self._stages
                    arrives = done[source] + (message(stage, which % self._stages) if remote else 0.0)
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
                    result, ends[rank] = self._steps[rank][at[rank]][3], now
                    at[rank] += 1
                    ready.append(rank)
                    if result >= 0:
                        done[result] = now
                        ready += [waiting.pop(result)] if result in waiting else []
            while coming and coming[0][0] <= now + _EPSILON:
                ready.append(heapq.heappop(coming)[1])
        self._require_done(at)
        return ends

    def peak_bytes(self, activations: Sequence[float]) -> list[float]:
        """Return the largest number of bytes of activations on each rank.

        Args:
            activations: Bytes that each stage keeps of a microbatch.
        """
        nothing, less = [0.0] * self._stages, [-each for each in activations]
        change = [*activations, *less, *nothing, *less]
        begun = [0.0] * len(self._steps)
        for stage, (forward, backward) in enumerate(self.schedule.before):
            begun[self.schedule.rank_of[stage]] += (forward - backward) * activations[stage]
        changes = [[change[step[0]] for step in steps] for steps in self._steps]
        return [max(accumulate(of, initial=first)) for of, first in zip(changes, begun, strict=True)]

    def _not_done(self) -> list[float]:
        """Return the time of each result: 0 for those of an earlier batch, -1 for those that are not there yet."""
        done = [-1.0] * (2 * self._stages * self._count)
        for stage, counts in enumerate(self.schedule.before):
            for kind, count in enumerate(counts):
                at = (kind * self._stages + stage) * self._count
                done[at : at + count] = [0.0] * count
        return done

    def _seconds(self, costs: Costs) -> list[float]:
        """Return the times of the steps, indexed by kind x stages + stage."""
        forward, input_, weight = (_each(cost, self._stages) for cost in (costs.forward, costs.input, costs.weight))
        return [*forward, *(a + b for a, b in zip(input_, weight, strict=True)), *input_, *weight]

    def _require_done(self, at: Sequence[int]) -> None:
        """Raise ScheduleError unless each rank has reached its end. at: number of steps that each rank has done."""
        for steps, number, rank in zip(self.schedule.steps, at, range(len(at)), strict=True):
            if number < len(steps):
                raise ScheduleError(f"{self.schedule.name}: rank {rank} waits forever at {steps[number]}")


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Simulation:
    """Return the times of all steps and the largest number of microbatches in flight.

    Args:
        schedule: Schedule to simulate.
        costs: Costs of its steps and messages; default 1 for each step, and free messages.

    Raises:
        ScheduleError: Steps wait for each other in a cycle.
    """
    prepared, times = PreparedSchedule(schedule), [list[tuple[float, float]]() for _ in schedule.steps]
    prepared.ends(costs, times)
    runs = tuple(
        tuple(TimedStep(step, *time) for step, time in zip(steps, rank_times, strict=True))
        for steps, rank_times in zip(schedule.steps, times, strict=True)
    )
    return Simulation(schedule, runs, tuple(map(int, prepared.peak_bytes([1] * schedule.stages))))


def needs(step: Compute, last: int) -> tuple[type, int] | None:
    """Return the step on another stage that a step waits for, for the same microbatch.

    Args:
        step: Compute step.
        last: Number of the last stage.

    Returns:
        (kind, stage) of that step; None if there is none.
    """
    if isinstance(step, Forward):
        return (Forward, step.stage - 1) if step.stage > 0 else None
    if isinstance(step, Backward | BackwardInput):
        return (Backward, step.stage + 1) if step.stage < last else None
    return None


def _each(cost: Cost, stages: int) -> list[float]:
    """Return the cost of each stage."""
    return [float(cost)] * stages if isinstance(cost, int | float) else list(cost)


# -- times and memory of long schedules, by extrapolation
#
# For a built-in schedule with more than 8 microbatches for each rank of the pipeline, two shorter ones are simulated,
# which differ by one round (as many microbatches as ranks). Their difference is added for each further round, because
# by then every round takes equally long. (With stages of very different lengths this holds a little later; the error
# stays below 1 %.)

ROUNDS = 8  # microbatches for each pipeline rank after which all rounds take equally long
_FULL = 4  # microbatches for each pipeline rank after which memory is constant, or grows equally in each round


class Flow:
    """Schedule whose times and memory are extrapolated if it has many microbatches.

    The arguments are those of `make_schedule`.

    Attributes:
        microbatches: Number of microbatches that the steps of the whole schedule count; slices, if there are slices.
        peak_bytes: Function that returns the largest bytes of activations on each rank, given the bytes that each stage
            keeps of a microbatch.
    """

    def __init__(self, name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> None:
        self._count, self._ranks, self._built_in = microbatches, ranks, name in SCHEDULES
        self.microbatches = microbatches * slices
        self._prepared: Callable[[int], PreparedSchedule] = lambda count: _prepared(name, ranks, count, chunks, slices)
        self.peak_bytes = lru_cache(maxsize=64)(
            lambda nbytes: self._extended(_FULL, lambda prepared: prepared.peak_bytes(nbytes))
        )

    @property
    def shape(self) -> Schedule:
        """Schedule with the same ranks and stages, and at most as many microbatches."""
        return self._rounds(_FULL)[0].schedule

    def ends(self, costs: Costs) -> list[float]:
        """Return the time at which each rank of the pipeline ends its last step, in the unit of the costs.

        Raises:
            ScheduleError: Steps wait for each other in a cycle.
        """
        return self._extended(ROUNDS, lambda prepared: prepared.ends(costs))

    def ends_on_shared_cores(
        self, costs: Costs, nodes: Sequence[int], cores: float, message: Callable[[int, int], float]
    ) -> list[float]:
        """Return the time at which each rank ends, if the ranks of a node share its cores. Nothing is extrapolated.

        Args:
            costs: Costs of the steps on a rank with its own core; `costs.message` is not used.
            nodes: Node of each rank of the pipeline.
            cores: Number of the pipeline's ranks on one node that can compute at full speed at the same time.
            message: message(stage, to) is the time from the end of a step of `stage` to the arrival of its message.
        """
        return self._prepared(self._count).ends_on_shared_cores(costs, nodes, cores, message)

    def _rounds(self, most: int) -> tuple[PreparedSchedule, PreparedSchedule, int]:
        """Return a shorter schedule, the same with one more round, and the number of rounds missing from the first."""
        few, ranks = self._count, self._ranks
        if self._built_in and few > most * ranks:
            few = (most - 1) * ranks + few % ranks
        more = (self._count - few) // ranks
        return self._prepared(few), self._prepared(few + (more > 0) * ranks), more

    def _extended(self, most: int, of: Callable[[PreparedSchedule], list[float]]) -> list[float]:
        """Return the values of the whole schedule; those of a long one are extrapolated from two shorter schedules."""
        short, long, more = self._rounds(most)
        return [a + (b - a) * more for a, b in zip(of(short), of(long), strict=True)] if more else of(short)


@lru_cache(maxsize=512)
def _prepared(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> PreparedSchedule:
    """Return the prepared schedule. Schedules are cached."""
    return PreparedSchedule(make_schedule(name, ranks, microbatches, chunks, slices))


def estimate(
    name: str, ranks: int, count: int, chunks: int, spread: Sequence[float], slowest: float, message: float
) -> float:
    """Return the approximate end of a schedule in closed form: the slowest rank's work, plus filling and draining.

    With equal stages and free messages, it equals the simulated `Flow.ends` wherever the table of idle fractions in
    `pipe.schedule` applies. A user's own schedule is treated as 1f1b.

    Args:
        name: Name of the schedule.
        ranks: Number of pipeline ranks.
        count: Number of microbatches.
        chunks: Stages a rank.
        spread: Seconds of a microbatch's forward, input and weight passes through a rank, if all ranks were equal.
        slowest: Seconds of a microbatch on the slowest rank.
        message: Seconds of a message between two stages.
    """
    forward, input_, weight = spread
    short = max(0, ranks - count)  # microbatches missing to keep a rank busy while the others fill
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
        sent += 2 * (ranks - 1) * count // ranks  # each rank alternates between sending and waiting
    return count * slowest + idle + sent * message


# -- passes over schedules: adding the messages, leaving out the backward half, and the proof


def with_messages(schedule: Schedule, costs: Costs = Costs()) -> PipelineProgram:
    """Return the schedule with a Send and a Receive wherever neighbouring stages are on different ranks.

    Args:
        schedule: Compute steps of every rank.
        costs: Costs that determine the order in which steps end; any costs give a correct program.
    """
    ends = [(run.end, rank, run.step) for rank, runs in enumerate(simulate(schedule, costs).runs) for run in runs]
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    for _, group in groupby(sorted(ends, key=lambda e: e[:2]), key=lambda e: e[0]):  # a rank's steps stay in order
        messages: list[tuple[Send, int]] = []  # after all steps that end at the same time
        for _, rank, step in group:
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
    """Return the schedule with its forward steps alone, for an evaluation."""
    steps = tuple(tuple(s for s in steps if isinstance(s, Forward)) for steps in schedule.steps)
    return replace(schedule, name=f"{schedule.name} forward", steps=steps)


def verify(program: PipelineProgram, training: bool = True) -> None:
    """Raise ScheduleError, naming the rank and the step, unless a program is correct.

    Args:
        program: Program of all ranks.
        training: If true, the program must contain all backward steps; otherwise only forward steps.
    """
    _Check(program, training).run()


class _Check:
    """Run of a program that computes nothing: it checks the order of the steps and messages of all ranks."""

    def __init__(self, program: PipelineProgram, training: bool) -> None:
        self.program, self.schedule, self.training = program, program.schedule, training
        ranks = self.schedule.ranks
        self.at = [0] * ranks
        # steps done, a Backward as both of its halves; and for each rank, inputs received or made, not used
        self.done, self.here = taken_before(self.schedule, self.schedule.before, 0)
        self.sent: set[tuple[int, int, bool]] = set()

    def run(self) -> None:
        """Advance every rank until none can continue, then require that all steps are done."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.schedule.ranks):
                while self._advance(rank):
                    moved = True
        for rank, steps in enumerate(self.program.steps):
            if self.at[rank] < len(steps):
                raise self._error(rank, "waits forever")
        self._check_complete()

    def _advance(self, rank: int) -> bool:
        """Run a rank's next step, unless it waits for another rank. Return True if it ran."""
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
        """Run a Send and its Receive, if the other rank has reached the Receive. Return True if they ran."""
        theirs = self.program.steps[step.to]
        at = self.at[step.to]
        if at == len(theirs):
            raise self._error(rank, f"sends to rank {step.to}, which has finished")
        receive = theirs[at]
        if not isinstance(receive, Receive) or receive.source != rank:
            return False
        what = step.stage, step.microbatch, step.gradient
        if (receive.stage, receive.microbatch, receive.gradient) != what:
            raise self._error(rank, f"sends a message that rank {step.to} does not expect: {receive}")
        if what in self.sent:
            raise self._error(rank, "sends a message twice")
        if what not in self.here[rank]:
            raise self._error(rank, "sends a tensor that it does not have")
        self.here[rank].discard(what)
        self.sent.add(what)
        self.here[step.to].add(what)
        self.at[rank] += 1
        self.at[step.to] += 1
        return True

    def _compute(self, rank: int, step: Compute) -> None:
        """Run a compute step.

        Raises:
            ScheduleError: The step belongs to another rank, has run already, or runs before its input is available.
        """
        schedule = self.schedule
        stage, microbatch = step.stage, step.microbatch
        if not 0 <= stage < schedule.stages or schedule.rank_of[stage] != rank:
            raise self._error(rank, "computes a stage of another rank")
        if not 0 <= microbatch < schedule.microbatches + schedule.most_ahead:
            raise self._error(rank, "computes a microbatch that does not exist")
        halves = (BackwardInput, BackwardWeight) if isinstance(step, Backward) else (type(step),)
        for half in halves:
            if (half, stage, microbatch) in self.done:
                raise self._error(rank, "computes a step twice")
        before = BackwardInput if isinstance(step, BackwardWeight) else Forward
        if not isinstance(step, Forward) and (before, stage, microbatch) not in self.done:
            raise self._error(rank, f"comes before its {before.__name__}")
        need = needs(step, schedule.stages - 1)
        if need is not None:
            what = need[1], microbatch, need[0] is not Forward
            if what not in self.here[rank]:
                raise self._error(rank, "runs before its input has arrived")
            self.here[rank].discard(what)
        self._check_slices(rank, step)
        self.done.update((half, stage, microbatch) for half in halves)
        if isinstance(step, Forward) and stage < schedule.stages - 1:
            self.here[rank].add((stage, microbatch, False))
        if isinstance(step, Backward | BackwardInput) and stage > 0:
            self.here[rank].add((stage, microbatch, True))

    def _check_slices(self, rank: int, step: Compute) -> None:
        """Require that slices of a sequence run in order forward, and in reverse order backward."""
        slices = self.schedule.slices
        number = step.microbatch % slices
        if isinstance(step, Forward):
            if number > 0 and (Forward, step.stage, step.microbatch - 1) not in self.done:
                raise self._error(rank, "comes before an earlier slice")
        elif number < slices - 1 and (BackwardInput, step.stage, step.microbatch + 1) not in self.done:
            raise self._error(rank, "comes before the backward step of a later slice")

    def _check_complete(self) -> None:
        """Require that every step of every stage and microbatch has run, and that every message was used."""
        kinds = (Forward, BackwardInput, BackwardWeight) if self.training else (Forward,)
        schedule = self.schedule
        expected: set[tuple[type, int, int]] = {
            (k, s, j) for k in kinds for s in range(schedule.stages) for j in range(schedule.microbatches)
        }
        ahead, waiting = taken_before(schedule, schedule.after, schedule.microbatches)
        expected |= ahead
        if self.done != expected:
            some = next(iter(expected ^ self.done))
            raise ScheduleError(
                f"{schedule.name}: {some[0].__name__} of microbatch {some[2]}, stage {some[1]} is missing or unexpected"
            )
        for rank, left in enumerate(self.here):
            if left != waiting[rank]:
                raise ScheduleError(f"{schedule.name}: rank {rank} ends with unused messages {sorted(left)}")

    def _error(self, rank: int, what: str) -> ScheduleError:
        """Return an error that names a rank and its current step."""
        at = self.at[rank]
        return ScheduleError(f"{self.schedule.name}: rank {rank}, step {at} ({self.program.steps[rank][at]}) {what}")
