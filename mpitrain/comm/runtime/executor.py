"""Execution of programs: a plan is bound to addresses once, and then running it is a loop over calls.

    program  --compile-->  Plan  --bind-->  Compiled  --call-->  one operation
    steps                  makers           calls on
                           of calls         addresses

Messages are persistent MPI requests of raw bytes.

`Reduction` defines the arithmetic of each (operation, dtype) pair:

- fp16 and bf16 are accumulated in fp32 and rounded once.
- Integers wrap on overflow, as in torch; their average is the sum divided by the number of ranks, rounded toward zero.
- bool is logical: sum and max are OR, product and min are AND, and there is no average.
- Complex numbers have no minimum and no maximum.

Host memory is processed with NumPy, whose calls cost half as much as torch's and copy as fast as memcpy. torch is used
instead if it may use several threads and there are enough elements to divide among them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import NO_VOLUME, Volume
from mpitrain.comm.memory.buffers import bytes_at, pieces, tensor_at
from mpitrain.comm.memory.elements import HALVES, SMALL_INTEGERS
from mpitrain.comm.programs.program import INBOX, tree_order
from mpitrain.comm.runtime.agreement import Board, Call, make_row
from mpitrain.comm.runtime.remote import Neighbours, Table, Transfers
from mpitrain.comm.runtime.split_phase import Event, EventSignal
from mpitrain.comm.runtime.waiting import wait_for_requests
from mpitrain.errors import CommunicationError, InputError

Array: TypeAlias = "torch.Tensor | np.ndarray"

_MIN_NUMEL_FOR_THREADS = 1 << 16  # number of elements from which it pays to divide an operation among torch's threads


@dataclass(frozen=True)
class _Operation:
    """Functions for one reduction: of torch, of NumPy, and of MPI."""

    torch: Callable[..., Any]
    numpy: Any
    mpi: MPI.Op


_SUM = _Operation(torch.add, np.add, MPI.SUM)
_ARITHMETIC = {
    "sum": _SUM,
    "avg": _SUM,
    "product": _Operation(torch.mul, np.multiply, MPI.PROD),
    "min": _Operation(torch.minimum, np.minimum, MPI.MIN),
    "max": _Operation(torch.maximum, np.maximum, MPI.MAX),
}
_OR = _Operation(torch.logical_or, np.logical_or, MPI.LOR)
_AND = _Operation(torch.logical_and, np.logical_and, MPI.LAND)
_LOGICAL = {"sum": _OR, "max": _OR, "product": _AND, "min": _AND}
OPERATIONS = tuple(_ARITHMETIC)


@dataclass(frozen=True)
class Reduction:
    """One operation on one dtype.

    Attributes:
        op: Name of the operation, one of `OPERATIONS`.
        dtype: Type of the elements.
        operation: Functions that perform it.
        scale: Factor applied to the result at the end; None for none. An integer is a divisor (see `make_scaling`).
    """

    op: str
    dtype: torch.dtype
    operation: _Operation
    scale: float | None = None

    @staticmethod
    def of(op: str, dtype: torch.dtype, size: int) -> Reduction:
        """Return the reduction of a name, for a dtype and a number of ranks.

        Args:
            op: One of `OPERATIONS`.
            dtype: Type of the elements.
            size: Number of ranks, by which averages are divided.

        Raises:
            InputError: There is no such operation, or it has no meaning for the dtype.
        """
        if op not in OPERATIONS:
            raise InputError(f"there is no reduction {op!r}; use one of {', '.join(OPERATIONS)}")
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.bool and op == "avg":
            raise InputError("op avg is not defined for bool; convert to float32 first")
        if op in ("min", "max") and dtype.is_complex:
            raise InputError(f"op {op} is not defined for {name}; complex numbers have no order")
        operation = (_LOGICAL if dtype == torch.bool else _ARITHMETIC)[op]
        if op != "avg" or size == 1:
            return Reduction(op, dtype, operation)
        return Reduction(op, dtype, operation, 1.0 / size if dtype.is_floating_point or dtype.is_complex else size)

    @property
    def library_saturates(self) -> bool:
        """True if an MPI library may saturate on overflow, as Open MPI does, where torch wraps around."""
        return self.operation is _SUM and self.dtype in SMALL_INTEGERS

    def combine(self, parts: Sequence[Array], out: Array, *, tree: bool, scale: float | None) -> list[Call]:
        """Return the calls that set `out` to the reduction of the parts, times `scale`.

        Args:
            parts: Flat tensors or arrays of equal length, of the kind that `uses_numpy` selects. With `tree`, any of
                them may be `out` itself; otherwise only the first.
            out: Receives the result.
            tree: If true, reduce as a fixed binary tree over the order of the parts; otherwise from left to right.
            scale: Factor; None for none.
        """
        if len(parts) == 1:
            return [make_copy(out, parts[0]), *make_scaling(out, scale)]
        if self.dtype in HALVES and (len(parts) > 2 or scale is not None):  # one by one, each pair would be rounded
            return [self._wide(parts, out, tree, scale)]
        join = self.operation.numpy if isinstance(out, np.ndarray) else self.operation.torch
        if tree and len(parts) > 2:
            return [lambda: make_copy(out, tree_order(parts, join))(), *make_scaling(out, scale)]
        calls: list[Call] = [partial(join, parts[0], parts[1], out=out)]
        calls += [partial(join, out, part, out=out) for part in parts[2:]]
        return [*calls, *make_scaling(out, scale)]

    def _wide(self, parts: Sequence[Any], out: Any, tree: bool, scale: float | None) -> Call:
        """Return the call that accumulates 16-bit parts in fp32 and rounds once."""
        join = self.operation.torch

        def run() -> None:
            if tree:
                total = tree_order([part.float() for part in parts], join)
            else:
                total = parts[0].float()
                for part in parts[1:]:
                    join(total, part, out=total)
            out.copy_(total if scale is None else total.mul_(scale))

        return run


def make_copy(into: Array, source: Array) -> Call:
    """Return a call that copies between flat tensors or arrays, and converts the dtype if they differ.

    Args:
        into: Destination.
        source: Source.
    """
    if isinstance(into, np.ndarray):
        return partial(np.copyto, into, source)
    assert isinstance(source, torch.Tensor)
    if into.dtype == source.dtype and uses_numpy(into.dtype, into.device, into.numel()):
        return partial(np.copyto, into.numpy(), source.numpy())
    return partial(into.copy_, source)


def make_scaling(x: Array, scale: float | None) -> list[Call]:
    """Return the calls that apply the scale of a reduction in place.

    Args:
        x: Flat tensor or array.
        scale: Factor; an integer is a divisor of integers, with quotients rounded toward zero. None for no call.
    """
    if scale is None:
        return []
    if isinstance(scale, int):  # divide in 64 bits, because the number of ranks may not fit into the type of x
        whole = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        return [lambda: whole.copy_(torch.div(whole.long(), scale, rounding_mode="trunc"))]
    return [partial(np.multiply, x, scale, out=x) if isinstance(x, np.ndarray) else partial(x.mul_, scale)]


def uses_numpy(dtype: torch.dtype, device: torch.device | None, numel: int) -> bool:
    """Return True to process elements with NumPy, whose calls cost less; return False to use torch.

    torch is used for 16-bit numbers, on devices, and if several threads have enough to do.

    Args:
        dtype: Type of the elements.
        device: Device of the memory; None for the host.
        numel: Number of elements.
    """
    if dtype in HALVES or (device is not None and device.type != "cpu"):
        return False
    return numel < _MIN_NUMEL_FOR_THREADS or torch.get_num_threads() == 1


SOURCE, TARGET, PEER, SCRATCH = "source", "target", "peer", "scratch"  # memories in addition to INBOX and SLOT


@dataclass(frozen=True)
class Layout:
    """Location of a program's memory, on this rank and its neighbours. Addresses are in bytes, bounds in elements.

    Attributes:
        dtype: Type of the elements.
        bounds: Offsets of the chunks in WORK, and the end of the last one.
        source, target: Addresses of WORK as input and as output; equal for operations in place.
        peers: For a rank of this node, returns the address of its WORK, if that is mapped in this process.
        neighbours: Processes whose WORK is accessed by system calls, if it is not mapped.
        exposed_address: Address of this rank's WORK that the others then use.
        slots: For a rank, returns the address of its staging slots, each of the size of the largest chunk.
        board: Board on which the ranks of the node compare their operations before they access each other's memory.
        descriptions: Descriptions that they compare, see `make_row`; the program's signals carry them too.
        events: For each event of the program, the object that carries its signals.
        inbox, inbox_bounds: Address and cell offsets of INBOX; without an address, the plan allocates it.
        device: Device of the memory; None for the host.
        memory: Returns the tensor at an address on a device; None for the host.
    """

    dtype: torch.dtype
    bounds: Sequence[int]
    source: int
    target: int
    peers: Callable[[int], int] | None = None
    neighbours: Neighbours | None = None
    exposed_address: int = 0
    slots: Callable[[int], int] | None = None
    board: Board | None = None
    descriptions: tuple[str, str] = ("", "")
    events: Mapping[str, Event] = field(default_factory=dict)
    inbox: int = 0
    inbox_bounds: Sequence[int] = ()
    device: torch.device | None = None
    memory: Callable[[int, int, torch.dtype], torch.Tensor] | None = None

    @property
    def slot(self) -> int:
        """Number of elements of a staging slot."""
        return max((hi - lo for lo, hi in pairwise(self.bounds)), default=0)

    @property
    def shape(self) -> Hashable:
        """Everything that a plan depends on: all fields except the addresses."""
        reached = (self.peers is not None, self.neighbours is not None, self.slots is not None)
        cells = (bool(self.inbox), tuple(self.inbox_bounds))
        return self.dtype, tuple(self.bounds), self.source == self.target, reached, cells, self.device


class Compiled:
    """A program bound to memory; call it to run it.

    Args:
        calls: Calls to make, in order.
        references: Objects to keep alive, such as buffers, and the compiled programs that this one consists of.
        requests: Persistent requests that it starts and that `free` releases.
        computes: True if it computes with floating-point numbers. NumPy's warnings are then turned off: NumPy would
            report overflows that torch and MPI ignore.
        meets: True if ranks meet at a fence in it and compare their operations.
        awaited_signal: Signals to wait for before it begins, if it is a phase of a program.
        volume: Bytes that it moves itself, without the compiled programs that it consists of.
    """

    __slots__ = ("_calls", "_computes", "_meets", "_references", "_requests", "_volume", "awaited_signal")

    def __init__(
        self,
        calls: Sequence[Call],
        references: Sequence[object] = (),
        requests: Sequence[MPI.Prequest] = (),
        computes: bool = False,
        meets: bool = False,
        awaited_signal: EventSignal | None = None,
        volume: Volume = NO_VOLUME,
    ) -> None:
        self._calls, self._references, self._requests = tuple(calls), references, requests
        self._computes, self._meets, self.awaited_signal, self._volume = computes, meets, awaited_signal, volume

    def __call__(self) -> None:
        if self._computes:
            with np.errstate(all="ignore"):
                for call in self._calls:
                    call()
        else:
            for call in self._calls:
                call()

    @property
    def calls(self) -> tuple[Call, ...]:
        """Calls that a run makes."""
        return (self,) if self._computes else self._calls

    def after(self, call: Call) -> Compiled:
        """Return this program with a call before it. This object must not be used any more."""
        calls = (call, *self._calls)
        return Compiled(calls, self._references, self._requests, self._computes, self._meets, volume=self._volume)

    @property
    def parts(self) -> list[Compiled]:
        """Compiled programs that this one consists of."""
        return [item for item in self._references if isinstance(item, Compiled)]

    @property
    def volume(self) -> Volume:
        """Bytes that a run moves, including all parts."""
        parts = self.parts
        return Volume.sum([self._volume, *(part.volume for part in parts)]) if parts else self._volume

    @property
    def meets(self) -> bool:
        """True if ranks meet at a fence in this program or in one of its parts."""
        return self._meets or any(part.meets for part in self.parts)

    @property
    def has_requests(self) -> bool:
        """True if there are requests that only `free` releases."""
        return bool(self._requests) or any(part.has_requests for part in self.parts)

    def free(self) -> None:
        """Release the requests. The program must not run again."""
        for request in self._requests:
            request.Free()
        for part in self.parts:
            part.free()
        self._calls = ()


class Place(NamedTuple):
    """Elements of a memory whose address is known when a plan is bound.

    Attributes:
        memory: SOURCE, TARGET, PEER, SCRATCH, SLOT or INBOX.
        owner: Rank that owns the memory, or the number of the scratch area.
        start: Index of the first element.
        numel: Number of elements.
    """

    memory: str
    owner: int
    start: int
    numel: int


class Binding:
    """Addresses for a plan, and the objects created for them. A `Maker` turns a binding into calls.

    Attributes:
        naps: True if waits nap.
        all_requests: Persistent requests created so far.
        table: Copies to and from other processes, if there are any.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        layout: Layout,
        scratch: Sequence[torch.Tensor],
        transfers: Transfers | None,
        local_places: Sequence[Place],
        naps: bool,
    ) -> None:
        """Prepare for the addresses of a layout.

        Args:
            comm: MPI communicator of the plan's ranks.
            layout: Location of the memory.
            scratch: Scratch areas of the plan.
            transfers: Copies to and from other processes, if there are any.
            local_places: This rank's side of each of these copies.
            naps: True if waits nap, because ranks share cores (see `waiting`).
        """
        self.comm, self.layout, self.item, self.naps = comm, layout, layout.dtype.itemsize, naps
        self._scratch, self._addresses = scratch, {SOURCE: layout.source, TARGET: layout.target, INBOX: layout.inbox}
        self.all_requests: list[MPI.Prequest] = []
        self._exchanges: dict[int, list[MPI.Prequest]] = {}
        self._arrays: dict[tuple[str, int], np.ndarray] = {}
        self.table = None if transfers is None else Table(transfers, [self.address(place) for place in local_places])
        self._event_signals: dict[str, EventSignal] = {}

    def address(self, place: Place) -> int:
        """Return the memory address of the first byte of a place."""
        return self._base(place.memory, place.owner) + place.start * self.item

    def view(self, place: Place) -> Array:
        """Return the elements of a place as a NumPy array or a torch tensor, whichever is used to process them."""
        layout = self.layout
        if layout.memory is not None:
            if place.memory == SCRATCH:
                return self._scratch[place.owner][place.start : place.start + place.numel]
            return layout.memory(self.address(place), place.numel, layout.dtype)
        if not uses_numpy(layout.dtype, layout.device, place.numel):
            return tensor_at(self.address(place), place.numel, layout.dtype)
        end = place.start + place.numel
        whole = self._arrays.get((place.memory, place.owner))
        if whole is None or whole.size < end:
            base = self._base(place.memory, place.owner)
            whole = tensor_at(base, max(end, layout.bounds[-1]), layout.dtype).numpy()
            self._arrays[place.memory, place.owner] = whole
        return whole[place.start : end]

    def _base(self, memory: str, owner: int) -> int:
        if memory in self._addresses:
            return self._addresses[memory]
        if memory == SCRATCH:
            return self._scratch[owner].data_ptr()
        where = self.layout.peers if memory == PEER else self.layout.slots
        assert where is not None
        return where(owner)

    def event_signal(self, event: str) -> EventSignal:
        """Return the `EventSignal` of an event of the program; the first call creates it."""
        if event not in self._event_signals:
            self._event_signals[event] = EventSignal(self.layout.events[event], make_row(0, *self.layout.descriptions))
        return self._event_signals[event]

    def requests(self, number: int, messages: Sequence[Message]) -> list[MPI.Prequest]:
        """Return the persistent requests of an exchange; the first call creates them.

        Args:
            number: Number of the exchange in the program.
            messages: Messages of the exchange.
        """
        requests = self._exchanges.get(number)
        if requests is None:
            requests = self._exchanges[number] = []
            for message in messages:
                init = self.comm.Send_init if message.sends else self.comm.Recv_init
                address = self.address(message.place)
                requests += [init(bytes_at(address + lo, n), message.peer) for lo, n in message.pieces(self.item)]
            self.all_requests += requests
        return requests


