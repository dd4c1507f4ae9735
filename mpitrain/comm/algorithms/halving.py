"""Recursive halving and doubling: log2 N rounds (Thakur, Rabenseifner & Gropp, IJHPCA 19, 2005).

An all-reduce halves the vector each round with a partner at distance 1, 2, 4, … (reduce-scatter), then
doubles it back the same way (all-gather). For 4 ranks, the part of the vector each rank still reduces:

               start     distance 1   distance 2
    rank 0   [0 1 2 3]   [0 1]        [0]
    rank 1   [0 1 2 3]   [2 3]        [2]
    rank 2   [0 1 2 3]   [0 1]        [1]
    rank 3   [0 1 2 3]   [2 3]        [3]

Other numbers of ranks are folded to the power of two below: of the first 2(N-p) ranks each odd one hands its
part to the even one before it and gets the result at the end. `place` below is the number of a rank among
the p that take part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpitrain.comm.programs.goals import all_gather_of, all_reduce_of, reduce_scatter_of
from mpitrain.comm.programs.program import NONE, Exchange, Finish, Ints, Program, Span, Step


class _Fold:
    """Which ranks take part, and under which number."""

    def __init__(self, rank: Ints, size: int) -> None:
        self.parts = 1 << size.bit_length() - 1
        self.extra = size - self.parts
        folded = rank < 2 * self.extra
        self.gives = folded & (rank % 2 == 1)
        self.takes = folded & (rank % 2 == 0)
        self.active = ~np.asarray(self.gives)
        self.place = np.where(folded, rank // 2, rank - self.extra)
        self.rounds = self.parts.bit_length() - 1
        self.rank = rank

    def rank_of(self, place: Ints) -> Ints:
        return np.where(place < self.extra, 2 * place, place + self.extra)

    def partner(self, distance: int) -> Ints:
        return np.where(self.active, self.rank_of(self.place ^ distance), NONE)

    def first_block(self, place: Ints) -> Ints:
        """The blocks of ranks are folded like the ranks: place p holds those from here to first_block(p + 1)."""
        return place + np.minimum(place, self.extra)

    def blocks(self, place: Ints, places: int) -> Span:
        """The blocks of so many places, this one the first."""
        return Span(self.first_block(place), self.first_block(place + places))

    def hand_over(self, given: Span, *, reduce: bool) -> Iterator[Step]:
        """Each odd folded rank sends `given` to its even neighbour."""
        if self.extra:
            to = np.where(self.gives, self.rank - 1, NONE)
            source = np.where(self.takes, self.rank + 1, NONE)
            yield Exchange(to, given, source, given, reduce)

    def hand_back(self, returned: Span) -> Iterator[Step]:
        if self.extra:
            to = np.where(self.takes, self.rank + 1, NONE)
            source = np.where(self.gives, self.rank - 1, NONE)
            yield Exchange(to, returned, source, returned)


def halving_all_reduce(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """All-reduce by recursive halving of the vector, then recursive doubling.

    It takes about 2 log2 N rounds, in which a rank sends about twice the vector in all.

    Args:
        size: Number of ranks N. The vector has as many blocks as ranks take part: the power of two that is N or below.
        segments: Chunks of a block: an exchange goes in as many messages, so that adding one overlaps sending the next.
        nodes: The node of each rank; without it all are on one.

    Reference:
        R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
        International Journal of High Performance Computing Applications 19 (2005).
    """
    blocks = 1 << size.bit_length() - 1

    def steps(rank: Ints) -> Iterator[Step]:
        fold = _Fold(rank, size)
        everything = Span(0, blocks * segments)
        yield from fold.hand_over(everything, reduce=True)
        lows = [np.zeros_like(fold.place)]  # the first block of the part each rank holds, round by round
        for k in range(fold.rounds):
            half = blocks >> k + 1
            bit = fold.place >> k & 1
            kept, given = lows[-1] + bit * half, lows[-1] + (1 - bit) * half
            yield from _pieces(fold.partner(1 << k), given, kept, half, segments, reduce=True)
            lows.append(kept)
        yield Finish(Span(lows[-1] * segments, (lows[-1] + fold.active) * segments))
        for k in reversed(range(fold.rounds)):
            half = blocks >> k + 1
            bit = fold.place >> k & 1
            held, wanted = lows[k] + bit * half, lows[k] + (1 - bit) * half
            yield from _pieces(fold.partner(1 << k), held, wanted, half, segments, reduce=False)
        yield from fold.hand_back(everything)

    goal = all_reduce_of(size, blocks)
    return Program("halving all_reduce", size, goal, steps, nodes, blocks=blocks, segments=segments)


def _pieces(peer: Ints, sent: Ints, received: Ints, blocks: int, segments: int, *, reduce: bool) -> Iterator[Step]:
    """One exchange of `blocks` blocks, cut into as many messages as a block has segments."""
    for s in range(segments):
        lo, hi = blocks * s, blocks * (s + 1)
        leaving = Span(sent * segments + lo, sent * segments + hi)
        arriving = Span(received * segments + lo, received * segments + hi)
        yield Exchange(peer, leaving, peer, arriving, reduce)


def doubling_all_reduce(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """All-reduce by recursive doubling: partners at distance 1, 2, 4, ... exchange the whole vector and add it.

    This has the fewest rounds, about log2 N, but the vector is sent in each. It is for vectors too short to halve.

    Args:
        size: Number of ranks N.
        nodes: The node of each rank; without it all are on one.

    Reference:
        Thakur, Rabenseifner and Gropp 2005, see `halving_all_reduce`.
    """
    whole = Span(0, 1)

    def steps(rank: Ints) -> Iterator[Step]:
        fold = _Fold(rank, size)
        yield from fold.hand_over(whole, reduce=True)
        for k in range(fold.rounds):
            peer = fold.partner(1 << k)
            yield Exchange(peer, whole, peer, whole, reduce=True)
        yield Finish(Span(0, fold.active + 0))
        yield from fold.hand_back(whole)

    return Program("doubling all_reduce", size, all_reduce_of(size, 1), steps, nodes)


def halving_reduce_scatter(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """Reduce-scatter by recursive halving, with the farthest partner first.

    In that order of partners each rank that takes part ends with the blocks of its own place.

    Args:
        size: Number of ranks.
        nodes: The node of each rank; without it all are on one.

    Reference:
        Thakur, Rabenseifner and Gropp 2005, see `halving_all_reduce`.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        fold = _Fold(rank, size)
        yield from fold.hand_over(Span(0, size), reduce=True)
        for k in reversed(range(fold.rounds)):
            half = 1 << k
            group = fold.place >> k << k  # first place of the half this rank keeps
            other = group ^ half
            peer = fold.partner(half)
            yield Exchange(peer, fold.blocks(other, half), peer, fold.blocks(group, half), reduce=True)
        first = fold.first_block(fold.place)
        yield Finish(Span(first, np.where(fold.active, fold.first_block(fold.place + 1), first)))
        if fold.extra:
            block = rank | 1  # the odd neighbour's
            yield from fold.hand_back(Span(block, block + 1))

    return Program("halving reduce_scatter", size, reduce_scatter_of(size), steps, nodes, blocks=size)


def doubling_all_gather(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """All-gather by recursive doubling: in each round the number of blocks that a rank holds doubles.

    Args:
        size: Number of ranks.
        nodes: The node of each rank; without it all are on one.

    Reference:
        Thakur, Rabenseifner and Gropp 2005, see `halving_all_reduce`.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        fold = _Fold(rank, size)
        block = rank | 1
        yield from fold.hand_over(Span(block, block + 1), reduce=False)
        for k in range(fold.rounds):
            held = 1 << k
            group = fold.place >> k << k
            peer = fold.partner(held)
            yield Exchange(peer, fold.blocks(group, held), peer, fold.blocks(group ^ held, held))
        yield from fold.hand_back(Span(0, size))

    return Program("doubling all_gather", size, all_gather_of(size), steps, nodes, blocks=size)
