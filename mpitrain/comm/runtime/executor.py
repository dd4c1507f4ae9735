"""Runs programs: what a plan says is bound to addresses once, and is then nothing but a loop over calls.

    program  --compile-->  Plan  --bind-->  Compiled  --call-->  one operation
    steps                  makers           calls on
                           of calls         addresses

Messages are persistent requests of raw bytes.

`Reduction` is the arithmetic, and what each (operation, dtype) pair means:

fp16 and bf16 are accumulated in fp32 and rounded once. Integers wrap where they overflow, as torch's do; their average
is the sum divided toward zero. bool is logical: sum and max are OR, product and min are AND, and there is no average.
Complex numbers have no minimum and no maximum.

Host memory is worked on with NumPy, whose calls cost half as much as torch's and copy as fast as memcpy, unless
torch may use several threads and there is enough for them to do.
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
from mpitrain.comm.job.traffic import NOTHING_MOVED, Moved
from mpitrain.comm.memory.buffers import bytes_at, pieces, tensor_at
from mpitrain.comm.memory.elements import HALVES, SMALL_INTEGERS
from mpitrain.comm.programs.program import INBOX, tree_order
from mpitrain.comm.runtime.agreement import Board, Call, row_of
from mpitrain.comm.runtime.remote import Neighbours, Table, Transfers
from mpitrain.comm.runtime.split_phase import Event, Telling
from mpitrain.errors import CommunicationError, InputError

Array: TypeAlias = "torch.Tensor | np.ndarray"

_FOR_THREADS = 1 << 16  # elements from which torch divides an operation among threads usefully


@dataclass(frozen=True)
class _Operation:
    """One reduction: by torch, by NumPy, by MPI."""

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
        dtype: Of the elements.
        operation: The functions that perform it.
        scale: Factor of the result, applied at the end; None for none. An integer is a divisor (see `scaling`).
    """

    op: str
    dtype: torch.dtype
    operation: _Operation
    scale: float | None = None

    @staticmethod
    def of(op: str, dtype: torch.dtype, size: int) -> Reduction:
        """The reduction that a name stands for.

        Args:
            op: One of `OPERATIONS`.
            dtype: Of the elements.
            size: Number of ranks, which averages are divided by.

        Raises:
            InputError: There is no such operation, or it has no meaning for the dtype.
        """
        if op not in OPERATIONS:
            raise InputError(f"there is no reduction {op!r}; use one of {', '.join(OPERATIONS)}")
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.bool and op == "avg":
            raise InputError("op avg has no meaning for bool; convert to float32 first")
        if op in ("min", "max") and dtype.is_complex:
            raise InputError(f"op {op} has no meaning for {name}; complex numbers have no order")
        operation = (_LOGICAL if dtype == torch.bool else _ARITHMETIC)[op]
        if op != "avg" or size == 1:
            return Reduction(op, dtype, operation)
        return Reduction(op, dtype, operation, 1.0 / size if dtype.is_floating_point or dtype.is_complex else size)

    @property
    def library_saturates(self) -> bool:
        """Return whether an MPI library may saturate where torch wraps around, as Open MPI does."""
        return self.operation is _SUM and self.dtype in SMALL_INTEGERS

    def combine(self, parts: Sequence[Array], out: Array, *, tree: bool, scale: float | None) -> list[Call]:
        """Calls that set `out` to the reduction of the parts, times `scale`.

        Args:
            parts: Flat tensors or arrays of one length, all in the form that `for_numpy` says. Where `tree` is set any
                of them may be `out` itself, else only the first.
            out: Where the result goes.
            tree: Reduce as a fixed binary tree over the order of the parts, else from left to right.
            scale: A factor; None for none.
        """
        if len(parts) == 1:
            return [copying(out, parts[0]), *scaling(out, scale)]
        if self.dtype in HALVES and (len(parts) > 2 or scale is not None):  # pairs would be rounded one by one
            return [self._wide(parts, out, tree, scale)]
        join = self.operation.numpy if isinstance(out, np.ndarray) else self.operation.torch
        if tree and len(parts) > 2:
            return [lambda: copying(out, tree_order(parts, join))(), *scaling(out, scale)]
        calls: list[Call] = [partial(join, parts[0], parts[1], out=out)]
        calls += [partial(join, out, part, out=out) for part in parts[2:]]
        return [*calls, *scaling(out, scale)]

    def _wide(self, parts: Sequence[Any], out: Any, tree: bool, scale: float | None) -> Call:
        """16-bit parts accumulated in fp32, rounded once."""
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


