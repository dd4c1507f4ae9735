"""The journal of a process: what it sends to other ranks, and how long it waits for them.

Every communication counts while the journal is on: collectives in any thread, messages, letters, fences, and the waits
for what runs in the background. While it is off nothing is looked up, made or added for it: `switched` tells whoever
has made functions without it to make them anew.

Bytes are known before an operation runs (`Moved`): they are found when it is bound to memory, so that counting adds a
few numbers to a row. `inside` is what this rank sends to ranks of its own node, or takes out of their memory, or writes
there; `between` is what it sends to ranks of other nodes. What a rank receives counts where it is sent. What ranks read
in memory that the node has once, where it lies, is not moved and does not count.

On or off, a `Record` says which operation a rank is in.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

clock = time.perf_counter  # on Linux the same clock as time.monotonic

_KEPT = 1_000_000  # operations, if nobody takes them; then no more are kept


class Moved(NamedTuple):
    """What one call of an operation moves on one rank.

    Attributes:
        algorithm: Of the operation: a program's first word, or "mpi" where the library has its own.
        inside: Bytes sent to ranks of the own node, or read or written in their memory.
        between: Bytes sent to ranks of other nodes.
    """

    algorithm: str = ""
    inside: int = 0
    between: int = 0

    def by(self, way: str) -> Moved:
        """The same, where the memory of devices is carried in some way."""
        return self if self.algorithm == way else self._replace(algorithm=f"{self.algorithm} ({way})")

    @staticmethod
    def sum(parts: Iterable[Moved]) -> Moved:
        """What all parts of an operation move; the algorithm is that of the first that has one."""
        algorithm, inside, between = "", 0, 0
        for part in parts:
            algorithm = algorithm or part.algorithm
            inside, between = inside + part.inside, between + part.between
        return Moved(algorithm, inside, between)


NOTHING_MOVED = Moved()


class Sent(NamedTuple):
    """What was sent since the journal was started, by operation, axis and algorithm.

    Attributes:
        operation: Name of the operation: of a collective, or send, recv, post, letter.
        axis: Label of the communicator: world, data, pipeline, tensor, ...
        algorithm: What carried it out; "none" where nothing was to be done.
        calls: Number of operations.
        inside, between: Bytes, as in `Moved`.
        seconds: Sum of their durations; those in the background count whole, whether or not somebody waited for them.
    """

    operation: str
    axis: str
    algorithm: str
    calls: int
    inside: int
    between: int
    seconds: float


class Communication(NamedTuple):
    """One operation that was performed while single ones were recorded.

    Attributes:
        operation, axis, algorithm, inside, between: As in `Sent`.
        begin, end: time.perf_counter() in seconds. Of a message: of the wait in which it was complete.
        background: Whether it ran beside the main thread.
        key, sequence: The same on all ranks that took part in the same operation, and on no other operation; for a
            message on its sender and its receiver.
    """

    operation: str
    axis: str
    algorithm: str
    inside: int
    between: int
    begin: float
    end: float
    background: bool
    key: str
    sequence: int


class Record:
    """The operation that a rank is in on one communicator. The operations write it, the watchdog reads it.

    Attributes:
        members: The ranks of the world that all carry out the same operations, in the same order.
        key: Name of the record, alike on all of them.
        awaited: The ranks of the world of which one is to send or receive a message.
        limited: Whether whoever waits stops waiting by itself.
        patient: Whether the wait may take any time, for as long as all ranks answer the watchdog.
    """

    __slots__ = (
        "__weakref__", "awaited", "key", "label", "limited", "members", "name", "patient", "sequence", "since",
        "tensor", "thread",
    )  # fmt: skip

    def __init__(self, label: str, members: Sequence[int] = (), key: str = "") -> None:
        self.label, self.members, self.key = label, members, key
        self.awaited: Sequence[int] = ()
        self.limited = self.patient = False
        self.sequence = 0
        self.name = ""
        self.tensor: torch.Tensor | None = None  # the operation's, as long as it lasts
        self.since = 0.0  # time.monotonic() of the beginning; 0: in no operation
        self.thread = 0

    def begin(self, name: str, tensor: torch.Tensor | None) -> None:
        """Note that an operation begins; `tensor` is None where it is on no data."""
        self.sequence += 1
        self.name, self.tensor = name, tensor
        self.thread = threading.get_ident()
        self.since = time.monotonic()

    def end(self) -> None:
        """Note that the operation has ended."""
        self.since, self.tensor = 0.0, None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Inside, this rank is in an operation on no data."""
        self.awaited = ()
        self.begin(name, None)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def comparing(self, name: str, tensor: torch.Tensor | None) -> Iterator[None]:
        """Inside, the ranks compare what they are about to do; the operation itself has not begun."""
        self.begin(f"before {name}", tensor)
        try:
            yield
        finally:
            self.end()
            self.sequence -= 1

    def text(self) -> str:
        """The operation in words, for messages."""
        tensor = self.tensor
        data = f" of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" if tensor is not None else ""
        return f"{self.label}: {self.name} #{self.sequence}{data}"


