"""Microbatches through the stages of a pipeline: when its ranks are done and what they hold, for many costs.

As `pipe.simulate`, step by step, but of a schedule that is prepared once, and without the steps between. Of a built-in
schedule with more than 8 microbatches a rank of the pipeline, two shorter ones are simulated, which differ by as many
microbatches as ranks, and the difference is added for each further so many: by then every round takes as long as the
one before it. (With stages of very different lengths that takes a little longer to come; the error stays below 1 %.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from mpitrain.pipe.schedule import BackwardInput, BackwardWeight, Forward, Schedule, ScheduleError
from mpitrain.pipe.schedules import SCHEDULES, make_schedule
from mpitrain.pipe.simulate import Costs, needs

ROUNDS = 8  # microbatches for each rank of the pipeline from which on rounds are alike
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)


class _Prepared:
    """A schedule in plain numbers."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        last, count = schedule.stages - 1, schedule.microbatches
        self.many = 2 * schedule.stages * count
        # of each rank's steps: kind x stages + stage; what it waits for, or -1; whether that comes from another rank;
        # what it makes, or -1
        self.steps: list[list[tuple[int, int, bool, int]]] = []
        kinds = {Forward: _FORWARD, BackwardInput: _INPUT, BackwardWeight: _WEIGHT}
        for rank, steps in enumerate(schedule.steps):
            own = []
            for step in steps:
                kind, need = kinds.get(type(step), _BACKWARD), needs(step, last)
                wanted, apart = -1, False
                if need is not None:
                    wanted = ((need[0] is not Forward) * schedule.stages + need[1]) * count + step.microbatch
                    apart = schedule.rank_of[need[1]] != rank
                made = ((kind != _FORWARD) * schedule.stages + step.stage) * count + step.microbatch
                own.append((kind * schedule.stages + step.stage, wanted, apart, -1 if kind == _WEIGHT else made))
            self.steps.append(own)

    def ends(self, costs: Costs) -> list[float]:
        """When each rank is done with its last step."""
        stages = self.schedule.stages
        forward, both, weight = (_each(cost, stages) for cost in (costs.forward, costs.input, costs.weight))
        seconds = [*forward, *(a + b for a, b in zip(both, weight, strict=True)), *both, *weight]
        message = costs.message
        done, waiting = [-1.0] * self.many, dict[int, int]()
        clock, at = [0.0] * len(self.steps), [0] * len(self.steps)
        ready = list(range(len(self.steps)))
        while ready:
            rank = ready.pop()
            steps, now = self.steps[rank], clock[rank]
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
                now += seconds[which]
                number += 1
                if made >= 0:
                    done[made] = now
                    if made in waiting:
                        ready.append(waiting.pop(made))
            clock[rank], at[rank] = now, number
        for rank, steps in enumerate(self.steps):
            if at[rank] < len(steps):
                raise ScheduleError(f"{self.schedule.name}: rank {rank} waits for ever at step {at[rank]}")
        return clock

    def held(self, activations: Sequence[float]) -> list[float]:
        """Bytes of activations that each rank holds at most."""
        stages, found = self.schedule.stages, []
        change = [*activations, *(-a for a in activations), *([0.0] * stages), *(-a for a in activations)]
        for steps in self.steps:
            now = most = 0.0
            for step in steps:
                now += change[step[0]]
                if now > most:
                    most = now
            found.append(most)
        return found


class Flow:
    """A schedule's numbers of microbatches, whole or extrapolated. The arguments are those of `make_schedule`.

    Attributes:
        shape: A schedule with the same ranks and stages, of as many or fewer microbatches.
        microbatches: That the steps of the whole schedule count (slices of them, where there are slices).
    """

    def __init__(self, name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> None:
        self._name, self._more = name, (chunks, slices)
        few = microbatches
        if name in SCHEDULES and microbatches > ROUNDS * ranks:
            few = (ROUNDS - 1) * ranks + microbatches % ranks
        self._rounds = (microbatches - few) // ranks
        self._count = microbatches
        self.microbatches = microbatches * slices
        self._short = _prepared(name, ranks, few, chunks, slices)
        self._long = _prepared(name, ranks, few + ranks, chunks, slices) if self._rounds else self._short
        self.shape = self._short.schedule
        self._held = lru_cache(maxsize=64)(self._find_held)

    @property
    def whole(self) -> Schedule:
        """The schedule with all microbatches."""
        return make_schedule(self._name, self.shape.ranks, self._count, *self._more)

    def ends(self, costs: Costs) -> list[float]:
        """When each rank of the pipeline is done with its last step, in the unit of the costs.

        Raises:
            ScheduleError: Steps wait for each other in a circle.
        """
        return self._extended(self._short.ends(costs), lambda: self._long.ends(costs))

    def held(self, activations: tuple[float, ...]) -> list[float]:
        """Bytes of activations that each rank holds at most. activations: that each stage keeps of a microbatch."""
        return self._held(activations)

    def _find_held(self, activations: tuple[float, ...]) -> list[float]:
        return self._extended(self._short.held(activations), lambda: self._long.held(activations))

    def _extended(self, few: list[float], more: Callable[[], list[float]]) -> list[float]:
        if not self._rounds:
            return few
        return [a + (b - a) * self._rounds for a, b in zip(few, more(), strict=True)]


@lru_cache(maxsize=256)
def _prepared(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> _Prepared:
    return _Prepared(make_schedule(name, ranks, microbatches, chunks, slices))


def _each(cost: float | Sequence[float], stages: int) -> list[float]:
    return [float(cost)] * stages if isinstance(cost, int | float) else list(cost)
