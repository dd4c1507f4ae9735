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
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mpitrain.comm.algorithms import messages
from mpitrain.comm.programs.program import (
    CALLER,
    INBOX,
    NONE,
    SLOT,
    WORK,
    Await,
    Combine,
    Copy,
    Exchange,
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


# -- Two levels: shared memory inside a node, messages between nodes, every local rank carrying its own slice.
#
# The vector is cut into as many slices as the smallest node has ranks. Local rank l of each node sums its
# node's slice l (as above), exchanges it with the other local ranks l, directly or round a ring of the nodes,
# then writes the result to its neighbours. All local ranks drive the network at once, each with 1/L of the bytes:
#
#     node A   rank 0: slice 0 <-> node B's local 0      between nodes 2(M-1)/M of the vector per node,
#              rank 1: slice 1 <-> node B's local 1      shared out over its L ranks
#
# Directly: node p gets part p of a slice from every node, adds these (a reduce-scatter by pairwise exchange) and sends
# the sum to all nodes. That is as many bytes as round a ring. In each round a rank has one partner to send to and one
# to receive from, and no message waits for what another node sent.


class Places:
    """Where each rank is.

    Attributes:
        node: The number of each rank's node, in the order in which nodes appear.
        nodes: Number of nodes.
        most, least: Number of ranks on the fullest and on the emptiest node.
        members: The ranks of each node by their local ranks; NONE where it has fewer than the fullest.
        local: The local rank of each rank.
        count: Number of ranks on each rank's node.
    """

    def __init__(self, nodes: tuple[int, ...]) -> None:
        numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        self.node = np.array([numbers[node] for node in nodes])
        self.nodes = len(numbers)
        counts = np.bincount(self.node, minlength=self.nodes)
        self.most, self.least = int(counts.max()), int(counts.min())
        self.members = np.full((self.nodes, self.most), NONE)
        self.local = np.zeros(len(nodes), dtype=int)
        for rank, node in enumerate(self.node):
            self.local[rank] = np.count_nonzero(self.node[:rank] == node)
            self.members[node, self.local[rank]] = rank
        self.count = counts[self.node]

    def neighbour(self, rank: Ints, t: int) -> Ints:
        """The rank that is t places after `rank` round its node, or NONE if the node has no more than t ranks."""
        count = self.count[rank]
        return np.where(t < count, self.members[self.node[rank], (self.local[rank] + t) % count], NONE)


@dataclass(frozen=True)
class _Slices:
    """The steps of ranks, each of which carries its slice between nodes. Blocks are slice * number of nodes + part."""

    places: Places
    rank: Ints
    segments: int
    tree: bool

    @property
    def parts(self) -> int:
        return self.places.nodes

    @property
    def node(self) -> Ints:
        return self.places.node[self.rank]

    @cached_property
    def carries(self) -> Ints:
        """True for a rank that carries a slice: a node may have more ranks than there are slices."""
        return self.places.local[self.rank] < self.places.least

    @cached_property
    def base(self) -> Ints:
        """The first block of the rank's slice."""
        return np.where(self.carries, self.places.local[self.rank], 0) * self.parts

    def block(self, part: Ints) -> Span:
        """All chunks of a part of the slice."""
        first = (self.base + part) * self.segments
        return Span(first, np.where(self.carries, first + self.segments, first))

    def chunk(self, part: Ints, s: int) -> Span:
        """One chunk of a part of the slice."""
        first = (self.base + part) * self.segments + s
        return Span(first, np.where(self.carries, first + 1, first))

    def peer(self, of_node: Ints) -> Ints:
        """The rank of a node that carries the same slice."""
        local = np.where(self.carries, self.places.local[self.rank], 0)
        return np.where(self.carries, self.places.members[of_node, local], NONE)

    def combine(self, part: Ints, s: int) -> Step:
        """Sum a chunk over the ranks of the node."""
        places, rank, span, order = self.places, self.rank, self.chunk(part, s), range(self.places.most)
        if self.tree:
            members = places.members
            owners = [np.where(t < places.count[rank], members[self.node, t], NONE) for t in order]
        else:
            owners = [places.neighbour(rank, t) for t in order]
        return Combine(span, tuple((owner, span) for owner in owners), self.tree)

    def publish(self, part: Ints, s: int) -> Iterator[Step]:
        """Write a chunk to the other ranks of the node."""
        for t in range(1, self.places.most):
            to = np.where(self.carries, self.places.neighbour(self.rank, t), NONE)
            yield Copy(to, self.chunk(part, s), self.rank, self.chunk(part, s))

    def on_ring(self, step: Exchange) -> Exchange:
        """A ring step between nodes, moved to this rank's slice and to ranks."""
        offset = self.base * self.segments
        send, recv = (Span(span.lo + offset, span.hi + offset) for span in (step.send, step.recv))
        return Exchange(self.peer(step.to), send, self.peer(step.source), recv, step.reduce)

    def round_the_ring(self) -> Iterator[Step]:
        """Sums and results go from node to node round a ring."""
        node, parts, segments = self.node, self.parts, self.segments
        # a part is summed over the node just before the ring needs it, so that summing overlaps sending
        yield from (self.combine((node - 1) % parts, s) for s in range(segments))
        for t, step in enumerate(messages.ring_reduce_scatter_steps(node, parts, segments)):
            if isinstance(step, Finish):
                yield Finish(self.block(node))
                continue
            if t % segments == 0:
                yield from (self.combine((node - t // segments - 2) % parts, s) for s in range(segments))
            assert isinstance(step, Exchange)
            yield self.on_ring(step)
        for s in range(segments):
            yield from self.publish(node, s)
        for t, step in enumerate(messages.ring_all_gather_steps(node, parts, segments)):
            assert isinstance(step, Exchange)
            yield self.on_ring(step)
            yield from self.publish((node - t // segments - 1) % parts, t % segments)

    def straight(self) -> Iterator[Step]:
        """Send each node's share of a part directly to the node that sums it, and the sum directly to all nodes."""
        yield from self.sum_directly(0)
        for s in range(self.segments):
            if s + 1 < self.segments:
                yield from self.sum_directly(s + 1)
            yield from self.spread_directly(s)

    def sum_directly(self, s: int) -> Iterator[Step]:
        """Chunk s of each part is summed on its node."""
        node, parts = self.node, self.parts
        for t in range(1, parts):
            yield self.combine((node + t) % parts, s)
        yield self.combine(node, s)
        for t in range(1, parts):
            to, source = (node + t) % parts, (node - t) % parts
            yield Exchange(self.peer(to), self.chunk(to, s), self.peer(source), self.chunk(node, s), reduce=True)

    def spread_directly(self, s: int) -> Iterator[Step]:
        """The sums of chunk s go to all nodes, and there to all ranks."""
        node, parts = self.node, self.parts
        yield Finish(self.chunk(node, s))
        for t in range(1, parts):
            to, source = (node + t) % parts, (node - t) % parts
            yield Exchange(self.peer(to), self.chunk(node, s), self.peer(source), self.chunk(source, s))
            if t == 1:
                yield from self.publish(node, s)
            yield from self.publish(source, s)


def two_level_all_reduce(
    nodes: tuple[int, ...], segments: int = 1, *, direct: bool = False, tree: bool = False
) -> Program:
    """All-reduce in the shared memory of each node, and by messages between nodes.

    Args:
        nodes: The node of each rank.
        segments: Chunks of a part of a slice, which are sent one after the other.
        direct: Send what a node has of a part straight to the node that sums it, and the sum straight to all, instead
            of both round a ring of the nodes: as many bytes, but no message waits for what another node sent.
        tree: Sum over the ranks of a node in the order of a fixed binary tree.
    """
    places = Places(nodes)
    blocks = places.least * places.nodes

    def steps(rank: Ints) -> Iterator[Step]:
        slices = _Slices(places, rank, segments, tree)
        yield Fence()
        yield from slices.straight() if direct and places.nodes > 1 else slices.round_the_ring()
        yield Fence()

    goal = all_reduce_of(len(nodes), blocks)
    return Program("two_level all_reduce", len(nodes), goal, steps, nodes, blocks=blocks, segments=segments)
