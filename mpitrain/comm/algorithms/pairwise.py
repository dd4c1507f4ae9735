"""Direct exchange: one message between every two ranks.

To reduce, every rank gets every contribution to its block and reduces them itself. As many bytes as the ring, N-1
messages to N-1 different ranks, and no partial sums on the wire: the sum can be taken in any order (the fixed tree of
reproducible sums) and in a wider type than the messages (16-bit).

Gather, scatter and all-to-all: for data too large for the library's calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from mpitrain.comm.programs.goals import all_reduce_of, all_to_all_of, gather_of, reduce_scatter_of, scatter_of
from mpitrain.comm.programs.program import INBOX, NONE, Combine, Copy, Exchange, Finish, Ints, Program, Span, Step


def _span(block: Ints) -> Span:
    return Span(block, block + 1)


def _cell(rank: Ints) -> Span:
    return Span(rank, rank + 1, INBOX)


def reduce_scatter_steps(rank: Ints, size: int) -> Iterator[Step]:
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
    steps = partial(reduce_scatter_steps, size=size)
    return Program("pairwise reduce_scatter", size, reduce_scatter_of(size), steps, nodes, blocks=size, inbox=size)


def pairwise_all_reduce(size: int, nodes: tuple[int, ...] = ()) -> Program:
    """All-reduce by a pairwise reduce-scatter, after which each rank sends its block to every other.

    Args:
        size: Number of ranks.
        nodes: The node of each rank; without it all are on one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield from reduce_scatter_steps(rank, size)
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
