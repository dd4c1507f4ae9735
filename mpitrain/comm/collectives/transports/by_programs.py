"""Transports that use the programs for host and shared memory: `Staged` and `Peer`.

`Staged` copies through pinned host memory that the node shares. A large operation is cut into pieces, three of which
are in progress at once: while the ranks reduce or move piece i in host memory, piece i + 1 is copied in on one side
stream of the device, and piece i - 1 is copied out on another.

    time   ----------------------->
    copy in    0   1   2   3
    host           0   1   2   3
    copy out           0   1   2   3
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpitrain.comm.algorithms import shared
from mpitrain.comm.collectives.binding import Binder, CollectiveOperation, offsets
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.device import current_stream, empty_pinned, new_stream, pin, record_event
from mpitrain.comm.programs.program import Program
from mpitrain.comm.runtime.agreement import describe_call
from mpitrain.comm.runtime.executor import Compiled, Reduction
from mpitrain.comm.selection import Algorithm, Setting, always

# -- Common to all transports: the call, and how it is cut into pieces.
#
# A large operation becomes smaller ones of the same kind, which pass through memory of a given size. A tensor of one
# block can be cut anywhere. From a tensor with one block per rank, a piece takes the same range of every block:
#
#     one block              one block per rank, two ranks
#     | 0 | 1 | 2 |          | 0 | 1 | 2 | 0 | 1 | 2 |
#
# The operation on pieces i of its tensors gives piece i of the result, because it treats each element separately.


class DeviceCall(NamedTuple):
    """One call of an operation on device memory.

    Attributes:
        operation: The operation.
        tensors: Tensor arguments: contiguous, on the rank's device; None where this rank has none.
        written: For each tensor, True if the operation changes it.
        arguments: Arguments other than the tensors.
    """

    operation: CollectiveOperation
    tensors: Sequence[Tensor | None]
    written: Sequence[bool]
    arguments: Sequence[Any]

    @property
    def present(self) -> list[Tensor]:
        """Tensors that this rank has."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the largest tensor."""
        return max(tensor.nbytes for tensor in self.present)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the argument of a parameter.

        Args:
            name: Name of the parameter.
            default: Value to return if the operation has no such parameter.
        """
        return self.operation.value(self.arguments, name, default)

    def reduction(self, size: int) -> Reduction | None:
        """Return the reduction over `size` ranks; None for an operation that only moves data."""
        op = self.value("op")
        return None if op is None else Reduction.of(op, self.present[0].dtype, size)


class Transport(ABC):
    """One way of carrying device memory, for one thread of one communicator.

    Attributes:
        name: Name of the transport, one of the values of `comm.device`.
    """

    name: str

    def carries(self, call: DeviceCall) -> bool:
        """Return True if the transport can perform the call; the answer is equal on all ranks.

        By default it can perform every call.
        """
        return True

    @abstractmethod
    def perform(self, call: DeviceCall) -> None:
        """Perform the operation, after the work already queued on the current stream and before work queued later."""

    def free(self) -> None:  # noqa: B027 - most have none
        """Release the memory of the transport, if it has any. Collective."""


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as a flat tensor without autograd history."""
    return tensor.detach().view(-1)


_ALIGNMENT = 64  # bytes: tensors begin at multiples of it in the memory of a piece, and piece widths are multiples
_MIN_PIECES = 4  # smallest number of pieces of a large operation, so that several can be in progress at once
_MIN_PIECE_BYTES = 1 << 19  # bytes of a piece below which cutting costs more than it gains


