"""Performs the operations of a communicator: at once or in the background, compared where debugging, watched.

Most of what an operation's first call does is not done again when a loop repeats it:

    first     arguments checked -> (ranks compared) -> bound to memory -> performed
    again     found in `ready` by the addresses, sizes and types of its tensors -> performed

Each file beside this one describes one `CollectiveOperation`, and makes an `Invocation` of each call that is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.collectives.owned import OwnedCommunicators
from mpitrain.comm.collectives.process import Process
from mpitrain.comm.member import Member
from mpitrain.comm.memory.device import is_accelerator, synchronize, through_host
from mpitrain.comm.process.record import Record
from mpitrain.comm.process.topology import Topology
from mpitrain.comm.runtime.debug import Checks, place_of
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.ordering import Call
from mpitrain.comm.runtime.repeating import repeated
from mpitrain.comm.runtime.work import Work, Worker, seen
from mpitrain.errors import InputError

# what looking for a key in `ready` raises: it is not there, or an argument is no tensor, has no storage or no hash
NOT_READY = (KeyError, AttributeError, RuntimeError, TypeError)

Tensors = Sequence["torch.Tensor | None"]
Bind = Callable[..., Call]


@dataclass(frozen=True)
class Invocation:
    """One call of an operation, whose arguments have been checked.

    Attributes:
        name: The operation's name in messages.
        bind: Makes what performs it on a rank's memory, of a binder and the tensors.
        tensors: What it works on; the first has the operation's size.
        written: Which of them it changes.
        key: Under which `bind` has the binder keep what it makes; None where nothing is kept.
        alike: What must be the same on all ranks besides the type, and, unless uneven, the size.
        uneven: Whether the sizes of ranks may differ.
        staged: Whether tensors on a device are to be staged; else bind takes them as they are.
        placed: The tensor that neighbours find in an arena by its offset.
    """

    name: str
    bind: Bind
    tensors: Tensors = ()
    written: Sequence[bool] = ()
    key: Hashable = None
    alike: object = None
    uneven: bool = False
    staged: bool = True
    placed: torch.Tensor | None = None

    @property
    def first(self) -> torch.Tensor | None:
        """The tensor that has the operation's size, if it is on any."""
        return self.tensors[0] if self.tensors else None


@dataclass(frozen=True)
class CollectiveOperation:
    """What is alike in all calls of an operation.

    It is given one tensor or two, of which the first has its size, and then what else must be the same on all ranks.

    Attributes:
        name: Its name in messages.
        tensors: How many of what it is given are tensors.
        bind: Makes what performs it on a rank's memory, of a binder and what is given.
        said: Tells in words what must be the same on the ranks of a node, of a binder and what is given.
        together: Whether its ranks wait for each other where there are any elements, of what is given.
    """

    name: str
    tensors: int
    bind: Callable[..., Compiled]
    said: Callable[..., str]
    together: Callable[..., bool]

    def key(self, *given: Any) -> tuple[Hashable, ...]:
        """Under which what performs it is kept; the operation's function looks for the same in `ready`."""
        first, rest = given[0], given[self.tensors :]
        others = (None if x is None else (x.data_ptr(), x.numel(), x.dtype) for x in given[1 : self.tensors])
        return (self.name, first.data_ptr(), first.numel(), first.dtype, *others, *rest)

    def bound(self, binder: Binder, *given: Any) -> Compiled:
        """The operation on a rank's memory, as it was bound before or is now."""
        bind, said = partial(self.bind, binder, *given), partial(self.said, binder, *given)
        together = self.together(*given)
        return binder.bound(self.key(*given), bind, *given[: self.tensors], said=said, together=together)

    def on(self, tensors: Tensors, written: Sequence[bool], *arguments: Any, **more: Any) -> Invocation:
        """One call of it.

        Args:
            tensors: The tensors that it is given, in their order.
            written: Which of them it changes.
            arguments: What else it is given.
            more: Further fields of the invocation.
        """

        def bind(binder: Binder, *tensors: torch.Tensor) -> Compiled:
            return self.bound(binder, *tensors, *arguments)

        fields = {"key": self.key(*tensors, *arguments), "alike": arguments, **more}
        return Invocation(self.name, bind, tensors, written, **fields)


