"""Traffic counters of a process: how much it sends to other ranks, and how long it waits for them.

While the counters are on, they count all communication: collectives of any thread, messages, letters, fences, and waits
for operations in the background. While it is off, it costs nothing: operations are then bound to functions that do not
count, and `TrafficCounters.on_switch` has them bound again when counting is switched.

The number of bytes is known before an operation runs (`Volume`): it is computed when the operation is bound to memory,
so counting only adds a few numbers to a row. `inside` counts intra-node bytes, which this rank sends to ranks of its
own node, or reads or writes in their memory; `between` counts inter-node bytes, which it sends to ranks of other nodes.
The sender counts a message, not its receiver. Reading memory in place that the node holds only once moves nothing and
is not counted.

Independent of the counters, a `Record` says which operation a rank is in.
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

from mpitrain.comm.job.topology import Topology

clock = time.perf_counter  # on Linux the same clock as time.monotonic

_MAX_RECORDS = 1_000_000  # operations kept at most if nobody takes them


class Volume(NamedTuple):
    """Bytes that one call of an operation moves on one rank.

    Attributes:
        algorithm: First word of the program's name, or "mpi" for an operation of the MPI library.
        inside: Bytes sent to ranks of the same node, or read or written in their memory.
        between: Bytes sent to ranks of other nodes.
    """

    algorithm: str = ""
    inside: int = 0
    between: int = 0

    def with_way(self, way: str) -> Volume:
        """Return a copy whose algorithm names the way in which device memory is carried (`way`)."""
        return self if self.algorithm == way else self._replace(algorithm=f"{self.algorithm} ({way})")

    @staticmethod
    def sum(parts: Iterable[Volume]) -> Volume:
        """Return the bytes of all parts of an operation; the algorithm is that of the first part that has one."""
        algorithm, inside, between = "", 0, 0
        for part in parts:
            algorithm = algorithm or part.algorithm
            inside, between = inside + part.inside, between + part.between
        return Volume(algorithm, inside, between)


NO_VOLUME = Volume()


class OperationTotals(NamedTuple):
    """Totals since counting was started, of one operation, axis and algorithm.

    Attributes:
        operation: Name of the collective, or send, recv, post, letter.
        axis: Label of the communicator: world, data, pipeline, tensor, ...
        algorithm: Algorithm that carried out the operation; "none" if nothing was to be done.
        calls: Number of operations.
        inside, between: Bytes, as in `Volume`.
        seconds: Sum of the durations. Background operations count in full, whether or not somebody waited for them.
    """

    operation: str
    axis: str
    algorithm: str
    calls: int
    inside: int
    between: int
    seconds: float


class Communication(NamedTuple):
    """One operation, as recorded while `TrafficCounters.record` is on.

    Attributes:
        operation, axis, algorithm, inside, between: See `OperationTotals`.
        begin, end: Times of time.perf_counter() in seconds. For a message: begin and end of the wait that completed it.
        background: True if it did not run in the main thread.
        key, sequence: Identification of the operation, equal on all ranks that took part in it and unique to it. The
            sender and the receiver of a message record the same pair.
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
    """The operation that a rank is in on one communicator. Operations write it, the watchdog reads it.

    Attributes:
        members: World ranks that all carry out the same operations in the same order.
        key: Name of the record, the same on all members.
        awaited: World ranks, one of which must send or receive a message for the wait to end.
        has_deadline: True if the wait ends by itself after a time limit.
        without_deadline: True if the wait may take any time, as long as all ranks answer the watchdog.
    """

    __slots__ = (
        "__weakref__", "awaited", "has_deadline", "key", "label", "members", "name", "sequence", "since", "tensor",
        "thread", "without_deadline",
    )  # fmt: skip

    def __init__(self, label: str, members: Sequence[int] = (), key: str = "") -> None:
        self.label, self.members, self.key = label, members, key
        self.awaited: Sequence[int] = ()
        self.has_deadline = self.without_deadline = False
        self.sequence = 0
        self.name = ""
        self.tensor: torch.Tensor | None = None  # the operation's tensor while it runs
        self.since = 0.0  # time.monotonic() at the beginning of the operation; 0: in no operation
        self.thread = 0

    def begin(self, name: str, tensor: torch.Tensor | None) -> None:
        """Note that an operation begins.

        Args:
            name: Name of the operation.
            tensor: Tensor that it works on; None for an operation without data.
        """
        self.sequence += 1
        self.name, self.tensor = name, tensor
        self.thread = threading.get_ident()
        self.since = time.monotonic()

    def end(self) -> None:
        """Note that the operation has ended."""
        self.since, self.tensor = 0.0, None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Show that this rank is in an operation without data while the `with` block runs."""
        self.awaited = ()
        self.begin(name, None)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def comparing(self, name: str, tensor: torch.Tensor | None) -> Iterator[None]:
        """Show that ranks compare their next operation while the `with` block runs. The operation itself has not begun.

        Args:
            name: Name of the next operation.
            tensor: Tensor that it will work on; None for an operation without data.
        """
        self.begin(f"before {name}", tensor)
        try:
            yield
        finally:
            self.end()
            self.sequence -= 1

    def text(self) -> str:
        """Return a description of the operation for messages."""
        tensor = self.tensor
        data = f" of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" if tensor is not None else ""
        return f"{self.label}: {self.name} #{self.sequence}{data}"


class Callbacks:
    """Methods to call when something changes, as long as their objects live."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, method: Callable[[], None]) -> None:
        """Add a method to call."""
        self._methods.append(weakref.WeakMethod(method, self._methods.remove))

    def call_all(self) -> None:
        """Call all methods."""
        for reference in list(self._methods):
            method = reference()
            if method is not None:
                method()


