"""Direct reductions in the memory that the ranks of a node share: no messages, about one memcpy.

In an arena every rank's vector can be read by its neighbours. Each rank reduces one slice of all vectors
and writes the result into every vector; slices are cut into chunks that stay in the cache between being
summed and being written. Two ranks, four chunks; between the fences rank 0 touches only its columns:

                slice 0         slice 1
    vector 0   [ s  s ]        [ .  . ]      s: rank 0 sums the two, writes both; then rank 1 likewise
    vector 1   [ s  s ]        [ .  . ]

Vectors outside an arena can pass through staging slots, three deep: while piece p is copied out of slot p%3,
piece p+1 is summed and piece p+2 copied in, with one fence a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mpitrain.comm.programs.program import (
    CALLER,
    INBOX,
    NONE,
    SLOT,
    WORK,
    Await,
    Collective,
    Combine,
    Copy,
    Fence,
    Finish,
    Goal,
    Ints,
    Program,
    Signal,
    Span,
    Step,
    all_gather_of,
    all_reduce_of,
    broadcast_of,
    one_node,
    reduce_of,
    reduce_scatter_of,
)

COMPLETE, READ = "complete", "read"  # events of a deferred reduction
_DEPTH = 3  # staging slots: one being read, one being summed, one being filled


def _span(chunk: Ints, memory: str = WORK) -> Span:
    return Span(chunk, chunk + 1, memory)


def _combine(rank: Ints, size: int, chunk: Ints, tree: bool) -> Combine:
    """Sum everybody's `chunk` into this rank's: own first, or as the fixed tree over ranks."""
    first = rank * 0 if tree else rank
    owners = tuple((first + t) % size for t in range(size))
    return Combine(_span(chunk), tuple((owner, _span(chunk)) for owner in owners), tree)


def shared_all_reduce(size: int, segments: int = 1, *, tree: bool = False) -> Program:
    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for s in range(segments):
            chunk = rank * segments + s
            yield _combine(rank, size, chunk, tree)
            yield Finish(_span(chunk))
            for t in range(1, size):
                yield Copy((rank + t) % size, _span(chunk), rank, _span(chunk))
        yield Fence()

    return Program(
        "shared all_reduce", size, all_reduce_of(size, size), steps, one_node(size), blocks=size, segments=segments
    )


def _own_block(rank: Ints, size: int, segments: int, tree: bool) -> Iterator[Step]:
    for s in range(segments):
        yield _combine(rank, size, rank * segments + s, tree)
    yield Finish(Span(rank * segments, (rank + 1) * segments))


def shared_reduce_scatter(size: int, segments: int = 1, *, tree: bool = False) -> Program:
    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        yield from _own_block(rank, size, segments, tree)
        yield Fence()

    return Program(
        "shared reduce_scatter", size, reduce_scatter_of(size), steps, one_node(size), blocks=size, segments=segments
    )


def deferred_reduce_scatter(size: int, segments: int = 1) -> Program:
    """Each fence in two halves, between which the caller does something else; see `runtime/split_phase.py`.

    Three vectors in turns let it fill one while it waits for another and the others still read the third.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Signal(COMPLETE)
        yield Await(COMPLETE)
        yield from _own_block(rank, size, segments, False)
        yield Signal(READ)
        yield Await(READ)

    made = shared_reduce_scatter(size, segments)
    return replace(made, name="deferred reduce_scatter", steps=steps, vectors=3)


def alternating_all_gather(size: int) -> Program:
    """The caller fills its own vector, the ranks meet, it reads all of them where they are.

    There is one fence a run, because the vectors are two in turns: whoever fills one again has been through the fence
    of the other, and so has everybody who read this one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for owner in range(size):
            yield Copy(rank, _span(owner, CALLER), rank * 0 + owner, _span(owner))

    return Program("alternating all_gather", size, _read_by_caller(size), steps, one_node(size), size, vectors=2)


def node_copy(size: int) -> Program:
    """One copy for all ranks of a node: each writes its own block of it, they meet, all read the whole.

    Before they write again the caller makes them meet: who updates parameters has waited for gradients of all.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        first = rank * 0
        yield Copy(first, _span(rank, SLOT), rank, _span(rank, CALLER))
        yield Fence()
        for block in range(size):
            yield Copy(rank, _span(block, CALLER), first, _span(block, SLOT))

    collective, nodes = _read_by_caller(size), one_node(size)
    return Program("node copy", size, collective, steps, nodes, blocks=size, slots=size, meets_between=True)


