"""Reductions in the memory that the ranks of a node share: no messages inside the node, about the time of one memcpy.

In an arena, every rank can read and write its neighbours' vectors. Each rank reduces one slice of all vectors and
writes the result into every vector. Slices are cut into chunks that stay in the cache between being summed and being
written. Two ranks, two slices of two chunks:

                slice 0         slice 1
    vector 0   [ 0  0 ]        [ 1  1 ]      Between the two fences, rank 0 touches only the chunks marked 0, and
    vector 1   [ 0  0 ]        [ 1  1 ]      rank 1 only those marked 1: it sums both vectors there and writes both.

Vectors outside an arena can pass through three staging slots. Piece p, which is chunk p of every slice, is copied out
of slot p % 3 while piece p + 1 is summed and piece p + 2 is copied in, with one fence per piece. Each element is summed
by the same rank, and so in the same order, as in an arena.
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
    """Return the step that sums the `chunk` of all ranks into this rank's vector.

    With `tree`, the sum follows the fixed tree over ranks; otherwise it starts with this rank's vector.
    """
    first = rank * 0 if tree else rank
    owners = tuple((first + t) % size for t in range(size))
    return Combine(_span(chunk), tuple((owner, _span(chunk)) for owner in owners), tree)


def shared_all_reduce(size: int, segments: int = 1, *, tree: bool = False) -> Program:
    """Build an all-reduce in shared memory: each rank sums one slice of all vectors and writes it into all of them.

    Args:
        size: Number of ranks, all on one node.
        segments: Number of chunks per slice; each chunk is summed and written while it is in the cache.
        tree: If true, sum in the order of a fixed binary tree over the ranks; otherwise each rank begins with its own
            vector.
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


def _reduce_block(rank: Ints, size: int, segments: int, tree: bool) -> Iterator[Step]:
    """Yield the steps that sum this rank's block over all vectors."""
    for s in range(segments):
        yield _combine(rank, size, rank * segments + s, tree)
    yield Finish(Span(rank * segments, (rank + 1) * segments))


def shared_reduce_scatter(size: int, segments: int = 1, *, tree: bool = False) -> Program:
    """Build a reduce-scatter in shared memory: each rank sums its block of all vectors into its own vector.

    Args:
        size: Number of ranks, all on one node.
        segments: Number of chunks per block; they are summed one after another.
        tree: If true, sum in the order of a fixed binary tree over the ranks; otherwise each rank begins with its own
            vector.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        yield from _reduce_block(rank, size, segments, tree)
        yield Fence()

    return Program("shared reduce_scatter", size, reduce_scatter_of(size), steps, blocks=size, segments=segments)


def deferred_reduce_scatter(size: int, segments: int = 1) -> Program:
    """Build a reduce-scatter in shared memory that splits each of its two fences into a signal and a wait.

    Between a signal and its wait, the caller can do other work; see `runtime/split_phase.py`. The caller uses three
    vectors in turn: it can fill one and wait for another while other ranks still read the third.

    Args:
        size: Number of ranks, all on one node.
        segments: Number of chunks per block; they are summed one after another.

    Reference:
        R. Gupta, "The fuzzy barrier: a mechanism for high speed synchronization of processors", ASPLOS III (1989).
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Signal(COMPLETE)
        yield Await(COMPLETE)
        yield from _reduce_block(rank, size, segments, False)
        yield Signal(READ)
        yield Await(READ)

    program = shared_reduce_scatter(size, segments)
    return replace(program, name="deferred reduce_scatter", steps=steps, vectors=3)


