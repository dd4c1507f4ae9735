"""Who works on which samples when, and how far ranks may be apart: the rules of the parameter server, without ranks.

The batch of each step is cut into as many parts as there were workers at first. Workers ask for the next part, so that
a slow one gets fewer, and the parts of one that died go to others:

    staleness s   the part of step t is given out when all parts of the steps before t - s have been applied
    0             bulk-synchronous: each worker has the part of its own number, as in a sum over all ranks
    None          asynchronous: there is no bound

A worker that holds a part of step t is at step t; the slowest is at the step after the last complete one. So a worker
is never more than s steps ahead of the slowest (the stale-synchronous parallel model of Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013, section 3).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


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
