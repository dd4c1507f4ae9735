"""Choice, by measurement, of the layers whose weight gradients a schedule with halved backward passes defers.

Halving a backward pass costs time: the weight half runs autograd's engine once for every layer. It pays only if the
weight half fills a gap in which the rank would wait. The first batches therefore measure each graph of a stage (a few
blocks, see `pipe.stage`): the whole backward pass in every second batch, and both halves in the others. The schedule is
then simulated with these times, and a graph is halved only where that ends the batch earlier.

    deferred        BackwardInput: input half            BackwardWeight: weight half
    not deferred    BackwardInput: whole backward pass   BackwardWeight: nothing

Times are the thread's CPU time, which other programs on the same core do not lengthen. The gradients are the same bit
by bit either way, because within a batch a graph's gradients are added in the order of the microbatches. Graphs that
share a parameter with another graph of the rank are always deferred: their order would change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from mpitrain.pipe.schedule import Schedule
from mpitrain.pipe.simulate import Costs, PreparedSchedule

T = TypeVar("T")
_LEAST_GAIN = 0.995  # a choice must take at most this fraction of another's time to replace it
_MOST_SIMULATED = 2_000_000  # steps that are simulated, about two seconds


class GraphSeconds(NamedTuple):
    """Seconds of one graph of a stage, for a microbatch.

    Attributes:
        whole: Seconds of the whole backward pass.
        input: Seconds of the input half.
        weight: Seconds of the weight half.
    """

    whole: float
    input: float
    weight: float


class StageSeconds(NamedTuple):
    """Seconds of a stage, for a microbatch.

    Attributes:
        forward: Seconds of the forward pass.
        graphs: Seconds of each graph's backward pass.
    """

    forward: float
    graphs: tuple[GraphSeconds, ...]


@dataclass
class StageTimes:
    """Times of a stage's passes while they are measured.

    Attributes:
        forward: Seconds of each forward pass.
        backward: Seconds by graph and kind: "whole", "input" or "weight".
        halves: If true, backward passes run in halves; set for each batch.
    """

    forward: list[float] = field(default_factory=list)
    backward: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    halves: bool = True

    def timed(self, graph: int, kind: str, call: Callable[[], T]) -> T:
        """Run a part of a graph's backward pass, record its time, and return its result.

        Args:
            graph: Index of the graph within the stage.
            kind: "whole", "input" or "weight".
            call: Function without arguments that runs the part.
        """
        return timed(self.backward.setdefault((graph, kind), []), call)

    def shortest(self, choosable: Sequence[bool], recompute: bool) -> StageSeconds | None:
        """Return the shortest times, or None if a time is missing.

        Args:
            choosable: For each graph of the stage, whether its backward pass may be whole; if not, that takes forever.
            recompute: If true, forward runs again before each backward pass, which counts as part of it.
        """
        kinds = [[self.backward.get((g, kind), []) for kind in GraphSeconds._fields] for g in range(len(choosable))]
        for of_graph, may_be_whole in zip(kinds, choosable, strict=True):
            of_graph[0] = of_graph[0] if may_be_whole else [math.inf]
        if not self.forward or not all(times for of_graph in kinds for times in of_graph):
            return None
        seconds, forward = [GraphSeconds(*map(min, of_graph)) for of_graph in kinds], min(self.forward)
        if recompute:
            seconds[0] = GraphSeconds(seconds[0].whole + forward, seconds[0].input + forward, seconds[0].weight)
        return StageSeconds(forward, tuple(seconds))


def timed(seconds: list[float], call: Callable[[], T]) -> T:
    """Run a function, append its seconds of CPU time, and return its result.

    Args:
        seconds: List to append to.
        call: Function without arguments.
    """
    begin = time.thread_time()
    result = call()
    seconds.append(time.thread_time() - begin)
    return result


Deferred = list[tuple[bool, ...]]  # for each stage and graph, whether its weight half is deferred


def choose_deferred(
    schedule: Schedule, measured: Sequence[Mapping[int, StageSeconds | None]], shared: bool
) -> Deferred | None:
    """Return the graphs to defer, so that the simulated schedule ends earliest.

    The search starts from the graphs whose halves take no longer than the whole, and from all graphs, and changes one
    graph at a time while that helps.

    Args:
        schedule: Schedule with halved backward passes.
        measured: Times by stage, of each rank. Replicas of a stage count with the slowest.
        shared: If true, ranks share cores. Another rank then computes while one waits, so that only the sum of all work
            counts.

    Returns:
        For each stage and graph, whether its weight half is deferred; None if no rank has measured a stage.
    """
    replicas = [[s for of in measured if (s := of.get(number)) is not None] for number in range(schedule.stages)]
    if not all(replicas):
        return None
    stages = [max(seconds) for seconds in replicas]
    cheap = [tuple(g.input + g.weight <= g.whole for g in stage.graphs) for stage in stages]
    if shared:
        return cheap
    prepared, budget = PreparedSchedule(schedule), _MOST_SIMULATED // max(1, sum(map(len, schedule.steps)))

    def end_of(deferred: Deferred) -> float:
        return max(prepared.ends(costs_of(stages, deferred)))

    best, earliest = cheap, end_of(cheap)
    for start in (cheap, [(True,) * len(stage.graphs) for stage in stages]):
        current, end, changed = list(start), end_of(start), True
        while changed and budget > 0:
            changed = False
            for number, stage in enumerate(stages):
                for graph in range(len(stage.graphs)):
                    other = list(current)
                    other[number] = tuple(d != (g == graph) for g, d in enumerate(current[number]))
                    other_end, budget = end_of(other), budget - 1
                    if other_end < end * _LEAST_GAIN:
                        current, end, changed = other, other_end, True
        if end < earliest * _LEAST_GAIN:
            best, earliest = current, end
    return best


def costs_of(stages: Sequence[StageSeconds], deferred: Deferred) -> Costs:
    """Return the costs of each stage's steps, for a simulation.

    Args:
        stages: Measured times of each stage.
        deferred: For each stage and graph, whether its weight half is deferred.
    """
    pairs = [list(zip(stage.graphs, of_stage, strict=True)) for stage, of_stage in zip(stages, deferred, strict=True)]
    return Costs(
        [stage.forward for stage in stages],
        [sum(g.input if late else g.whole for g, late in of_stage) for of_stage in pairs],
        [sum(g.weight for g, late in of_stage if late) for of_stage in pairs],
    )
