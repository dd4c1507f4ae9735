"""Dispatch of operations: immediate or in the background, compared between ranks in debug mode, and watched.

This module also has the services that all communicators of a process share, and the MPI communicators that belong to
one `Communicator`.

When a loop repeats an operation, most of the work of the first call is skipped:

    first call    check arguments -> (compare ranks) -> bind to memory -> perform
    later calls   look up in `ready` by addresses, sizes and dtypes of the tensors -> perform

Each operation is described by one `CollectiveOperation`. A call that is not found in `ready` becomes an `Invocation`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from mpitrain.comm.collectives.binding import Binder, CollectiveOperation, Invocation, Levels, Tensors
from mpitrain.comm.collectives.transports.by_programs import DeviceCall, perform_through_host
from mpitrain.comm.collectives.transports.choice import DeviceMemory, Transports, Way, perform_on_one_rank
from mpitrain.comm.job.abort import Faults
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Member, Share, Topology
from mpitrain.comm.job.traffic import Note, Record, RecordedOperation, TrafficCounters, Volume, clock
from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.memory.buffers import as_tensor, inner_tensors, is_wrapper
from mpitrain.comm.programs.verify import Proofs
from mpitrain.comm.runtime.agreement import Call, compare, make_repeated_call, run_watched
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.watchdog import FailureHandler, Watchdog
from mpitrain.comm.runtime.work import QueuedOperation, StreamOrder, Streams, Work, Worker, in_stream_order
from mpitrain.comm.tuning import Tuning
from mpitrain.errors import InputError

# raised by a lookup in `ready`: the key is missing, or an argument is not a tensor, has no storage or no hash
NOT_READY = (KeyError, AttributeError, RuntimeError, TypeError)

_BARRIER = "barrier"


def _barrier(binder: Binder) -> Compiled:
    return binder.bind_cached(_BARRIER, lambda: Compiled([binder.comm.Barrier], volume=Volume("mpi")))


@dataclass(frozen=True)
class ProcessServices:
    """Services and state that all communicators of a process share.

    The values are equal on all ranks, except `cores` and the records of the watchdog.

    Attributes:
        arenas: Index of the arenas of this process.
        tuning: Table of the fastest algorithms on this machine.
        watchdog: Ends the job if an operation does not complete.
        progress: Makes progress on pending receives and deferred operations.
        faults: Ends the job if this rank fails.
        cores: This rank's share of the cores of its machine.
        spare_cores: Cores beyond one per rank, for communication threads; the minimum over all ranks. Negative if some
            ranks have no hardware thread of their own.
        device_memory: Device of this rank, and the way its memory is communicated.
        debug: True if ranks compare what they are about to do.
        proofs: Proofs of the programs used so far, in debug mode.
        failures: Handler of dead ranks, if the job continues without them (see `faults.ulfm`).
        journal: Counts the bytes sent.
    """

    arenas: ArenaIndex
    tuning: Tuning
    watchdog: Watchdog
    progress: ProgressEngine
    faults: Faults
    cores: Share
    spare_cores: int
    device_memory: DeviceMemory
    debug: bool
    proofs: Proofs | None = None
    failures: FailureHandler | None = None
    journal: TrafficCounters = field(default_factory=TrafficCounters)

    def may_release(self, comm: MPI.Intracomm) -> bool:
        """Return whether the ranks of a tracked communicator can still act together."""
        return self.failures is None or self.failures.is_tracked(comm)


class OwnedCommunicators:
    """MPI communicators owned by one `Communicator`. All its ranks make and free them in the same order.

    `free` is collective, because MPI_Comm_free is. If a `Communicator` is dropped without `free`, its MPI communicators
    exist until the job ends: Python collects garbage at different times on different ranks, so no collective call can
    be made then. Resources of this process alone, such as the watchdog's records and the communication thread, are
    still released.
    """

    def __init__(self, process: ProcessServices) -> None:
        self._failures = process.failures
        self._comms: list[MPI.Intracomm] = []

    def keep(self, comm: MPI.Comm) -> MPI.Intracomm:
        """Register a new MPI communicator, also with the failure handler if there is one, and return it."""
        intracomm = MPI.Intracomm(comm)  # Split returns an intracommunicator, but mpi4py types it as Comm
        self._comms.append(intracomm if self._failures is None else self._failures.track(intracomm))
        return intracomm

    def free(self) -> None:
        """Free the communicators, except those that were abandoned because of dead ranks. Collective."""
        while self._comms:
            comm = self._comms.pop()
            if self._failures is None or self._failures.forget(comm):
                comm.Free()


class Dispatcher(Member):
    """Base of `Communicator`: performs all of its operations.

    Attributes:
        process: Services that all communicators of the process share.
        journal: Counts the bytes that this process sends on all communicators.
        ready: For the key of an operation performed before, a function that performs it again. It is used for CPU
            tensors, and not in debug mode.
        binder: Binds operations for the calling thread.
        probe: The all_reduce operation, with which the ways of carrying device memory are timed.
        channel: Makes the communicator that compressed operations use inside.
    """

    probe: ClassVar[CollectiveOperation]
    channel: ClassVar[type[Any]]  # Channel of comm.collectives.reducing

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: ProcessServices, label: str) -> None:
        super().__init__(topology, label)
        self.process, self.journal = process, process.journal
        self._owned_comms = OwnedCommunicators(process)
        self._comm = comm = self._owned_comms.keep(comm)
        self.binder = self._make_binder(comm)
        self.ready = self.binder.cache.ready
        threaded = process.spare_cores > 0 and topology.size > 1  # its binder is made now, which is collective
        self._background = self._make_binder(self._owned_comms.keep(comm.Dup())) if threaded else None
        self._worker = Worker(self._background is not None, process.journal, process.progress)
        compares = process.debug and topology.size > 1
        self._debug_comm = self._owned_comms.keep(comm.Dup()) if compares else None  # for comparisons alone
        self._record = process.watchdog.record(label, topology.world_ranks)
        self._background_record = process.watchdog.record(f"{label} (async)", topology.world_ranks)
        self._transports: dict[Binder, Transports] = {}
        self._levels: dict[Binder, Levels | None] = {}
        self._streams: Streams = {}  # for operations on a device in the background
        self._freed = False
        # a ready function counts only if the traffic counters were on when it was made
        self.journal.on_switch.add(self.binder.cache.forget_ready)

    def record_operation(self, name: str, volume: Volume, begin: float, key: str = "", sequence: int = 0) -> None:
        """Add to the traffic counters an operation that this rank took part in but did not dispatch.

        Args:
            name: Name of the operation.
            volume: Algorithm and bytes moved.
            begin: `clock()` at its start.
            key, sequence: Identifier and number of the operation, equal on all ranks; without `key`, those of the last
                dispatched operation.
        """
        key, sequence = (key, sequence) if key else (self._record.key, self._record.sequence)
        Note(self.journal, name, self.label, volume, key, sequence).count_operation(begin)

    def _make_binder(self, comm: MPI.Intracomm) -> Binder:
        process = self.process
        node = self._owned_comms.keep(comm.Split(self._topology.nodes[comm.rank], comm.rank))
        oversubscribed = process.spare_cores < 0
        return Binder(comm, node, self._topology, process.arenas, process.tuning, oversubscribed, process.proofs)

    def duplicate_of_node(self) -> MPI.Intracomm:
        """Return a new communicator of this node's ranks, which is freed with this one. Collective over the node."""
        return self._owned_comms.keep(self.binder.node.Dup())

    def levels(self, async_op: bool) -> Levels | None:
        """Return the binders of the two levels of nodes and ranks. The first call is collective.

        Args:
            async_op: If true, they are for an operation in the background.

        Returns:
            The binders; None unless there are several nodes, each with the same number of ranks, more than one.
        """
        binder = (self._background or self.binder) if async_op else self.binder
        if binder not in self._levels:
            self._levels[binder] = self._make_levels(binder)
        return self._levels[binder]

    def _make_levels(self, binder: Binder) -> Levels | None:
        topology, process = self._topology, self.process
        local_sizes = {topology.nodes.count(node) for node in topology.nodes}
        if topology.num_nodes == 1 or len(local_sizes) > 1 or local_sizes == {1}:
            return None
        local = self.local_rank
        with self._record.during("split into nodes"):
            across = self._owned_comms.keep(self._comm.Split(local, self.rank))
        services = process.arenas, process.tuning, process.spare_cores < 0, process.proofs
        inside, between = (
            topology.subgroup(topology.neighbours, local),
            topology.subgroup(topology.counterparts, across.rank),
        )
        return Levels(
            Binder(binder.node, binder.node, inside, *services), Binder(across, MPI.COMM_SELF, between, *services)
        )

    @property
    def overlaps(self) -> bool:
        """True if operations started with async_op make progress while this rank computes."""
        return self._background is not None

    def barrier(self, async_op: bool = False) -> Work | None:
        """Wait until every rank has called this. Collective.

        Args:
            async_op: If true, return at once with a `Work` that completes when every rank has called this.

        Raises:
            CommunicationError: MPI fails.
        """
        ready = None if async_op else self.ready.get(_BARRIER)
        if ready is None:
            return self.dispatch(Invocation(_BARRIER, _barrier, key=_BARRIER), async_op)
        ready()
        return None

    def call(
        self,
        operation: CollectiveOperation,
        async_op: bool,
        tensors: Sequence[Any],
        written: Sequence[bool],
        *arguments: Any,
    ) -> Work | None:
        """Check and dispatch one call of an operation that was not found in `ready`.

        Args:
            operation: The operation.
            async_op: If true, run it in the background.
            tensors: Tensor arguments in order; the last is left out on ranks that do not have it.
            written: For each tensor, True if the operation changes it.
            arguments: The other arguments.
        """
        return self.begin(partial(self.check_call, operation, written, arguments), async_op, tensors, written)

    def check_call(
        self, operation: CollectiveOperation, written: Sequence[bool], arguments: Sequence[Any], *passed: Any
    ) -> Invocation:
        """Check the arguments of a call, compute the block sizes, and return its invocation."""
        tensors, compared = passed if len(passed) == operation.tensors else (*passed, None), arguments
        if "root" in operation.parameters:
            check_rank(self, operation.value(arguments, "root"))
        if len(passed) == 2:
            whole = operation.by_rank.index(True)
            names = ["out" if changed else "x" for changed in (written[1 - whole], written[whole])]
            counts = operation.value(arguments, "counts")
            blocks = block_sizes(self, operation.name, tensors[1 - whole], tensors[whole], counts, *names)
            compared = operation.replace_arguments(arguments, counts=blocks)
            arguments = operation.replace_arguments(
                arguments, counts=tuple(blocks) if min(blocks) != max(blocks) else None
            )
        place = operation.placed if self._debug_comm is not None else None  # used in debug mode alone
        placed = None if place is None else place(self.binder.topology, *tensors, *arguments)
        return operation.invocation(tensors, written, *arguments, compared_values=compared, placed=placed)

    def begin(
        self,
        make_invocation: Callable[..., Invocation],
        async_op: bool,
        tensors: Sequence[Any],
        written: Sequence[bool],
    ) -> Work | None:
        """Dispatch a call that was not found in `ready`; wrapper tensors are dispatched once for each inner tensor.

        Args:
            make_invocation: Checks the other arguments, given the tensors, and returns the invocation.
            async_op: If true, run it in the background.
            tensors: Tensor arguments in order.
            written: For each tensor, True if the operation changes it.
        """
        if any(map(is_wrapper, tensors)):
            return for_each_inner(lambda *inner: self.begin(make_invocation, async_op, inner, written), *tensors)
        return self.dispatch(self.prepare(make_invocation, tensors, written), async_op)

    def prepare(
        self, make_invocation: Callable[..., Invocation], tensors: Sequence[Any], written: Sequence[bool]
    ) -> Invocation:
        """Return the invocation of a call; the arguments are those of `begin`."""
        passed = [as_tensor(x, written=changed) for x, changed in zip(tensors, written)]  # noqa: B905 - see `check_call`
        return make_invocation(*passed)

    def dispatch(self, call: Invocation, async_op: bool = False) -> Work | None:
        """Perform an operation and return None, or start it in the background and return its handle.

        Args:
            call: The call, with checked arguments.
            async_op: If true, run it in the background.

        Raises:
            InputError: The communicator was freed, or binding finds that the arguments are not supported.
            CommunicationError: MPI fails, or ranks call different operations.
        """
        known = None if async_op or call.key is None else self.ready.get(call.key)
        if known is not None:
            known()
            return None
        self.compare(call.name, call.tensors, call.compared_values, call.uneven, call.placed)
        device = self._device_of(call.name, call.tensors)
        if async_op:
            name = f"{call.name} of {0 if call.first is None else call.first.numel()} elements on {self.label}"
            perform = partial(self._perform, call, self._background or self.binder, self._background_record, device)
            on_device = [] if device is None else [tensor for tensor in call.tensors if tensor is not None]
            order = StreamOrder(on_device, self._streams) if on_device else None
            return QueuedOperation(name, perform, self._worker, order)
        if self._background is None and self._worker.queue:
            self._worker.drain()  # operations deferred to this thread come first
        if device is not None:
            with in_stream_order(device):
                self._perform(call, self.binder, self._record, device)
            return None
        self._perform(call, self.binder, self._record)
        if call.key is not None and self._debug_comm is None and all(map(_may_repeat, call.tensors)):
            compiled = self.binder.cache.bound.get(call.key)
            if compiled is not None:
                self.ready[call.key] = self.make_repeat(call, compiled)
        return None

    def make_repeat(self, call: Invocation, compiled: Compiled, signed: int = 1) -> Call:
        """Return a function that performs an operation again, and counts it while the traffic counters are on.

        Args:
            call: The operation.
            compiled: Its program.
            signed: The rank signs one operation in this number, see `make_repeated_call`.
        """
        name, record, drain, journal = call.name, self._record, self._worker.drain, self.journal
        waiting, shown = self._worker.queue if self._background is None else (), RecordedOperation.on(name, call.first)
        if not (journal.on and call.counts):
            return make_repeated_call(record, shown, compiled.calls, waiting, drain, signed)
        counted = make_repeated_call(record, shown, compiled.calls, (), drain, signed)  # deferred ones count themselves
        first = drain if self._background is None else None
        return journal.make_counting_call(counted, name, self.label, compiled.volume, record, first)

    def compare(
        self,
        name: str,
        tensors: Tensors,
        compared_values: object,
        uneven: bool = False,
        placed: torch.Tensor | None = None,
    ) -> None:
        """Check that the communicator was not freed and, in debug mode, that all ranks are about to do the same.

        Args:
            name: Name of the operation.
            tensors: Tensor arguments; the size and dtype of the first are compared.
            compared_values: Other values that must be equal on all ranks.
            uneven: If true, sizes may differ between ranks.
            placed: Tensor that must be at the same offset in an arena on all ranks of a node.

        Raises:
            InputError: The communicator was freed.
            CommunicationError: In debug mode, ranks are about to do different things.
        """
        if self._freed:
            raise InputError(f"{name}: {self.label} was freed; make another communicator with split or subgroup")
        if self._debug_comm is None:
            return
        first, description, place = tensors[0] if tensors else None, name, ""
        if first is not None:
            description += f" of {'?' if uneven else first.numel()} {str(first.dtype).removeprefix('torch.')}"
        if compared_values is not None:
            description += f" {compared_values}"
        arena = None if placed is None else self.binder.arena_of(placed)
        if placed is not None and arena is not None and placed.numel():
            place = f" at byte {placed.data_ptr() - arena.start} of an arena of {arena.nbytes}"
        with self._record.comparing(name, first):
            shown = f"#{self._record.sequence} {description[:300]}{place}"
            compare(self._debug_comm, description, shown, place, self.nodes)

    def require_same(self, description: str) -> None:
        """Compare by messages what all ranks are about to do, in any mode. Collective.

        Args:
            description: Description that must be equal on all ranks.

        Raises:
            CommunicationError: The descriptions differ; raised on all ranks.
        """
        with self._record.comparing(description, None):
            compare(self._comm, description)

    def _perform(self, call: Invocation, binder: Binder, record: Record, device: torch.device | None = None) -> None:
        """Perform a call under the watchdog, and count it while the traffic counters are on."""

        def run(*tensors: torch.Tensor | None) -> None:
            binder.run(call.bind(binder, *tensors))

        def act() -> None:
            if device is None or call.on_device:
                run(*call.tensors)
            elif call.operation is not None:
                self.perform(binder, call.operation, call.tensors, call.written, *call.arguments)
            else:
                perform_through_host(run, call.tensors, call.written)

        if not (self.journal.on and call.counts):
            run_watched(record, call.name, call.first, act)
            return
        counted = binder.volume = []
        begin = clock()
        try:
            run_watched(record, call.name, call.first, act)
        finally:
            binder.volume = None
        volume = Volume.sum(counted)
        if call.algorithm:
            volume = volume._replace(algorithm=call.algorithm)
        self.journal.count(call.name, self.label, volume, begin, record)

    def perform(
        self, binder: Binder, operation: CollectiveOperation, tensors: Tensors, written: Sequence[bool], *arguments: Any
    ) -> None:
        """Perform an operation, or a part of one, in the calling thread, on host memory or on the rank's device.

        Args:
            binder: Binder of the calling thread.
            operation: The operation.
            tensors: Tensor arguments in order.
            written: For each tensor, True if the operation changes it.
            arguments: The other arguments.
        """
        device = self._device_of(operation.name, tensors)
        if device is None:
            binder.run(operation.bind_cached(binder, *tensors, *arguments))
        else:
            call = DeviceCall(operation, tensors, written, arguments)
            perform = perform_on_one_rank if self.size == 1 else self._transports_of(binder, device).perform
            perform(call)

    def _device_of(self, name: str, tensors: Tensors) -> torch.device | None:
        """Return the device of the tensors, which must be the rank's device; None for the host.

        Raises:
            InputError: The tensors are on several devices, or not on the rank's device.
        """
        present = [tensor for tensor in tensors if tensor is not None]
        if all(tensor.is_cpu for tensor in present):
            return None
        device, memory = present[0].device, self.process.device_memory
        if any(tensor.device != device for tensor in present):
            places = ", ".join(str(tensor.device) for tensor in present)
            raise InputError(f"{name}: the tensors are on {places}; move them to one device")
        if memory.device is None:
            memory.device = device
        if memory.device != device:
            raise InputError(
                f"{name}: a tensor is on {device}, but rank {self.rank} uses {memory.device}; "
                f"move it to {memory.device} (each rank uses one device)"
            )
        return device

    def _transports_of(self, binder: Binder, device: torch.device) -> Transports:
        if binder not in self._transports:
            self._transports[binder] = Transports(binder, self.process.device_memory, device, self.probe)
        return self._transports[binder]

    def device_ways(self, device: torch.device) -> list[Way]:
        """Return the ways in which this communicator can carry device memory; none for a single rank. Collective."""
        return self._transports_of(self.binder, device).ways if self.size > 1 else []

    def _free(self) -> None:
        """Release the resources of the operations. Collective. Nothing can be dispatched afterwards."""
        self._freed = True
        self.binder.cache.forget_ready()
        self._worker.close()
        if self.process.may_release(self._comm):
            for binder in (self.binder, self._background):
                if binder in self._transports:
                    self._transports.pop(binder).free()
                for each in (*(self._levels.pop(binder, None) or ()), binder) if binder is not None else ():
                    each.free()
            self._owned_comms.free()
        for record in (self._record, self._background_record):
            self.process.watchdog.forget(record)


