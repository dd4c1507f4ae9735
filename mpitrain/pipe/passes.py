"""Passes over schedules: adding the messages, leaving out the backward half.

Messages are put into one order for all ranks: that in which the steps that make them end. A rank's program is its
part of that order, with each of its own steps at its end:

    rank 0   F0 | send F0 .  F1 | send F1
    rank 1        recv F0    .    recv F1    F0          (F0 of rank 1 ends after F1 of rank 0 does)

So even if every send waited for its receive, all ranks would get through the one order together: no costs and no
MPI can make them deadlock. A receive comes before the step that is under way when its message arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mpitrain.pipe.schedule import BackwardWeight, Compute, Forward, PipelineProgram, Receive, Schedule, Send, Step
from mpitrain.pipe.simulate import Costs, simulate


def with_messages(schedule: Schedule, costs: Costs = Costs()) -> PipelineProgram:
    """The schedule with a Send and a Receive wherever a stage and its neighbour are on different ranks.

    Args:
        schedule: The schedule.
        costs: Of the steps, to say in which order they end; every choice gives a right program.
    """
    ends = [
        (run.end, rank, number, run.step)
        for rank, runs in enumerate(simulate(schedule, costs).runs)
        for number, run in enumerate(runs)
    ]
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    pending: list[tuple[Send, int]] = []  # messages of steps that ended now: after all steps that did
    now = 0.0
    for end, rank, _, step in sorted(ends, key=lambda e: e[:3]):
        if end > now:
            _append(steps, pending)
            pending, now = [], end
        steps[rank].append(step)
        pending += [(message, rank) for message in _messages(schedule, rank, step)]
    _append(steps, pending)
    return PipelineProgram(schedule, tuple(tuple(s) for s in steps))


def forward_only(schedule: Schedule) -> Schedule:
    """The forward steps of a schedule alone, for an evaluation."""
    steps = tuple(tuple(s for s in steps if isinstance(s, Forward)) for steps in schedule.steps)
    return replace(schedule, name=f"{schedule.name} forward", steps=steps)


def _messages(schedule: Schedule, rank: int, step: Compute) -> Iterator[Send]:
    """What leaves the rank when a step has ended."""
    if isinstance(step, BackwardWeight):
        return
    gradient = not isinstance(step, Forward)
    neighbour = step.stage - 1 if gradient else step.stage + 1
    if 0 <= neighbour < schedule.stages and schedule.rank_of[neighbour] != rank:
        yield Send(step.stage, step.microbatch, gradient, schedule.rank_of[neighbour])


def _append(steps: list[list[Step]], pending: list[tuple[Send, int]]) -> None:
    """Append each Send to its rank's steps, and its Receive to those of the rank it goes to."""
    for send, rank in pending:
        steps[rank].append(send)
        steps[send.to].append(Receive(send.stage, send.microbatch, send.gradient, rank))
