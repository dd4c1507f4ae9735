"""Collective algorithms as data: their steps, and everything that can be derived from the steps without running MPI.

An algorithm is a pure generator of `Step`s for a rank. The same steps are simulated here, verified in `verify.py` and
executed by `executor.py`; collectives are executed in no other way.

Memory as a program sees it, in chunks (the caller's buffer is cut into `chunks` pieces of any size):

    WORK    the caller's vector, chunks 0 to chunks-1, on every rank
    SLOT    staging cells in memory that the ranks of a node share, for vectors outside an arena
    INBOX   private cells for messages that are combined later
    CALLER  other memory of the caller; the caller itself copies from and to it
    BOARD   one row per rank, on which the ranks of a node announce what they are about to do

The ranks of a node meet at a `Fence`. A fence can also be split: `Signal` notifies the other ranks and waits for
nobody; `Await` of the same event waits for the signals of all ranks. An `Await` starts a new phase of the program:
before it, the caller may do other work, and start other runs of the program on other vectors (`Program.vectors`).

A generator is called either with one rank (an int, for execution and verification) or with `numpy.arange(size)` (all
ranks at once, to simulate thousands of ranks). It therefore uses arithmetic that works for both, and yields the same
number of steps of the same kinds on every rank; a rank with nothing to do has peer NONE.
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
    """Range of chunks (or cells) of one memory, from number `lo` up to, but not including, `hi`."""

    lo: Ints
    hi: Ints
    memory: str = WORK


@dataclass(frozen=True)
class Exchange:
    """Step that sends a span to one rank and receives one from another; both complete before the next step.

    Attributes:
        to: Rank to send to; NONE to send nothing.
        send: Span that is sent.
        source: Rank to receive from; NONE to receive nothing.
        recv: Span that receives the values.
        reduce: If true, combine the received values with those in `recv`; otherwise overwrite these.
    """

    to: Ints
    send: Span
    source: Ints
    recv: Span
    reduce: bool = False


@dataclass(frozen=True)
class Combine:
    """Step that sets a span of this rank's memory to the reduction of several spans.

    Attributes:
        into: Span that receives the result.
        parts: (owner, span) of each operand. The owner is a rank of this node; NONE leaves the operand out.
        tree: If true, reduce the parts as a fixed binary tree over their order (`tree_order`); otherwise from left to
            right.
    """

    into: Span
    parts: tuple[tuple[Ints, Span], ...]
    tree: bool = False


@dataclass(frozen=True)
class Copy:
    """Step that copies one span to another: one is this rank's, the other belongs to any rank of its node.

    Attributes:
        dest: Rank whose memory is written; NONE to do nothing.
        into: Span that is written.
        source: Rank whose memory is read.
        of: Span that is read.
    """

    dest: Ints
    into: Span
    source: Ints
    of: Span


@dataclass(frozen=True)
class Fence:
    """Step at which the ranks of a node meet: all can then read what any of them wrote to shared memory before."""


@dataclass(frozen=True)
class Signal:
    """Step that tells the ranks of the node, without waiting, that this rank has reached an event.

    Each event is signalled once per run.
    """

    event: str


@dataclass(frozen=True)
class Await:
    """Step that starts a phase by waiting for the event's signal from all ranks of the node.

    Afterwards this rank can read the data that they wrote to shared memory before their signal.
    """

    event: str


@dataclass(frozen=True)
class Tell:
    """Step that writes on the board what this rank is about to do."""


@dataclass(frozen=True)
class Compare:
    """Step that checks on the board that all ranks of the node are about to do the same."""


@dataclass(frozen=True)
class Finish:
    """Step that applies the final operation (the division of `avg`) to a span that has all contributions."""

    span: Span


Step = Exchange | Combine | Copy | Fence | Signal | Await | Tell | Compare | Finish


@dataclass(frozen=True)
class Goal:
    """Piece of the result that a rank must have at the end.

    Attributes:
        memory: Memory in which the piece lies.
        cell: Its position in this memory, in blocks.
        block: Number of the vector's block that it is.
        ranks: Ranks whose contributions it includes.
    """

    memory: str
    cell: int
    block: int
    ranks: Sequence[int]


@dataclass(frozen=True)
class Collective:
    """Specification of a collective operation: the initial data and the required result.

    Attributes:
        name: Name of the operation.
        holds: For (rank, block), returns True if the rank starts with a contribution to this block of WORK.
        ends: For a rank, returns its goals.
        reduces: True if contributions are reduced; each complete block must then be finished (`Finish`) exactly once.
    """

    name: str
    holds: Callable[[int, int], bool]
    ends: Callable[[int], list[Goal]]
    reduces: bool = False


@dataclass(frozen=True)
class Program:
    """An algorithm for a given number of ranks and their placement on nodes.

    Attributes:
        name: Name of the algorithm, then of the operation, such as "ring all_reduce".
        size: Number of ranks.
        collective: Specification that the program fulfils.
        steps: Generator of a rank's steps, see the top of this module.
        nodes: Node number of each rank; by default all ranks are on one node. Ranks access each other's memory inside a
            node only.
        blocks: Number of blocks of the vector. In scatters and gathers, block r is the share of rank r.
        segments: Number of chunks per block; the number of a chunk is block * segments + segment.
        slots: Number of cells of SLOT; each has the size of the largest chunk.
        inbox: Number of cells of INBOX.
        vectors: Number of vectors that the caller uses in turn: run n uses vector n modulo this number.
        meets_between: True if the caller makes the ranks of a node meet between two runs.
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
        """True if ranks send partial sums to each other; 16-bit data must then be widened first."""
        return any(isinstance(step, Exchange) and step.reduce for step in self.steps(0))

    @functools.cached_property
    def compares(self) -> bool:
        """True if ranks compare their operations on the board: they access each other's memory between two fences."""
        return sum(isinstance(step, Fence) for step in self.steps(0)) > 1

    def executed(self, rank: int) -> list[Step]:
        """Return the steps that one rank executes, with those added around the first fence that compare the ranks."""
        steps = list(self.steps(rank))
        if not self.compares:
            return steps
        first = next(number for number, step in enumerate(steps) if isinstance(step, Fence))
        return [*steps[:first], Tell(), Fence(), Compare(), *steps[first + 1 :]]

    def phases(self, rank: int) -> list[list[Step]]:
        """Return the steps that one rank executes, cut into phases before every `Await`."""
        cut: list[list[Step]] = [[]]
        for step in self.executed(rank):
            if isinstance(step, Await):
                cut.append([])
            cut[-1].append(step)
        return cut


