"""Which of the ways to carry device memory is taken: the one that was asked for, else the fastest of those possible."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from mpitrain.comm.collectives.binding import Binder, CollectiveOperation
from mpitrain.comm.collectives.services import DeviceMemory
from mpitrain.comm.collectives.transports.direct import Direct, takes_addresses
from mpitrain.comm.collectives.transports.nccl import Nccl
from mpitrain.comm.collectives.transports.peer import Peer
from mpitrain.comm.collectives.transports.staged import Staged
from mpitrain.comm.collectives.transports.transport import DeviceCall, Transport
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.device import synchronize
from mpitrain.comm.memory.sharing import all_agree
from mpitrain.errors import refusal

_MEASURED = (1 << 16, 1 << 20, 1 << 24)  # bytes
_REPEATS = 4  # of which the first does not count


@dataclass(frozen=True)
class Way:
    """What is known of one way on the ranks of a communicator.

    Attributes:
        name: As `comm.device` names it.
        obstacle: Why it is not possible; "" where it is.
        seconds: Of an all_reduce of each size in bytes that was measured.
    """

    name: str
    obstacle: str
    seconds: dict[int, float]


class Transports:
    """The ways in which one thread of a communicator carries device memory."""

    def __init__(self, binder: Binder, memory: DeviceMemory, device: torch.device, probe: CollectiveOperation) -> None:
        """Find out what is possible, and where there is a choice what is fastest. Collective.

        Args:
            binder: Binds operations for the thread.
            memory: What is to be done in this process.
            device: This rank's device.
            probe: The operation that is measured: all_reduce.

        Raises:
            InputError: On all ranks: the way that was asked for is not possible.
        """
        self._binder, self._device, self._probe = binder, device, probe
        self._staged = Staged(binder, device)
        self._possible: dict[str, Transport] = {"staged": self._staged}
        self._obstacles = {"staged": ""}
        wanted = ("mpi", "peer", "nccl") if memory.way == "auto" else (memory.way,)
        for name in wanted:
            if name != "staged":
                made, self._obstacles[name] = self._make(name)
                if made is not None:
                    self._possible[name] = made
        if memory.way != "auto" and self._obstacles[memory.way]:
            self.free()
            raise refusal(f"comm.device {memory.way} is not possible: {self._obstacles[memory.way]}; use auto")
        self._seconds = self._measure() if memory.way == "auto" and len(self._possible) > 1 else {}
        self._default = memory.way if memory.way != "auto" else "staged"

    @property
    def ways(self) -> list[Way]:
        """All that was looked at."""
        return [Way(name, why, self._seconds.get(name, {})) for name, why in self._obstacles.items()]

    def of_size(self, nbytes: int) -> Transport:
        """The way that an operation on so many bytes a rank goes, unless this way does not carry it."""
        if not self._seconds:
            return self._possible[self._default]
        near = min(_MEASURED, key=lambda size: abs(np.log(size / max(1, nbytes))))
        return self._possible[min(self._seconds, key=lambda name: self._seconds[name][near])]

    def perform(self, call: DeviceCall) -> None:
        """Perform an operation on the rank's device; see `Transport.perform`."""
        transport = self.of_size(call.nbytes)
        if not transport.carries(call):
            transport = self._staged
        counted = self._binder.moved
        before = 0 if counted is None else len(counted)
        transport.perform(call)
        if counted is not None:
            counted[before:] = [moved.by(transport.name) for moved in counted[before:]]

    def free(self) -> None:
        """Release the memory of all of them. Collective."""
        for transport in self._possible.values():
            transport.free()

    def _make(self, name: str) -> tuple[Transport | None, str]:
        """A transport, else why there is none; the same on all ranks."""
        binder, device = self._binder, self._device
        if name == "mpi":
            takes = all_agree(binder.comm, takes_addresses(device.type))
            return (Direct(binder), "") if takes else (None, f"this MPI takes no addresses of {device.type} memory")
        if name == "peer":
            if binder.topology.num_nodes > 1:
                return None, "the ranks are on several nodes"
            peer = Peer(binder, device)
            if peer.possible:
                return peer, ""
            peer.free()
            return None, "the ranks cannot map each other's device memory"
        return Nccl.make(binder, device)

    def _measure(self) -> dict[str, dict[int, float]]:
        """Seconds of an all_reduce by each way, at each size: the best of a few, of the slowest rank."""
        found: dict[str, dict[int, float]] = {name: {} for name in self._possible}
        counted, self._binder.moved = self._binder.moved, None  # by the operation that comes first, not by this
        for nbytes in _MEASURED:
            x = torch.zeros(nbytes // 4, device=self._device)
            measured = DeviceCall(self._probe, (x,), (True,), ("sum", "auto", False))
            for name, transport in self._possible.items():
                times = []
                for _ in range(_REPEATS):
                    synchronize(self._device)
                    self._binder.comm.Barrier()
                    begin = time.perf_counter()
                    transport.perform(measured)
                    synchronize(self._device)
                    times.append(time.perf_counter() - begin)
                best = np.array([min(times[1:])])
                self._binder.comm.Allreduce(MPI.IN_PLACE, best, MPI.MAX)
                found[name][nbytes] = float(best[0])
        self._binder.moved = counted
        return found


def alone(call: DeviceCall) -> None:
    """The operation of a communicator of one rank: the only block is where it came from, and goes where it is to be."""
    present = call.present
    call.reduction(1)  # which checks it
    if len(present) == 2:
        into, of = reversed(present) if call.operation.name in ("reduce_scatter", "gather", "all_to_all") else present
        into.detach().view(-1).copy_(of.detach().view(-1))
