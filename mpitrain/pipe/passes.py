"""Passes over schedules: adding the messages, leaving out the backward half, and the proof that a program is right.

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

from dataclasses import replace

from mpitrain.pipe.schedule import (
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
)
from mpitrain.pipe.simulate import Costs, needs, simulate


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
        gradient = not isinstance(step, Forward)
        to = step.stage - 1 if gradient else step.stage + 1
        sends = not isinstance(step, BackwardWeight) and 0 <= to < schedule.stages
        if sends and schedule.rank_of[to] != rank:
            pending.append((Send(step.stage, step.microbatch, gradient, schedule.rank_of[to]), rank))
    _append(steps, pending)
    return PipelineProgram(schedule, tuple(tuple(s) for s in steps))


def forward_only(schedule: Schedule) -> Schedule:
    """The forward steps of a schedule alone, for an evaluation."""
    steps = tuple(tuple(s for s in steps if isinstance(s, Forward)) for steps in schedule.steps)
    return replace(schedule, name=f"{schedule.name} forward", steps=steps)


def _append(steps: list[list[Step]], pending: list[tuple[Send, int]]) -> None:
    """Append each Send to its rank's steps, and its Receive to those of the rank it goes to."""
    for send, rank in pending:
        steps[rank].append(send)
        steps[send.to].append(Receive(send.stage, send.microbatch, send.gradient, rank))


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
        steps = self.program.steps[rank]
        at = self.at[rank]
        return ScheduleError(f"{self.schedule.name}: rank {rank}, step {at} ({steps[at]}) {what}")
