"""Device memory through pinned host memory that the node shares, with the programs for host memory.

A large operation goes in pieces, of which three are under way at once: while the ranks reduce or move piece i in host
memory, piece i + 1 is copied in on one side stream of the device, and piece i - 1 out on another.

    copy in    0   1   2   3
    host           0   1   2   3
    copy out           0   1   2   3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpitrain.comm.collectives.binding import Binder, CollectiveOperation
from mpitrain.comm.collectives.transports.transport import DeviceCall, OperationPiece, TensorPart, cut, flat
from mpitrain.comm.memory.device import current_stream, new_stream, pin, pinned, recorded

_SLOTS = 3  # one is filled, one is worked on, one is emptied
_SLOT = 4 << 20  # bytes


class _Filled(NamedTuple):
    """A piece on its way through a slot: its tensors in host memory, and the event after which they are there."""

    slot: int
    piece: OperationPiece
    host: list[Tensor | None]
    event: torch.Event


class Staged:
    """Carries device memory through a few slots of host memory. Made by all ranks of a communicator together."""

    name = "staged"

    def __init__(self, binder: Binder, device: torch.device) -> None:
        """binder: of the operations in host memory, for the thread that is to carry."""
        self._binder, self._device = binder, device
        self._arena = binder.allocate(_SLOTS * _SLOT)
        self._unpin = pin(self._arena.tensor, device)
        self._in, self._out = new_stream(device), new_stream(device)
        self._emptied: list[torch.Event | None] = [None] * _SLOTS

    def carries(self, call: DeviceCall) -> bool:
        """It carries every operation."""
        return True

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation; see `Transport.perform`."""
        operation, tensors, written, given = call
        if not operation.by_rank:
            through_host(partial(_run, operation, self._binder, given), tensors, written)
            return
        caller = current_stream(self._device)
        asked = recorded(self._device, caller)
        self._in.wait_event(asked)  # and so does what is copied out, since the host waits for what is copied in
        given_by = [None if tensor is None else flat(tensor) for tensor in tensors]
        read = [operation.in_place or not changed for changed in written]
        pieces = cut(call, self._binder.topology.size, _SLOT)
        filled = self._fill(0, pieces[0], given_by, read)
        for number in range(len(pieces)):
            ready = filled
            if number + 1 < len(pieces):
                filled = self._fill((number + 1) % _SLOTS, pieces[number + 1], given_by, read)
            ready.event.synchronize()
            self._binder.run(operation.bound(self._binder, *ready.host, *ready.piece.given))
            self._empty(ready, given_by, written)
        emptied = self._emptied[(len(pieces) - 1) % _SLOTS]
        if emptied is not None and any(written):
            caller.wait_event(emptied)

    def _fill(
        self, slot: int, piece: OperationPiece, tensors: Sequence[Tensor | None], read: Sequence[bool]
    ) -> _Filled:
        """Begin to copy a piece of what is read into a slot, when what was there before has been copied out of it."""
        emptied, host = self._emptied[slot], list[Tensor | None]()
        if emptied is not None:
            self._in.wait_event(emptied)
        with self._in:
            for tensor, part, is_read in zip(tensors, piece.parts, read, strict=True):
                if tensor is None or part is None:
                    host.append(None)
                    continue
                place = self._place(slot, part, tensor.dtype)
                host.append(place)
                if is_read:
                    for here, there in spans(part, place, tensor):
                        here.copy_(there, non_blocking=True)
        return _Filled(slot, piece, host, recorded(self._device, self._in))

    def _empty(self, filled: _Filled, tensors: Sequence[Tensor | None], written: Sequence[bool]) -> None:
        """Begin to copy out of a slot what the operation has changed."""
        with self._out:
            each = zip(tensors, filled.host, filled.piece.parts, written, strict=True)
            for tensor, place, part, changed in each:
                if changed and tensor is not None and place is not None and part is not None:
                    for here, there in spans(part, place, tensor):
                        there.copy_(here, non_blocking=True)
        self._emptied[filled.slot] = recorded(self._device, self._out)

    def _place(self, slot: int, part: TensorPart, dtype: torch.dtype) -> Tensor:
        lo = slot * _SLOT + part.start
        return self._arena.tensor[lo : lo + part.numel * dtype.itemsize].view(dtype)

    def free(self) -> None:
        """Release the slots. Collective."""
        for emptied in self._emptied:
            if emptied is not None:
                emptied.synchronize()
        if self._unpin is not None:
            self._unpin()
        self._arena.free()


def spans(part: TensorPart, place: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each block, what lies in the slot and what lies on the device."""
    found, begin = list[tuple[Tensor, Tensor]](), 0
    for offset, length in part.spans:
        if length:
            found.append((place[begin : begin + length], tensor[offset : offset + length]))
        begin += length
    return found


def _run(operation: CollectiveOperation, binder: Binder, given: Sequence[Any], *tensors: Tensor | None) -> None:
    binder.run(operation.bound(binder, *tensors, *given))


def through_host(perform: Callable[..., None], tensors: Sequence[Tensor | None], written: Sequence[bool]) -> None:
    """Perform an operation that cannot be cut on pinned host copies of the tensors it is on.

    Args:
        perform: Given the copies, performs the operation on them.
        tensors: On a device; None where an argument is missing.
        written: For each of them, whether the operation changes it.
    """
    host = [None if t is None else pinned(t.shape, t.dtype, t.device) for t in tensors]
    pairs = [
        (here, there.detach(), changed)
        for here, there, changed in zip(host, tensors, written, strict=True)
        if here is not None and there is not None
    ]
    for here, there, _ in pairs:
        here.copy_(there, non_blocking=True)
    for device in {there.device for _, there, _ in pairs}:
        recorded(device).synchronize()
    perform(*host)
    for here, there, changed in pairs:
        if changed:
            there.copy_(here, non_blocking=True)