def copying(into: Array, of: Array) -> Call:
    """A call that copies between flat tensors or arrays, and converts the type where they differ."""
    if isinstance(into, np.ndarray):
        return partial(np.copyto, into, of)
    assert isinstance(of, torch.Tensor)
    if into.dtype == of.dtype and for_numpy(into.dtype, into.device, into.numel()):
        return partial(np.copyto, into.numpy(), of.numpy())
    return partial(into.copy_, of)


def scaling(x: Array, scale: float | None) -> list[Call]:
    """Return the calls that apply the scale of a reduction in place.

    Args:
        x: Flat tensor or array.
        scale: Factor; an integer is a divisor of integers, and the quotient is rounded toward zero. None for no call.
    """
    if scale is None:
        return []
    if isinstance(scale, int):  # divided in 64 bits, because a number of ranks need not fit into the type of x
        whole = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        return [lambda: whole.copy_(torch.div(whole.long(), scale, rounding_mode="trunc"))]
    return [partial(np.multiply, x, scale, out=x) if isinstance(x, np.ndarray) else partial(x.mul_, scale)]


def for_numpy(dtype: torch.dtype, device: torch.device | None, numel: int) -> bool:
    """Whether so many elements are worked on with NumPy rather than with torch.

    NumPy's calls cost less. Torch serves for 16-bit numbers, on devices, and where several threads have enough to do.
    """
    if dtype in HALVES or (device is not None and device.type != "cpu"):
        return False
    return numel < _FOR_THREADS or torch.get_num_threads() == 1


SOURCE, TARGET, PEER, SCRATCH = "source", "target", "peer", "scratch"  # memories besides INBOX and SLOT


@dataclass(frozen=True)
class Layout:
    """Where a program's memories are, for this rank and its neighbours. Addresses are in bytes, bounds in elements.

    Attributes:
        dtype: Type of the elements.
        bounds: Offsets of the chunks in WORK, one more than there are chunks.
        source, target: WORK as the caller gave it and as the caller gets it; the same for operations in place.
        peers: For a rank of this node, the address of its WORK, if that is mapped here.
        neighbours: Reach the other ranks' WORK by its address where it is not mapped.
        seen: The address that this rank then shows the others.
        slots: For a rank, the address of its staging slots, each of the largest chunk's size.
        board: Where the ranks of the node compare what they do, before they touch each other's memory.
        said: What they compare, see `row_of`; the program's signals carry it too.
        events: What carries the signals of each event of the program.
        inbox, inbox_bounds: Address and cell offsets of INBOX; without an address the plan has its own.
        device: Where the memory is; None for the host.
        memory: Finds the tensor over an address on a device; None for the host.
    """

    dtype: torch.dtype
    bounds: Sequence[int]
    source: int
    target: int
    peers: Callable[[int], int] | None = None
    neighbours: Neighbours | None = None
    seen: int = 0
    slots: Callable[[int], int] | None = None
    board: Board | None = None
    said: tuple[str, str] = ("", "")
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
        """Everything in it but the addresses: what a plan depends on."""
        reached = (self.peers is not None, self.neighbours is not None, self.slots is not None)
        cells = (bool(self.inbox), tuple(self.inbox_bounds))
        return self.dtype, tuple(self.bounds), self.source == self.target, reached, cells, self.device


