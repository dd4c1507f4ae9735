"""Two levels: shared memory inside a node, messages between nodes, every local rank carrying its own slice.

The vector is cut into as many slices as the smallest node has ranks. Local rank l of each node sums its
node's slice l (as in `shared`), exchanges it with the other local ranks l, directly or round a ring of the nodes,
then writes the result to its neighbours. All local ranks drive the network at once, each with 1/L of the bytes:

    node A   rank 0: slice 0 <-> node B's local 0      between nodes 2(M-1)/M of the vector per node,
             rank 1: slice 1 <-> node B's local 1      shared out over its L ranks

Directly: part p of a slice goes from every node straight to node p, which adds them (a reduce-scatter by pairwise
exchange) and sends the sum to all. As many bytes as round a ring, in shifts of which each has one partner to send
to and one to receive from, but no message waits for what another node sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpitrain.comm.algorithms import ring
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
    """Where each rank sits: node number in order of appearance, place on its node, ranks there."""

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
        """The rank t places on round the node; NONE where the node has no more than t ranks."""
        count = self.count[rank]
        return np.where(t < count, self.members[self.node[rank], (self.local[rank] + t) % count], NONE)


def two_level_all_reduce(
    nodes: tuple[int, ...], segments: int = 1, *, direct: bool = False, tree: bool = False
) -> Program:
    """nodes: the node of each rank. Blocks are slice * number of nodes + part: part p is summed up on node p.

    direct: what a node has of a part goes straight to the node that sums it, and the sum straight to all, instead of
    both going round a ring of the nodes: as many bytes, but nothing waits for what another node sent before.
    """
    places = Places(nodes)
    slices, parts = places.least, places.nodes

    def steps(rank: Ints) -> Iterator[Step]:
        node, local = places.node[rank], places.local[rank]
        carries = local < slices
        base = np.where(carries, local, 0) * parts

        def block(part: Ints) -> Span:
            first = (base + part) * segments
            return Span(first, np.where(carries, first + segments, first))

        def chunk(part: Ints, s: int) -> Span:
            first = (base + part) * segments + s
            return Span(first, np.where(carries, first + 1, first))

        def peer(of_node: Ints) -> Ints:
            return np.where(carries, places.members[of_node, np.where(carries, local, 0)], NONE)

        def combine(part: Ints, s: int) -> Step:
            span, order = chunk(part, s), range(places.most)
            if tree:
                owners = [np.where(t < places.count[rank], places.members[node, t], NONE) for t in order]
            else:
                owners = [places.neighbour(rank, t) for t in order]
            return Combine(span, tuple((owner, span) for owner in owners), tree)

        def publish(part: Ints, s: int) -> Iterator[Step]:
            for t in range(1, places.most):
                to = np.where(carries, places.neighbour(rank, t), NONE)
                yield Copy(to, chunk(part, s), rank, chunk(part, s))

        def on_ring(step: Exchange) -> Exchange:
            """A ring step between nodes, moved to this rank's slice and to ranks."""
            offset = base * segments
            return Exchange(
                peer(step.to),
                Span(step.send.lo + offset, step.send.hi + offset),
                peer(step.source),
                Span(step.recv.lo + offset, step.recv.hi + offset),
                step.reduce,
            )

        def round_the_ring() -> Iterator[Step]:
            # a part is summed over the node just before the ring needs it, so that summing overlaps sending
            yield from (combine((node - 1) % parts, s) for s in range(segments))
            for t, step in enumerate(ring.reduce_scatter_steps(node, parts, segments)):
                if isinstance(step, Finish):
                    yield Finish(block(node))
                    continue
                if t % segments == 0:
                    yield from (combine((node - t // segments - 2) % parts, s) for s in range(segments))
                assert isinstance(step, Exchange)
                yield on_ring(step)
            for s in range(segments):
                yield from publish(node, s)
            for t, step in enumerate(ring.all_gather_steps(node, parts, segments)):
                assert isinstance(step, Exchange)
                yield on_ring(step)
                yield from publish((node - t // segments - 1) % parts, t % segments)

        def sum_directly(s: int) -> Iterator[Step]:
            for t in range(1, parts):
                yield combine((node + t) % parts, s)
            yield combine(node, s)
            for t in range(1, parts):
                to, source = (node + t) % parts, (node - t) % parts
                yield Exchange(peer(to), chunk(to, s), peer(source), chunk(node, s), reduce=True)

        def spread_directly(s: int) -> Iterator[Step]:
            yield Finish(chunk(node, s))
            for t in range(1, parts):
                to, source = (node + t) % parts, (node - t) % parts
                yield Exchange(peer(to), chunk(node, s), peer(source), chunk(source, s))
                if t == 1:
                    yield from publish(node, s)
                yield from publish(source, s)

        def straight() -> Iterator[Step]:
            yield from sum_directly(0)
            for s in range(segments):
                if s + 1 < segments:
                    yield from sum_directly(s + 1)
                yield from spread_directly(s)

        yield Fence()
        yield from straight() if direct and parts > 1 else round_the_ring()
        yield Fence()

    return Program(
        "two_level all_reduce",
        len(nodes),
        all_reduce_of(len(nodes), slices * parts),
        steps,
        nodes,
        blocks=slices * parts,
        segments=segments,
    )
