"""Performs calls of operations: at once or in the background, compared where debugging, watched.

Here too are the services that all communicators of a process share, and the MPI communicators that each of them uses.

Most of what an operation's first call does is not done again when a loop repeats it:

    first     arguments checked -> (ranks compared) -> bound to memory -> performed
    again     found in `ready` by the addresses, sizes and types of its tensors -> performed

Each operation's file describes one `CollectiveOperation`; an `Invocation` is made of each call that is not found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from mpitrain.comm.collectives.binding import Binder, CollectiveOperation, Invocation, Ready, Tensors
from mpitrain.comm.collectives.transports.by_programs import DeviceCall, through_host
from mpitrain.comm.collectives.transports.choice import DeviceMemory, Transports, Way, alone
from mpitrain.comm.job.abort import Faults
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Member, Share, Topology
from mpitrain.comm.job.traffic import Journal, Moved, Note, Record, clock
from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.memory.buffers import as_tensor, inner_tensors, is_wrapper
from mpitrain.comm.programs.verify import Proofs
from mpitrain.comm.runtime.agreement import compare, repeated, seen
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.watchdog import FailureHandler, Watchdog
from mpitrain.comm.runtime.work import Order, Queued, Streams, Work, Worker, between
from mpitrain.comm.selection import Tuning
from mpitrain.errors import InputError

# what looking for a key in `ready` raises: it is not there, or an argument is no tensor, has no storage or no hash
NOT_READY = (KeyError, AttributeError, RuntimeError, TypeError)

_BARRIER = "barrier"


def _barrier(binder: Binder) -> Compiled:
    return binder.bound(_BARRIER, lambda: Compiled([binder.comm.Barrier], moved=Moved("mpi")))


@dataclass(frozen=True)
class ProcessServices:
    """State that all communicators of a process share; except `cores` and the watchdog's work, the same on every rank.

    Attributes:
        arenas: Where this process has arenas.
        tuning: Which algorithms are fastest on this machine.
        watchdog: What ends operations that do not complete.
        progress: What makes progress on receives and on operations that were put off.
        faults: What ends the job where this rank fails.
        cores: What this rank has of its node's.
        spare_cores: Of the ranks that have fewest, cores that no rank computes on; negative for ranks that have none.
        device_memory: Which device this rank has, and how its memory is carried.
        debug: Whether the ranks compare what they are about to do.
        proofs: Of the programs used so far, in the debug mode.
        failures: Where the job is to go on without ranks that die (see `faults.ulfm`).
        journal: Counts what is sent.
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
    journal: Journal = field(default_factory=Journal)

    def may_release(self, comm: MPI.Intracomm) -> bool:
        """Return whether the ranks of a tracked communicator can still act together."""
        return self.failures is None or self.failures.tracks(comm)


class OwnedCommunicators:
    """The MPI communicators that a `Communicator` is made of. Made and freed by all of its ranks in the same order.

    MPI_Comm_free is collective, and so `free` is. A communicator that is dropped instead keeps what it has of MPI until
    the job ends: Python collects garbage on each rank at a time of its own, and what is collective may not be called
    then. What only this process has, the watchdog's records and the communication thread, goes with it all the same.
    """

    def __init__(self, process: ProcessServices) -> None:
        self._failures = process.failures
        self._comms: list[MPI.Intracomm] = []

    def keep(self, made: MPI.Comm) -> MPI.Intracomm:
        """Note a new communicator, also where it may have to be given up, and give it back."""
        comm = MPI.Intracomm(made)  # what Split gives is one, but mpi4py types it as any communicator
        self._comms.append(comm if self._failures is None else self._failures.track(comm))
        return comm

    def free(self) -> None:
        """Release them, except those that were given up with dead ranks. Collective."""
        while self._comms:
            comm = self._comms.pop()
            if self._failures is None or self._failures.forget(comm):
                comm.Free()