Row = list[float]  # calls, inside, between, seconds


class TrafficCounters:
    """Counters and records of this process's communication; `world.journal` is the only instance.

    The main thread is the one that called `start`.

    Attributes:
        on: True while operations are call_and_count.
        waited: Seconds that the main thread has spent in communication since `start`: in collectives, and waiting for
            background operations, messages and letters. Subtract two readings to get the time between them.
        on_switch: Methods called whenever counting is switched on or off.
    """

    def __init__(self) -> None:
        self.on = False
        self.waited = 0.0
        self._main = threading.get_ident()
        self._rows: dict[tuple[str, str, str, int], Row] = {}
        self._lock = threading.Lock()  # of rows that several threads add to
        self._recorded: list[Communication] | None = None
        self._numbers: Counter[str] = Counter()  # of messages, by sender, receiver and tag
        self.on_switch = Callbacks()

    def start(self) -> None:
        """Reset all counts and start counting. The calling thread becomes the main thread."""
        with self._lock:
            self._rows.clear()
            self._numbers.clear()
        self._main, self.waited, self.on = threading.get_ident(), 0.0, True
        self.on_switch.call_all()

    def stop(self) -> None:
        """Stop counting and recording. `account` still returns the counts."""
        self.on, self._recorded = False, None
        self.on_switch.call_all()

    def account(self) -> list[OperationTotals]:
        """Return the totals since `start`, sorted by name. Counting goes on."""
        sums: dict[tuple[str, str, str], Row] = {}
        with self._lock:
            rows = list(self._rows.items())
        for (operation, axis, algorithm, _), row in rows:
            total = sums.setdefault((operation, axis, algorithm), [0, 0, 0, 0.0])
            total[:] = [a + b for a, b in zip(total, row, strict=True)]
        totals = sorted((name, row) for name, row in sums.items() if any(row))
        return [OperationTotals(*name, int(row[0]), int(row[1]), int(row[2]), row[3]) for name, row in totals]

    def record(self, on: bool) -> None:
        """Start or stop recording single operations. This requires `start`.

        Args:
            on: True to start recording, False to stop.
        """
        self._recorded = [] if on and self.on else None

    def take(self) -> list[Communication]:
        """Return the operations recorded since the last call, sorted by their end times."""
        records = self._recorded
        if not records:
            return []
        taken = records[:]
        del records[: len(taken)]  # another thread may have added some
        return sorted(taken, key=lambda one: one.end)

    # -- for the operations

    def make_counting_call(
        self,
        perform: Callable[..., float],
        operation: str,
        axis: str,
        volume: Volume,
        record: Record,
        first: Callable[[], None] | None = None,
    ) -> Callable[[object], None]:
        """Return a function that performs an operation, any number of times, and counts it.

        Args:
            perform: Function that performs the operation, shows it in the record, and returns time.monotonic() of its
                beginning.
            operation: Name of the operation.
            axis: Label of its communicator.
            volume: Algorithm, and bytes of each call.
            record: Record in which the operation is shown.
            first: Function to call before the operation, which does its own counting.
        """
        algorithm, inside, between = volume.algorithm or "none", volume.inside, volume.between
        row, main, now = self._row(operation, axis, algorithm, id(record)), self._main, clock

        def call_and_count(tensor: object) -> None:
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
            if self._recorded is not None:
                self.append_record(operation, axis, volume, begin, end, record.key, record.sequence)

        return call_and_count

    def _row(self, operation: str, axis: str, algorithm: str, owner: int) -> Row:
        """Return the row to add to. `owner` separates rows that threads add to without a lock; 0 for locked rows."""
        return self._rows.setdefault((operation, axis, algorithm, owner), [0, 0, 0, 0.0])

    def count(
        self, operation: str, axis: str, volume: Volume, begin: float, record: Record | None = None, calls: int = 1
    ) -> None:
        """Count an operation that began at `begin` and ends now. Any thread may call this.

        Args:
            operation: Name of the operation.
            axis: Label of its communicator.
            volume: Algorithm and bytes.
            begin: `clock()` at its beginning.
            record: Record of the operation, which is then also kept singly; None for a part of an operation, or if the
                caller calls `append_record` itself.
            calls: Number of operations to count; 0 for a part of an operation that is call_and_count elsewhere.
        """
        end = clock()
        with self._lock:
            row = self._row(operation, axis, volume.algorithm or "none", 0)
            row[0] += calls
            row[1] += volume.inside
            row[2] += volume.between
            row[3] += end - begin
        if threading.get_ident() == self._main:
            self.waited += end - begin
        if record is not None and self._recorded is not None:
            self.append_record(operation, axis, volume, begin, end, record.key, record.sequence)

    def append_record(
        self, operation: str, axis: str, volume: Volume, begin: float, end: float, key: str, sequence: int
    ) -> None:
        """Record a single operation if recording is on.

        Args:
            operation, axis, begin, key, sequence: See `Communication`.
            volume: Algorithm and bytes.
            end: `clock()` at the end of the operation.
        """
        records = self._recorded
        if records is not None and len(records) < _MAX_RECORDS:
            background, algorithm = threading.get_ident() != self._main, volume.algorithm or "none"
            moved = volume.inside, volume.between
            records.append(Communication(operation, axis, algorithm, *moved, begin, end, background, key, sequence))

    def add_wait(self, begin: float) -> None:
        """Add to `waited` the time since `begin`, during which the calling thread waited for another thread."""
        if self.on and threading.get_ident() == self._main:
            self.waited += clock() - begin

    def next_number(self, name: str) -> int:
        """Count one more message under this name (sender, receiver and tag) and return its number, starting at 1."""
        with self._lock:
            self._numbers[name] += 1
            return self._numbers[name]


