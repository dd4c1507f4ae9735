"""Offsets between the clocks of the ranks, measured by messages.

A rank is asked for its time again and again. Of the question that was answered soonest the time must have been taken
between its begin and its end; half of that bounds the error. On each node the first rank asks the others of the node,
the nodes beside one another; then rank 0 asks the first rank of each node. Ranks whose turn it is not sleep meanwhile:
where there are more ranks than cores they would take the time that the answers need.

Reference:
    Cristian 1989, Probabilistic clock synchronization.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpitrain.comm import Communicator, Work
from mpitrain.errors import CommunicationError

Clock = Callable[[], float]
_QUESTIONS = 60  # at least, to each rank, and ...
_MOST = 6000  # ... at most, as long as ...
_GOOD = 80e-6  # ... no answer came within so many seconds
_LONGEST = 2.0  # seconds for one rank at most
_SPIN = 3e-4  # seconds that an answer is waited for without a pause
_BURST = 10  # questions, before which the rank that asks sleeps: who has slept is let run at once, for a while
_PAUSE = 1e-3  # seconds between two looks of a rank whose turn it is not
_ASK, _TOLD, _TURN = 71, 72, 73  # tags


@dataclass(frozen=True)
class Offset:
    """The difference between rank 0's time and a rank's.

    Attributes:
        at: The rank's time at which that holds, in seconds.
        seconds: What is to be added.
        within: How far off that may be, in seconds.
    """

    at: float
    seconds: float
    within: float


def measure(world: Communicator, clock: Clock) -> Offset:
    """This rank's offset from rank 0. Collective.

    Args:
        world: All ranks.
        clock: This rank's.
    """
    firsts = [world.nodes.index(node) for node in sorted(set(world.nodes))]
    mine = [rank for rank, node in enumerate(world.nodes) if node == world.node]
    own = Offset(clock(), 0.0, 0.0)
    if world.rank in firsts:
        for rank in mine[1:]:
            _ask(world, rank, clock)
    else:
        own = _answer(world, mine[0], clock)
    firsts.sort()
    of_first = own if world.rank in firsts else Offset(0.0, 0.0, 0.0)
    if world.rank == 0:
        for rank in firsts[1:]:
            _ask(world, rank, clock)
    elif world.rank in firsts:
        of_first = own = _answer(world, 0, clock)
    if world.rank in firsts:  # whose offset is added to that of the other ranks of its node
        for rank in mine[1:]:
            world.send(torch.tensor([of_first.seconds, of_first.within], dtype=torch.float64), rank, _TOLD)
        return own
    told = torch.empty(2, dtype=torch.float64)
    _sleep_until(world, world.irecv(told, mine[0], _TOLD))
    seconds, within = told.tolist()
    return Offset(own.at, own.seconds + seconds, own.within + within)


def _ask(world: Communicator, rank: int, clock: Clock) -> None:
    """Ask a rank for its time until it is known well, and tell it its offset."""
    question, answer = torch.zeros(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    best, at, seconds = float("inf"), 0.0, 0.0
    began = time.perf_counter()
    for number in range(_MOST):
        last = (
            number >= _QUESTIONS and (best < _GOOD or time.perf_counter() - began > _LONGEST)
        ) or number == _MOST - 1
        question[0] = 1.0 if last else 0.0
        if number % _BURST == 0:
            time.sleep(_PAUSE)
        coming = world.irecv(answer, rank, _ASK)
        begin = clock()
        sent = world.isend(question, rank, _ASK)
        _wait(world, coming)
        end = clock()
        _wait(world, sent)
        if end - begin < best:
            best, at = end - begin, float(answer[0])
            seconds = (begin + end) / 2 - at
        if last:
            break
    world.send(torch.tensor([at, seconds, best / 2], dtype=torch.float64), rank, _TURN)


def _answer(world: Communicator, asker: int, clock: Clock) -> Offset:
    """Answer a rank's questions; returns the offset from it that it has found."""
    question, answer = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    wait: Callable[[Communicator, Work], None] = _sleep_until  # for the first question
    while True:
        wait(world, world.irecv(question, asker, _ASK))
        wait = _wait
        answer[0] = clock()
        sent = world.isend(answer, asker, _ASK)
        _wait(world, sent)
        if question[0]:
            break
    told = torch.empty(3, dtype=torch.float64)
    world.recv(told, asker, _TURN)
    return Offset(*told.tolist())


def _wait(world: Communicator, work: Work, *, spin: float = _SPIN, pause: float = _SPIN / 3) -> None:
    """Wait, at first without a pause; then with pauses, as the other rank may need this core."""
    began = time.monotonic()
    while not work.done():
        waited = time.monotonic() - began
        if waited > world.process.watchdog.timeout:
            raise CommunicationError("another rank did not answer when clocks were compared; is it still there?")
        if waited > spin:
            time.sleep(pause)


def _sleep_until(world: Communicator, work: Work) -> None:
    """Wait without taking time from others."""
    _wait(world, work, spin=0.0, pause=_PAUSE)
