"""Collective algorithms as data: steps, and what can be known of them without running MPI.

An algorithm is a pure generator of `Step`s for a rank. The same steps are verified and simulated
here, and executed by `executor.py`; nothing else executes a collective.

Memory as a program sees it, in chunks (the caller's buffer cut into `chunks` pieces of any sizes):

    WORK    the caller's vector, chunk 0 .. chunks-1, on every rank
    SLOT    staging cells in memory the ranks of a node share, for vectors that are not in an arena
    INBOX   private cells for messages that are combined later
    CALLER  what the caller has besides: copies from and to it the caller makes itself, with code of its own
    BOARD   one row a rank, where the ranks of a node say what they are about to do

The ranks of a node meet at a `Fence`, or in two halves: a `Signal` tells the others and waits for nobody, the `Await`
of the same event waits for their signals. An `Await` ends a phase of the program: before it, the caller may do
something else, and begin other runs of the program on other vectors (`Program.vectors`).

A generator is called with one rank (an int: execution, verification) or with `numpy.arange(size)` (every
rank at once: simulation of thousands of ranks), so it only uses arithmetic that does both, and takes the
same number of steps of the same kinds on every rank; a rank with nothing to do has peer NONE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

NONE = -1  # no peer
WORK, SLOT, INBOX, CALLER, BOARD = "work", "slot", "inbox", "caller", "board"

Ints = Any  # int, or an int array with one entry per rank


@dataclass(frozen=True)
class Span:
    """The chunks (or cells) from number lo up to, but without, number hi of one memory."""

    lo: Ints
    hi: Ints
    memory: str = WORK


@dataclass(frozen=True)
class Exchange:
    """Send a span to one rank while receiving one from another; both must complete before the next step.

    Attributes:
        to: The rank that is sent to, or NONE to send nothing.
        send: What is sent.
        source: The rank that is received from, or NONE to receive nothing.
        recv: Where the received values go.
        reduce: Combine the received values with those of `recv` by the reduction's operation; else replace these.
    """

    to: Ints
    send: Span
    source: Ints
    recv: Span
    reduce: bool = False


@dataclass(frozen=True)
class Combine:
    """Set a span of this rank's memory to the reduction of several spans.

    Attributes:
        into: The span that gets the result.
        parts: (owner, span) of each operand; the owner is a rank of this node, or NONE for an operand that is left out.
        tree: Reduce the parts as a fixed binary tree over their order (`tree_order`), else from left to right.
    """

    into: Span
    parts: tuple[tuple[Ints, Span], ...]
    tree: bool = False


@dataclass(frozen=True)
class Copy:
    """Copy a span to another: at least one of them is this rank's, the other may be that of a rank on its node.

    Attributes:
        dest: The rank that is written to; NONE to do nothing.
        into: The span of its memory.
        source: The rank that is read from.
        of: The span of its memory.
    """

    dest: Ints
    into: Span
    source: Ints
    of: Span


@dataclass(frozen=True)
class Fence:
    """The ranks of a node meet: what any wrote in shared memory before, all may read after."""


@dataclass(frozen=True)
class Signal:
    """Tell the ranks of the node that this one has come here, and wait for nobody. Once in a run for each event."""

    event: str


@dataclass(frozen=True)
class Await:
    """Begin a phase: wait until all ranks of the node have given the event's signal; all they wrote before is there."""

    event: str


@dataclass(frozen=True)
class Tell:
    """Write on the board what this rank is about to do."""


@dataclass(frozen=True)
class Compare:
    """Read on the board what the ranks of the node are about to do: it must be the same."""


@dataclass(frozen=True)
class Finish:
    """Apply to a span that holds every contribution what comes once at the end: the division of `avg`."""

    span: Span


Step = Exchange | Combine | Copy | Fence | Signal | Await | Tell | Compare | Finish


@dataclass(frozen=True)
class Goal:
    """A piece of the result that a rank must end with.

    Attributes:
        memory: The memory that the piece lies in.
        cell: Where in it, in blocks.
        block: Which block of the vector it is.
        ranks: The ranks whose contributions it holds.
    """

    memory: str
    cell: int
    block: int
    ranks: Sequence[int]


@dataclass(frozen=True)
class Collective:
    """What a collective operation starts from and what it must end with.

    Attributes:
        name: Of the operation.
        holds: For (rank, block), whether the rank starts with a contribution to this block of WORK.
        ends: For a rank, its goals.
        reduces: Whether contributions are reduced; a whole block must then be finished (`Finish`) exactly once.
    """

    name: str
    holds: Callable[[int, int], bool]
    ends: Callable[[int], list[Goal]]
    reduces: bool = False