class Note(NamedTuple):
    """Entry of a message or letter under way; exists only while the traffic counters are on.

    Attributes:
        counters: Traffic counters to which it is added.
        operation, axis: Name of the operation and label of its communicator.
        volume: Algorithm and bytes.
        key: Identification of the message, together with `sequence`. It contains "{}" for a source not known yet.
        sequence: Number among the messages of the same key; 0 if not known yet.
    """

    counters: TrafficCounters
    operation: str
    axis: str
    volume: Volume
    key: str = ""
    sequence: int = 0

    def record_end(self, begin: float, source: int | None) -> None:
        """Record that the message was completed by a wait that began at `begin`.

        Args:
            begin: `clock()` at the beginning of the wait.
            source: World rank that sent the message; None if `key` already names it.
        """
        if self.counters._recorded is not None and self.key:
            key = self.key.format(source)
            sequence = self.sequence or self.counters.next_number(key)
            self.counters.append_record(self.operation, self.axis, self.volume, begin, clock(), key, sequence)

    def count_operation(self, begin: float) -> None:
        """Count the operation, which began at `begin` and ends now, and record it."""
        if self.counters.on:
            self.counters.count(self.operation, self.axis, self.volume, begin)
            self.record_end(begin, None)

    def count_wait(self, begin: float) -> None:
        """Add the time since `begin`, in which the message was waited for, to its row."""
        if self.counters.on:
            self.counters.count(self.operation, self.axis, Volume(self.volume.algorithm), begin, calls=0)


