"""The rules of the parameter server, without ranks: who works on which samples when, and what ranks tell each other.

The batch of each step is cut into as many parts as there were workers at first. Workers ask for the next part, so that
a slow one gets fewer, and the parts of one that died go to others:

    staleness s   the part of step t is given out when all parts of the steps before t - s have been applied
    0             bulk-synchronous: each worker has the part of its own number, as in a sum over all ranks
    None          asynchronous: there is no bound

A worker that holds a part of step t is at step t; the slowest is at the step after the last complete one. So a worker
is never more than s steps ahead of the slowest (the stale-synchronous parallel model of Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013, section 3).

Workers and servers write words in small messages, whose first says what they are:

    to a server                                                   to a worker, or to any rank
    CLAIM   limit, stop      give me the next part                 GRANT    step, part         work on this one
    PULL    least, final     send the parameters                   MEET     limit              there are no more
    PUSHED  step, part, b    bucket b of gradients is there        BUCKET   b, completed, progress   it is there
    UNUSED  step, part       parameters that the part left alone
    COMMIT  step, part, ...  apply what I pushed                   RECORD   step, loss, ...    a step is complete
    SQUARES step, sum        of my shares of the gradients         FAILED                   this rank's server did
    HERE                     I have what I need to meet    TOGETHER                 all workers have
    END                      no more will come

Gradients and parameters travel with PUSHED and BUCKET where the ranks share no memory (see `mpitrain.loose.sharding`).
UNUSED, which is left out where there are no such parameters, comes with a flag for each.

Below them is what servers are told once, and what they keep of letters: until they can do what these ask for, and so
that others can go on when workers died.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch


class Portion(NamedTuple):
    """One part of a step's batch.

    Attributes:
        step: From 1.
        part: From 0.
    """

    step: int
    part: int


class Applied:
    """Which parts of which steps have been applied.

    Args:
        parts: Of each step.
        completed: Steps of which all parts have been.
        beyond: Parts of later steps that have been.

    Attributes:
        completed: Steps of which all parts have been applied.
    """

    def __init__(self, parts: int, completed: int = 0, beyond: Collection[Portion] = ()) -> None:
        self.parts, self.completed = parts, completed
        self._of: dict[int, set[int]] = {}
        for portion in beyond:
            self._of.setdefault(portion.step, set()).add(portion.part)

    def add(self, portion: Portion) -> list[int]:
        """Note one more; returns the steps that are complete by it, in order."""
        self._of.setdefault(portion.step, set()).add(portion.part)
        found = []
        while len(self._of.get(self.completed + 1, ())) == self.parts:
            self.completed += 1
            del self._of[self.completed]
            found.append(self.completed)
        return found

    def __contains__(self, portion: Portion) -> bool:
        return portion.step <= self.completed or portion.part in self._of.get(portion.step, ())

    @property
    def beyond(self) -> list[Portion]:
        """The parts of steps that are not complete."""
        return sorted(Portion(step, part) for step, parts in self._of.items() for part in parts)


class Clock:
    """Gives out the parts of all steps.

    Args:
        applied: What has been applied; kept up to date by the caller.
        workers: Their numbers.
        staleness: How many steps a worker may be ahead of the slowest; None for any number.

    Attributes:
        limit: The last step to be given out.
    """

    def __init__(self, applied: Applied, workers: Sequence[int], staleness: int | None) -> None:
        self.applied, self.staleness = applied, staleness
        self.limit = applied.completed
        self._workers = list(workers)
        self._opened = applied.completed  # the last step that `open` allowed; `stop` takes nothing back of it
        self._before = applied.completed  # the last step before those that `open` allowed
        self._begun = applied.completed  # the last step that parts were given out of, or may be
        self._open: list[Portion] = []  # not given out, of the steps begun; in order

    def open(self, limit: int) -> bool:
        """Allow parts up to those of step `limit`; returns whether that is more than were ever allowed before.

        So workers that do not know of a `stop` yet do not undo it.
        """
        if limit <= self._opened:
            return False
        self._before, self.limit, self._opened = self.limit, limit, limit
        return True

    def claim(self, worker: int) -> Portion | None:
        """Give a worker its next part; None as long as there is none for it."""
        ahead = self.limit if self.staleness is None else self.applied.completed + 1 + self.staleness
        while True:
            for portion in self._open:  # at staleness 0 each worker has the parts of its own number
                if self.staleness != 0 or self._workers[portion.part % len(self._workers)] == worker:
                    self._open.remove(portion)
                    return portion
            if self._begun >= min(self.limit, ahead):
                return None
            self._begun += 1
            parts = (Portion(self._begun, part) for part in range(self.applied.parts))
            self._open += [portion for portion in parts if portion not in self.applied]

    @property
    def exhausted(self) -> bool:
        """Whether all parts of all steps up to the limit have been given out."""
        return not self._open and self._begun >= self.limit

    def stop(self) -> int:
        """Give out no more steps than have been begun, but at least one; returns the last of them."""
        self.limit = min(self.limit, max(self._begun, self._before + 1))
        return self.limit


class LetterKind(IntEnum):
    """The first word of a letter."""

    CLAIM = 1
    PULL = 2
    PUSHED = 3
    COMMIT = 4
    SQUARES = 5
    HERE = 6
    END = 7
    UNUSED = 8
    GRANT = 11
    MEET = 12
    BUCKET = 13
    RECORD = 14
    TOGETHER = 15
    FAILED = 16


class Commit(NamedTuple):
    """A worker has pushed all gradients of a part.

    Attributes:
        step: Of the part.
        part: Its number.
        lr: The learning rate of the step.
        weight: The part of the batch's samples that it has.
        factor: What the gradients are to be multiplied by: for clipping; 0 where they are not finite.
        loss: Its contribution to the mean loss of the step's batch.
        norm: The 2-norm of the mean gradient of its samples; 0 where the servers find that of the whole batch.
        progress: What the server had applied when it sent the parameters, in steps.
        ahead: Steps that the worker was ahead of the slowest when it got the parameters.
    """

    step: float
    part: float
    lr: float
    weight: float
    factor: float
    loss: float
    norm: float
    progress: float
    ahead: float


class StepRecord(NamedTuple):
    """What becomes known of a step when it is complete.

    Attributes:
        step: From 1.
        loss: The mean over its batch.
        norm: Of the batch's gradients where the step is bulk-synchronous, else the root of the mean square of the
            norms of its parts.
        skipped: 1 where nothing was updated, because a gradient is not finite.
        staleness_mean: Of its parts: what was applied between the sending of the parameters and the gradient's own
            update, in steps.
        staleness_max: The largest of these.
        ahead_max: The most steps that a worker was ahead of the slowest.
        between_nodes: Bytes of gradients and parameters that went between nodes for it.
        seconds: Since the step before was complete; of several that become complete together, each has its part.
    """

    step: float
    loss: float
    norm: float
    skipped: float
    staleness_mean: float
    staleness_max: float
    ahead_max: float
    between_nodes: float
    seconds: float


class Pull(NamedTuple):
    """A worker that waits for parameters with all updates of the steps up to `least`."""

    worker: int
    least: int
    final: bool


@dataclass
class Summing:
    """A bulk-synchronous step, as far as its gradients have come."""

    added: list[int]  # of each bucket, how many parts; they are added in order
    waiting: list[dict[int, torch.Tensor]]  # of each bucket, gradients of later parts
    commits: dict[int, Commit] = field(default_factory=dict)  # by part
    told: bool = False  # whether the other servers know this one's squares


class AppliedPart(NamedTuple):
    """A part that was applied.

    Attributes:
        worker: Who computed it.
        commit: What it said.
        staleness: What was applied between the sending of its parameters and its own update, in steps.
    """

    worker: int
    commit: Commit
    staleness: float


@dataclass(frozen=True)
class Remembered:
    """What has been applied, and what is known of it.

    Attributes:
        parts: Of each step.
        completed: Steps of which all parts have been applied.
        beyond: Parts of later steps that have been.
        told: Of the steps that are not complete, by step.
        records: Of the steps since all ranks met last.
    """

    parts: int
    completed: int
    beyond: Sequence[Portion] = ()
    told: Mapping[int, Sequence[AppliedPart]] = field(default_factory=dict)
    records: Sequence[StepRecord] = ()

    def applied(self) -> Applied:
        """Return a mutable copy of what has been applied."""
        return Applied(self.parts, self.completed, self.beyond)

    def to_json(self) -> list[Any]:
        """As values that JSON can hold."""
        return [self.parts, self.completed, list(self.beyond), list(self.told.items()), list(self.records)]

    @staticmethod
    def from_json(values: Sequence[Any]) -> Remembered:
        """From what `to_json` gave."""
        parts, completed, beyond, listed, records = values
        told = {step: [AppliedPart(worker, Commit(*of), late) for worker, of, late in some] for step, some in listed}
        portions = [Portion(*portion) for portion in beyond]
        return Remembered(parts, completed, portions, told, [StepRecord(*record) for record in records])
