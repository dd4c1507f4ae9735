"""Message-passing collectives, for any placement of ranks: rings, binomial trees, pairwise exchange, recursive halving.

Most functions build a `Program` for a number of ranks; those named `*_steps` yield the steps of such a program. The
drawings in the comments show which rank sends what, and when.
"""

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

# -- Ring algorithms: bandwidth-optimal, neighbours only (Patarasuk & Yuan, J. Parallel Distrib. Comput. 69, 2009).
#
# Rank r always sends to r+1 and receives from r-1. Reduce-scatter on 4 ranks: rows are ranks, columns are rounds,
# and a cell is the block received and added in that round (and sent in the next round):
#
#             t=0  t=1  t=2
#     rank 0   2    1    0     -> ends with block 0 complete
#     rank 1   3    2    1
#     rank 2   0    3    2
#     rank 3   1    0    3
#
# An all-gather forwards the complete blocks along the same ring. The two together are the all-reduce, in which each
# rank sends 2(N-1)/N of the buffer in 2(N-1) rounds. Blocks are cut into segments, so that one segment is added
# while the next is in flight.


def _block(index: Ints, segments: int) -> Span:
    return Span(index * segments, (index + 1) * segments)


def ring_reduce_scatter_steps(rank: Ints, size: int, segments: int) -> Iterator[Step]:
    """Yield the steps of a ring reduce-scatter; at the end, rank r has the sum of block r.

    Args:
        rank: This rank, or an array of all ranks.
        size: Number of ranks.
        segments: Number of chunks per block; each chunk is a separate message.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for t in range(size - 1):
        sent, received = (rank - t - 1) % size * segments, (rank - t - 2) % size * segments
        for s in range(segments):
            yield Exchange(right, Span(sent + s, sent + s + 1), left, Span(received + s, received + s + 1), reduce=True)
    yield Finish(_block(rank, segments))


def ring_all_gather_steps(rank: Ints, size: int, segments: int) -> Iterator[Step]:
    """Yield the steps of a ring all-gather; at the end, every rank has the blocks of all ranks.

    Args:
        rank: This rank, or an array of all ranks.
        size: Number of ranks.
        segments: Number of chunks per block; each chunk is a separate message.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for t in range(size - 1):
        sent, received = (rank - t) % size * segments, (rank - t - 1) % size * segments
        for s in range(segments):
            yield Exchange(right, Span(sent + s, sent + s + 1), left, Span(received + s, received + s + 1))


