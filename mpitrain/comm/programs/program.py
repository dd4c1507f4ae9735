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
