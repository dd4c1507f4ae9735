"""When every step of a pipeline runs where ranks share cores: as `pipe.simulate`, but steps at one time take turns.

The model: the ranks of a node that compute at the same time share its cores evenly (processor sharing); one alone never
gets more than its own speed. A rank that waits uses none.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpitrain.pipe.schedule import BackwardWeight, Compute, Forward, Schedule, ScheduleError
from mpitrain.pipe.simulate import Costs, needs

_EPSILON = 1e-12  # seconds: less is left of a step by rounding alone
Made = tuple[bool, int, int]  # whether forward, stage, microbatch


@dataclass(frozen=True)
class Run:
    """What came out.

    Attributes:
        ends: When each rank ended its last step, in the unit of the costs.
        busy: Of each rank, the time in which it was computing or waiting for its turn to.
    """

    ends: tuple[float, ...]
    busy: tuple[float, ...]


def run(
    schedule: Schedule,
    costs: Costs,
    nodes: Sequence[int],
    cores: float,
    message: Callable[[int, int], float],
) -> Run:
    """Run a schedule on shared cores.

    Args:
        schedule: The schedule.
        costs: What steps cost a rank that has a core for itself; its `message` is not used.
        nodes: The node of each rank of the pipeline.
        cores: How many of the pipeline's ranks on one node can compute at full speed at the same time.
        message: message(stage, to): time between the end of a step of `stage` and the arrival of what it sends to the
            rank of stage `to`; it keeps no core busy.

    Raises:
        ScheduleError: Steps wait for each other in a circle.
    """
    return _Turns(schedule, costs, nodes, cores, message).run()


class _Turns:
    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        nodes: Sequence[int],
        cores: float,
        message: Callable[[int, int], float],
    ) -> None:
        self.schedule, self.costs, self.message = schedule, costs, message
        self.last = schedule.stages - 1
        ranks = range(schedule.ranks)
        self.nodes, self.cores = list(nodes), cores
        self.running: dict[int, float] = {}  # rank -> what is left of its step, at full speed
        self.at = [0 for _ in ranks]
        self.here: set[Made] = set()  # what has arrived where it is needed
        self.wanted: dict[Made, int] = {}  # what a rank waits for
        self.coming: list[tuple[float, Made]] = []
        self.busy = [0.0 for _ in ranks]
        self.ends = [0.0 for _ in ranks]
        self.active = dict.fromkeys(nodes, 0)

    def run(self) -> Run:
        now = 0.0
        for rank in range(self.schedule.ranks):
            self._begin(rank)
        while self.running or self.coming:
            pace = {node: min(1.0, self.cores / count) for node, count in self.active.items() if count}
            first = min((left / pace[self.nodes[rank]] for rank, left in self.running.items()), default=math.inf)
            if self.coming:
                first = min(first, max(0.0, self.coming[0][0] - now))
            now += first
            for rank in self.running:
                self.running[rank] -= first * pace[self.nodes[rank]]
                self.busy[rank] += first
            for rank in [rank for rank, left in self.running.items() if left <= _EPSILON]:
                self._end(rank, now)
            while self.coming and self.coming[0][0] <= now + _EPSILON:
                self._arrive(heapq.heappop(self.coming)[1])
        if self.wanted:
            rank = next(iter(self.wanted.values()))
            step = self.schedule.steps[rank][self.at[rank]]
            raise ScheduleError(f"{self.schedule.name}: rank {rank} waits for ever at {step}")
        return Run(tuple(self.ends), tuple(self.busy))

    def _begin(self, rank: int) -> None:
        """Begin the rank's next step, or wait for what it needs."""
        if self.at[rank] == len(self.schedule.steps[rank]):
            return
        step = self.schedule.steps[rank][self.at[rank]]
        need = needs(step, self.last)
        if need is not None and (key := (need[0] is Forward, need[1], step.microbatch)) not in self.here:
            self.wanted[key] = rank
            return
        self.running[rank] = max(self.costs.of(step), 2 * _EPSILON)
        self.active[self.nodes[rank]] += 1

    def _end(self, rank: int, now: float) -> None:
        step = self.schedule.steps[rank][self.at[rank]]
        del self.running[rank]
        self.active[self.nodes[rank]] -= 1
        self.ends[rank] = now
        self.at[rank] += 1
        if not isinstance(step, BackwardWeight):
            self._pass_on(step, rank, now)
        self._begin(rank)

    def _pass_on(self, step: Compute, rank: int, now: float) -> None:
        forward = isinstance(step, Forward)
        to = step.stage + (1 if forward else -1)
        if not 0 <= to <= self.last:
            return
        made = forward, step.stage, step.microbatch
        if self.schedule.rank_of[to] == rank:
            self._arrive(made)
        else:
            heapq.heappush(self.coming, (now + self.message(step.stage, to), made))

    def _arrive(self, made: Made) -> None:
        self.here.add(made)
        rank = self.wanted.pop(made, None)
        if rank is not None:
            self._begin(rank)