@dataclass(frozen=True)
class TensorPart:
    """Part of one tensor in a piece of an operation.

    Attributes:
        spans: (offset, length) of the part of each block, in elements of the tensor.
        numel: Sum of the lengths.
        start: Offset of the part in the memory of the piece, in bytes; equal on all ranks.
    """

    spans: tuple[tuple[int, int], ...]
    numel: int
    start: int

    def view_in(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the memory of this part as a tensor.

        Args:
            memory: Memory of the piece, as bytes.
            dtype: Type of the elements.
        """
        return memory[self.start : self.start + self.numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class OperationPiece:
    """Piece of an operation: a part of each tensor (None where there is no tensor), and its other arguments."""

    parts: tuple[TensorPart | None, ...]
    arguments: tuple[Any, ...]


def cut(call: DeviceCall, size: int, room: int) -> list[OperationPiece]:
    """Cut an operation into pieces; their number is equal on all ranks.

    Args:
        call: Call of an operation that can be cut (see `CollectiveOperation.by_rank`).
        size: Number of ranks.
        room: Bytes of memory for one piece.
    """
    operation, item, counts = call.operation, call.present[0].element_size(), call.value("counts")
    lengths = list[Sequence[int] | None]()  # of each block of each tensor, in elements
    for tensor, by_rank in zip(call.tensors, operation.by_rank, strict=True):
        whole = 0 if tensor is None else tensor.numel()
        each = (counts or [whole // size] * size) if by_rank else [whole]
        lengths.append(None if tensor is None else each)
    longest = max(counts) if counts else max(length for blocks in lengths for length in blocks or [0])
    blocks = sum(size if by_rank else 1 for by_rank in operation.by_rank)
    width = _width(longest, item, blocks, room)
    pieces = []
    for lo in range(0, max(longest, 1), width):
        hi = lo + width
        start, parts = 0, list[TensorPart | None]()
        for block_lengths in lengths:
            part = None if block_lengths is None else _part(block_lengths, lo, hi, start)
            start += 0 if part is None else -(-part.numel * item // _ALIGNMENT) * _ALIGNMENT
            parts.append(part)
        clipped = tuple(_clip(n, lo, hi) for n in counts) if counts else None
        pieces.append(OperationPiece(tuple(parts), operation.replace_arguments(call.arguments, counts=clipped)))
    return pieces


def _width(longest: int, item: int, blocks: int, room: int) -> int:
    """Return the number of elements that a piece takes of the longest block."""
    each = max(_ALIGNMENT, (room - blocks * _ALIGNMENT) // blocks)
    target = max(_MIN_PIECE_BYTES // blocks, longest * item // _MIN_PIECES)
    return max(1, min(each, target) // _ALIGNMENT * _ALIGNMENT // item)


def _clip(length: int, lo: int, hi: int) -> int:
    return max(0, min(hi, length) - lo)


def _part(lengths: Sequence[int], lo: int, hi: int, start: int) -> TensorPart:
    spans = [(offset + lo, _clip(n, lo, hi)) for offset, n in zip(offsets(lengths), lengths, strict=False)]
    return TensorPart(tuple(spans), sum(n for _, n in spans), start)


# -- Device memory through pinned host memory

_SLOTS = 3  # one is filled, one is worked on, one is emptied
_SLOT = 4 << 20  # bytes


class _FilledSlot(NamedTuple):
    """Piece of an operation in a staging slot.

    Attributes:
        slot: Number of the slot.
        piece: The piece.
        host: Its tensors in host memory.
        event: Event that completes when they have been copied in.
    """

    slot: int
    piece: OperationPiece
    host: list[Tensor | None]
    event: torch.Event


class Staged(Transport):
    """Transport that copies device memory through slots in pinned host memory.

    All ranks of a communicator create it together.
    """

    name = "staged"

    def __init__(self, binder: Binder, device: torch.device) -> None:
        """Allocate and pin the slots. Collective.

        Args:
            binder: Binder of the operations in host memory, for the thread that uses this transport.
            device: This rank's device.
        """
        self._binder, self._device = binder, device
        self._arena = binder.allocate(_SLOTS * _SLOT)
        self._unpin = pin(self._arena.tensor, device)
        self._in, self._out = new_stream(device), new_stream(device)
        self._emptied: list[torch.Event | None] = [None] * _SLOTS

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation; see `Transport.perform`."""
        operation, tensors, written, call_arguments = call
        if not operation.by_rank:
            binder = self._binder
            perform_through_host(
                lambda *host: binder.run(operation.bind_cached(binder, *host, *call_arguments)), tensors, written
            )
            return
        caller = current_stream(self._device)
        submission = record_event(self._device, caller)
        self._in.wait_event(submission)  # copies out come later anyway, since the host waits for the copies in
        vectors = [None if tensor is None else flat(tensor) for tensor in tensors]
        read = [operation.in_place or not changed for changed in written]
        pieces = cut(call, self._binder.topology.size, _SLOT)
        filled = self._fill(0, pieces[0], vectors, read)
        for number in range(len(pieces)):
            ready = filled
            if number + 1 < len(pieces):
                filled = self._fill((number + 1) % _SLOTS, pieces[number + 1], vectors, read)
            ready.event.synchronize()
            self._binder.run(operation.bind_cached(self._binder, *ready.host, *ready.piece.arguments))
            self._empty(ready, vectors, written)
        emptied = self._emptied[(len(pieces) - 1) % _SLOTS]
        if emptied is not None and any(written):
            caller.wait_event(emptied)

    def _fill(
        self, slot: int, piece: OperationPiece, tensors: Sequence[Tensor | None], read: Sequence[bool]
    ) -> _FilledSlot:
        """Start to copy a piece of the tensors that are read into a slot, after its last results were copied out."""
        emptied, host = self._emptied[slot], list[Tensor | None]()
        if emptied is not None:
            self._in.wait_event(emptied)
        with self._in:
            for tensor, part, is_read in zip(tensors, piece.parts, read, strict=True):
                if tensor is None or part is None:
                    host.append(None)
                    continue
                place = part.view_in(self._arena.tensor[slot * _SLOT :], tensor.dtype)
                host.append(place)
                if is_read:
                    for here, there in span_pairs(part, place, tensor):
                        here.copy_(there, non_blocking=True)
        return _FilledSlot(slot, piece, host, record_event(self._device, self._in))

    def _empty(self, filled: _FilledSlot, tensors: Sequence[Tensor | None], written: Sequence[bool]) -> None:
        """Start to copy the tensors that the operation changed out of a slot."""
        with self._out:
            each = zip(tensors, filled.host, filled.piece.parts, written, strict=True)
            for tensor, place, part, changed in each:
                if changed and tensor is not None and place is not None and part is not None:
                    for here, there in span_pairs(part, place, tensor):
                        there.copy_(here, non_blocking=True)
        self._emptied[filled.slot] = record_event(self._device, self._out)

    def free(self) -> None:
        """Release the slots. Collective."""
        for emptied in self._emptied:
            if emptied is not None:
                emptied.synchronize()
        if self._unpin is not None:
            self._unpin()
        self._arena.free()


def span_pairs(part: TensorPart, place: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return, for each block, the pair of its part in host or arena memory and its part in the tensor.

    Args:
        part: Part of the tensor that the piece takes.
        place: Memory of the part.
        tensor: The whole tensor.
    """
    pieces = torch.split(place, [length for _, length in part.spans])
    return [(near, tensor[lo : lo + n]) for near, (lo, n) in zip(pieces, part.spans, strict=True) if n]


def perform_through_host(
    perform: Callable[..., None], tensors: Sequence[Tensor | None], written: Sequence[bool]
) -> None:
    """Perform an operation that cannot be cut on pinned host copies of its tensors.

    Args:
        perform: Performs the operation, given the copies.
        tensors: Tensors on a device; None where this rank has none.
        written: For each tensor, True if the operation changes it.
    """
    host = [None if t is None else empty_pinned(t.shape, t.dtype, t.device) for t in tensors]
    pairs = [
        (here, there.detach(), changed)
        for here, there, changed in zip(host, tensors, written, strict=True)
        if here is not None and there is not None
    ]
    for here, there, _ in pairs:
        here.copy_(there, non_blocking=True)
    for device in {there.device for _, there, _ in pairs}:
        record_event(device).synchronize()
    perform(*host)
    for here, there, changed in pairs:
        if changed:
            there.copy_(here, non_blocking=True)


# -- Device memory that the ranks of a node have mapped from each other, with the programs for shared memory.
#
# A vector in a device arena is used in place. Any other vector passes through a device arena in pieces. Copies and
# additions run on the device; at a fence, the host waits for them before it meets the other ranks.

_ROOM = 16 << 20  # bytes of the arena for vectors outside arenas


def _algorithm(program: Callable[[Setting], Program]) -> Algorithm:
    return Algorithm(program, one_node=True, reach=True, reproduces=always)


_ALGORITHMS = {
    "all_reduce": _algorithm(lambda s: shared.shared_all_reduce(s.size, tree=s.reproducible)),
    "reduce": _algorithm(lambda s: shared.shared_reduce(s.size, s.root, 1)),
    "broadcast": _algorithm(lambda s: shared.shared_broadcast(s.size, s.root)),
    "reduce_scatter": _algorithm(lambda s: shared.shared_reduce_scatter(s.size, tree=s.reproducible)),
    "all_gather": _algorithm(lambda s: shared.shared_all_gather(s.size)),
}


class Peer(Transport):
    """Transport for ranks of one node that have mapped each other's device memory.

    All ranks of a communicator create it together.

    Attributes:
        possible: True if these ranks can map each other's memory; equal on all of them.
    """

    name = "peer"

    def __init__(self, binder: Binder, device: torch.device) -> None:
        self._binder = binder
        self._room: Arena = binder.allocate(_ROOM, device=device)
        self.possible = bool(self._room.segments)
        self._emptied: torch.Event | None = None  # completes after the last copy out of the arena

    def carries(self, call: DeviceCall) -> bool:
        """Return True for an operation that has a program for shared memory."""
        return call.operation.name in _ALGORITHMS and call.value("algorithm", "auto") in ("auto", "shared")

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation; see `Transport.perform`."""
        vectors, written = [flat(tensor) for tensor in call.present], call.written
        if self._binder.arena_of(vectors[0]) is not None:
            self._run(call._replace(tensors=vectors))
            return
        if self._emptied is not None:  # the last copy may be on another stream
            current_stream(vectors[0].device).wait_event(self._emptied)
        for piece in cut(call, self._binder.topology.size, _ROOM):
            places = list[Tensor]()
            for tensor, part, changed in zip(vectors, piece.parts, written, strict=True):
                assert part is not None
                places.append(part.view_in(self._room.tensor, tensor.dtype))
                if call.operation.in_place or not changed:
                    for here, there in span_pairs(part, places[-1], tensor):
                        here.copy_(there)
            self._run(call._replace(tensors=places, arguments=piece.arguments))
            for tensor, place, part, changed in zip(vectors, places, piece.parts, written, strict=True):
                if changed and part is not None:
                    for here, there in span_pairs(part, place, tensor):
                        there.copy_(here)
        self._emptied = record_event(vectors[0].device)

    def _run(self, call: DeviceCall) -> None:
        """Perform a call whose first tensor is in an arena."""
        operation, tensors, binder = call.operation, call.present, self._binder
        vector, size = tensors[0], binder.topology.size
        if vector.numel() == 0:
            return
        reproducible = call.value("reproducible", False)
        setting = binder.setting(vector, root=call.value("root", 0), reproducible=reproducible)
        program = binder.program(_ALGORITHMS[operation.name], setting)
        arena = binder.arena_of(vector)
        assert arena is not None and arena.mapped is not None
        bounds = offsets(call.value("counts") or [vector.numel() // size] * size) if len(tensors) == 2 else []
        layout = binder.layout_in_place(program, vector, bounds=bounds)
        mapped = arena.mapped
        if operation.name == "reduce_scatter":
            first = bounds[binder.topology.rank] * vector.element_size()
            layout = replace(layout, target=tensors[1].data_ptr() - first)
            mapped = mapped.with_memory(tensors[1])
        elif operation.name == "all_gather":
            own_block = vector[bounds[binder.topology.rank] : bounds[binder.topology.rank + 1]]
            if own_block.data_ptr() != tensors[1].data_ptr():
                own_block.copy_(tensors[1])
        layout = replace(layout, device=vector.device, memory=mapped.at)
        description = describe_call(
            operation.name, vector.numel(), vector.dtype, *map(str, call.arguments), binder.describe_place(vector)
        )
        compiled: Compiled = binder.compile(program, layout, call.reduction(size), arena, description=description)
        binder.run(binder.with_signature(description, compiled))

    def free(self) -> None:
        """Release the arena. Collective."""
        self._room.free()
