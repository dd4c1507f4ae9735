"""Direct exchange: every rank gets every contribution to its block and reduces them itself.

As many bytes as the ring, N-1 messages to N-1 different ranks, and no partial sums on the wire: the sum can
be taken in any order (the fixed tree of reproducible sums) and in a wider type than the messages (16-bit).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mpitrain.comm.programs.goals import all_reduce_of, reduce_scatter_of
from mpitrain.comm.programs.program import INBOX, Combine, Copy, Exchange, Finish, Ints, Program, Span, Step


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