Maker: TypeAlias = Callable[[Binding], Sequence[Call]]


class Message(NamedTuple):
    """One message of an exchange.

    Attributes:
        sends: True if it is sent to the peer; False if it is received from it.
        place: Memory that is sent or received into.
        peer: The other rank.
    """

    sends: bool
    place: Place
    peer: int

    def pieces(self, item: int) -> list[tuple[int, int]]:
        """Return (offset, length) in bytes of each MPI message that this is cut into; elements have `item` bytes."""
        return pieces(self.place.numel * item)


# -- makers: functions that return calls on the addresses of a binding


def start(number: int, messages: Sequence[Message], binding: Binding) -> list[Call]:
    """Return the call that starts an exchange.

    Args:
        number: Number of the exchange in the program.
        messages: Messages of the exchange.
        binding: Addresses.
    """
    requests = binding.requests(number, messages)
    return [requests[0].Start if len(requests) == 1 else partial(MPI.Prequest.Startall, requests)]


def wait(number: int, messages: Sequence[Message], binding: Binding) -> list[Call]:
    """Return the call that completes an exchange; it raises CommunicationError if too few bytes arrive.

    Args:
        number: Number of the exchange in the program.
        messages: Messages of the exchange.
        binding: Addresses.
    """
    requests = binding.requests(number, messages)
    parts = [(message, nbytes) for message in messages for _, nbytes in message.pieces(binding.item)]
    if all(message.sends for message in messages):
        single = len(requests) == 1 and not binding.naps
        return [requests[0].Wait if single else partial(wait_for_requests, requests, binding.naps)]
    statuses = [MPI.Status() for _ in requests]
    each = zip(statuses, parts, strict=True)
    arriving = [(status, message.peer, nbytes) for status, (message, nbytes) in each if not message.sends]
    return [partial(_receive, requests, binding.naps, statuses, arriving)]


