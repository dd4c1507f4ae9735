"""Timing contenders against each other.

On one node all processes read one clock, so a repetition lasts from the first rank's start to the last rank's end:
a rank that was kept waiting for a core before it began is counted, which its own stop-watch would hide. Between
nodes the clocks differ, and the longest of the ranks' own durations is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_BATCH = 4e-3  # seconds: short operations are repeated in one measurement until they take about as long
_MOST = 200
_ALWAYS = 3  # repetitions that are made however long they take


@dataclass(frozen=True)
class Contender:
    """What is measured.

    Attributes:
        call: The operation, collective over the ranks.
        prepare: Called before each measurement, and not timed.
        single: Whether never to repeat it within one measurement, because the second time would find its data in the
            cache.
    """

    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    single: bool = False


@dataclass(frozen=True)
class Times:
    """Seconds of one operation in each repetition; the same on all ranks.

    Attributes:
        all: The seconds.
    """

    all: Sequence[float]

    @property
    def median(self) -> float:
        """The median of them."""
        return float(np.median(self.all))

    @property
    def best(self) -> float:
        """The least of them."""
        return float(min(self.all))


def interleaved(
    world: Communicator,
    contenders: Mapping[str, Contender],
    repeats: int,
    budget: float = math.inf,
    *,
    begins: bool = True,
) -> dict[str, Times]:
    """Times of each contender, measured in turns: A B C A B C … Collective.

    Args:
        world: The ranks.
        contenders: What is measured, by name.
        repeats: How many repetitions there are.
        budget: Seconds after which no further repetition is begun, but for the first three.
        begins: Whether on one node a repetition may be said to have begun because this rank has: not one that only
            waits for what others begin.
    """
    began, all_of_them = time.perf_counter(), list(contenders.values())
    once = [
        extents(world, np.array(_round(world, all_of_them, [1] * len(all_of_them))), begins=begins) for _ in range(2)
    ]
    expected = np.minimum(*once)  # they also warm up: operations are bound, pages touched
    counts = [
        1 if contender.single else int(np.clip(_BATCH / max(seconds, 1e-9), 1, _MOST))
        for contender, seconds in zip(all_of_them, expected, strict=True)
    ]
    stamps: list[list[tuple[float, float]]] = []
    over = np.zeros(1, dtype=np.uint8)
    while len(stamps) < min(repeats, _ALWAYS) or (len(stamps) < repeats and not over[0]):
        stamps.append(_round(world, all_of_them, counts))
        over[0] = time.perf_counter() - began > budget
        world.broadcast(over, 0)  # the ranks must stop together
    seconds = extents(world, np.array(stamps), begins=begins) / counts
    return {name: Times(seconds[:, turn].tolist()) for turn, name in enumerate(contenders)}


def _round(world: Communicator, contenders: Sequence[Contender], counts: Sequence[int]) -> list[tuple[float, float]]:
    """Begin and end of each contender's turn, in which it is called so many times. Collective."""
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


def extents(world: Communicator, stamps: np.ndarray, *, begins: bool = True) -> np.ndarray:
    """Durations over all ranks of (begin, end) pairs in the last axis. Collective. begins: see `interleaved`."""
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