class Watchers:
    """Methods that are called whenever something changes, for as long as the objects that they belong to live."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, method: Callable[[], None]) -> None:
        """Have one more called."""
        self._methods.append(weakref.WeakMethod(method, self._methods.remove))

    def tell(self) -> None:
        """Call them all."""
        for reference in list(self._methods):
            method = reference()
            if method is not None:
                method()


Row = list[float]  # calls, inside, between, seconds


class Journal:
    """Counts the communication of this process; `world.journal` is the only one.

    Its main thread is the one that calls `start`.

    Attributes:
        on: Whether operations are counted.
        waited: Seconds that the main thread has spent in communication since `start`: in collectives, in waits for
            those in the background, for messages and for letters. Read it before and after something to know how much
            of that was communication.
        switched: Called whenever the journal is switched on or off.
    """

    def __init__(self) -> None:
        self.on = False
        self.waited = 0.0
        self._main = threading.get_ident()
        self._rows: dict[tuple[str, str, str, int], Row] = {}
        self._lock = threading.Lock()  # of what several threads add to
        self._kept: list[Communication] | None = None
        self._numbers: Counter[str] = Counter()  # of messages, by sender, receiver and tag
        self.switched = Watchers()

    def start(self) -> None:
        """Count from now on, from zero. The caller's thread becomes the main thread."""
        with self._lock:
            self._rows.clear()
            self._numbers.clear()
        self._main, self.waited, self.on = threading.get_ident(), 0.0, True
        self.switched.tell()

    def stop(self) -> None:
        """Count no longer, and keep no single operations. What was counted can still be asked for."""
        self.on, self._kept = False, None
        self.switched.tell()

    def account(self) -> list[Sent]:
        """What was sent since `start`, in order of names. It goes on being counted."""
        sums: dict[tuple[str, str, str], Row] = {}
        with self._lock:
            rows = list(self._rows.items())
        for (operation, axis, algorithm, _), row in rows:
            total = sums.setdefault((operation, axis, algorithm), [0, 0, 0, 0.0])
            total[:] = [a + b for a, b in zip(total, row, strict=True)]
        found = sorted((name, row) for name, row in sums.items() if any(row))
        return [Sent(*name, int(row[0]), int(row[1]), int(row[2]), row[3]) for name, row in found]

    def record(self, on: bool) -> None:
        """Keep single operations from now on, or no longer. It needs `start`.

        Args:
            on: Whether to keep them.
        """
        self._kept = [] if on and self.on else None

    def take(self) -> list[Communication]:
        """The single operations that were kept since the last take, in order of their ends."""
        kept = self._kept
        if not kept:
            return []
        taken = kept[:]
        del kept[: len(taken)]  # another thread may have added some
        return sorted(taken, key=lambda one: one.end)

    # -- for the operations

    def counting(
        self,
        perform: Callable[..., float],
        operation: str,
        axis: str,
        moved: Moved,
        record: Record,
        first: Callable[[], None] | None = None,
    ) -> Callable[[object], None]:
        """What performs an operation again and again, counted.

        Args:
            perform: Performs it, shown in the record, and returns the time.monotonic() of its beginning.
            operation: Its name.
            axis: Label of its communicator.
            moved: By what, and how many bytes.
            record: Where it is shown.
            first: What is performed before, and counts by itself.
        """
        algorithm, inside, between = moved.algorithm or "none", moved.inside, moved.between
        row, main, now = self._row(operation, axis, algorithm, id(record)), self._main, clock

        def counted(tensor: object) -> None:
            if first is not None:
                first()
            begin = perform(tensor)
            end = now()
            spent = end - begin
            row[0] += 1
            row[1] += inside
            row[2] += between
            row[3] += spent
            if record.thread == main:
                self.waited += spent
            if self._kept is not None:
                self.keep(operation, axis, moved, begin, end, record.key, record.sequence)

        return counted

    def _row(self, operation: str, axis: str, algorithm: str, owner: int) -> Row:
        """owner: tells rows apart that different threads add to without a lock; 0 with one."""
        return self._rows.setdefault((operation, axis, algorithm, owner), [0, 0, 0, 0.0])

    def note(
        self, operation: str, axis: str, moved: Moved, begin: float, record: Record | None = None, calls: int = 1
    ) -> None:
        """Enter what began at `begin` and ends now, of any thread.

        Args:
            operation: What was done.
            axis: Label of its communicator.
            moved: By what, and how many bytes.
            begin: `clock()` at its beginning.
            record: Which one it was, for it to be kept; None for a part of one, or one that `keep` is told of.
            calls: How many operations it was; 0 for a part of one that is entered besides.
        """
        end = clock()
        with self._lock:
            row = self._row(operation, axis, moved.algorithm or "none", 0)
            row[0] += calls
            row[1] += moved.inside
            row[2] += moved.between
            row[3] += end - begin
        if threading.get_ident() == self._main:
            self.waited += end - begin
        if record is not None and self._kept is not None:
            self.keep(operation, axis, moved, begin, end, record.key, record.sequence)

    def keep(self, operation: str, axis: str, moved: Moved, begin: float, end: float, key: str, sequence: int) -> None:
        """Keep a single operation, while they are recorded; see `Communication`."""
        kept = self._kept
        if kept is not None and len(kept) < _KEPT:
            aside, sent = threading.get_ident() != self._main, (moved.algorithm or "none", moved.inside, moved.between)
            kept.append(Communication(operation, axis, *sent, begin, end, aside, key, sequence))

    def wait(self, begin: float) -> None:
        """Enter that the calling thread has waited since `begin` for what another thread counts."""
        if self.on and threading.get_ident() == self._main:
            self.waited += clock() - begin

    def number(self, name: str) -> int:
        """How many messages of one sender, receiver and tag there were, this one included."""
        with self._lock:
            self._numbers[name] += 1
            return self._numbers[name]


