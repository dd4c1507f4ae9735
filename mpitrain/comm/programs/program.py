"""Collective algorithms as data: steps, and what can be known of them without running MPI.

An algorithm is a pure generator of `Step`s for a rank. The same steps are verified, counted and simulated
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
    """Chunks [lo, hi) of one memory."""

    lo: Ints
    hi: Ints
    memory: str = WORK


NOTHING = Span(0, 0)


@dataclass(frozen=True)
class Exchange:
    """Send a span to one rank while receiving one from another; both must complete before the next step.

    reduce: the received values are added to the span's (op applied), else they replace them.
    """

    to: Ints
    send: Span
    source: Ints
    recv: Span
    reduce: bool = False


@dataclass(frozen=True)
class Combine:
    """into (this rank's) = the reduction of `parts`, each (owner, span): an owner is a rank of this node or NONE.

    tree: reduce the parts as a fixed binary tree over their order (`tree_order`), else from left to right.
    """

    into: Span
    parts: tuple[tuple[Ints, Span], ...]
    tree: bool = False


@dataclass(frozen=True)
class Copy:
    """Copy a span of rank `source` to a span of rank `dest`, one of which is this rank, the other on its node."""

    dest: Ints
    into: Span
    source: Ints
    of: Span


@dataclass(frozen=True)
class Fence:
    """The ranks of a node meet: what any wrote in shared memory before, all may read after."""


@dataclass(frozen=True)
class Signal:
    """Tell the ranks of the node that this one has come here; waits for nobody. Once a run for each event."""

    event: str


@dataclass(frozen=True)
class Await:
    """Begins a phase: all ranks of the node have given the signal; what they wrote before it, this one may read."""

    event: str


@dataclass(frozen=True)
class Tell:
    """Write on the board what this rank is about to do."""


@dataclass(frozen=True)
class Compare:
    """Read on the board what the ranks of the node are about to do: it must be the same."""


@dataclass(frozen=True)
class Withdraw:
    """Take off the board what this rank was about to do."""


@dataclass(frozen=True)
class Finish:
    """The span holds every contribution: apply what comes once at the end (the division of `avg`)."""

    span: Span


Step = Exchange | Combine | Copy | Fence | Signal | Await | Tell | Compare | Withdraw | Finish


@dataclass(frozen=True)
class Goal:
    """What a rank must end with: in `cell` of `memory`, block `block` with the contributions of `ranks`."""

    memory: str
    cell: int
    block: int
    ranks: Sequence[int]


@dataclass(frozen=True)
class Collective:
    """What an operation starts from and must end with.

    holds(rank, block): does this rank start with a contribution to this block of WORK?
    ends(rank): its goals, in blocks.
    reduces: whether contributions are reduced (a whole block must then be `Finish`ed exactly once).
    """

    name: str
    holds: Callable[[int, int], bool]
    ends: Callable[[int], list[Goal]]
    reduces: bool = False


def _everywhere(rank: int, block: int) -> bool:
    return True


def all_reduce_of(size: int, blocks: int) -> Collective:
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("all_reduce", _everywhere, lambda r: ends, reduces=True)


def reduce_of(size: int, blocks: int, root: int) -> Collective:
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("reduce", _everywhere, lambda r: ends if r == root else [], reduces=True)


def reduce_scatter_of(size: int) -> Collective:
    return Collective("reduce_scatter", _everywhere, lambda r: [Goal(WORK, r, r, range(size))], reduces=True)


def all_gather_of(size: int) -> Collective:
    ends = [Goal(WORK, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", lambda r, b: r == b, lambda r: ends)


def broadcast_of(size: int, root: int) -> Collective:
    return Collective("broadcast", lambda r, b: r == root, lambda r: [Goal(WORK, 0, 0, (root,))])


def gather_of(size: int, root: int) -> Collective:
    """Rank r's one block of WORK ends in cell r of the root's inbox."""
    ends = [Goal(INBOX, r, 0, (r,)) for r in range(size)]
    return Collective("gather", _everywhere, lambda r: ends if r == root else [])


def scatter_of(size: int, root: int) -> Collective:
    """The root's block r of WORK ends in rank r's inbox."""
    return Collective("scatter", lambda r, b: r == root, lambda r: [Goal(INBOX, 0, r, (root,))])


def all_to_all_of(size: int) -> Collective:
    """Rank s's block r of WORK ends in cell s of rank r's inbox."""
    return Collective("all_to_all", _everywhere, lambda r: [Goal(INBOX, s, r, (s,)) for s in range(size)])


@dataclass(frozen=True)
class Program:
    """One algorithm for one communicator shape.

    blocks: pieces the collective speaks of (rank r's share is block r in scatters and gathers).
    segments: chunks per block; chunk = block * segments + segment.
    slots, inbox: cells of those memories; a slot is as large as the largest chunk.
    steps(rank): the generator described above.
    nodes: the node of each rank; ranks may touch each other's memory inside one node only.
    vectors: how many vectors the caller takes in turns: run n is on the one of number n modulo this.
    meets_between: whether the caller sees to it that the ranks of a node meet between two runs.
    """

    name: str
    size: int
    collective: Collective
    steps: Callable[[Ints], Iterator[Step]]
    nodes: tuple[int, ...]
    blocks: int = 1
    segments: int = 1
    slots: int = 0
    inbox: int = 0
    vectors: int = 1
    meets_between: bool = False

    @property
    def chunks(self) -> int:
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
        """The steps of one rank, with those around the first fence and after the last one by which ranks compare."""
        steps = list(self.steps(rank))
        if not self.compares:
            return steps
        fences = [number for number, step in enumerate(steps) if isinstance(step, Fence)]
        first, last = fences[0], fences[-1]
        return [
            *steps[:first],
            Tell(),
            Fence(),
            Compare(),
            *steps[first + 1 : last + 1],
            Withdraw(),
            *steps[last + 1 :],
        ]

    def phases(self, rank: int) -> list[list[Step]]:
        """What one rank executes, cut before every Await."""
        cut: list[list[Step]] = [[]]
        for step in self.executed(rank):
            if isinstance(step, Await):
                cut.append([])
            cut[-1].append(step)
        return cut


def one_node(size: int) -> tuple[int, ...]:
    return (0,) * size


def chunk_bounds(block_bounds: Sequence[int], segments: int) -> list[int]:
    """Element offsets of the chunks: each block cut into `segments` nearly equal pieces.

    block_bounds: offsets of the blocks, one more than there are blocks. Returns blocks * segments + 1 offsets.
    """
    bounds = [block_bounds[0]]
    for lo, hi in pairwise(block_bounds):
        bounds += [lo + (hi - lo) * (s + 1) // segments for s in range(segments)]
    return bounds


def even_bounds(numel: int, blocks: int, multiple: int = 1) -> list[int]:
    """Offsets that cut numel elements into `blocks` nearly equal pieces at multiples of `multiple`, longer first."""
    units, rest = divmod(numel, multiple)
    base, extra = divmod(units, blocks)
    bounds = [(b * base + min(b, extra)) * multiple for b in range(blocks + 1)]
    bounds[-1] += rest
    return bounds


def tree_order(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Reduce parts as the fixed binary tree: left subtree of the largest power of two below their number.

    For 6 parts: ((0+1)+(2+3))+(4+5). Aligned runs of 2^k parts are subtrees whatever the total, so the same
    bits come out wherever the runs are reduced.
    """
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return join(tree_order(parts[:half], join), tree_order(parts[half:], join))


@dataclass(frozen=True)
class Traffic:
    """What one rank sends and does. bytes and messages leave the rank; rounds wait for a peer, a fence or a signal."""

    bytes_sent: int
    messages: int
    rounds: int
    fences: int
    bytes_reduced: int
    bytes_copied: int


def count(program: Program, rank: int, chunk_bytes: Sequence[int]) -> Traffic:
    """Bytes, messages and rounds of one rank. chunk_bytes: the size of every chunk, in bytes."""
    total = np.concatenate([[0], np.cumsum(chunk_bytes)])
    cell = max(chunk_bytes, default=0)
    sent = messages = rounds = fences = reduced = copied = 0

    def size_of(span: Span) -> int:
        lo, hi = int(span.lo), int(span.hi)
        return int(total[hi] - total[lo]) if span.memory == WORK else (hi - lo) * cell

    for step in program.steps(rank):
        if isinstance(step, Exchange):
            if int(step.to) != NONE:
                sent, messages = sent + size_of(step.send), messages + 1
            if int(step.source) != NONE and step.reduce:
                reduced += size_of(step.recv)
            rounds += int(step.to) != NONE or int(step.source) != NONE
        elif isinstance(step, Fence | Await):
            fences, rounds = fences + 1, rounds + 1
        elif isinstance(step, Combine):
            reduced += size_of(step.into) * (sum(int(owner) != NONE for owner, _ in step.parts) - 1)
        elif isinstance(step, Copy) and int(step.dest) != NONE:
            copied += size_of(step.of)
    return Traffic(sent, messages, rounds, fences, reduced, copied)