def one_node(size: int) -> tuple[int, ...]:
    """Return the `nodes` of a program whose ranks are all on one node."""
    return (0,) * size


def chunk_bounds(block_bounds: Sequence[int], segments: int) -> list[int]:
    """Return the offsets of the chunks in elements: each block is cut into `segments` nearly equal pieces.

    Args:
        block_bounds: Offsets of the blocks, and the end of the last one.
        segments: Number of chunks per block.

    Returns:
        blocks * segments + 1 offsets.
    """
    bounds = [block_bounds[0]]
    for lo, hi in pairwise(block_bounds):
        bounds += [lo + (hi - lo) * (s + 1) // segments for s in range(segments)]
    return bounds


def even_bounds(numel: int, blocks: int, multiple: int = 1) -> list[int]:
    """Return the offsets that cut `numel` elements into `blocks` nearly equal pieces, longer ones first.

    Args:
        numel: Number of elements.
        blocks: Number of pieces.
        multiple: All offsets but the last are multiples of this; the last piece also takes the remaining elements.

    Returns:
        blocks + 1 offsets.
    """
    units, rest = divmod(numel, multiple)
    base, extra = divmod(units, blocks)
    bounds = [(b * base + min(b, extra)) * multiple for b in range(blocks + 1)]
    bounds[-1] += rest
    return bounds


def tree_order(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Reduce parts in the order of a fixed binary tree.

    The left subtree has the largest power of two that is less than the number of parts: 6 parts give
    ((0+1)+(2+3))+(4+5). Every aligned run of 2^k parts is a subtree, whatever the number of parts, so the result has
    the same bits no matter where such runs are reduced.

    Args:
        parts: Operands, at least one.
        join: Reduces two operands.
    """
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return join(tree_order(parts[:half], join), tree_order(parts[half:], join))


# -- The collectives: initial data and required result of each.


def _holds_every_block(rank: int, block: int) -> bool:
    return True


def all_reduce_of(size: int, blocks: int) -> Collective:
    """Specify an all-reduce: every rank ends with every block, reduced over all ranks.

    Args:
        size: Number of ranks.
        blocks: Number of blocks of the vector.
    """
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("all_reduce", _holds_every_block, lambda r: ends, reduces=True)


def reduce_of(size: int, blocks: int, root: int) -> Collective:
    """Specify a reduce: the root ends with every block, reduced over all ranks.

    Args:
        size: Number of ranks.
        blocks: Number of blocks of the vector.
        root: Rank that receives the result.
    """
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("reduce", _holds_every_block, lambda r: ends if r == root else [], reduces=True)


def reduce_scatter_of(size: int) -> Collective:
    """Specify a reduce-scatter on `size` ranks: rank r ends with block r, reduced over all ranks."""
    return Collective("reduce_scatter", _holds_every_block, lambda r: [Goal(WORK, r, r, range(size))], reduces=True)


def all_gather_of(size: int) -> Collective:
    """Specify an all-gather on `size` ranks: rank r starts with block r, and every rank ends with every block."""
    ends = [Goal(WORK, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", lambda r, b: r == b, lambda r: ends)


def broadcast_of(size: int, root: int) -> Collective:
    """Specify a broadcast: the root starts with the only block, and every rank ends with it.

    Args:
        size: Number of ranks.
        root: Rank that has the block.
    """
    return Collective("broadcast", lambda r, b: r == root, lambda r: [Goal(WORK, 0, 0, (root,))])


def gather_of(size: int, root: int) -> Collective:
    """Specify a gather: rank r starts with one block in WORK, which ends in cell r of the root's INBOX.

    Args:
        size: Number of ranks.
        root: Rank that receives the blocks.
    """
    ends = [Goal(INBOX, r, 0, (r,)) for r in range(size)]
    return Collective("gather", _holds_every_block, lambda r: ends if r == root else [])


def scatter_of(size: int, root: int) -> Collective:
    """Specify a scatter: block r of the root's WORK ends in the INBOX of rank r.

    Args:
        size: Number of ranks.
        root: Rank that has the blocks.
    """
    return Collective("scatter", lambda r, b: r == root, lambda r: [Goal(INBOX, 0, r, (root,))])


def all_to_all_of(size: int) -> Collective:
    """Specify an all-to-all on `size` ranks: block r of the WORK of rank s ends in cell s of the INBOX of rank r."""
    return Collective("all_to_all", _holds_every_block, lambda r: [Goal(INBOX, s, r, (s,)) for s in range(size)])


def all_gather_to_caller_of(size: int) -> Collective:
    """Specify an all-gather on `size` ranks whose result the caller itself copies or reads."""
    ends = [Goal(CALLER, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", all_gather_of(size).holds, lambda r: ends)


# -- Predicted time of a program on a machine of any size: all ranks at once, step by step, without MPI.
#
# The model: a message costs latency + bytes / bandwidth (Hockney, Parallel Computing 20, 1994), with different values
# inside a node and between nodes. Messages that leave a node at the same time share its network link, and
# simultaneous memory accesses share its memory bandwidth. If more ranks than cores work in a step, they take turns.
# When blocks are cut into segments, the executor receives from other nodes, adds and sends at the same time, so only
# the slowest of these counts. Inside a node the ranks themselves move the bytes, so they cannot add at the same time.


@dataclass(frozen=True)
class Machine:
    """Speeds of a simulated machine. Times are in seconds, rates in bytes per second.

    The defaults are those of a current CPU cluster.
    """

    latency: float = 2e-6  # of a message between nodes
    bandwidth: float = 12.5e9  # of a node's network link
    local_latency: float = 0.7e-6  # of a message inside a node
    local_bandwidth: float = 6e9  # of one message inside a node
    copy_rate: float = 10e9  # of one core copying
    reduce_rate: float = 8e9  # of one core adding two vectors, per byte of the result
    memory_rate: float = 100e9  # of all cores of a node copying at once
    step: float = 2e-6  # of starting one step in Python
    fence: float = 1e-6  # of a barrier in a node, per doubling of its ranks
    cores: float = 64  # per node; less than the node has if other processes use some
    eager: float = 1 << 16  # bytes of the longest message between nodes that is sent without handshake, see `flights`

    def flights(self, nbytes: np.ndarray | float) -> np.ndarray | float:
        """Return the number of latencies until the first byte of a message between nodes arrives.

        A message longer than `eager` is sent only when sender and receiver are ready: it is first announced, then
        requested, then sent (the rendezvous protocol of MPI libraries), which takes three latencies.
        """
        return np.where(np.asarray(nbytes) > self.eager, 3.0, 1.0)


def simulate(program: Program, chunk_bytes: Sequence[float], machine: Machine = Machine()) -> float:
    """Predict the duration of a program in seconds, until its last rank is done.

    Args:
        program: The program.
        chunk_bytes: Size of each chunk in bytes.
        machine: Speeds of the machine.

    Reference:
        R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994), for the cost of a message.
    """
    return _Simulation(program, chunk_bytes, machine).run()


class _Simulation:
    """Simulation of one program: clocks of all ranks, advanced step by step. Arrays have one entry per rank."""

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
        self.clock = np.zeros(program.size)  # time at which each rank is free for its next step
        self.adding = np.zeros(program.size)  # time at which the additions of earlier segments are done
        self.signals: dict[str, np.ndarray] = {}  # by event, time of the last signal on each rank's node

    def run(self) -> float:
        """Simulate all steps, and return the time at which the last rank is done."""
        for step in self.program.steps(self.ranks):
            if isinstance(step, Exchange):
                self._exchange(step)
            elif isinstance(step, Combine):
                for owner, _ in step.parts[1:]:
                    self._add_work(owner, step.into, self.reduce_rate)
            elif isinstance(step, Copy):
                self._add_work(step.dest, step.of, self.copy_rate)
            elif isinstance(step, Fence):
                self._wait(self._last_arrival())
            elif isinstance(step, Signal):
                self.signals[step.event] = self._last_arrival()
            elif isinstance(step, Await):
                self._wait(self.signals[step.event])
        return float(np.maximum(self.clock, self.adding).max())

    def _bytes(self, span: Span) -> np.ndarray:
        lo, hi = np.asarray(span.lo), np.asarray(span.hi)
        sizes = self.offsets[hi] - self.offsets[lo] if span.memory == WORK else (hi - lo) * self.cell
        return np.broadcast_to(sizes, self.ranks.shape)

    def _turns(self, works: np.ndarray) -> np.ndarray:
        """Return, for each rank, how many working ranks of its node share a core (at least 1).

        Args:
            works: True for the ranks that work in this step.
        """
        return np.maximum(1.0, np.bincount(self.node, weights=works)[self.node] / self.machine.cores)

    def _add_work(self, peer: int | np.ndarray, span: Span, rate: np.ndarray) -> None:
        """Add the time of local work, at `rate` bytes per second, on the ranks whose peer is not NONE."""
        size = self._bytes(span)
        works = np.broadcast_to(np.asarray(peer) != NONE, self.ranks.shape) & (size > 0)
        takes = (self.machine.step + size / rate) * self._turns(works)
        self.clock = np.where(works, self.clock + takes, self.clock)

    def _last_arrival(self) -> np.ndarray:
        """Return, for each rank, the time at which the last rank of its node reaches this step."""
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
        else:  # data that is forwarded must have been added before
            self.clock = np.where(sends, np.maximum(self.clock, self.adding), self.clock)