def alternating_all_gather(size: int) -> Program:
    """Build an all-gather in which the caller reads the blocks directly from the vectors of all ranks.

    Each rank fills its vector, the ranks meet at a fence, and each rank reads all vectors in place. A run needs only
    one fence because the caller alternates between two vectors: before a rank fills one again, all ranks have passed
    the fence of the other, so nobody still reads the first.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for owner in range(size):
            yield Copy(rank, _span(owner, CALLER), rank * 0 + owner, _span(owner))

    return Program("alternating all_gather", size, all_gather_to_caller_of(size), steps, blocks=size, vectors=2)


def node_copy(size: int) -> Program:
    """Build an all-gather into one copy per node: each rank writes its block, the ranks meet, and all read the copy.

    The caller must make the ranks meet before they write again. A parameter update does so, because it needs the
    gradients of all ranks.
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
    """Build an all-gather in shared memory: each rank copies the other ranks' blocks into its own vector."""

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        for t in range(1, size):
            owner = (rank + t) % size
            yield Copy(rank, _span(owner), owner, _span(owner))
        yield Fence()

    return Program("shared all_gather", size, all_gather_of(size), steps, blocks=size)


def shared_broadcast(size: int, root: int) -> Program:
    """Build a broadcast in shared memory: each rank copies the root's vector into its own.

    Args:
        size: Number of ranks, all on one node.
        root: Rank that has the vector.
    """

    def steps(rank: Ints) -> Iterator[Step]:
        yield Fence()
        yield Copy(np.where(rank == root, NONE, rank), _span(0), rank * 0 + root, _span(0))
        yield Fence()

    return Program("shared broadcast", size, broadcast_of(size, root), steps)


