"""Rules of the parameter server, independent of MPI: assignment of samples to workers, and the message formats.

The batch of each step is divided into as many parts as there were workers at the start. Workers ask for the next part,
so a slow worker gets fewer parts, and the parts of a dead worker go to others:

    staleness s   a part of step t is granted once all parts of the steps before t - s have been applied
    0             bulk-synchronous: each worker gets the part with its own number, as in a sum over all ranks
    None          asynchronous: there is no bound

A worker that has a part of step t is at step t. The slowest possible worker is at the step after the last complete one.
A worker is therefore never more than s steps ahead of the slowest (the stale-synchronous parallel model of Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013, section 3).

Workers and servers exchange small messages (letters) of a few numbers; the first number is the kind of message:

    to a server                                                   to a worker, or to any rank
    CLAIM   limit, stop      request for the next part       GRANT    step, part         part to work on
    PULL    least, final     request for the parameters      MEET     limit              there are no more parts
    PUSHED  step, part, b    bucket b of gradients is ready  BUCKET   b, share, completed, progress
    UNUSED  step, part       parameters unused by the part                               bucket b is ready
    COMMIT  step, part, ...  request to apply the gradients  RECORD   step, loss, ...    a step is complete
    SQUARES step, sum        sum of the shares' squares      FAILED                      this rank's server failed
    READY                    the worker is ready to meet     ALL_READY                   all workers are ready to meet
    END                      no more messages will come

Gradients and parameters travel with PUSHED and BUCKET if the ranks share no memory (see `mpitrain.loose.sharding`).
UNUSED carries a flag for each parameter, and is left out if the part used all of them.

The classes after the messages are the server's state: messages that it cannot serve yet, and the record of applied
parts that lets the other ranks continue after a worker has died.
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
        step: Number of the step, from 1.
        part: Number of the part, from 0.
    """

    step: int
    part: int


class Applied:
    """Record of the parts that have been applied.

    Args:
        parts: Number of parts of each step.
        completed: Last step up to which all parts have been applied; 0 for none.
        beyond: Applied parts of later steps.

    Attributes:
        completed: Last step up to which all parts have been applied.
    """

    def __init__(self, parts: int, completed: int = 0, beyond: Collection[Portion] = ()) -> None:
        self.parts, self.completed = parts, completed
        self._of: dict[int, set[int]] = {}
        for portion in beyond:
            self._of.setdefault(portion.step, set()).add(portion.part)

    def add(self, portion: Portion) -> list[int]:
        """Record an applied part. Returns the steps that it completes, in order."""
        self._of.setdefault(portion.step, set()).add(portion.part)
        steps = []
        while len(self._of.get(self.completed + 1, ())) == self.parts:
            self.completed += 1
            del self._of[self.completed]
            steps.append(self.completed)
        return steps

    def __contains__(self, portion: Portion) -> bool:
        return portion.step <= self.completed or portion.part in self._of.get(portion.step, ())

    @property
    def beyond(self) -> list[Portion]:
        """Applied parts of steps that are not complete, sorted."""
        return sorted(Portion(step, part) for step, parts in self._of.items() for part in parts)


class Clock:
    """Assignment of the parts of all steps to workers.

    Args:
        applied: Record of applied parts, kept up to date by the caller.
        workers: Numbers of the workers.
        staleness: Largest number of steps that a worker may be ahead of the slowest; None for no bound.

    Attributes:
        limit: Last step whose parts may be granted.
    """

    def __init__(self, applied: Applied, workers: Sequence[int], staleness: int | None) -> None:
        self.applied, self.staleness = applied, staleness
        self.limit = applied.completed
        self._workers = list(workers)
        self._opened = applied.completed  # the highest step that `open` has allowed; `stop` does not lower it
        self._before = applied.completed  # the limit before the last `open`
        self._begun = applied.completed  # the last step whose parts have been listed in `_open`
        self._open: list[Portion] = []  # parts of these steps that have not been granted, in order

    def open(self, limit: int) -> bool:
        """Allow parts up to step `limit`. Return True if this limit is higher than all earlier ones.

        A lower or equal limit is ignored, so that workers that have not seen a `stop` yet do not undo it.
        """
        if limit <= self._opened:
            return False
        self._before, self.limit, self._opened = self.limit, limit, limit
        return True

    def claim(self, worker: int) -> Portion | None:
        """Grant a worker its next part, and return the part; None if there is no part for it at present."""
        ahead = self.limit if self.staleness is None else self.applied.completed + 1 + self.staleness
        while True:
            for portion in self._open:  # at staleness 0 each worker gets the part with its own number
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
        """True if all parts of all steps up to the limit have been granted."""
        return not self._open and self._begun >= self.limit

    def stop(self) -> int:
        """Lower the limit to the last step that has begun, but allow at least one step. Return the new limit."""
        self.limit = min(self.limit, max(self._begun, self._before + 1))
        return self.limit