# -- Estimate of the bytes that a rank sends if the algorithm is not known: in a ring, or directly to the receiver.
#
# The MPI library does not report its traffic. The estimate assumes the algorithm that moves the fewest bytes. For N
# ranks and a vector of X bytes, each rank sends
#
#     all_reduce                  2(N-1)/N X    a ring: everything goes to the next rank
#     reduce_scatter, all_gather   (N-1)/N X    a ring as well; every block but one
#     broadcast, reduce                    X    a chain from or to the root; the last rank sends nothing
#     gather, scatter, all_to_all               each block goes directly from its owner to its receiver
#
# Rank r sends to rank r + 1, so each rank of a ring sends either only inside its node or only to another node.


def blocks_sent(operation: str, rank: int, blocks: Sequence[int], root: int = 0) -> list[tuple[int, int]]:
    """Return the bytes that a rank sends to each other rank in an operation, estimated by the table above.

    Args:
        operation: Name of the collective operation.
        rank: Rank that sends.
        blocks: Bytes of each rank's block. For all_to_all: bytes that this rank sends to each rank. For all_reduce,
            reduce and broadcast, whose vector has no blocks, any division of the vector; see `even_shares`.
        root: Root of broadcast, reduce, gather and scatter.

    Returns:
        Pairs (receiving rank, bytes), without what stays on this rank.
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
    """Return the bytes of each rank's share of a vector that is divided as evenly as possible.

    Args:
        nbytes: Bytes of the vector. The first nbytes % size ranks get one byte more than the others.
        size: Number of ranks.
    """
    each, rest = divmod(nbytes, size)
    return [each + (rank < rest) for rank in range(size)]


def bytes_sent(operation: str, nbytes: float, size: int) -> float:
    """Return the bytes that a rank sends in an operation, averaged over the ranks, by the formulas above.

    Args:
        operation: all_reduce, reduce_scatter, all_gather or broadcast.
        nbytes: Bytes of the whole vector: the input of reduce_scatter, the output of all_gather.
        size: Number of ranks.
    """
    return (2 if operation == "all_reduce" else 1) * (size - 1) / size * nbytes


def library_volume(topology: Topology, operation: str, blocks: Sequence[int] | int, root: int = 0) -> Volume:
    """Return the bytes that the MPI library moves on this rank, as far as they can be known; see `blocks_sent`.

    Args:
        topology: Placement of the ranks.
        operation: Name of the operation.
        blocks: Bytes of each rank's block, or of a whole vector that has no blocks.
        root: Root rank, for an operation that has one.
    """
    inside = between = 0
    shares = even_shares(blocks, topology.size) if isinstance(blocks, int) else blocks
    for other, nbytes in blocks_sent(operation, topology.rank, shares, root):
        here = topology.nodes[other] == topology.nodes[topology.rank]
        inside, between = inside + nbytes * here, between + nbytes * (not here)
    return Volume("mpi", inside, between)