class Compiled:
    """A program bound to memory; calling it runs it.

    Args:
        calls: What it calls, in order.
        keeps: What must live as long (buffers), and the compiled programs that it is made of.
        requests: The persistent requests that it starts and that `free` releases.
        computes: Whether it computes with floating-point numbers. NumPy would report overflows that torch and MPI pass
            on without a word.
        meets: Whether ranks meet at a fence in it, and compare what they do.
        awaits: The signals that it waits for before it begins, if it is a phase of a program.
        moved: What it moves by itself, without the compiled programs that it is made of.
    """

    __slots__ = ("_calls", "_computes", "_keeps", "_meets", "_moved", "_requests", "awaits")

    def __init__(
        self,
        calls: Sequence[Call],
        keeps: Sequence[object] = (),
        requests: Sequence[MPI.Prequest] = (),
        computes: bool = False,
        meets: bool = False,
        awaits: Telling | None = None,
        moved: Moved = NOTHING_MOVED,
    ) -> None:
        self._calls, self._keeps, self._requests = tuple(calls), keeps, requests
        self._computes, self._meets, self.awaits, self._moved = computes, meets, awaits, moved

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
        """The calls that running it makes."""
        return (self,) if self._computes else self._calls

    def after(self, call: Call) -> Compiled:
        """The same program with a call before it. This one must not be used any more."""
        calls = (call, *self._calls)
        return Compiled(calls, self._keeps, self._requests, self._computes, self._meets, moved=self._moved)

    @property
    def parts(self) -> list[Compiled]:
        """The compiled programs that this one is made of."""
        return [kept for kept in self._keeps if isinstance(kept, Compiled)]

    @property
    def moved(self) -> Moved:
        """What a run of it moves, with all its parts."""
        parts = self.parts
        return Moved.sum([self._moved, *(part.moved for part in parts)]) if parts else self._moved

    @property
    def meets(self) -> bool:
        """Whether ranks meet at a fence in it or in one of its parts."""
        return self._meets or any(part.meets for part in self.parts)

    @property
    def has_requests(self) -> bool:
        """Whether there is anything that only `free` releases."""
        return bool(self._requests) or any(part.has_requests for part in self.parts)

    def free(self) -> None:
        """Release the requests. The program must not run again."""
        for request in self._requests:
            request.Free()
        for part in self.parts:
            part.free()
        self._calls = ()


class Place(NamedTuple):
    """Elements of one of the memories that get their address when a plan is bound.

    Attributes:
        memory: SOURCE, TARGET, PEER, SCRATCH, SLOT or INBOX.
        owner: The rank whose memory it is, or the number of the scratch area.
        start: Number of the first element.
        numel: Number of elements.
    """

    memory: str
    owner: int
    start: int
    numel: int


class Binding:
    """The addresses of a plan, and what is made for them. A `Maker` turns it into calls.

    Attributes:
        made: The persistent requests made so far.
        table: The transfers to and from other processes, if there are any.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        layout: Layout,
        scratch: Sequence[torch.Tensor],
        transfers: Transfers | None,
        locals: Sequence[Place],
    ) -> None:
        """Prepare for the addresses of a layout.

        Args:
            comm: The ranks of the plan.
            layout: Where the memories are.
            scratch: The plan's own memory.
            transfers: Its transfers to and from other processes, if it has any.
            locals: This rank's side of each transfer.
        """
        self.comm, self.layout, self.item = comm, layout, layout.dtype.itemsize
        self._scratch, self._own = scratch, {SOURCE: layout.source, TARGET: layout.target, INBOX: layout.inbox}
        self.made: list[MPI.Prequest] = []
        self._exchanges: dict[int, list[MPI.Prequest]] = {}
        self._arrays: dict[tuple[str, int], np.ndarray] = {}
        self.table = None if transfers is None else Table(transfers, [self.address(place) for place in locals])
        self._tellings: dict[str, Telling] = {}

    def address(self, place: Place) -> int:
        """The address of a place, in bytes."""
        return self._base(place.memory, place.owner) + place.start * self.item

    def view(self, place: Place) -> Array:
        """The elements of a place, in the form in which they are worked on: a NumPy array or a torch tensor."""
        layout = self.layout
        if layout.memory is not None:
            if place.memory == SCRATCH:
                return self._scratch[place.owner][place.start : place.start + place.numel]
            return layout.memory(self.address(place), place.numel, layout.dtype)
        if not for_numpy(layout.dtype, layout.device, place.numel):
            return tensor_at(self.address(place), place.numel, layout.dtype)
        end = place.start + place.numel
        whole = self._arrays.get((place.memory, place.owner))
        if whole is None or whole.size < end:
            base = self._base(place.memory, place.owner)
            whole = tensor_at(base, max(end, layout.bounds[-1]), layout.dtype).numpy()
            self._arrays[place.memory, place.owner] = whole
        return whole[place.start : end]

    def _base(self, memory: str, owner: int) -> int:
        if memory in self._own:
            return self._own[memory]
        if memory == SCRATCH:
            return self._scratch[owner].data_ptr()
        where = self.layout.peers if memory == PEER else self.layout.slots
        assert where is not None
        return where(owner)

    def telling(self, event: str) -> Telling:
        """This rank's part in an event of the program."""
        if event not in self._tellings:
            self._tellings[event] = Telling(self.layout.events[event], row_of(0, *self.layout.said))
        return self._tellings[event]

    def requests(self, number: int, messages: Sequence[Message]) -> list[MPI.Prequest]:
        """The persistent requests of exchange `number`, which are made when they are first asked for."""
        made = self._exchanges.get(number)
        if made is None:
            made = self._exchanges[number] = []
            for message in messages:
                init = self.comm.Send_init if message.sends else self.comm.Recv_init
                address = self.address(message.place)
                made += [init(bytes_at(address + lo, n), message.peer) for lo, n in message.pieces(self.item)]
            self.made += made
        return made


