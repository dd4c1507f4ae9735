"""Two levels: shared memory inside a node, messages between nodes, every local rank carrying its own slice.

The vector is cut into as many slices as the smallest node has ranks. Local rank l of each node sums its
node's slice l (as in `shared`), exchanges it with the other local ranks l, directly or round a ring of the nodes,
then writes the result to its neighbours. All local ranks drive the network at once, each with 1/L of the bytes:

    node A   rank 0: slice 0 <-> node B's local 0      between nodes 2(M-1)/M of the vector per node,
             rank 1: slice 1 <-> node B's local 1      shared out over its L ranks

Directly: node p gets part p of a slice from every node, adds these (a reduce-scatter by pairwise exchange) and sends
the sum to all nodes. That is as many bytes as round a ring. In each round a rank has one partner to send to and one to
receive from, and no message waits for what another node sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpitrain.comm.algorithms import messages
from mpitrain.comm.programs.program import (
    NONE,
    Combine,
    Copy,
    Exchange,
    Fence,
    Finish,
    Ints,
    Program,
    Span,
    Step,
    all_reduce_of,
)


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
        """Whether the rank carries a slice: a node may have more ranks than there are slices."""
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
        """What a node has of a part goes straight to the node that sums it, and the sum straight to all."""
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