def _read_by_caller(size: int) -> Collective:
    """An all-gather whose result the caller reads where it is."""
    ends = [Goal(CALLER, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", all_gather_of(size).holds, lambda r: ends)


def shared_all_gather(size: int) -> Program:
    """Each rank reads its neighbours' blocks."""

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for t in range(1, size):
            owner = (rank + t) % size
            yield Copy(rank, _span(owner), owner, _span(owner))
        yield Fence()

    return Program("shared all_gather", size, all_gather_of(size), steps, one_node(size), blocks=size)


def shared_broadcast(size: int, root: int) -> Program:
    """Each rank reads the root's vector."""

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        yield Copy(np.where(rank == root, NONE, rank), _span(0), rank * 0 + root, _span(0))
        yield Fence()

    return Program("shared broadcast", size, broadcast_of(size, root), steps, one_node(size))


def shared_reduce(size: int, root: int, segments: int = 1, *, tree: bool = False) -> Program:
    """Each rank sums one slice in its inbox and writes it into the root's vector; the others' stay as they were."""

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for s in range(segments):
            chunk = rank * segments + s
            yield Combine(Span(0, 1, INBOX), _combine(rank, size, chunk, tree).parts, tree)
            yield Finish(Span(0, 1, INBOX))
            yield Copy(rank * 0 + root, _span(chunk), rank, Span(0, 1, INBOX))
        yield Fence()

    return Program(
        "shared reduce",
        size,
        reduce_of(size, size, root),
        steps,
        one_node(size),
        blocks=size,
        segments=segments,
        inbox=1,
    )


def staged_all_reduce(size: int, pieces: int, *, tree: bool = False) -> Program:
    """All-reduce of vectors outside an arena, through the slots; block p * size + q is slice q of piece p."""

    def slot(piece: int, q: Ints) -> Span:
        return _span(piece % _DEPTH * size + q, SLOT)

    def fill(rank: Ints, piece: int) -> Iterator[Step]:
        for t in range(1, size):
            q = (rank + t) % size
            yield Copy(rank, slot(piece, q), rank, _span(piece * size + q))

    def reduce(rank: Ints, piece: int) -> Iterator[Step]:
        mine = _span(piece * size + rank)
        if tree:  # parts in rank order, so the own slice goes through the slot as well
            yield Copy(rank, slot(piece, rank), rank, mine)
            parts = tuple((rank * 0 + q, slot(piece, rank)) for q in range(size))
        else:
            parts = ((rank, mine), *(((rank + t) % size, slot(piece, rank)) for t in range(1, size)))
        yield Combine(mine, parts, tree)
        yield Finish(mine)
        yield Copy(rank, slot(piece, rank), rank, mine)

    def drain(rank: Ints, piece: int) -> Iterator[Step]:
        for t in range(1, size):
            q = (rank + t) % size
            yield Copy(rank, _span(piece * size + q), q, slot(piece, q))

    def steps(rank: Ints) -> Iterator[Step]:
        yield from fill(rank, 0)
        yield Fence()
        for piece in range(pieces):
            yield from reduce(rank, piece)
            if piece + 1 < pieces:
                yield from fill(rank, piece + 1)
            yield Fence()
            yield from drain(rank, piece)
        yield Fence()  # for the next vector, which may be of another size and cut the slots differently

    return Program(
        "staged all_reduce",
        size,
        all_reduce_of(size, pieces * size),
        steps,
        one_node(size),
        blocks=pieces * size,
        slots=_DEPTH * size,
    )