@dataclass(frozen=True)
class Program:
    """One algorithm for one number of ranks and their places on nodes.

    Attributes:
        name: What it is called.
        size: For how many ranks it is.
        collective: What it must do.
        steps: Makes the steps of a rank, as described at the top of this file.
        nodes: The node of each rank, without it one for all; ranks may touch each other's memory inside one node only.
        blocks: Pieces that the collective speaks of (in scatters and gathers, rank r's share is block r).
        segments: Chunks of each block; a chunk's number is block * segments + segment.
        slots: How many cells the slots have; a slot is as large as the largest chunk.
        inbox: How many cells the inbox has.
        vectors: How many vectors the caller takes in turns: run n is on vector n modulo this number.
        meets_between: Whether the caller sees to it that the ranks of a node meet between two runs.
    """

    name: str
    size: int
    collective: Collective
    steps: Callable[[Ints], Iterator[Step]]
    nodes: tuple[int, ...] = ()
    blocks: int = 1
    segments: int = 1
    slots: int = 0
    inbox: int = 0
    vectors: int = 1
    meets_between: bool = False

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", one_node(self.size))

    @property
    def chunks(self) -> int:
        """Number of chunks of WORK."""
        return self.blocks * self.segments

    @functools.cached_property
    def sends_partial_sums(self) -> bool:
        """Whether sums in progress travel between ranks: 16-bit data must then be widened first."""
        return any(isinstance(step, Exchange) and step.reduce for step in self.steps(0))

    @functools.cached_property
    def compares(self) -> bool:
        """Whether ranks say on the board what they do: they touch others' memory between a first and a last fence."""
        return sum(isinstance(step, Fence) for step in self.steps(0)) > 1

    def executed(self, rank: int) -> list[Step]:
        """The steps of one rank, with those added around the first fence by which ranks compare."""
        steps = list(self.steps(rank))
        if not self.compares:
            return steps
        first = next(number for number, step in enumerate(steps) if isinstance(step, Fence))
        return [*steps[:first], Tell(), Fence(), Compare(), *steps[first + 1 :]]

    def phases(self, rank: int) -> list[list[Step]]:
        """The steps that one rank executes, cut before every `Await`."""
        cut: list[list[Step]] = [[]]
        for step in self.executed(rank):
            if isinstance(step, Await):
                cut.append([])
            cut[-1].append(step)
        return cut


def one_node(size: int) -> tuple[int, ...]:
    """The `nodes` of a program whose ranks are all on one node."""
    return (0,) * size