class Dispatcher(Member):
    """What all operations of a communicator go through.

    Attributes:
        process: What all communicators of the process share.
        journal: Counts what this process sends, on all communicators.
        ready: What performs an operation that was performed before, by its key. It is for CPU tensors, and not when
            debugging.
        binder: Binds operations for the calling thread.
        probe: all_reduce, by which the ways of carrying device memory are measured.
    """

    probe: ClassVar[CollectiveOperation]

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: ProcessServices, label: str) -> None:
        super().__init__(topology, label)
        self.process, self.journal = process, process.journal
        self._owned = OwnedCommunicators(process)
        self._comm = comm = self._owned.keep(comm)
        self.binder = self._make_binder(comm)
        self.ready = self.binder.cache.ready
        threaded = process.spare_cores > 0 and topology.size > 1  # made now, because making them is collective
        self._background = self._make_binder(self._owned.keep(comm.Dup())) if threaded else None
        self._worker = Worker(self._background is not None, process.journal, process.progress)
        compares = process.debug and topology.size > 1
        self._compared = self._owned.keep(comm.Dup()) if compares else None  # for the debug mode's comparisons alone
        self._record = process.watchdog.record(label, topology.world_ranks)
        self._background_record = process.watchdog.record(f"{label} (async)", topology.world_ranks)
        self._transports: dict[Binder, Transports] = {}
        self._streams: Streams = {}  # for operations on a device in the background
        self._freed = False
        # what is ready counts, or does not, as the journal was when it was made
        self.journal.switched.add(self.binder.cache.forget_ready)

    def entered(self, name: str, moved: Moved, begin: float, key: str = "", sequence: int = 0) -> None:
        """Enter in the journal what this rank has done with the others since `begin`, and is not dispatched.

        Args:
            name: Of what was done.
            moved: By what, and how many bytes.
            begin: `journal.clock()` at its beginning.
            key, sequence: Which one it was, alike on all ranks; without a key, the last that was dispatched.
        """
        key, sequence = (key, sequence) if key else (self._record.key, self._record.sequence)
        Note(self.journal, name, self.label, moved, key, sequence).performed(begin)

    def _make_binder(self, comm: MPI.Intracomm) -> Binder:
        process = self.process
        node = self._owned.keep(comm.Split(self._topology.nodes[comm.rank], comm.rank))
        oversubscribed = process.spare_cores < 0
        return Binder(comm, node, self._topology, process.arenas, process.tuning, oversubscribed, process.proofs)

    def duplicate_of_node(self) -> MPI.Intracomm:
        """A new communicator of this node's ranks, freed with this one. Collective over the node."""
        return self._owned.keep(self.binder.node.Dup())

    @property
    def overlaps(self) -> bool:
        """Whether operations begun with async_op make progress while this rank computes."""
        return self._background is not None

    def barrier(self, async_op: bool = False) -> Work | None:
        """Return when every rank has come here. Collective.

        Args:
            async_op: Return at once with a `Work` that is complete when every rank has come here.

        Raises:
            CommunicationError: MPI fails.
        """
        ready = None if async_op else self.ready.get(_BARRIER)
        if ready is None:
            return self.dispatch(Invocation(_BARRIER, _barrier, key=_BARRIER), async_op)
        ready(None)
        return None

    def call(
        self,
        operation: CollectiveOperation,
        async_op: bool,
        tensors: Sequence[Any],
        written: Sequence[bool],
        *given: Any,
    ) -> Work | None:
        """Check one call of an operation that was not found in `ready`, and dispatch it.

        Args:
            operation: The operation.
            async_op: Whether it runs in the background.
            tensors: What it was given for tensors, in their order; the last is left out where this rank has none.
            written: Which of them it changes.
            given: What else it was given.
        """
        return self.begin(partial(self._checked, operation, written, given), async_op, tensors, written)

    def _checked(
        self, operation: CollectiveOperation, written: Sequence[bool], given: Sequence[Any], *passed: Any
    ) -> Invocation:
        tensors, alike = passed if len(passed) == operation.tensors else (*passed, None), given
        if "root" in operation.parameters:
            check_rank(self, operation.value(given, "root"))
        if len(passed) == 2:
            whole = operation.by_rank.index(True)
            names = ["out" if changed else "x" for changed in (written[1 - whole], written[whole])]
            counts = operation.value(given, "counts")
            blocks = block_sizes(self, operation.name, tensors[1 - whole], tensors[whole], counts, *names)
            alike = operation.replaced(given, counts=blocks)
            given = operation.replaced(given, counts=tuple(blocks) if min(blocks) != max(blocks) else None)
        place = operation.placed if self._compared is not None else None  # which only the debug mode asks for
        placed = None if place is None else place(self.rank, *tensors, *given)
        return operation.on(tensors, written, *given, alike=alike, placed=placed)

    def begin(
        self, checked: Callable[..., Invocation], async_op: bool, tensors: Sequence[Any], written: Sequence[bool]
    ) -> Work | None:
        """Dispatch a call that was not found in `ready`, once for each inner tensor of those that wrap others.

        Args:
            checked: Checks the rest of what the call was given, of its tensors.
            async_op: Whether it runs in the background.
            tensors: What it was given for tensors.
            written: Which of them it changes.
        """
        if any(map(is_wrapper, tensors)):
            return for_each_inner(lambda *inner: self.begin(checked, async_op, inner, written), *tensors)
        passed = [as_tensor(x, written=changed) for x, changed in zip(tensors, written)]  # noqa: B905 - see `checked`
        return self.dispatch(checked(*passed), async_op)

    def dispatch(self, call: Invocation, async_op: bool = False) -> Work | None:
        """Perform an operation, now or in the background; a handle of what runs in the background.

        Raises:
            InputError: The communicator was freed, or the binding finds that the arguments cannot be served.
            CommunicationError: MPI fails, or ranks call different operations.
        """
        known = None if async_op or call.key is None else self.ready.get(call.key)
        if known is not None:
            known(call.first)
            return None
        self.compare(call.name, call.tensors, call.alike, call.uneven, call.placed)
        device = self._device_of(call.name, call.tensors)
        if async_op:
            name = f"{call.name} of {0 if call.first is None else call.first.numel()} elements on {self.label}"
            perform = partial(self._perform, call, self._background or self.binder, self._background_record, device)
            on_device = [] if device is None else [tensor for tensor in call.tensors if tensor is not None]
            return Queued(name, perform, self._worker, Order(on_device, self._streams) if on_device else None)
        if self._background is None and self._worker.waiting:
            self._worker.drain()  # what waits to be run here comes first
        if device is not None:
            with between(device):
                self._perform(call, self.binder, self._record, device)
            return None
        self._perform(call, self.binder, self._record)
        if call.key is not None and self._compared is None and all(map(_may_repeat, call.tensors)):
            compiled = self.binder.cache.bound.get(call.key)
            if compiled is not None:
                self.ready[call.key] = self._repeated(call, compiled)
        return None

    def _repeated(self, call: Invocation, compiled: Compiled) -> Ready:
        """What performs an operation again, and counts it while the journal is on."""
        name, record, drain, journal = call.name, self._record, self._worker.drain, self.journal
        waiting = self._worker.waiting if self._background is None else ()
        if not (journal.on and call.counts):
            return repeated(record, name, compiled.calls, waiting, drain)
        perform = repeated(record, name, compiled.calls, (), drain)  # what comes first counts by itself
        first = drain if self._background is None else None
        return journal.counting(perform, name, self.label, compiled.moved, record, first)

    def compare(
        self, name: str, tensors: Tensors, alike: object, uneven: bool = False, placed: torch.Tensor | None = None
    ) -> None:
        """That there is a communicator; when debugging also that all ranks are about to do the same."""
        if self._freed:
            raise InputError(f"{name}: {self.label} was freed; make another communicator with split or subgroup")
        if self._compared is None:
            return
        first, said, place = tensors[0] if tensors else None, name, ""
        if first is not None:
            said += f" of {'?' if uneven else first.numel()} {str(first.dtype).removeprefix('torch.')}"
        if alike is not None:
            said += f" {alike}"
        arena = None if placed is None else self.binder.arena_of(placed)
        if placed is not None and arena is not None and placed.numel():
            place = f" at byte {placed.data_ptr() - arena.start} of an arena of {arena.nbytes}"
        with self._record.comparing(name, first):
            shown = f"#{self._record.sequence} {said[:300]}{place}"
            compare(self._compared, said, shown, place, self.nodes)

    def require_same(self, said: str) -> None:
        """Compare by messages what all ranks are about to do, in any mode. Collective.

        Args:
            said: What must be the same on all of them, in words.

        Raises:
            CommunicationError: They are about to do different things; raised on all of them.
        """
        with self._record.comparing(said, None):
            compare(self._comm, said)

    def _perform(self, call: Invocation, binder: Binder, record: Record, device: torch.device | None = None) -> None:
        def run(*tensors: torch.Tensor | None) -> None:
            binder.run(call.bind(binder, *tensors))

        def act() -> None:
            if device is None or call.on_device:
                run(*call.tensors)
            elif call.operation is not None:
                self.perform(binder, call.operation, call.tensors, call.written, *call.given)
            else:
                through_host(run, call.tensors, call.written)

        if not (self.journal.on and call.counts):
            seen(record, call.name, call.first, act)
            return
        counted = binder.moved = []
        begin = clock()
        try:
            seen(record, call.name, call.first, act)
        finally:
            binder.moved = None
        moved = Moved.sum(counted)
        if call.algorithm:
            moved = moved._replace(algorithm=call.algorithm)
        self.journal.note(call.name, self.label, moved, begin, record)

    def perform(
        self, binder: Binder, operation: CollectiveOperation, tensors: Tensors, written: Sequence[bool], *given: Any
    ) -> None:
        """Perform an operation, or a part of one, in the calling thread, on host memory or on the rank's device."""
        device = self._device_of(operation.name, tensors)
        if device is None:
            binder.run(operation.bound(binder, *tensors, *given))
        else:
            call = DeviceCall(operation, tensors, written, given)
            perform = alone if self.size == 1 else self._transports_of(binder, device).perform
            perform(call)

    def _device_of(self, name: str, tensors: Tensors) -> torch.device | None:
        """The device that the tensors are on, which is the rank's; None for the host.

        Raises:
            InputError: They are on several devices, or on another than the rank's.
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
                f"{name}: a tensor is on {device}, but rank {self.rank} communicates what is on {memory.device}; "
                f"move it there (a rank has one device)"
            )
        return device

    def _transports_of(self, binder: Binder, device: torch.device) -> Transports:
        if binder not in self._transports:
            self._transports[binder] = Transports(binder, self.process.device_memory, device, self.probe)
        return self._transports[binder]

    def device_ways(self, device: torch.device) -> list[Way]:
        """The ways in which this communicator can carry what is on a device; none for one rank. Collective."""
        return self._transports_of(self.binder, device).ways if self.size > 1 else []

    def _free(self) -> None:
        """Release what operations use; collective. Nothing may be dispatched afterwards."""
        self._freed = True
        self.ready.clear()
        self._worker.close()
        if self.process.may_release(self._comm):
            for binder in (self.binder, self._background):
                if binder in self._transports:
                    self._transports.pop(binder).free()
                if binder is not None:
                    binder.free()
            self._owned.free()
        for record in (self._record, self._background_record):
            self.process.watchdog.forget(record)


def _may_repeat(x: Any) -> bool:
    """Whether a contiguous tensor that has x's address, size and type can be nothing but what x is.

    It could be a lazily conjugated one, or, of one element, the negated imaginary part of such a one, which lies at an
    odd place of its storage.
    """
    if x is None:
        return True
    return x.device.type == "cpu" and not x.is_complex() and (x.numel() != 1 or x.storage_offset() % 2 == 0)


class SeveralWorks(Work):
    """Operations that were begun as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        """Block until all are complete; see `Work.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def done(self) -> bool:
        """Return whether all are complete."""
        return all(work.done() for work in self._works)


def for_each_inner(operation: Callable[..., Work | None], *tensors: Any) -> Work | None:
    """Perform an operation once for each inner tensor.

    Args:
        operation: Called with one inner tensor of each tensor.
        tensors: The operation's tensors; None for those that this rank need not give.

    Returns:
        A handle of all of them, if they run in the background.

    Raises:
        InputError: The tensors are not made of equally many.
    """
    parts = [None if x is None else inner_tensors(x) if is_wrapper(x) else [x] for x in tensors]
    numbers = {len(inner) for inner in parts if inner is not None}
    if len(numbers) > 1:
        made = ", ".join(f"a {type(x).__name__} of {len(inner)}" for x, inner in zip(tensors, parts) if inner)  # noqa: B905
        raise InputError(f"the tensors of one operation must be made of equally many tensors, not {made}")
    calls = [[None if inner is None else inner[i] for inner in parts] for i in range(numbers.pop())]
    works = [operation(*inner) for inner in calls]
    begun = [work for work in works if work is not None]
    return SeveralWorks(begun) if begun else None


def check_rank(comm: Member, rank: int) -> None:
    """Raise InputError unless the communicator has the rank."""
    if not 0 <= rank < comm.size:
        raise InputError(f"there is no rank {rank} in {comm.label}; ranks are 0 to {comm.size - 1}")


def block_sizes(
    comm: Member, name: str, part: torch.Tensor | None, whole: torch.Tensor, counts: Sequence[int] | None, *names: str
) -> list[int]:
    """Return the elements of each rank's block of `whole`, checked against this rank's part.

    names: of the part and of the whole, in messages.
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
                f"{name}: counts {blocks} must be {comm.size} numbers that sum to {whole_name}'s {whole.numel()}"
            )
    if part is not None and part.numel() != blocks[comm.rank]:
        raise InputError(
            f"{name}: {part_name} has {part.numel()} elements, rank {comm.rank}'s block has {blocks[comm.rank]}; "
            f"{whole_name} is one block per rank"
        )
    return blocks
