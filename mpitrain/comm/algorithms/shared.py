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
    Combine,
    Copy,
    Fence,
    Finish,
    Ints,
    Program,
    Signal,
    Span,
    Step,
    all_gather_of,
    all_gather_to_caller_of,
    all_reduce_of,
    broadcast_of,
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
    """All-reduce in shared memory: each rank sums its slice of all vectors and writes the sum into all of them.

    Args:
        size: Number of ranks, all on one node.
        segments: Chunks of a slice; one is summed and written while it is in the cache.
        tree: Sum in the order of a fixed binary tree over the ranks; else each rank begins with its own vector.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for s in range(segments):
            chunk = rank * segments + s
            yield _combine(rank, size, chunk, tree)
            yield Finish(_span(chunk))
            for t in range(1, size):
                yield Copy((rank + t) % size, _span(chunk), rank, _span(chunk))
        yield Fence()

    return Program("shared all_reduce", size, all_reduce_of(size, size), steps, blocks=size, segments=segments)


def _own_block(rank: Ints, size: int, segments: int, tree: bool) -> Iterator[Step]:
    for s in range(segments):
        yield _combine(rank, size, rank * segments + s, tree)
    yield Finish(Span(rank * segments, (rank + 1) * segments))


def shared_reduce_scatter(size: int, segments: int = 1, *, tree: bool = False) -> Program:
    """Reduce-scatter in shared memory: each rank sums its own block of all vectors into its own vector.

    Args:
        size: Number of ranks, all on one node.
        segments: Chunks of a block, which are summed one after the other.
        tree: Sum in the order of a fixed binary tree over the ranks; else each rank begins with its own vector.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        yield from _own_block(rank, size, segments, tree)
        yield Fence()

    return Program("shared reduce_scatter", size, reduce_scatter_of(size), steps, blocks=size, segments=segments)


def deferred_reduce_scatter(size: int, segments: int = 1) -> Program:
    """Reduce-scatter in shared memory whose two fences are each a signal and a wait for it.

    Between signal and wait the caller does something else, see `runtime/split_phase.py`. With three vectors in turns it
    may fill one of them while it waits for another and the other ranks still read the third.

    Args:
        size: Number of ranks, all on one node.
        segments: Chunks of a block, which are summed one after the other.

    Reference:
        R. Gupta, "The fuzzy barrier: a mechanism for high speed synchronization of processors", ASPLOS III (1989).
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
    """All-gather by the caller itself: it fills its vector, the ranks meet, and it reads all vectors where they are.

    There is only one fence in a run, because two vectors are used in turns: whoever fills one again has been through
    the fence of the other, and so has everybody who read this one.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for owner in range(size):
            yield Copy(rank, _span(owner, CALLER), rank * 0 + owner, _span(owner))

    return Program("alternating all_gather", size, all_gather_to_caller_of(size), steps, blocks=size, vectors=2)


def node_copy(size: int) -> Program:
    """All-gather into one copy for all ranks of a node: each writes its block of it, they meet, and all read the whole.

    The caller makes the ranks meet before they write again. Where parameters are updated this is so, since the update
    needs gradients of all ranks.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        first = rank * 0
        yield Copy(first, _span(rank, SLOT), rank, _span(rank, CALLER))
        yield Fence()
        for block in range(size):
            yield Copy(rank, _span(block, CALLER), first, _span(block, SLOT))

    collective = all_gather_to_caller_of(size)
    return Program("node copy", size, collective, steps, blocks=size, slots=size, meets_between=True)


def shared_all_gather(size: int) -> Program:
    """All-gather in shared memory: each rank copies the other ranks' blocks from their vectors into its own."""

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for t in range(1, size):
            owner = (rank + t) % size
            yield Copy(rank, _span(owner), owner, _span(owner))
        yield Fence()

    return Program("shared all_gather", size, all_gather_of(size), steps, blocks=size)


def shared_broadcast(size: int, root: int) -> Program:
    """Broadcast in shared memory: each rank copies the root's vector into its own."""

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        yield Copy(np.where(rank == root, NONE, rank), _span(0), rank * 0 + root, _span(0))
        yield Fence()

    return Program("shared broadcast", size, broadcast_of(size, root), steps)


def shared_reduce(size: int, root: int, segments: int = 1, *, tree: bool = False) -> Program:
    """Reduce in shared memory: each rank sums one slice of all vectors and writes the sum into the root's vector.

    The other ranks' vectors stay as they were, since the sum is formed in the inbox.

    Args:
        size: Number of ranks, all on one node.
        root: The rank that gets the result.
        segments: Chunks of a slice, which are summed one after the other.
        tree: Sum in the order of a fixed binary tree over the ranks; else each rank begins with its own vector.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for s in range(segments):
            chunk = rank * segments + s
            yield Combine(Span(0, 1, INBOX), _combine(rank, size, chunk, tree).parts, tree)
            yield Finish(Span(0, 1, INBOX))
            yield Copy(rank * 0 + root, _span(chunk), rank, Span(0, 1, INBOX))
        yield Fence()

    return Program("shared reduce", size, reduce_of(size, size, root), steps, blocks=size, segments=segments, inbox=1)


def staged_all_reduce(size: int, pieces: int, *, tree: bool = False) -> Program:
    """All-reduce of vectors outside an arena: they pass in pieces through staging slots, which the node shares.

    Block p * size + q is slice q of piece p, which rank q sums.

    Args:
        size: Number of ranks, all on one node.
        pieces: Pieces of the vector that pass through the slots one after the other.
        tree: Sum in the order of a fixed binary tree over the ranks; else each rank begins with its own vector.
    """

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

    blocks = pieces * size
    return Program("staged all_reduce", size, all_reduce_of(size, blocks), steps, blocks=blocks, slots=_DEPTH * size)
