"""Algorithms by messages alone, for ranks wherever they are: rings, binomial trees, pairwise exchange and halving."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from mpitrain.comm.programs.program import (
    INBOX,
    NONE,
    Combine,
    Copy,
    Exchange,
    Finish,
    Ints,
    Program,
    Span,
    Step,
    all_gather_of,
    all_reduce_of,
    all_to_all_of,
    broadcast_of,
    gather_of,
    reduce_of,
    reduce_scatter_of,
    scatter_of,
)

# -- Ring algorithms: bandwidth-optimal, neighbours only (Patarasu & Yuan, J. Parallel Distrib. Comput. 69, 2009).
#
# Rank r always sends to r+1 and receives from r-1. Reduce-scatter on 4 ranks; rows are ranks, columns rounds,
# a cell is the block received and added (the block sent in the next round):
#
#             t=0  t=1  t=2
#     rank 0   2    1    0     -> ends with block 0 complete
#     rank 1   3    2    1
#     rank 2   0    3    2
#     rank 3   1    0    3
#
# An all-gather passes the complete blocks on round the same ring; both together are the all-reduce, which
# sends 2(N-1)/N of the buffer per rank in 2(N-1) rounds. Blocks are cut into segments: while one segment is
# being added the next is already on its way.


def _block(index: Ints, segments: int) -> Span:
    return Span(index * segments, (index + 1) * segments)


def ring_reduce_scatter_steps(rank: Ints, size: int, segments: int) -> Iterator[Step]:
    """The steps of a reduce-scatter round a ring, after which rank r holds the sum of block r.

    Args:
        rank: This rank, or all ranks as an array.
        size: Number of ranks.
        segments: Chunks of a block; each is sent and received in a message of its own.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for t in range(size - 1):
        sent, received = (rank - t - 1) % size * segments, (rank - t - 2) % size * segments
        for s in range(segments):
            yield Exchange(right, Span(sent + s, sent + s + 1), left, Span(received + s, received + s + 1), reduce=True)
    yield Finish(_block(rank, segments))


def ring_all_gather_steps(rank: Ints, size: int, segments: int) -> Iterator[Step]:
    """The steps of an all-gather round a ring, which passes every rank's block on to every rank.

    Args:
        rank: This rank, or all ranks as an array.
        size: Number of ranks.
        segments: Chunks of a block; each is sent and received in a message of its own.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for t in range(size - 1):
        sent, received = (rank - t) % size * segments, (rank - t - 1) % size * segments
        for s in range(segments):
            yield Exchange(right, Span(sent + s, sent + s + 1), left, Span(received + s, received + s + 1))


def ring_reduce_scatter(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Reduce-scatter round a ring: rank r ends with block r, reduced over all ranks.

    Args:
        size: Number of ranks.
        segments: Chunks of a block; one is added while the next is on its way.
        nodes: The node of each rank; without it all are on one.

    Reference:
        P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", Journal of
        Parallel and Distributed Computing 69 (2009).
    """
    steps = partial(ring_reduce_scatter_steps, size=size, segments=segments)
    return Program("ring reduce_scatter", size, reduce_scatter_of(size), steps, nodes, blocks=size, segments=segments)