def _receive(
    requests: list[MPI.Prequest],
    naps: bool,
    statuses: list[MPI.Status],
    arriving: Sequence[tuple[MPI.Status, int, int]],
) -> None:
    wait_for_requests(requests, naps, statuses)
    for status, peer, nbytes in arriving:
        if status.Get_count(MPI.BYTE) != nbytes:
            raise CommunicationError(
                f"rank {peer} sent {status.Get_count(MPI.BYTE)} bytes instead of {nbytes}; every rank "
                "must make the same call with the same sizes and types"
            )


def combine(
    reduction: Reduction, parts: Sequence[Place], into: Place, tree: bool, scale: float | None, binding: Binding
) -> list[Call]:
    """Return the calls that set `into` to the reduction of the parts.

    Args:
        reduction: Arithmetic.
        parts: Operands.
        into: Receives the result.
        tree: If true, reduce as a fixed binary tree over the order of the parts; otherwise from left to right.
        scale: Factor of the result; None for none.
        binding: Addresses.
    """
    out, calls = binding.view(into), list[Call]()
    views = [_on_device_of(binding.view(part), out, calls) for part in parts]
    return [*calls, *reduction.combine(views, out, tree=tree, scale=scale)]


def _on_device_of(view: Array, out: Array, calls: list[Call]) -> Array:
    """Return the view, or a copy of it on the device of `out`; the call that makes the copy is added to `calls`."""
    if isinstance(view, np.ndarray) or isinstance(out, np.ndarray) or view.device == out.device:
        return view
    near = torch.empty_like(out)
    calls.append(make_copy(near, view))
    return near