class Note(NamedTuple):
    """A message or a letter on its way to be complete; made only while the journal is on.

    Attributes:
        journal: Where it is entered.
        operation, axis: What it is.
        moved: By what, and how many bytes.
        key: Which one it is, with the sequence. It has a gap ({}) for the source where that is not known yet.
        sequence: Its number among those of its key; 0 where that is not known yet.
    """

    journal: Journal
    operation: str
    axis: str
    moved: Moved
    key: str = ""
    sequence: int = 0

    def ended(self, begin: float, source: int | None) -> None:
        """It is complete, in a wait since `begin`.

        Args:
            begin: `clock()` at the beginning of the wait.
            source: The rank of the world that has sent it.
        """
        if self.journal._kept is not None and self.key:
            key = self.key.format(source)
            sequence = self.sequence or self.journal.number(key)
            self.journal.keep(self.operation, self.axis, self.moved, begin, clock(), key, sequence)

    def performed(self, begin: float) -> None:
        """It was performed since `begin`."""
        if self.journal.on:
            self.journal.note(self.operation, self.axis, self.moved, begin)
            self.ended(begin, None)

    def waited(self, begin: float) -> None:
        """It was waited for since `begin`."""
        if self.journal.on:
            self.journal.note(self.operation, self.axis, Moved(self.moved.algorithm), begin, calls=0)


# -- What a rank sends in an operation whose algorithm is not known: in a ring, or straight to whom it is for.
#
# The MPI library does not tell what it sends. What it sends is reckoned as if it took the algorithm that moves the
# fewest bytes of all: for N ranks and a vector of X bytes
#
#     all_reduce                  2(N-1)/N X    a ring: to the next rank, whatever is sent
#     reduce_scatter, all_gather   (N-1)/N X    likewise; every block but one
#     broadcast, reduce                    X    a chain from or to the root; the last rank sends nothing
#     gather, scatter, all_to_all               each block from the rank that has it straight to the one that gets it
#
# Rank r's next rank is r + 1, so that all that a ring sends is sent inside a node, or all of it between two.


def blocks_sent(operation: str, rank: int, blocks: Sequence[int], root: int = 0) -> list[tuple[int, int]]:
    """What a rank sends to whom.

    Args:
        operation: Name of the collective operation.
        rank: The rank that sends.
        blocks: Bytes of the block of each rank. Of all_to_all: of those that leave this rank, by whom they are for. For
            all_reduce, reduce and broadcast, whose vector has no blocks, any division of it: see `even_shares`.
        root: Of broadcast, reduce, gather and scatter.

    Returns:
        (receiving rank, bytes) of all that leaves.
    """
    whole, after = sum(blocks), (rank + 1) % len(blocks)
    to_next = {
        "all_reduce": 2 * whole - blocks[rank] - blocks[after],
        "reduce_scatter": whole - blocks[rank],
        "all_gather": whole - blocks[after],
        "broadcast": whole if after != root else 0,
        "reduce": whole if rank != root else 0,
    }
    if operation in to_next:
        sent = {after: to_next[operation]}
    elif operation == "gather":
        sent = {root: blocks[rank]}
    else:  # scatter, all_to_all
        sent = dict(enumerate(blocks)) if operation == "all_to_all" or rank == root else {}
    return [(other, nbytes) for other, nbytes in sent.items() if other != rank]


def even_shares(nbytes: int, size: int) -> list[int]:
    """A vector's bytes, divided evenly over so many ranks."""
    each, rest = divmod(nbytes, size)
    return [each + (rank < rest) for rank in range(size)]


def bytes_sent(operation: str, nbytes: float, size: int) -> float:
    """What a rank sends in an operation on average over its ranks, by the formulas above.

    Args:
        operation: all_reduce, reduce_scatter, all_gather or broadcast.
        nbytes: Of the whole vector, which reduce_scatter takes and all_gather gives.
        size: Number of ranks.
    """
    return (2 if operation == "all_reduce" else 1) * (size - 1) / size * nbytes