def ring_all_gather(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """All-gather round a ring: every rank ends with every rank's block.

    Args:
        size: Number of ranks.
        segments: Chunks of a block; one is passed on while the next is on its way.
        nodes: The node of each rank; without it all are on one.
    """
    steps = partial(ring_all_gather_steps, size=size, segments=segments)
    return Program("ring all_gather", size, all_gather_of(size), steps, nodes, blocks=size, segments=segments)


def ring_all_reduce(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """All-reduce round a ring: a reduce-scatter, then an all-gather, in 2(N-1) rounds of one block each.

    Args:
        size: Number of ranks N.
        segments: Chunks of a block; one is added while the next is on its way.
        nodes: The node of each rank; without it all are on one.

    Reference:
        Patarasuk and Yuan 2009, see `ring_reduce_scatter`.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from ring_reduce_scatter_steps(rank, size, segments)
        yield from ring_all_gather_steps(rank, size, segments)

    return Program("ring all_reduce", size, all_reduce_of(size, size), steps, nodes, blocks=size, segments=segments)


# -- Binomial trees: fewest rounds for small messages, and the canonical order of reproducible sums.
#
# Ranks are renumbered so that the root is 0. A reduction joins subtrees of 1, 2, 4, … ranks, so the sum is
# always ((0+1)+(2+3))+((4+5)+…): the order of `program.tree_order`. A broadcast is the same tree upside down.
# 8 ranks, an arrow per message:
#
#     round 0   1>0   3>2   5>4   7>6
#     round 1   2>0         6>4
#     round 2   4>0


def _tree_rounds(size: int) -> range:
    return range((size - 1).bit_length())


def reduce_steps(rank: Ints, size: int, root: int, segments: int) -> Iterator[Step]:
    """The steps by which the vectors of all ranks are summed at the root, along a binomial tree.

    Args:
        rank: This rank, or all ranks as an array.
        size: Number of ranks.
        root: The rank that gets the sum.
        segments: Chunks of the vector, which go up the tree one after the other.
    """
    place = (rank - root) % size
    for s in range(segments):
        part = Span(s, s + 1)
        for k in _tree_rounds(size):
            bit = 1 << k
            sends = place % (2 * bit) == bit
            receives = (place % (2 * bit) == 0) & (place + bit < size)
            to = np.where(sends, (place - bit + root) % size, NONE)
            source = np.where(receives, (place + bit + root) % size, NONE)
            yield Exchange(to, part, source, part, reduce=True)


def broadcast_steps(rank: Ints, size: int, root: int, segments: int) -> Iterator[Step]:
    """The steps by which the root's vector comes to all ranks, down a binomial tree.

    Args:
        rank: This rank, or all ranks as an array.
        size: Number of ranks.
        root: The rank that has the vector.
        segments: Chunks of the vector, which go down the tree one after the other.
    """
    place = (rank - root) % size
    for s in range(segments):
        part = Span(s, s + 1)
        for k in reversed(_tree_rounds(size)):
            bit = 1 << k
            sends = (place % (2 * bit) == 0) & (place + bit < size)
            receives = place % (2 * bit) == bit
            to = np.where(sends, (place + bit + root) % size, NONE)
            source = np.where(receives, (place - bit + root) % size, NONE)
            yield Exchange(to, part, source, part)


def _tree_finish(rank: Ints, root: int, segments: int) -> Finish:
    return Finish(Span(0, np.where(rank == root, segments, 0)))


def tree_reduce(size: int, root: int = 0, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Reduce along a binomial tree: the root ends with the reduced vector.

    The other ranks' vectors may be overwritten with sums in progress.

    Args:
        size: Number of ranks.
        root: The rank that gets the result.
        segments: Chunks of the vector, which go up the tree one after the other.
        nodes: The node of each rank; without it all are on one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from reduce_steps(rank, size, root, segments)
        yield _tree_finish(rank, root, segments)

    return Program("tree reduce", size, reduce_of(size, 1, root), steps, nodes, segments=segments)


def tree_broadcast(size: int, root: int = 0, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Broadcast along a binomial tree: every rank ends with the root's vector.

    Args:
        size: Number of ranks.
        root: The rank that has the vector.
        segments: Chunks of the vector, which go down the tree one after the other.
        nodes: The node of each rank; without it all are on one.
    """
    steps = partial(broadcast_steps, size=size, root=root, segments=segments)
    return Program("tree broadcast", size, broadcast_of(size, root), steps, nodes, segments=segments)


def tree_all_reduce(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """All-reduce along a binomial tree: reduce to rank 0, then broadcast from there.

    Args:
        size: Number of ranks.
        segments: Chunks of the vector, which follow each other along the tree.
        nodes: The node of each rank; without it all are on one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from reduce_steps(rank, size, 0, segments)
        yield _tree_finish(rank, 0, segments)
        yield from broadcast_steps(rank, size, 0, segments)

    return Program("tree all_reduce", size, all_reduce_of(size, 1), steps, nodes, segments=segments)


# -- Direct exchange: one message between every two ranks.
#
# To reduce, every rank gets every contribution to its block and reduces them itself. As many bytes as the ring, N-1
# messages to N-1 different ranks, and no partial sums on the wire: the sum can be taken in any order (the fixed tree of
# reproducible sums) and in a wider type than the messages (16-bit).
#
# Gather, scatter and all-to-all: for data too large for the library's calls.


def _span(block: Ints) -> Span:
    return Span(block, block + 1)


def _cell(rank: Ints) -> Span:
    return Span(rank, rank + 1, INBOX)


def pairwise_reduce_scatter_steps(rank: Ints, size: int) -> Iterator[Step]:
    """The steps of a reduce-scatter in which each rank gets every contribution to its block and reduces them itself.

    They are reduced in the order of a fixed binary tree over the ranks.

    Args:
        rank: This rank, or all ranks as an array.
        size: Number of ranks.
    """
    yield Copy(rank, _cell(rank), rank, _span(rank))
    for t in range(1, size):
        to, source = (rank + t) % size, (rank - t) % size
        yield Exchange(to, _span(to), source, _cell(source))
    yield Combine(_span(rank), tuple((rank, _cell(rank * 0 + q)) for q in range(size)), tree=True)
    yield Finish(_span(rank))


def pairwise_reduce_scatter(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """Reduce-scatter by pairwise exchange: rank r gets every contribution to block r and reduces these itself.

    Args:
        size: Number of ranks.
        nodes: The node of each rank; without it all are on one.
    """
    steps = partial(pairwise_reduce_scatter_steps, size=size)
    return Program("pairwise reduce_scatter", size, reduce_scatter_of(size), steps, nodes, blocks=size, inbox=size)


def pairwise_all_reduce(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """All-reduce by a pairwise reduce-scatter, after which each rank sends its block to every other.

    Args:
        size: Number of ranks.
        nodes: The node of each rank; without it all are on one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from pairwise_reduce_scatter_steps(rank, size)
        for t in range(1, size):
            to, source = (rank + t) % size, (rank - t) % size
            yield Exchange(to, _span(rank), source, _span(source))

    return Program("pairwise all_reduce", size, all_reduce_of(size, size), steps, nodes, blocks=size, inbox=size)


def direct_gather(size: int, root: int, nodes: tuple[int, ...] = ()) -> Program:
    """Gather by one message from every rank to the root.

    The rank's own block is in its WORK; the root ends with all blocks in its INBOX, cell r from rank r.

    Args:
        size: Number of ranks.
        root: The rank that gets the blocks.
        nodes: The node of each rank; without it all are on one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        at_root = rank == root
        yield Copy(np.where(at_root, rank, NONE), _cell(root), rank, _span(0))
        for t in range(1, size):
            other = (root + t) % size
            to, source = np.where(rank == other, root, NONE), np.where(at_root, other, NONE)
            yield Exchange(to, _span(0), source, _cell(other))

    return Program("direct gather", size, gather_of(size, root), steps, nodes, inbox=size)


def direct_scatter(size: int, root: int, nodes: tuple[int, ...] = ()) -> Program:
    """Scatter by one message from the root to every rank.

    The root's WORK holds the blocks of all ranks; each rank ends with its own in its INBOX.

    Args:
        size: Number of ranks.
        root: The rank that has the blocks.
        nodes: The node of each rank; without it all are on one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        at_root = rank == root
        yield Copy(np.where(at_root, rank, NONE), _cell(0), rank, _span(root))
        for t in range(1, size):
            other = (root + t) % size
            to, source = np.where(at_root, other, NONE), np.where(rank == other, root, NONE)
            yield Exchange(to, _span(other), source, _cell(0))

    return Program("direct scatter", size, scatter_of(size, root), steps, nodes, blocks=size, inbox=1)


def direct_all_to_all(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """All-to-all by one message between every two ranks, each way.

    In round t a rank sends to the one t places after it and receives from the one t places before it. WORK holds the
    blocks for all ranks; they end in the others' INBOX, cell s from rank s.

    Args:
        size: Number of ranks.
        nodes: The node of each rank; without it all are on one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Copy(rank, _cell(rank), rank, _span(rank))
        for t in range(1, size):
            to, source = (rank + t) % size, (rank - t) % size
            yield Exchange(to, _span(to), source, _cell(source))

    return Program("direct all_to_all", size, all_to_all_of(size), steps, nodes, blocks=size, inbox=size)


# -- Recursive halving and doubling: log2 N rounds (Thakur, Rabenseifner & Gropp, IJHPCA 19, 2005).
#
# An all-reduce halves the vector each round with a partner at distance 1, 2, 4, … (reduce-scatter), then
# doubles it back the same way (all-gather). For 4 ranks, the part of the vector each rank still reduces:
#
#                start     distance 1   distance 2
#     rank 0   [0 1 2 3]   [0 1]        [0]
#     rank 1   [0 1 2 3]   [2 3]        [2]
#     rank 2   [0 1 2 3]   [0 1]        [1]
#     rank 3   [0 1 2 3]   [2 3]        [3]
#
# Other numbers of ranks are folded to the power of two below: of the first 2(N-p) ranks each odd one hands its
# part to the even one before it and gets the result at the end. `place` below is the number of a rank among
# the p that take part.


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
        """Return the span of the blocks of `places` places, from `place` on."""
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