def copy(into: Place, source: Place, binding: Binding) -> list[Call]:
    """Return the call that copies one place to another; none if both have the same address.

    Args:
        into: Destination.
        source: Source.
        binding: Addresses.
    """
    same = binding.address(into) == binding.address(source)
    return [] if same else [make_copy(binding.view(into), binding.view(source))]


def signal(event: str, binding: Binding) -> list[Call]:
    """Return the call that gives the signal of an event.

    Args:
        event: Name of the event.
        binding: Addresses.
    """
    return [binding.event_signal(event).signal]


def wait_for_all(event: str, binding: Binding) -> list[Call]:
    """Return the call that waits until all ranks of the node have given the signal of an event.

    Args:
        event: Name of the event.
        binding: Addresses.
    """
    return [binding.event_signal(event).wait]


def meet(fence: Sequence[Call], binding: Binding) -> Sequence[Call]:
    """Return the calls of the first fence, at which ranks compare their operations if there is a board.

    Args:
        fence: Calls at which the ranks of the node meet.
        binding: Addresses.
    """
    layout, table = binding.layout, binding.table
    if layout.board is None:
        return fence
    row = make_row(layout.exposed_address, *layout.descriptions)
    return [layout.board.make_meeting_call(row, fence, None if table is None else table.fill)]


def transfer(which: slice, binding: Binding) -> Sequence[Call]:
    """Return the calls for some of the copies to and from other processes.

    Args:
        which: Range of the copies.
        binding: Addresses.
    """
    assert binding.table is not None
    return binding.table.transfers[which]
