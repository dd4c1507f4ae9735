"""Ring algorithms: bandwidth-optimal, neighbours only (Patarasu & Yuan, J. Parallel Distrib. Comput. 69, 2009).

Rank r always sends to r+1 and receives from r-1. Reduce-scatter on 4 ranks; rows are ranks, columns rounds,
a cell is the block received and added (the block sent in the next round):

            t=0  t=1  t=2
    rank 0   2    1    0     -> ends with block 0 complete
    rank 1   3    2    1
    rank 2   0    3    2
    rank 3   1    0    3

An all-gather passes the complete blocks on round the same ring; both together are the all-reduce, which
sends 2(N-1)/N of the buffer per rank in 2(N-1) rounds. Blocks are cut into segments: while one segment is
being added the next is already on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mpitrain.comm.programs.goals import all_gather_of, all_reduce_of, reduce_scatter_of
from mpitrain.comm.programs.program import Exchange, Finish, Ints, Program, Span, Step


def _block(index: Ints, segments: int) -> Span:
    return Span(index * segments, (index + 1) * segments)


def reduce_scatter_steps(rank: Ints, size: int, segments: int) -> Iterator[Step]:
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


def all_gather_steps(rank: Ints, size: int, segments: int) -> Iterator[Step]:
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
    steps = partial(reduce_scatter_steps, size=size, segments=segments)
    return Program("ring reduce_scatter", size, reduce_scatter_of(size), steps, nodes, blocks=size, segments=segments)


def ring_all_gather(size: int, segments: int = 1, nodes: tuple[int, ...] = ()) -> Program:
    """All-gather round a ring: every rank ends with every rank's block.

    Args:
        size: Number of ranks.
        segments: Chunks of a block; one is passed on while the next is on its way.
        nodes: The node of each rank; without it all are on one.
    """
    steps = partial(all_gather_steps, size=size, segments=segments)
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
        yield from reduce_scatter_steps(rank, size, segments)
        yield from all_gather_steps(rank, size, segments)

    return Program("ring all_reduce", size, all_reduce_of(size, size), steps, nodes, blocks=size, segments=segments)
