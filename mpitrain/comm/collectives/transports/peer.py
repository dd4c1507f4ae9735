"""Device memory by the ranks of a node that have mapped each other's, with the programs for shared memory.

A vector in an arena on the device is worked on where it is. Another passes through such an arena in pieces. What is a
copy or an addition in host memory is one of the device here, and at a fence the host waits for them before it meets the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mpitrain.comm.algorithms import shared
from mpitrain.comm.collectives.binding import Binder, offsets
from mpitrain.comm.collectives.transports.staged import spans
from mpitrain.comm.collectives.transports.transport import DeviceCall, cut, flat
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.device import current_stream, recorded
from mpitrain.comm.programs.program import Program
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.selection import Algorithm, Setting, always

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


class Peer:
    """Carries device memory where the ranks have mapped each other's. Made by all ranks of a communicator together."""

    name = "peer"

    def __init__(self, binder: Binder, device: torch.device) -> None:
        self._binder = binder
        self._room: Arena = binder.allocate(_ROOM, device=device)
        self._emptied: torch.Event | None = None  # behind the last copy out of the room

    @property
    def possible(self) -> bool:
        """Whether these ranks can map each other's memory; the same on all of them."""
        return bool(self._room.segments)

    def carries(self, call: DeviceCall) -> bool:
        """Operations that have programs for shared memory."""
        return call.operation.name in _ALGORITHMS and call.value("algorithm", "auto") in ("auto", "shared")

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation; see `Transport.perform`."""
        own, written = [flat(tensor) for tensor in call.present], call.written
        if self._binder.arena_of(own[0]) is not None:
            self._run(call._replace(tensors=own))
            return
        if self._emptied is not None:  # perhaps on another stream
            current_stream(own[0].device).wait_event(self._emptied)
        for piece in cut(call, self._binder.topology.size, _ROOM):
            places = list[Tensor]()
            for tensor, part, changed in zip(own, piece.parts, written, strict=True):
                assert part is not None
                place = self._room.tensor[part.start : part.start + part.numel * tensor.element_size()]
                places.append(place.view(tensor.dtype))
                if call.operation.in_place or not changed:
                    for here, there in spans(part, places[-1], tensor):
                        here.copy_(there)
            self._run(call._replace(tensors=places, given=piece.given))
            for tensor, place, part, changed in zip(own, places, piece.parts, written, strict=True):
                if changed and part is not None:
                    for here, there in spans(part, place, tensor):
                        there.copy_(here)
        self._emptied = recorded(own[0].device)

    def _run(self, call: DeviceCall) -> None:
        """Perform it on a vector in an arena: the first tensor."""
        operation, tensors, binder = call.operation, call.present, self._binder
        vector, reduction = tensors[0], call.reduction(binder.topology.size)
        if vector.numel() == 0:
            return
        reproducible = call.value("reproducible", False)
        setting = binder.setting(vector, root=call.value("root", 0), reproducible=reproducible)
        program = binder.program(_ALGORITHMS[operation.name], setting)
        arena = binder.arena_of(vector)
        assert arena is not None and arena.mapped is not None
        bounds = self._bounds(vector, call.value("counts")) if len(tensors) == 2 else ()
        layout = binder.in_place(program, vector, bounds=bounds)
        mapped = arena.mapped
        if operation.name == "reduce_scatter":
            first = bounds[binder.topology.rank] * vector.element_size()
            layout = replace(layout, target=tensors[1].data_ptr() - first)
            mapped = mapped.beside(tensors[1])
        elif operation.name == "all_gather":
            own = vector[bounds[binder.topology.rank] : bounds[binder.topology.rank + 1]]
            if own.data_ptr() != tensors[1].data_ptr():
                own.copy_(tensors[1])
        layout = replace(layout, device=vector.device, memory=mapped.at)
        said = described(operation.name, vector.numel(), vector.dtype, *map(str, call.given), binder.place(vector))
        compiled: Compiled = binder.compile(program, layout, reduction, arena, said=said)
        binder.run(binder.signed(said, compiled))

    def _bounds(self, vector: Tensor, counts: Sequence[int] | None) -> list[int]:
        size = self._binder.topology.size
        return offsets(counts or [vector.numel() // size] * size)

    def free(self) -> None:
        """Release the arena. Collective."""
        self._room.free()
