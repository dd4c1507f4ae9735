"""Binomial trees: fewest rounds for small messages, and the canonical order of reproducible sums.

Ranks are renumbered so that the root is 0. A reduction joins subtrees of 1, 2, 4, … ranks, so the sum is
always ((0+1)+(2+3))+((4+5)+…): the order of `program.tree_order`. A broadcast is the same tree upside down.
8 ranks, an arrow per message:

    round 0   1>0   3>2   5>4   7>6
    round 1   2>0         6>4
    round 2   4>0
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from mpitrain.comm.programs.goals import all_reduce_of, broadcast_of, reduce_of
from mpitrain.comm.programs.program import NONE, Exchange, Finish, Ints, Program, Span, Step


def _rounds(size: int) -> range:
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
        for k in _rounds(size):
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
        for k in reversed(_rounds(size)):
            bit = 1 << k
            sends = (place % (2 * bit) == 0) & (place + bit < size)
            receives = place % (2 * bit) == bit
            to = np.where(sends, (place + bit + root) % size, NONE)
            source = np.where(receives, (place - bit + root) % size, NONE)
            yield Exchange(to, part, source, part)


def _finish_at(rank: Ints, root: int, segments: int) -> Finish:
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
        yield _finish_at(rank, root, segments)

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
        yield _finish_at(rank, 0, segments)
        yield from broadcast_steps(rank, size, 0, segments)

    return Program("tree all_reduce", size, all_reduce_of(size, 1), steps, nodes, segments=segments)