def chunk_bounds(block_bounds: Sequence[int], segments: int) -> list[int]:
    """Offsets in elements of the chunks: each block is cut into `segments` nearly equal pieces.

    Args:
        block_bounds: Offsets of the blocks, one more than there are blocks.
        segments: Chunks of a block.

    Returns:
        blocks * segments + 1 offsets.
    """
    bounds = [block_bounds[0]]
    for lo, hi in pairwise(block_bounds):
        bounds += [lo + (hi - lo) * (s + 1) // segments for s in range(segments)]
    return bounds


def even_bounds(numel: int, blocks: int, multiple: int = 1) -> list[int]:
    """Offsets that cut `numel` elements into `blocks` nearly equal pieces, the longer ones first.

    All but the last offset are multiples of `multiple`: the last piece takes the elements that are left over.
    """
    units, rest = divmod(numel, multiple)
    base, extra = divmod(units, blocks)
    bounds = [(b * base + min(b, extra)) * multiple for b in range(blocks + 1)]
    bounds[-1] += rest
    return bounds


def tree_order(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Reduce parts in the order of a fixed binary tree, and return the result.

    The left subtree has the largest power of two below their number; 6 parts are ((0+1)+(2+3))+(4+5). Aligned runs of
    2^k parts are subtrees whatever the number of parts, so the same bits come out wherever the runs are reduced.

    Args:
        parts: At least one operand.
        join: Reduces two operands.
    """
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return join(tree_order(parts[:half], join), tree_order(parts[half:], join))


# -- The collectives: for each, what its ranks start from and what they must end with.


def _everywhere(rank: int, block: int) -> bool:
    return True


def all_reduce_of(size: int, blocks: int) -> Collective:
    """An all-reduce: every rank ends with every block, reduced over all ranks."""
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("all_reduce", _everywhere, lambda r: ends, reduces=True)


def reduce_of(size: int, blocks: int, root: int) -> Collective:
    """A reduce: the root ends with every block, reduced over all ranks."""
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("reduce", _everywhere, lambda r: ends if r == root else [], reduces=True)


def reduce_scatter_of(size: int) -> Collective:
    """A reduce-scatter: rank r ends with block r, reduced over all ranks."""
    return Collective("reduce_scatter", _everywhere, lambda r: [Goal(WORK, r, r, range(size))], reduces=True)


def all_gather_of(size: int) -> Collective:
    """An all-gather: rank r starts with block r, and every rank ends with every block."""
    ends = [Goal(WORK, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", lambda r, b: r == b, lambda r: ends)


def broadcast_of(size: int, root: int) -> Collective:
    """A broadcast: the root starts with the only block, and every rank ends with it."""
    return Collective("broadcast", lambda r, b: r == root, lambda r: [Goal(WORK, 0, 0, (root,))])


def gather_of(size: int, root: int) -> Collective:
    """A gather: the one block of WORK that rank r starts with ends in cell r of the root's inbox."""
    ends = [Goal(INBOX, r, 0, (r,)) for r in range(size)]
    return Collective("gather", _everywhere, lambda r: ends if r == root else [])


def scatter_of(size: int, root: int) -> Collective:
    """A scatter: block r of the root's WORK ends in the inbox of rank r."""
    return Collective("scatter", lambda r, b: r == root, lambda r: [Goal(INBOX, 0, r, (root,))])


def all_to_all_of(size: int) -> Collective:
    """An all-to-all: block r of the WORK of rank s ends in cell s of the inbox of rank r."""
    return Collective("all_to_all", _everywhere, lambda r: [Goal(INBOX, s, r, (s,)) for s in range(size)])


def all_gather_to_caller_of(size: int) -> Collective:
    """An all-gather whose result the caller reads where it is."""
    ends = [Goal(CALLER, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", all_gather_of(size).holds, lambda r: ends)


# -- Predicted time of a program on a machine of any size: all ranks at once, step by step, without MPI.
#
# The model: a message costs latency + bytes / bandwidth (Hockney, Parallel Computing 20, 1994), with separate
# figures inside a node and between nodes; messages that leave a node at the same time share its network link,
# and memory traffic at the same time shares its memory; more ranks than cores take turns in a step, as far as they
# have something to do in it. A block cut into segments is received from another node, added and sent at the same
# time, as the executor does, so that only the slower counts. Inside a node it is the ranks themselves that move the
# bytes, and they cannot add meanwhile.


@dataclass(frozen=True)
class Machine:
    """The speeds of a simulated machine. Times are in seconds, rates in bytes per second.

    The defaults are those of a present-day CPU cluster.
    """

    latency: float = 2e-6  # of a message between nodes
    bandwidth: float = 12.5e9  # of a node's network link
    local_latency: float = 0.7e-6  # of a message inside a node
    local_bandwidth: float = 6e9  # of one message inside a node
    copy_rate: float = 10e9  # of one core copying
    reduce_rate: float = 8e9  # of one core adding two vectors, per byte of the result
    memory_rate: float = 100e9  # of all cores of a node copying at once
    step: float = 2e-6  # of starting any one step in Python
    fence: float = 1e-6  # of a barrier in a node, per doubling of its ranks
    cores: float = 64  # per node; a fraction of them where others use the rest
    eager: float = 1 << 16  # bytes: a longer message between nodes is asked for first, see `flights`

    def flights(self, nbytes: np.ndarray | float) -> np.ndarray | float:
        """Return how many latencies pass until the first byte of a message between nodes arrives.

        A long message goes from the sender's memory to the receiver's only when both are ready: it is announced, and
        asked for, before it goes (the rendezvous protocol of MPI libraries).
        """
        return np.where(np.asarray(nbytes) > self.eager, 3.0, 1.0)


def simulate(program: Program, chunk_bytes: Sequence[float], machine: Machine = Machine()) -> float:
    """Predict how many seconds a program takes, until its last rank is done.

    Args:
        program: The program.
        chunk_bytes: The size of each of its chunks, in bytes.
        machine: The speeds of the machine.

    Reference:
        R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994), for the cost of a message.
    """
    return _Simulation(program, chunk_bytes, machine).run()


class _Simulation:
    def __init__(self, program: Program, chunk_bytes: Sequence[float], machine: Machine) -> None:
        self.program, self.machine = program, machine
        self.ranks = np.arange(program.size)
        self.node = np.unique(np.array(program.nodes), return_inverse=True)[1]
        per_node = np.bincount(self.node)
        local = per_node[self.node]
        share = machine.memory_rate / np.minimum(local, machine.cores)
        self.copy_rate = np.minimum(machine.copy_rate, share)
        self.reduce_rate = np.minimum(machine.reduce_rate, share)
        self.local_rate = np.minimum(machine.local_bandwidth, share)
        self.fence = machine.fence * np.ceil(np.log2(np.maximum(local, 2))) * np.maximum(1.0, local / machine.cores)
        self.offsets = np.concatenate([[0], np.cumsum(np.asarray(chunk_bytes, dtype=float))])
        self.cell = float(max(chunk_bytes, default=0))
        self.overlaps = program.segments > 1
        self.clock = np.zeros(program.size)  # when each rank is free for its next step
        self.adding = np.zeros(program.size)  # when the additions of earlier segments are done
        self.signals: dict[str, np.ndarray] = {}  # when the last rank of each rank's node has given them

    def run(self) -> float:
        for step in self.program.steps(self.ranks):
            if isinstance(step, Exchange):
                self._exchange(step)
            elif isinstance(step, Combine):
                for owner, _ in step.parts[1:]:
                    self._busy(owner, step.into, self.reduce_rate)
            elif isinstance(step, Copy):
                self._busy(step.dest, step.of, self.copy_rate)
            elif isinstance(step, Fence):
                self._wait(self._last())
            elif isinstance(step, Signal):
                self.signals[step.event] = self._last()
            elif isinstance(step, Await):
                self._wait(self.signals[step.event])
        return float(np.maximum(self.clock, self.adding).max())

    def _bytes(self, span: Span) -> np.ndarray:
        lo, hi = np.asarray(span.lo), np.asarray(span.hi)
        sizes = self.offsets[hi] - self.offsets[lo] if span.memory == WORK else (hi - lo) * self.cell
        return np.broadcast_to(sizes, self.ranks.shape)

    def _turns(self, works: np.ndarray) -> np.ndarray:
        """Return, for each rank, how many working ranks of its node share a core."""
        return np.maximum(1.0, np.bincount(self.node, weights=works)[self.node] / self.machine.cores)

    def _busy(self, peer: int | np.ndarray, span: Span, rate: np.ndarray) -> None:
        """Local work of the ranks whose peer is not NONE."""
        size = self._bytes(span)
        works = np.broadcast_to(np.asarray(peer) != NONE, self.ranks.shape) & (size > 0)
        takes = (self.machine.step + size / rate) * self._turns(works)
        self.clock = np.where(works, self.clock + takes, self.clock)

    def _last(self) -> np.ndarray:
        """When the last rank of each rank's node has come to this step."""
        last = np.zeros(self.node.max() + 1)
        np.maximum.at(last, self.node, np.maximum(self.clock, self.adding))
        return last[self.node]

    def _wait(self, last: np.ndarray) -> None:
        self.clock = np.maximum(np.maximum(self.clock, self.adding), last) + self.fence
        self.adding = self.clock.copy()

    def _exchange(self, step: Exchange) -> None:
        to = np.broadcast_to(step.to, self.ranks.shape)
        source = np.broadcast_to(step.source, self.ranks.shape)
        sends, receives = to != NONE, source != NONE
        begin = self.clock if self.overlaps else np.maximum(self.clock, self.adding)
        peer_to, peer_from = np.where(sends, to, self.ranks), np.where(receives, source, self.ranks)
        leaves = sends & (self.node[peer_to] != self.node)
        enters = receives & (self.node[peer_from] != self.node)
        link = self.machine.bandwidth / np.maximum(1, np.bincount(self.node, weights=leaves))
        turns = self._turns(sends | receives)
        local_rate = self.local_rate / turns
        rate_out = np.where(leaves, link[self.node], local_rate)
        rate_in = np.where(enters, link[self.node[peer_from]], local_rate[peer_from])
        size_in, size_out = self._bytes(step.recv), self._bytes(step.send)
        far_in, far_out = (self.machine.latency * self.machine.flights(size) for size in (size_in, size_out))
        latency_out = np.where(leaves, far_out, self.machine.local_latency)
        latency_in = np.where(enters, far_in, self.machine.local_latency)
        sent = np.maximum(begin, begin[peer_to]) + latency_out + size_out / rate_out
        got = np.maximum(begin, begin[peer_from]) + latency_in + size_in / rate_in
        end = np.maximum(np.where(sends, sent, begin), np.where(receives, got, begin))
        self.clock = np.where(sends | receives, end + self.machine.step * turns, self.clock)
        if step.reduce:
            added = np.maximum(self.clock, self.adding) + size_in / self.reduce_rate * self._turns(receives)
            self.adding = np.where(receives, added, self.adding)
            self.clock = np.where(receives & ~enters, added, self.clock)
        else:  # what is passed on must have been added
            self.clock = np.where(sends, np.maximum(self.clock, self.adding), self.clock)