def shared_reduce(size: int, root: int, segments: int = 1, *, tree: bool = False) -> Program:
    """Build a reduce in shared memory: each rank sums one slice of all vectors into the root's vector.

    The vectors of the other ranks do not change, because the sum is computed in the inbox.

    Args:
        size: Number of ranks, all on one node.
        root: Rank that receives the result.
        segments: Number of chunks per slice; they are summed one after another.
        tree: If true, sum in the order of a fixed binary tree over the ranks; otherwise each rank begins with its own
            vector.
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


def staged_all_reduce(size: int, segments: int, *, tree: bool = False) -> Program:
    """Build an all-reduce for vectors outside an arena: they pass in pieces through staging slots that the node shares.

    Piece p consists of chunk p of every slice; rank q sums slice q, as in `shared_all_reduce`.

    Args:
        size: Number of ranks, all on one node.
        segments: Number of chunks per slice, and so of pieces; they pass through the slots one after another.
        tree: If true, sum in the order of a fixed binary tree over the ranks; otherwise each rank begins with its own
            vector.
    """

    def chunk(piece: int, q: Ints) -> Span:
        return _span(q * segments + piece)

    def slot(piece: int, q: Ints) -> Span:
        return _span(piece % _DEPTH * size + q, SLOT)

    def fill(rank: Ints, piece: int) -> Iterator[Step]:
        # copy a piece of this rank's vector into its slot, except the slice that the rank sums itself
        for t in range(1, size):
            q = (rank + t) % size
            yield Copy(rank, slot(piece, q), rank, chunk(piece, q))

    def reduce(rank: Ints, piece: int) -> Iterator[Step]:  # sum this rank's slice of a piece over all ranks
        mine = chunk(piece, rank)
        if tree:  # operands in order of rank, so this rank's slice goes through the slot too
            yield Copy(rank, slot(piece, rank), rank, mine)
            parts = tuple((rank * 0 + q, slot(piece, rank)) for q in range(size))
        else:
            parts = ((rank, mine), *(((rank + t) % size, slot(piece, rank)) for t in range(1, size)))
        yield Combine(mine, parts, tree)
        yield Finish(mine)
        yield Copy(rank, slot(piece, rank), rank, mine)

    def drain(rank: Ints, piece: int) -> Iterator[Step]:
        # copy the other ranks' sums of a piece into this rank's vector
        for t in range(1, size):
            q = (rank + t) % size
            yield Copy(rank, chunk(piece, q), q, slot(piece, q))

    def steps(rank: Ints) -> Iterator[Step]:
        yield from fill(rank, 0)
        yield Fence()
        for piece in range(segments):
            yield from reduce(rank, piece)
            if piece + 1 < segments:
                yield from fill(rank, piece + 1)
            yield Fence()
            yield from drain(rank, piece)
        yield Fence()  # the next vector may have another size, and then cuts the slots differently

    goal, slots = all_reduce_of(size, size), _DEPTH * size
    return Program("staged all_reduce", size, goal, steps, blocks=size, segments=segments, slots=slots)


# -- Two levels: shared memory inside a node, messages between nodes; each local rank communicates its own slice.
#
# The vector is cut into as many slices as the smallest node has ranks. Local rank l of each node sums slice l over its
# node (as above), exchanges it with local rank l of the other nodes, directly or along a ring of the nodes, then writes
# the result into its neighbours' vectors. All L local ranks use the network at once, each for 1/L of the bytes. With M
# nodes, each node sends 2(M-1)/M of the vector in total:
#
#     node A, local rank 0: slice 0  <->  node B, local rank 0
#     node A, local rank 1: slice 1  <->  node B, local rank 1
#
# Direct exchange: node p receives part p of a slice from every node, adds the parts (a reduce-scatter by pairwise
# exchange) and sends the sum to all nodes. Each node sends as many bytes as on a ring. In each round a rank sends to
# one partner and receives from one, and no message has to wait for data from a third node.


class Places:
    """Placement of ranks on nodes.

    Attributes:
        node: Node number of each rank; nodes are numbered in the order in which they first appear.
        nodes: Number of nodes.
        max_ranks, min_ranks: Number of ranks on the fullest and on the emptiest node.
        members: Ranks of each node by local rank, shape (nodes, max_ranks); NONE where a node has fewer ranks.
        local: Local rank of each rank.
        count: Number of ranks on the node of each rank.
    """

    def __init__(self, nodes: tuple[int, ...]) -> None:
        numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        self.node = np.array([numbers[node] for node in nodes])
        self.nodes = len(numbers)
        counts = np.bincount(self.node, minlength=self.nodes)
        self.max_ranks, self.min_ranks = int(counts.max()), int(counts.min())
        self.members = np.full((self.nodes, self.max_ranks), NONE)
        self.local = np.zeros(len(nodes), dtype=int)
        for rank, node in enumerate(self.node):
            self.local[rank] = np.count_nonzero(self.node[:rank] == node)
            self.members[node, self.local[rank]] = rank
        self.count = counts[self.node]

    def neighbour(self, rank: Ints, t: int) -> Ints:
        """Return the rank that is t places after `rank` on its node, wrapping around.

        Args:
            rank: A rank, or an array of ranks.
            t: Number of places. If the node has no more than t ranks, the result is NONE.
        """
        count = self.count[rank]
        return np.where(t < count, self.members[self.node[rank], (self.local[rank] + t) % count], NONE)


@dataclass(frozen=True)
class _Slices:
    """Steps of a two-level all-reduce for ranks that each communicate one slice between nodes.

    Block s * M + p is part p of slice s, where M is the number of nodes.

    Attributes:
        places: Placement of the ranks.
        rank: This rank, or an array of all ranks.
        segments: Number of chunks per part.
        tree: If true, sum over the ranks of a node in the order of a fixed binary tree.
    """

    places: Places
    rank: Ints
    segments: int
    tree: bool

    @property
    def parts(self) -> int:
        """Number of parts of a slice: one per node."""
        return self.places.nodes

    @property
    def node(self) -> Ints:
        """Node number of the rank."""
        return self.places.node[self.rank]

    @cached_property
    def carries(self) -> Ints:
        """True for a rank that communicates a slice; a node may have more ranks than there are slices."""
        return self.places.local[self.rank] < self.places.min_ranks

    @cached_property
    def base(self) -> Ints:
        """Number of the first block of the rank's slice."""
        return np.where(self.carries, self.places.local[self.rank], 0) * self.parts

    def block(self, part: Ints) -> Span:
        """Return all chunks of a part of the rank's slice."""
        first = (self.base + part) * self.segments
        return Span(first, np.where(self.carries, first + self.segments, first))

    def chunk(self, part: Ints, s: int) -> Span:
        """Return chunk `s` of a part of the rank's slice.

        Args:
            part: Number of the part.
            s: Number of the chunk in the part.
        """
        first = (self.base + part) * self.segments + s
        return Span(first, np.where(self.carries, first + 1, first))

    def peer(self, node: Ints) -> Ints:
        """Return the rank of a node that communicates the same slice as this rank."""
        local = np.where(self.carries, self.places.local[self.rank], 0)
        return np.where(self.carries, self.places.members[node, local], NONE)

    def combine(self, part: Ints, s: int) -> Step:
        """Return the step that sums a chunk over the ranks of the node.

        Args:
            part: Number of the part.
            s: Number of the chunk in the part.
        """
        places, rank, span, order = self.places, self.rank, self.chunk(part, s), range(self.places.max_ranks)
        if self.tree:
            members = places.members
            owners = [np.where(t < places.count[rank], members[self.node, t], NONE) for t in order]
        else:
            owners = [places.neighbour(rank, t) for t in order]
        return Combine(span, tuple((owner, span) for owner in owners), self.tree)

    def publish(self, part: Ints, s: int) -> Iterator[Step]:
        """Yield the steps that write a chunk into the vectors of the other ranks of the node.

        Args:
            part: Number of the part.
            s: Number of the chunk in the part.
        """
        for t in range(1, self.places.max_ranks):
            to = np.where(self.carries, self.places.neighbour(self.rank, t), NONE)
            yield Copy(to, self.chunk(part, s), self.rank, self.chunk(part, s))

    def translate_ring_step(self, step: Exchange) -> Exchange:
        """Translate a ring step between node numbers into a step between ranks, on chunks of this rank's slice."""
        offset = self.base * self.segments
        send, recv = (Span(span.lo + offset, span.hi + offset) for span in (step.send, step.recv))
        return Exchange(self.peer(step.to), send, self.peer(step.source), recv, step.reduce)

    def ring_steps(self) -> Iterator[Step]:
        """Yield the steps that pass partial sums, then results, from node to node along a ring."""
        node, parts, segments = self.node, self.parts, self.segments
        # sum each part over the node just before the ring needs it, so that summing overlaps sending
        yield from (self.combine((node - 1) % parts, s) for s in range(segments))
        for t, step in enumerate(messages.ring_reduce_scatter_steps(node, parts, segments)):
            if isinstance(step, Finish):
                yield Finish(self.block(node))
                continue
            if t % segments == 0:
                yield from (self.combine((node - t // segments - 2) % parts, s) for s in range(segments))
            assert isinstance(step, Exchange)
            yield self.translate_ring_step(step)
        for s in range(segments):
            yield from self.publish(node, s)
        for t, step in enumerate(messages.ring_all_gather_steps(node, parts, segments)):
            assert isinstance(step, Exchange)
            yield self.translate_ring_step(step)
            yield from self.publish((node - t // segments - 1) % parts, t % segments)

    def direct_steps(self) -> Iterator[Step]:
        """Yield the steps that send each part directly to the node that sums it, and its sum directly to all nodes."""
        yield from self.sum_directly(0)
        for s in range(self.segments):
            if s + 1 < self.segments:
                yield from self.sum_directly(s + 1)
            yield from self.spread_directly(s)

    def sum_directly(self, s: int) -> Iterator[Step]:
        """Yield the steps that sum chunk `s` of each part at the node of that part."""
        node, parts = self.node, self.parts
        for t in range(1, parts):
            yield self.combine((node + t) % parts, s)
        yield self.combine(node, s)
        for t in range(1, parts):
            to, source = (node + t) % parts, (node - t) % parts
            yield Exchange(self.peer(to), self.chunk(to, s), self.peer(source), self.chunk(node, s), reduce=True)

    def spread_directly(self, s: int) -> Iterator[Step]:
        """Yield the steps that send the sums of chunk `s` to all nodes, and there to all ranks."""
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
    """Build an all-reduce that uses shared memory inside each node and messages between nodes.

    Args:
        nodes: Node number of each rank.
        segments: Number of chunks per part of a slice; they are sent one after another.
        direct: If true, each node sends its share of a part directly to the node that sums it, and that node sends the
            sum directly to all nodes. Otherwise both go along a ring of the nodes. Both ways send the same number of
            bytes, but in the direct way no message has to wait for data from a third node.
        tree: If true, sum over the ranks of a node in the order of a fixed binary tree.
    """
    places = Places(nodes)
    blocks = places.min_ranks * places.nodes

    def steps(rank: Ints) -> Iterator[Step]:
        slices = _Slices(places, rank, segments, tree)
        yield Fence()
        yield from slices.direct_steps() if direct and places.nodes > 1 else slices.ring_steps()
        yield Fence()

    goal = all_reduce_of(len(nodes), blocks)
    return Program("two_level all_reduce", len(nodes), goal, steps, nodes, blocks=blocks, segments=segments)


def two_level_reduce_scatter(nodes: tuple[int, ...], segments: int = 1) -> Program:
    """Build a reduce-scatter that sums in shared memory inside each node and sends one message per pair of nodes.

    Local rank l of a node sums, over its node, the blocks of local rank l of every node. It sends each sum to the
    block's owner, which adds them up. A node sends (M-1)/M of the vector between M nodes.

    Args:
        nodes: Node number of each rank; all nodes have the same number of ranks.
        segments: Number of chunks per block; they are sent one after another.
    """
    places = Places(nodes)

    def steps(rank: Ints) -> Iterator[Step]:
        node, local, count = places.node[rank], places.local[rank], places.nodes
        owners = [places.neighbour(rank, t) for t in range(places.max_ranks)]
        yield Fence()
        for s in range(segments):
            for t in (*range(1, count), 0):  # its own block last, while the first sums could be sent
                span = _span(places.members[(node + t) % count, local] * segments + s)
                yield Combine(span, tuple((owner, span) for owner in owners), False)
            mine = _span(rank * segments + s)
            for t in range(1, count):
                to, source = (places.members[(node + i) % count, local] for i in (t, -t))
                yield Exchange(to, _span(to * segments + s), source, mine, reduce=True)
        yield Finish(Span(rank * segments, (rank + 1) * segments))
        yield Fence()

    goal = reduce_scatter_of(len(nodes))
    return Program("two_level reduce_scatter", len(nodes), goal, steps, nodes, blocks=len(nodes), segments=segments)


def two_level_all_gather(nodes: tuple[int, ...]) -> Program:
    """Build an all-gather that sends each block once between every two nodes, and copies it in shared memory there.

    Local rank l of a node exchanges its block with local rank l of the other nodes. The ranks of a node then copy what
    the others have received. Their own blocks they copy while the messages are in flight. A node receives (M-1)/M of
    the vector between M nodes, which is the minimum; on a ring of all N ranks it would be (N-1)/N.

    Args:
        nodes: Node number of each rank; all nodes have the same number of ranks.
    """
    places = Places(nodes)

    def steps(rank: Ints) -> Iterator[Step]:
        node, local, count = places.node[rank], places.local[rank], places.nodes
        owners = [places.neighbour(rank, t) for t in range(1, places.max_ranks)]
        yield Fence()
        for owner in owners:
            yield Copy(rank, _span(owner), owner, _span(owner))
        for t in range(1, count):
            to, source = (places.members[(node + i) % count, local] for i in (t, -t))
            yield Exchange(to, _span(rank), source, _span(source))
        yield Fence()
        for owner in owners:
            for t in range(1, count):
                block = _span(places.members[(node + t) % count, places.local[owner]])
                yield Copy(rank, block, owner, block)
        yield Fence()

    return Program("two_level all_gather", len(nodes), all_gather_of(len(nodes)), steps, nodes, blocks=len(nodes))