class LetterKind(IntEnum):
    """Kind of a message, which is its first number."""

    CLAIM = 1
    PULL = 2
    PUSHED = 3
    COMMIT = 4
    SQUARES = 5
    READY = 6
    END = 7
    UNUSED = 8
    GRANT = 11
    MEET = 12
    BUCKET = 13
    RECORD = 14
    ALL_READY = 15
    FAILED = 16


class Commit(NamedTuple):
    """Message of a worker that has pushed all gradients of a part.

    Attributes:
        step: Number of the part's step.
        part: Number of the part.
        lr: Learning rate of the step.
        weight: Fraction of the batch's samples in the part.
        factor: Factor for the gradients, for clipping; 0 if they are not finite.
        loss: Contribution of the part to the mean loss of the step's batch.
        norm: 2-norm of the mean gradient of the part's samples; 0 if the servers compute the norm of the whole batch.
        progress: Steps, with fractions, that the server had applied when it sent the parameters.
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
    """Statistics of a complete step.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss over the step's batch.
        norm: Norm of the batch's gradient if the step is bulk-synchronous, else the root mean square of the parts'
            norms.
        skipped: 1 if the parameters were not updated because a gradient is not finite, else 0.
        staleness_mean: Mean staleness of the parts: steps (with fractions) that the server applied after it sent a
            part's parameters and before it applied the part's gradients.
        staleness_max: Largest staleness of a part, in steps.
        ahead_max: Largest number of steps that a worker was ahead of the slowest.
        between_nodes: Bytes of gradients and parameters sent between nodes for the step.
        seconds: Seconds since the previous step was complete; steps completed at the same time share them equally.
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
    """Request of a worker for parameters.

    Attributes:
        worker: Rank of the worker.
        least: Step up to which the parameters must include all updates.
        final: True if it is the worker's last request before the ranks meet.
    """

    worker: int
    least: int
    final: bool


@dataclass
class StepSum:
    """Sum of the gradients of a bulk-synchronous step in progress."""

    added: list[int]  # number of parts added, by bucket; parts are added in order
    waiting: list[dict[int, torch.Tensor]]  # gradients of later parts, by bucket and part
    commits: dict[int, Commit] = field(default_factory=dict)  # by part
    squares_sent: bool = False  # whether this server's squares have been sent to the others


class AppliedPart(NamedTuple):
    """Part that has been applied.

    Attributes:
        worker: Rank of the worker that computed it.
        commit: Message with which the worker committed it.
        staleness: Steps (with fractions) that the server applied after it sent the parameters and before it applied the
            gradients.
    """

    worker: int
    commit: Commit
    staleness: float


@dataclass(frozen=True)
class History:
    """Record of the applied parts, from which servers can continue.

    Attributes:
        parts: Number of parts of each step.
        completed: Last step up to which all parts have been applied.
        beyond: Applied parts of later steps.
        applied_parts: Applied parts of each incomplete step, by step.
        records: Statistics of the steps since all ranks last met.
    """

    parts: int
    completed: int
    beyond: Sequence[Portion] = ()
    applied_parts: Mapping[int, Sequence[AppliedPart]] = field(default_factory=dict)
    records: Sequence[StepRecord] = ()

    def applied(self) -> Applied:
        """Return a mutable copy of the record of applied parts."""
        return Applied(self.parts, self.completed, self.beyond)

    def to_json(self) -> list[Any]:
        """Return the record as values that JSON can represent."""
        return [self.parts, self.completed, list(self.beyond), list(self.applied_parts.items()), list(self.records)]

    @staticmethod
    def from_json(values: Sequence[Any]) -> History:
        """Return the record that `to_json` encoded."""
        parts, completed, beyond, listed, records = values
        applied_parts = {
            step: [AppliedPart(worker, Commit(*of), late) for worker, of, late in some] for step, some in listed
        }
        portions = [Portion(*portion) for portion in beyond]
        return History(parts, completed, portions, applied_parts, [StepRecord(*record) for record in records])