Maker: TypeAlias = Callable[[Binding], Sequence[Call]]


class Message(NamedTuple):
    """One side of an exchange.

    Attributes:
        sends: Whether it is sent to the peer, else received from it.
        place: What is sent, or where it goes.
        peer: The other rank.
    """

    sends: bool
    place: Place
    peer: int

    def pieces(self, item: int) -> list[tuple[int, int]]:
        """Offset and length, in bytes, of each MPI message that it is cut into."""
        return pieces(self.place.numel * item)


# -- makers: calls on the addresses of a binding


def start(number: int, messages: Sequence[Message], binding: Binding) -> list[Call]:
    """The call that begins exchange `number`."""
    requests = binding.requests(number, messages)
    return [requests[0].Start if len(requests) == 1 else partial(MPI.Prequest.Startall, requests)]


def wait(number: int, messages: Sequence[Message], binding: Binding) -> list[Call]:
    """The call that completes exchange `number`.

    Raises:
        CommunicationError: In the call: less has arrived than was expected.
    """
    requests = binding.requests(number, messages)
    parts = [(message, nbytes) for message in messages for _, nbytes in message.pieces(binding.item)]
    if all(message.sends for message in messages):
        return [requests[0].Wait if len(requests) == 1 else partial(MPI.Request.Waitall, requests)]
    statuses = [MPI.Status() for _ in requests]
    each = zip(statuses, parts, strict=True)
    arriving = [(status, message.peer, nbytes) for status, (message, nbytes) in each if not message.sends]
    return [partial(_receive, requests, statuses, arriving)]


def _receive(
    requests: list[MPI.Prequest], statuses: list[MPI.Status], arriving: Sequence[tuple[MPI.Status, int, int]]
) -> None:
    MPI.Request.Waitall(requests, statuses)
    for status, peer, nbytes in arriving:
        if status.Get_count(MPI.BYTE) != nbytes:
            raise CommunicationError(
                f"{status.Get_count(MPI.BYTE)} bytes arrived from rank {peer} where {nbytes} were expected; every rank "
                "must make the same call with the same sizes and types"
            )


def combine(
    reduction: Reduction, parts: Sequence[Place], into: Place, tree: bool, scale: float | None, binding: Binding
) -> list[Call]:
    """The calls that set `into` to the reduction of the parts, times `scale` if there is one."""
    out, calls = binding.view(into), list[Call]()
    views = [_beside(binding.view(part), out, calls) for part in parts]
    return [*calls, *reduction.combine(views, out, tree=tree, scale=scale)]


def _beside(view: Array, out: Array, calls: list[Call]) -> Array:
    """The view, or a copy of it on out's device, where a neighbour computes on another; calls: gets what copies it."""
    if isinstance(view, np.ndarray) or isinstance(out, np.ndarray) or view.device == out.device:
        return view
    near = torch.empty_like(out)
    calls.append(copying(near, view))
    return near


def copy(into: Place, of: Place, binding: Binding) -> list[Call]:
    """The call that copies one place to another; none if both are at one address."""
    same = binding.address(into) == binding.address(of)
    return [] if same else [copying(binding.view(into), binding.view(of))]


def signal(event: str, binding: Binding) -> list[Call]:
    """The call that gives the signal of an event."""
    return [binding.telling(event).signal]


def wait_for_all(event: str, binding: Binding) -> list[Call]:
    """The call that waits until all ranks of the node have given the signal of an event."""
    return [binding.telling(event).wait]


def meet(fence: Sequence[Call], binding: Binding) -> Sequence[Call]:
    """Make the calls of a first fence, at which ranks compare what they do where there is a board."""
    layout, table = binding.layout, binding.table
    if layout.board is None:
        return fence
    row = row_of(layout.seen, *layout.said)
    return [layout.board.meeting(row, fence, None if table is None else table.fill)]


def transfer(which: slice, binding: Binding) -> Sequence[Call]:
    """The calls that perform some of the transfers to and from other processes."""
    assert binding.table is not None
    return binding.table.transfers[which]
