"""Timing of operations that are compared with each other.

On one node all processes read the same clock, so a repetition lasts from the start of the first rank to the end of the
last rank. This includes the time a rank waited for a core before it began, which its own measurement would miss. The
clocks of different nodes differ, so between nodes the longest of the ranks' own durations is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_BATCH = 4e-3  # seconds; short operations are repeated in one measurement until they take about this long
_MOST = 200
_ALWAYS = 3  # least number of repetitions, regardless of the budget
_WARM_UPS = 2  # rounds before the measurements, in which operations are bound and pages touched
# Ranks that share cores begin at different times, by more than a short operation lasts. How long one takes is therefore
# found out in further rounds, by series of calls.
_SERIES_ROUNDS = 2
_SERIES = 10  # least number of calls in such a series
_SHORT = 2e-2  # seconds; operations that take longer are called once


@dataclass(frozen=True)
class Contender:
    """Operation to time.

    Attributes:
        call: Operation, collective over the ranks.
        prepare: Function called before each measurement, not timed.
        single: If true, never repeat the operation within one measurement, because its data would be in the cache.
    """

    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    single: bool = False


@dataclass(frozen=True)
class Times:
    """Seconds of one operation in each repetition; equal on all ranks.

    Attributes:
        all: Seconds of each repetition.
    """

    all: Sequence[float]

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return float(np.median(self.all))

    @property
    def best(self) -> float:
        """Smallest of the seconds."""
        return float(min(self.all))


def measure_in_turns(
    world: Communicator,
    contenders: Mapping[str, Contender],
    repeats: int,
    budget: float = math.inf,
    *,
    begins: bool = True,
) -> dict[str, Times]:
    """Return the times of each contender, measured in turns: A B C A B C … Collective.

    Args:
        world: All ranks.
        contenders: Operations by name.
        repeats: Number of repetitions.
        budget: Seconds after which no further repetition begins; at least three are made.
        begins: On one node, true if this rank's begin may count as the begin of a repetition; false for a rank that
            only waits for what others begin.
    """
    began, all_of_them = time.perf_counter(), list(contenders.values())
    single = np.array([contender.single for contender in all_of_them])
    counts, expected = np.ones(len(single), dtype=np.int64), np.full(len(single), math.inf)
    for least in [1] * _WARM_UPS + [_SERIES] * (0 if single.all() else _SERIES_ROUNDS):
        tried = np.where(single | (expected > _SHORT), counts, np.maximum(counts, least))
        stamps = np.array(_round(world, all_of_them, tried))
        expected = np.minimum(expected, durations(world, stamps, begins=begins) / tried)
        enough = np.clip(_BATCH / np.maximum(expected, 1e-9), 1, _MOST).astype(np.int64)
        counts = np.where(single, 1, enough)
    rounds: list[list[tuple[float, float]]] = []
    over = np.zeros(1, dtype=np.uint8)
    while len(rounds) < min(repeats, _ALWAYS) or (len(rounds) < repeats and not over[0]):
        rounds.append(_round(world, all_of_them, counts))
        over[0] = time.perf_counter() - began > budget
        world.broadcast(over, 0)  # the ranks must stop together
    seconds = durations(world, np.array(rounds), begins=begins) / counts
    return {name: Times(seconds[:, turn].tolist()) for turn, name in enumerate(contenders)}


def _round(world: Communicator, contenders: Sequence[Contender], counts: Iterable[int]) -> list[tuple[float, float]]:
    """Return begin and end of each contender's turn, with `counts` calls each. Collective."""
    stamps, clock = [], time.perf_counter
    for contender, count in zip(contenders, counts, strict=True):
        if contender.prepare is not None:
            contender.prepare()
        call, turns = contender.call, range(count)
        world.barrier()
        begin = clock()
        for _ in turns:
            call()
        stamps.append((begin, clock()))
    return stamps


def durations(world: Communicator, stamps: np.ndarray, *, begins: bool = True) -> np.ndarray:
    """Return the durations over all ranks of (begin, end) pairs. Collective.

    Args:
        world: All ranks.
        stamps: Times in seconds, shape (..., 2).
        begins: See `measure_in_turns`.
    """
    if world.num_nodes > 1:
        lasted = stamps[..., 1] - stamps[..., 0]
        world.all_reduce(lasted, "max")
        return lasted
    begin, end = stamps[..., 0].copy(), stamps[..., 1].copy()
    if not begins:
        begin[:] = math.inf
    world.all_reduce(begin, "min")
    world.all_reduce(end, "max")
    return end - begin