def _may_repeat(x: torch.Tensor | None) -> bool:
    """Return True if every contiguous tensor with x's address, size and dtype has the values of x or is negated.

    It may not have: a complex tensor can be lazily conjugated.
    """
    return x is None or (x.is_cpu and not x.is_complex())


class CombinedWork(Work):
    """Handle of several operations that were started as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        """Block until all operations are complete; see `Work.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def done(self) -> bool:
        """Return True if all operations are complete."""
        return all(work.done() for work in self._works)


def for_each_inner(operation: Callable[..., Work | None], *tensors: Any) -> Work | None:
    """Perform an operation once for each inner tensor of wrapper tensors.

    Args:
        operation: Called with one inner tensor of each tensor.
        tensors: Tensors of the operation; None where this rank has none.

    Returns:
        A handle of all calls, if they run in the background; otherwise None.

    Raises:
        InputError: The tensors have different numbers of inner tensors.
    """
    parts = [None if x is None else inner_tensors(x) if is_wrapper(x) else [x] for x in tensors]
    numbers = {len(inner) for inner in parts if inner is not None}
    if len(numbers) > 1:
        kinds = ", ".join(f"a {type(x).__name__} of {len(inner)}" for x, inner in zip(tensors, parts) if inner)  # noqa: B905
        raise InputError(
            f"the tensors of one operation must consist of the same number of inner tensors, not {kinds}; "
            "pass the inner tensors one by one"
        )
    calls = [[None if inner is None else inner[i] for inner in parts] for i in range(numbers.pop())]
    works = [operation(*inner) for inner in calls]
    begun = [work for work in works if work is not None]
    return CombinedWork(begun) if begun else None


def check_rank(comm: Member, rank: int) -> None:
    """Check that the communicator has a rank.

    Args:
        comm: The communicator.
        rank: Number of the rank.

    Raises:
        InputError: There is no such rank.
    """
    if not 0 <= rank < comm.size:
        raise InputError(f"there is no rank {rank} in {comm.label}; ranks are 0 to {comm.size - 1}")


def block_sizes(
    comm: Member, name: str, part: torch.Tensor | None, whole: torch.Tensor, counts: Sequence[int] | None, *names: str
) -> list[int]:
    """Return the number of elements of each rank's block of `whole`, checked against this rank's part.

    Args:
        comm: The ranks.
        name: Name of the operation, for messages.
        part: This rank's block; None if it is not checked.
        whole: All blocks in order of rank.
        counts: Elements of each block; None for equal blocks.
        names: Argument names of `part` and `whole`, for messages.

    Raises:
        InputError: Dtypes differ, `whole` cannot be divided equally, or sizes do not match `counts`.
    """
    part_name, whole_name = names
    if part is not None and part.dtype != whole.dtype:
        raise InputError(f"{name}: {part_name} is {part.dtype}, {whole_name} is {whole.dtype}; make them the same")
    if counts is None:
        each, rest = divmod(whole.numel(), comm.size)
        if rest:
            raise InputError(
                f"{name}: {whole_name} has {whole.numel()} elements, not a multiple of {comm.size} ranks; pad it "
                "or give counts"
            )
        blocks = [each] * comm.size
    else:
        blocks = [int(n) for n in counts]
        if len(blocks) != comm.size or min(blocks) < 0 or sum(blocks) != whole.numel():
            raise InputError(
                f"{name}: counts {blocks} must be {comm.size} non-negative numbers that sum to the "
                f"{whole.numel()} elements of {whole_name}"
            )
    if part is not None and part.numel() != blocks[comm.rank]:
        raise InputError(
            f"{name}: {part_name} has {part.numel()} elements, but rank {comm.rank}'s block of {whole_name} has "
            f"{blocks[comm.rank]}; {whole_name} must have one block per rank"
        )
    return blocks
