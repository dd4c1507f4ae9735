"""What a schedule costs: when every step runs, the idle fraction and the memory held, without MPI.

The model: a rank computes its steps in order, each as soon as what it needs is there; a message takes
`Costs.message` from the end of the step that made it, and delays nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.pipe.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward, Schedule, ScheduleError

Cost = float | Sequence[float]  # of every stage, or of each


@dataclass(frozen=True)
class Costs:
    """What steps cost, per microbatch and stage; a number stands for all stages alike.

    Attributes:
        forward: Time of a forward step, in any one unit.
        input: Time of the gradients of a stage's input.
        weight: Time of the gradients of its parameters.
        message: Time between the end of a step and the arrival of what it sends.
        activation: Bytes that a stage keeps of a microbatch from its forward step until its weight gradients.
    """

    forward: Cost = 1
    input: Cost = 1
    weight: Cost = 1
    message: float = 0
    activation: Cost = 1

    def of(self, step: Compute) -> float:
        """Time of a step."""
        if isinstance(step, Forward):
            return _of(self.forward, step.stage)
        if isinstance(step, BackwardInput):
            return _of(self.input, step.stage)
        if isinstance(step, BackwardWeight):
            return _of(self.weight, step.stage)
        return _of(self.input, step.stage) + _of(self.weight, step.stage)


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
        memory: Bytes of activations that each rank holds at most.
    """

    schedule: Schedule
    runs: tuple[tuple[TimedStep, ...], ...]
    peaks: tuple[int, ...]
    memory: tuple[float, ...]

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


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Simulation:
    """When every step runs, and what is held meanwhile.

    Raises:
        ScheduleError: Steps wait for each other in a circle.
    """
    peaks, memory = zip(*(held(steps, costs) for steps in schedule.steps), strict=True)
    return Simulation(schedule, _times(schedule, costs), peaks, memory)


def needs(step: Compute, last: int) -> tuple[type, int] | None:
    """(kind, stage) of the step on another stage that a step waits for, of the same microbatch; None if there is none.

    last: the last stage.
    """
    if isinstance(step, Forward):
        return (Forward, step.stage - 1) if step.stage > 0 else None
    if isinstance(step, Backward | BackwardInput):
        return (Backward, step.stage + 1) if step.stage < last else None
    return None


def _times(schedule: Schedule, costs: Costs) -> tuple[tuple[TimedStep, ...], ...]:
    """When every step of every rank runs."""
    last = schedule.stages - 1
    done: dict[tuple[type, int, int], float] = {}
    waiting: dict[tuple[type, int, int], int] = {}  # what a rank waits for
    runs: list[list[TimedStep]] = [[] for _ in range(schedule.ranks)]
    clock = [0.0 for _ in range(schedule.ranks)]
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        steps = schedule.steps[rank]
        for step in steps[len(runs[rank]) :]:
            begin = clock[rank]
            need = needs(step, last)
            if need is not None:
                key = (*need, step.microbatch)
                if key not in done:
                    waiting[key] = rank
                    break
                apart = costs.message if schedule.rank_of[need[1]] != rank else 0
                begin = max(begin, done[key] + apart)
            end = begin + costs.of(step)
            runs[rank].append(TimedStep(step, begin, end))
            clock[rank] = end
            if not isinstance(step, BackwardWeight):
                made = (Forward if isinstance(step, Forward) else Backward, step.stage, step.microbatch)
                done[made] = end
                if made in waiting:
                    ready.append(waiting.pop(made))
    for rank, (made_runs, steps) in enumerate(zip(runs, schedule.steps, strict=True)):
        if len(made_runs) < len(steps):
            raise ScheduleError(f"{schedule.name}: rank {rank} waits for ever at {steps[len(made_runs)]}")
    return tuple(tuple(r) for r in runs)


def held(steps: Sequence[Compute], costs: Costs) -> tuple[int, float]:
    """Stage-microbatches and bytes of activations that a rank with these steps holds at most."""
    count = peak = 0
    held = most = 0.0
    for step in steps:
        if isinstance(step, Forward):
            count, held = count + 1, held + _of(costs.activation, step.stage)
            peak, most = max(peak, count), max(most, held)
        elif not isinstance(step, BackwardInput):
            count, held = count - 1, held - _of(costs.activation, step.stage)
    return peak, most


def _of(cost: Cost, stage: int) -> float:
    """The cost of one stage."""
    return cost if isinstance(cost, int | float) else cost[stage]