class Dispatcher(Member):
    """What all operations of a communicator go through.

    Attributes:
        process: What all communicators of the process share.
        ready: What performs an operation that was performed before, by its key. It is for CPU tensors, and not when
            debugging.
        binder: Binds operations for the calling thread.
    """

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: Process, label: str) -> None:
        super().__init__(topology, label)
        self.process = process
        self._owned = OwnedCommunicators(process)
        self._comm = comm = self._owned.keep(comm)
        self.binder = self._make_binder(comm)
        self.ready = self.binder.cache.ready
        self._background: Binder | None = None
        if process.spare_cores > 0 and topology.size > 1:  # made now, because making them is collective
            self._background = self._make_binder(self._owned.duplicate(comm))
        self._worker = Worker(threaded=self._background is not None)
        compared = process.debug and topology.size > 1
        self._checks = Checks(self._owned.duplicate(comm), topology.nodes) if compared else None
        self._record = process.watchdog.record(label, topology.world_ranks)
        self._background_record = process.watchdog.record(f"{label} (async)", topology.world_ranks)
        self._freed = False

    def _make_binder(self, comm: MPI.Intracomm) -> Binder:
        process = self.process
        node = self._owned.keep(comm.Split(self._topology.nodes[comm.rank], comm.rank))
        oversubscribed = process.spare_cores < 0
        return Binder(comm, node, self._topology, process.arenas, process.tuning, oversubscribed, process.proofs)

    def duplicate_of_node(self) -> MPI.Intracomm:
        """A new communicator of this node's ranks, freed with this one. Collective over the node."""
        return self._owned.duplicate(self.binder.node)

    @property
    def overlaps(self) -> bool:
        """Whether operations begun with async_op make progress while this rank computes."""
        return self._background is not None

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
        if async_op:
            numel = call.first.numel() if call.first is not None else 0
            binder = self._background or self.binder
            perform = partial(self._perform, call, binder, self._background_record)
            return self._worker.submit(f"{call.name} of {numel} elements on {self.label}", perform)
        if self._background is None:
            self._worker.drain()  # what waits to be run here comes first
        self._perform(call, self.binder, self._record)
        if call.key is not None and self._checks is None and all(map(_may_repeat, call.tensors)):
            compiled = self.binder.cache.bound.get(call.key)
            if compiled is not None:
                waiting = self._worker.waiting if self._background is None else ()
                self.ready[call.key] = repeated(self._record, call.name, compiled.calls, waiting, self._worker.drain)
        return None

    def compare(
        self, name: str, tensors: Tensors, alike: object, uneven: bool = False, placed: torch.Tensor | None = None
    ) -> None:
        """That there is a communicator; when debugging also that all ranks are about to do the same."""
        if self._freed:
            raise InputError(f"{name}: {self.label} was freed; make another communicator with split or subgroup")
        if self._checks is None:
            return
        first = tensors[0] if tensors else None
        place = "" if placed is None else place_of(placed, self.binder.arena_of(placed))
        with self._record.comparing(name, first):
            self._checks.compare(name, first, alike, None if uneven else first, self._record.sequence, place)

    def _perform(self, call: Invocation, binder: Binder, record: Record) -> None:
        def act() -> None:
            if call.staged:
                self.carry_out(binder, call.bind, call.tensors, call.written)
            else:
                call.bind(binder, *call.tensors)()

        seen(record, call.name, call.first, act)

    def carry_out(self, binder: Binder, bind: Bind, tensors: Tensors, written: Sequence[bool]) -> None:
        """Bind and perform an operation, or a part of one, on host copies of what the library cannot read."""
        if not tensors or tensors[0] is None or not is_accelerator(tensors[0].device):
            bind(binder, *tensors)()
        elif self.process.cuda_aware:
            call = bind(binder, *tensors)
            for tensor in tensors:
                if tensor is not None:
                    synchronize(tensor.device)
            call()
        else:
            through_host(partial(bind, binder), tensors, written)

    def _free(self) -> None:
        """Release what operations use; collective. Nothing may be dispatched afterwards."""
        self._freed = True
        self.ready.clear()
        self._worker.close()
        if self.process.may_release(self._comm):
            for binder in (self.binder, self._background):
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