def ring_reduce_scatter(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Build a reduce-scatter on a ring: rank r ends with block r, reduced over all ranks.

    Args:
        size: Number of ranks.
        segments: Number of chunks per block; one chunk is added while the next is in flight.
        nodes: Node number of each rank; by default all ranks are on one node.

    Reference:
        P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", Journal of
        Parallel and Distributed Computing 69 (2009).
    """
    steps = partial(ring_reduce_scatter_steps, size=size, segments=segments)
    return Program("ring reduce_scatter", size, reduce_scatter_of(size), steps, nodes, blocks=size, segments=segments)


def ring_all_gather(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Build an all-gather on a ring: every rank ends with the blocks of all ranks.

    Args:
        size: Number of ranks.
        segments: Number of chunks per block; one chunk is forwarded while the next is in flight.
        nodes: Node number of each rank; by default all ranks are on one node.
    """
    steps = partial(ring_all_gather_steps, size=size, segments=segments)
    return Program("ring all_gather", size, all_gather_of(size), steps, nodes, blocks=size, segments=segments)


def ring_all_reduce(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Build an all-reduce on a ring: a reduce-scatter, then an all-gather.

    It takes 2(N-1) rounds, and each rank sends one block per round.

    Args:
        size: Number of ranks N.
        segments: Number of chunks per block; one chunk is added while the next is in flight.
        nodes: Node number of each rank; by default all ranks are on one node.

    Reference:
        Patarasuk and Yuan 2009, see `ring_reduce_scatter`.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from ring_reduce_scatter_steps(rank, size, segments)
        yield from ring_all_gather_steps(rank, size, segments)

    return Program("ring all_reduce", size, all_reduce_of(size, size), steps, nodes, blocks=size, segments=segments)


# -- Binomial trees: fewest rounds for small messages, and the fixed order of reproducible sums.
#
# Ranks are renumbered so that the root is 0. A reduction joins subtrees of 1, 2, 4, … ranks, so the sum is
# always ((0+1)+(2+3))+((4+5)+…), the order of `program.tree_order`. A broadcast uses the same tree downwards.
# Reduction on 8 ranks, where a>b is a message from rank a to rank b:
#
#     round 0   1>0   3>2   5>4   7>6
#     round 1   2>0         6>4
#     round 2   4>0


def _tree_rounds(size: int) -> range:
    return range((size - 1).bit_length())


def reduce_steps(rank: Ints, size: int, root: int, segments: int) -> Iterator[Step]:
    """Yield the steps that sum the vectors of all ranks at the root, up a binomial tree.

    Args:
        rank: This rank, or an array of all ranks.
        size: Number of ranks.
        root: Rank that receives the sum.
        segments: Number of chunks of the vector; they go up the tree one after another.
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
    """Yield the steps that send the root's vector to all ranks, down a binomial tree.

    Args:
        rank: This rank, or an array of all ranks.
        size: Number of ranks.
        root: Rank that has the vector.
        segments: Number of chunks of the vector; they go down the tree one after another.
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
    """Build a reduce on a binomial tree: the root ends with the reduced vector.

    The vectors of the other ranks may be overwritten with partial sums.

    Args:
        size: Number of ranks.
        root: Rank that receives the result.
        segments: Number of chunks of the vector; they go up the tree one after another.
        nodes: Node number of each rank; by default all ranks are on one node.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from reduce_steps(rank, size, root, segments)
        yield _tree_finish(rank, root, segments)

    return Program("tree reduce", size, reduce_of(size, 1, root), steps, nodes, segments=segments)


def tree_broadcast(size: int, root: int = 0, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Build a broadcast on a binomial tree: every rank ends with the root's vector.

    Args:
        size: Number of ranks.
        root: Rank that has the vector.
        segments: Number of chunks of the vector; they go down the tree one after another.
        nodes: Node number of each rank; by default all ranks are on one node.
    """
    steps = partial(broadcast_steps, size=size, root=root, segments=segments)
    return Program("tree broadcast", size, broadcast_of(size, root), steps, nodes, segments=segments)


def tree_all_reduce(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Build an all-reduce on a binomial tree: a reduce to rank 0, then a broadcast from rank 0.

    Args:
        size: Number of ranks.
        segments: Number of chunks of the vector; they pass through the tree one after another.
        nodes: Node number of each rank; by default all ranks are on one node.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from reduce_steps(rank, size, 0, segments)
        yield _tree_finish(rank, 0, segments)
        yield from broadcast_steps(rank, size, 0, segments)

    return Program("tree all_reduce", size, all_reduce_of(size, 1), steps, nodes, segments=segments)


# -- Direct exchange: one message between every two ranks.
#
# To reduce, every rank receives all contributions to its block and reduces them itself. Each rank sends as many bytes
# as on the ring, in N-1 messages to N-1 different ranks. No partial sums are sent, so the sum can be computed in any
# order (such as the fixed tree of reproducible sums) and in a wider type than that of 16-bit messages.
#
# Gather, scatter and all-to-all are for data too large for the calls of the MPI library.


def _span(block: Ints) -> Span:
    return Span(block, block + 1)


def _cell(rank: Ints) -> Span:
    return Span(rank, rank + 1, INBOX)


def pairwise_reduce_scatter_steps(rank: Ints, size: int) -> Iterator[Step]:
    """Yield the steps of a reduce-scatter in which each rank receives all contributions to its block and reduces them.

    The contributions are reduced in the order of a fixed binary tree over the ranks.

    Args:
        rank: This rank, or an array of all ranks.
        size: Number of ranks.
    """
    yield Copy(rank, _cell(rank), rank, _span(rank))
    for t in range(1, size):
        to, source = (rank + t) % size, (rank - t) % size
        yield Exchange(to, _span(to), source, _cell(source))
    yield Combine(_span(rank), tuple((rank, _cell(rank * 0 + q)) for q in range(size)), tree=True)
    yield Finish(_span(rank))


def pairwise_reduce_scatter(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """Build a reduce-scatter by pairwise exchange: rank r receives all contributions to block r and reduces them.

    Args:
        size: Number of ranks.
        nodes: Node number of each rank; by default all ranks are on one node.
    """
    steps = partial(pairwise_reduce_scatter_steps, size=size)
    return Program("pairwise reduce_scatter", size, reduce_scatter_of(size), steps, nodes, blocks=size, inbox=size)


def pairwise_all_reduce(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """Build an all-reduce by pairwise exchange: a reduce-scatter, after which each rank sends its block to all others.

    Args:
        size: Number of ranks.
        nodes: Node number of each rank; by default all ranks are on one node.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from pairwise_reduce_scatter_steps(rank, size)
        for t in range(1, size):
            to, source = (rank + t) % size, (rank - t) % size
            yield Exchange(to, _span(rank), source, _span(source))

    return Program("pairwise all_reduce", size, all_reduce_of(size, size), steps, nodes, blocks=size, inbox=size)


def direct_gather(size: int, root: int, nodes: tuple[int, ...] = ()) -> Program:
    """Build a gather in which every rank sends one message to the root.

    Each rank's block is in its WORK. The root ends with all blocks in its INBOX; cell r has the block of rank r.

    Args:
        size: Number of ranks.
        root: Rank that receives the blocks.
        nodes: Node number of each rank; by default all ranks are on one node.
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
    """Build a scatter in which the root sends one message to every rank.

    The root's WORK has the blocks of all ranks. Each rank ends with its own block in its INBOX.

    Args:
        size: Number of ranks.
        root: Rank that has the blocks.
        nodes: Node number of each rank; by default all ranks are on one node.
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
    """Build an all-to-all with one message in each direction between every two ranks.

    In round t, a rank sends to the rank t places after it and receives from the rank t places before it. Each rank's
    WORK has one block for every rank. In the INBOX of the receiver, cell s has the block from rank s.

    Args:
        size: Number of ranks.
        nodes: Node number of each rank; by default all ranks are on one node.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Copy(rank, _cell(rank), rank, _span(rank))
        for t in range(1, size):
            to, source = (rank + t) % size, (rank - t) % size
            yield Exchange(to, _span(to), source, _cell(source))

    return Program("direct all_to_all", size, all_to_all_of(size), steps, nodes, blocks=size, inbox=size)


# -- Recursive halving and doubling: log2 N rounds (Thakur, Rabenseifner & Gropp, IJHPCA 19, 2005).
#
# In an all-reduce, partners at distance 1, 2, 4, … each keep half of the vector (reduce-scatter), then double it back
# in the reverse order (all-gather). For 4 ranks, the blocks that each rank still reduces:
#
#                start     distance 1   distance 2
#     rank 0   [0 1 2 3]   [0 1]        [0]
#     rank 1   [0 1 2 3]   [2 3]        [2]
#     rank 2   [0 1 2 3]   [0 1]        [1]
#     rank 3   [0 1 2 3]   [2 3]        [3]
#
# If the number of ranks N is not a power of two, only p ranks take part, where p is the largest power of two below N.
# Among the first 2(N-p) ranks, each odd rank hands its data to the even rank before it and receives the result at the
# end. `place` below is the number of a rank among the p that take part.


class _Fold:
    """The 2^k ranks that take part in recursive halving, and their numbers (places) from 0 to 2^k - 1.

    Attributes:
        parts: Number of ranks that take part: the largest power of two that is not above the number of ranks.
        extra: Number of ranks that do not take part.
        sends: True for a rank that hands its data to the rank before it and does not take part.
        receives: True for a rank that receives the data of the rank after it.
        active: True for a rank that takes part.
        place: Number of the rank among those that take part.
        rounds: log2 of `parts`.
        rank: The rank, or an array of all ranks.
    """

    def __init__(self, rank: Ints, size: int) -> None:
        self.parts = 1 << size.bit_length() - 1
        self.extra = size - self.parts
        folded = rank < 2 * self.extra
        self.sends = folded & (rank % 2 == 1)
        self.receives = folded & (rank % 2 == 0)
        self.active = ~np.asarray(self.sends)
        self.place = np.where(folded, rank // 2, rank - self.extra)
        self.rounds = self.parts.bit_length() - 1
        self.rank = rank

    def rank_of(self, place: Ints) -> Ints:
        return np.where(place < self.extra, 2 * place, place + self.extra)

    def partner(self, distance: int) -> Ints:
        return np.where(self.active, self.rank_of(self.place ^ distance), NONE)

    def first_block(self, place: Ints) -> Ints:
        """Return the first block of a place; place p has the blocks from first_block(p) up to first_block(p + 1)."""
        return place + np.minimum(place, self.extra)

    def blocks(self, place: Ints, places: int) -> Span:
        """Return the span of the blocks of several consecutive places.

        Args:
            place: First place.
            places: Number of places.
        """
        return Span(self.first_block(place), self.first_block(place + places))

    def hand_over(self, span: Span, *, reduce: bool) -> Iterator[Step]:
        """Yield the step in which each rank that does not take part sends its data to the rank before it.

        Args:
            span: Span that is sent.
            reduce: If true, the receiver adds the values to its own; otherwise they replace its own.
        """
        if self.extra:
            to = np.where(self.sends, self.rank - 1, NONE)
            source = np.where(self.receives, self.rank + 1, NONE)
            yield Exchange(to, span, source, span, reduce)

    def hand_back(self, returned: Span) -> Iterator[Step]:
        """Yield the step in which each rank that does not take part receives `returned` from the rank before it."""
        if self.extra:
            to = np.where(self.receives, self.rank + 1, NONE)
            source = np.where(self.sends, self.rank - 1, NONE)
            yield Exchange(to, returned, source, returned)


def halving_all_reduce(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """Build an all-reduce by recursive halving of the vector, then recursive doubling.

    It takes about 2 log2 N rounds, in which each rank sends about twice the vector in total.

    Args:
        size: Number of ranks N. The vector has as many blocks as the largest power of two that is not above N.
        segments: Number of chunks per block. Each exchange is cut into this many messages, so that adding one overlaps
            sending the next.
        nodes: Node number of each rank; by default all ranks are on one node.

    Reference:
        R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
        International Journal of High Performance Computing Applications 19 (2005).
    """
    blocks = 1 << size.bit_length() - 1

    def steps(rank: Ints) -> Iterator[Step]:
        fold = _Fold(rank, size)
        everything = Span(0, blocks * segments)
        yield from fold.hand_over(everything, reduce=True)
        lows = [np.zeros_like(fold.place)]  # first block of the part that each rank still reduces, round by round
        for k in range(fold.rounds):
            half = blocks >> k + 1
            bit = fold.place >> k & 1
            kept_low, sent_low = lows[-1] + bit * half, lows[-1] + (1 - bit) * half
            yield from _exchange_in_segments(fold.partner(1 << k), sent_low, kept_low, half, segments, reduce=True)
            lows.append(kept_low)
        yield Finish(Span(lows[-1] * segments, (lows[-1] + fold.active) * segments))
        for k in reversed(range(fold.rounds)):
            half = blocks >> k + 1
            bit = fold.place >> k & 1
            reduced_low, missing_low = lows[k] + bit * half, lows[k] + (1 - bit) * half
            yield from _exchange_in_segments(
                fold.partner(1 << k), reduced_low, missing_low, half, segments, reduce=False
            )
        yield from fold.hand_back(everything)

    goal = all_reduce_of(size, blocks)
    return Program("halving all_reduce", size, goal, steps, nodes, blocks=blocks, segments=segments)


def _exchange_in_segments(
    peer: Ints, sent: Ints, received: Ints, blocks: int, segments: int, *, reduce: bool
) -> Iterator[Step]:
    """Yield one exchange of `blocks` blocks with `peer`, cut into `segments` messages."""
    for s in range(segments):
        lo, hi = blocks * s, blocks * (s + 1)
        leaving = Span(sent * segments + lo, sent * segments + hi)
        arriving = Span(received * segments + lo, received * segments + hi)
        yield Exchange(peer, leaving, peer, arriving, reduce)


def doubling_all_reduce(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """Build an all-reduce by recursive doubling: partners at distance 1, 2, 4, ... exchange and add the whole vector.

    It has the fewest rounds, about log2 N, but sends the whole vector in each. Use it for vectors too short to halve.

    Args:
        size: Number of ranks N.
        nodes: Node number of each rank; by default all ranks are on one node.

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
    """Build a reduce-scatter by recursive halving, starting with the most distant partner.

    With this order of partners, each rank that takes part ends with the blocks of its own place (see `_Fold`).

    Args:
        size: Number of ranks.
        nodes: Node number of each rank; by default all ranks are on one node.

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
    """Build an all-gather by recursive doubling: the number of blocks on a rank doubles in each round.

    Args:
        size: Number of ranks.
        nodes: Node number of each rank; by default all ranks are on one node.

    Reference:
        Thakur, Rabenseifner and Gropp 2005, see `halving_all_reduce`.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        fold = _Fold(rank, size)
        block = rank | 1
        yield from fold.hand_over(Span(block, block + 1), reduce=False)
        for k in range(fold.rounds):
            num_blocks = 1 << k
            group = fold.place >> k << k
            peer = fold.partner(num_blocks)
            yield Exchange(peer, fold.blocks(group, num_blocks), peer, fold.blocks(group ^ num_blocks, num_blocks))
        yield from fold.hand_back(Span(0, size))

    return Program("doubling all_gather", size, all_gather_of(size), steps, nodes, blocks=size)
