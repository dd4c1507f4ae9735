"""The rules of the parameter server, without ranks: which worker gets which samples, and how stale it may be."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.loose.clock import Applied, Clock, Portion


class Workers:
    """Workers that ask a clock for parts, as ranks ask the first server, in random order and at random times.

    The rules of the clock are checked after each event.
    """

    def __init__(self, chance: random.Random, workers: int, staleness: int | None, done: int) -> None:
        self.chance, self.staleness = chance, staleness
        self.numbers = list(range(10, 10 + workers))  # not those of their parts
        self.clock = Clock(Applied(workers, done), self.numbers, staleness)
        self.holds: dict[int, Portion] = {}
        self.assigned: list[Portion] = []
        self.stop_at: int | None = None  # parts given
        self.met: set[int] = set()  # the steps after which a worker was told that there are no more

    def meet(self, limit: int, *, stop_after: int | None = None, fails_after: int | None = None) -> int:
        """Work up to step `limit` and return the step at which the workers meet.

        stop_after: the first worker requests a stop when this many more parts were handed out.
        fails_after: some of several workers die when this many parts were applied.
        """
        clock, working = self.clock, set(self.numbers)
        self.met, self.stop_at = set(), None if stop_after is None else len(self.assigned) + stop_after
        while working:
            waiting = sorted(working - self.holds.keys())
            able = [worker for worker in waiting if self._claim(worker, limit, working)] if waiting else []
            assert able or self.holds or not working  # nothing is stuck
            if self.holds and self.chance.random() < 0.6:
                self._apply(self.chance.choice(sorted(self.holds)))
                applied = self.clock.applied
                done = applied.completed * applied.parts + len(applied.beyond)
                if fails_after is not None and done >= fails_after and len(self.numbers) > 1:
                    self.remove_workers(self.chance.randrange(1, len(self.numbers)))
                    clock, working, self.met, fails_after = self.clock, set(self.numbers), set(), None
        assert self.met == {clock.limit}
        return clock.limit

    def remove_workers(self, dead: int) -> None:
        """Continue without `dead` of the workers, from the parts that are known to be applied."""
        applied = self.clock.applied
        for worker in self.chance.sample(self.numbers, dead):
            self.numbers.remove(worker)
        self.holds.clear()  # who is left begins again, too
        self.assigned = [portion for portion in self.assigned if portion in applied]
        before = Applied(applied.parts, applied.completed, applied.beyond)
        self.clock = Clock(before, self.numbers, self.staleness)

    def _claim(self, worker: int, limit: int, working: set[int]) -> bool:
        """Ask for a part; return True if there is one, or if there are no more."""
        if self.chance.random() < 0.3 and self.holds:
            return False  # it is not yet so far
        clock = self.clock
        clock.open(limit)
        if self.stop_at is not None and len(self.assigned) >= self.stop_at and worker == self.numbers[0]:
            clock.stop()  # the others do not know, and ask as before
        portion = clock.claim(worker)
        if portion is None:
            if clock.exhausted:
                working.discard(worker)
                self.met.add(clock.limit)
            return clock.exhausted
        assert portion not in self.assigned and portion.step <= clock.limit
        if self.staleness is not None:
            assert portion.step <= clock.applied.completed + 1 + self.staleness
        if self.staleness == 0:
            assert self.numbers[portion.part % len(self.numbers)] == worker
        self.assigned.append(portion)
        self.holds[worker] = portion
        return True

    def _apply(self, worker: int) -> None:
        portion, before = self.holds.pop(worker), self.clock.applied.completed
        complete = self.clock.applied.add(portion)
        assert complete == list(range(before + 1, self.clock.applied.completed + 1))
        assert portion in self.clock.applied


STALENESS = st.one_of(st.none(), st.integers(0, 4))
CHANCE = st.integers(0, 10**6).map(random.Random)  # st.randoms draws mostly zeros


@given(CHANCE, st.integers(1, 6), STALENESS, st.integers(0, 7), st.lists(st.integers(1, 5), max_size=3))
@settings(max_examples=60, deadline=None)
def test_every_part_is_assigned_once_within_the_staleness_bound(chance, workers, staleness, done, lengths):
    crowd, limit = Workers(chance, workers, staleness, done), done
    for length in lengths:
        limit += length
        assert crowd.meet(limit) == limit == crowd.clock.applied.completed
    everything = [Portion(step, part) for step in range(done + 1, limit + 1) for part in range(workers)]
    assert sorted(crowd.assigned) == everything
    assert not crowd.clock.applied.beyond


@given(CHANCE, st.integers(1, 6), STALENESS, st.integers(0, 3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_stop_finishes_the_steps_in_progress_and_at_least_one(chance, workers, staleness, first, length):
    crowd = Workers(chance, workers, staleness, 0)
    if first:
        crowd.meet(first)
    stop_after = chance.randrange(0, workers * length)
    last = crowd.meet(first + length, stop_after=stop_after)
    assert first + 1 <= last <= first + length and crowd.clock.applied.completed == last
    assert sorted(crowd.assigned) == [Portion(step, part) for step in range(1, last + 1) for part in range(workers)]


@given(CHANCE, st.integers(2, 6), STALENESS, st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_parts_of_dead_workers_are_assigned_to_others(chance, workers, staleness, length):
    crowd = Workers(chance, workers, staleness, 0)
    assert crowd.meet(length, fails_after=chance.randrange(1, workers * length)) == length
    assert len(crowd.numbers) < workers and crowd.clock.applied.completed == length
    assert sorted(crowd.assigned) == [Portion(step, part) for step in range(1, length + 1) for part in range(workers)]


def test_a_claim_with_the_old_limit_does_not_undo_a_stop():
    clock = Clock(Applied(2), [0, 1], 0)
    clock.open(5)
    assert clock.claim(0) == Portion(1, 0)
    assert clock.stop() == 1
    assert not clock.open(5)  # the other worker asks as it would have
    assert clock.limit == 1 and clock.claim(1) == Portion(1, 1)
    clock.applied.add(Portion(1, 0))
    clock.applied.add(Portion(1, 1))
    assert clock.claim(0) is None and clock.exhausted


@given(st.integers(1, 4), st.integers(0, 3), CHANCE)
def test_applied_parts_are_restored_after_a_restart(parts, done, chance):
    everything = [Portion(step, part) for step in range(done + 1, done + 4) for part in range(parts)]
    chance.shuffle(everything)
    applied = Applied(parts, done)
    for portion in everything[: chance.randrange(len(everything))]:
        applied.add(portion)
    again = Applied(parts, applied.completed, applied.beyond)
    assert all((portion in again) == (portion in applied) for portion in everything)
    left = [portion for portion in everything if portion not in again]
    assert [step for portion in left for step in again.add(portion)] == list(range(applied.completed + 1, done + 4))
