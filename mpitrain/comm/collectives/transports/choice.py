"""Which of the ways to carry device memory is taken: the one that was asked for, else the fastest of those possible."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mpitrain.comm.collectives.binding import Binder, CollectiveOperation, moved_by_library
from mpitrain.comm.collectives.transports.by_programs import DeviceCall, Peer, Staged, Transport, flat
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import all_gather_bytes
from mpitrain.comm.memory.arena import all_agree
from mpitrain.comm.memory.buffers import overlap
from mpitrain.comm.memory.device import (
    current_stream,
    identity,
    memory_kind,
    mpi_reads,
    native_handle,
    recorded,
    synchronize,
    use,
)
from mpitrain.comm.memory.elements import DTYPES, HALVES, LARGEST_COUNT
from mpitrain.comm.runtime.executor import Compiled, scaling
from mpitrain.errors import refusal

_MEASURED = (1 << 16, 1 << 20, 1 << 24)  # bytes


@dataclass
class DeviceMemory:
    """The way in which this process communicates device memory.

    Attributes:
        way: How it is carried: "auto", "mpi", "staged", "peer" or "nccl".
        device: The device of this rank, once anything on one was communicated.
        mpi_reads: Whether MPI takes addresses of the device's memory, once that was asked.
    """

    way: str = "auto"
    device: torch.device | None = None
    mpi_reads: bool | None = None


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
        for name in {"auto": ("mpi", "peer", "nccl"), "staged": ()}.get(memory.way, (memory.way,)):
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

    def perform(self, call: DeviceCall) -> None:
        """Perform an operation on the rank's device; see `Transport.perform`."""
        near = min(_MEASURED, key=lambda size: abs(np.log(size / max(1, call.nbytes))))
        name = min(self._seconds, key=lambda name: self._seconds[name][near], default=self._default)
        transport = self._possible[name]
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
                for _ in range(4):  # of which the first does not count
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


# -- Device memory by an MPI library that takes its addresses.
#
# MPI knows nothing of streams: the host waits for what was asked of the caller's stream before it calls, and when a
# call returns the data are there. Only blocking reductions are called, because those of Open MPI that do not block
# crash on device memory (mpi4py issue 164). 16-bit sums and averages, which the library does not compute, are computed
# on the device.


def takes_addresses(kind: str) -> bool:
    """Whether the MPI library takes addresses of a kind of device memory. MPITRAIN_DEVICE_AWARE=0|1 overrides it.

    The library is asked by its own function for the kind, or by the kinds of memory that it says it was built or
    started for (MPI-4.1, section 12.4.3).
    """
    for name in ("MPITRAIN_DEVICE_AWARE", "MPITRAIN_CUDA_AWARE"):  # the second is the older name
        override = os.environ.get(name)
        if override is not None:
            return override not in ("0", "", "no", "false")
    answer = mpi_reads(kind)
    if answer is not None:
        return answer
    kinds = (MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or "").split(",")
    return memory_kind(kind) in [named.split(":")[0] for named in kinds]


class Direct(Transport):
    """Carries device memory by calls of the MPI library on it."""

    name = "mpi"

    def __init__(self, binder: Binder) -> None:
        self._binder = binder

    def carries(self, call: DeviceCall) -> bool:
        """Whatever the library can do in one call, in the order of its own."""
        size = self._binder.topology.size
        reduction = call.reduction(size)
        return (
            not (reduction is not None and reduction.library_saturates)
            and bool(call.operation.by_rank)
            and call.nbytes * size <= LARGEST_COUNT
            and call.value("algorithm", "mpi") in ("auto", "mpi")
            and not call.value("reproducible", False)
        )

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation; see `Transport.perform`."""
        operation, tensors, written, given = call
        first, op, reduction = call.present[0], call.value("op"), call.reduction(self._binder.topology.size)
        given = operation.replaced(given, algorithm="mpi", op="sum" if op == "avg" else op)
        wide = op is not None and first.dtype in HALVES
        passed = [None if t is None else t.detach().float() if wide else t.detach() for t in tensors]
        if len(passed) == 2 and passed[0] is not None and passed[1] is not None and overlap(passed[0], passed[1]):
            passed = [t if changed or t is None else t.clone() for t, changed in zip(passed, written, strict=True)]
        recorded(first.device).synchronize()
        self._binder.run(operation.bind(self._binder, *passed, *given))
        for tensor, result, changed in zip(tensors, passed, written, strict=True):
            if changed and tensor is not None and result is not None:
                for scale in scaling(result, reduction.scale if reduction is not None else None):
                    scale()
                if wide:
                    tensor.detach().copy_(result)


# -- Device memory by NCCL, or RCCL on ROCm: the library's own calls, through NVIDIA's bindings of it (nccl4py).
#
# The id of a communicator travels over MPI, so that there is no port and no environment variable. A device may carry
# one rank of a communicator only; where ranks share one, the other ways serve.

_OPERATIONS = {"sum": "SUM", "avg": "AVG", "product": "PROD", "min": "MIN", "max": "MAX"}
_DTYPES = DTYPES - {torch.bool, torch.int16, torch.complex64, torch.complex128}  # NCCL has none of these
_CARRIED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")


class Nccl(Transport):
    """Carries device memory by NCCL. Made by `make`."""

    name = "nccl"

    def __init__(self, library: Any, comm: Any, binder: Binder) -> None:
        self._library, self._comm, self._binder = library, comm, binder

    @staticmethod
    def make(binder: Binder, device: torch.device) -> tuple[Nccl | None, str]:
        """One for the ranks of a binder's communicator, else why there is none. Collective.

        Args:
            binder: Its communicator carries the id.
            device: This rank's device.
        """
        comm = binder.comm
        library, obstacle = _library()
        uid = np.zeros(128, dtype=np.uint8)  # as long as an id is
        if library is not None and comm.rank == 0:
            uid[:] = np.frombuffer(bytes(library.get_unique_id()), dtype=np.uint8)
        if not all_agree(comm, library is not None):
            return None, obstacle or "nccl4py is not installed on every node"
        place = f"{MPI.Get_processor_name()} {identity(device)}".encode()
        if not all_agree(comm, all_gather_bytes(comm, place).count(place) == 1):
            return None, "several ranks share a device, which NCCL refuses"
        comm.Bcast(uid)
        use(device)
        try:
            made = library.Communicator.init(comm.size, comm.rank, library.UniqueId.from_bytes(uid.tobytes()))
        except Exception as error:  # it has a family of its own
            made, obstacle = None, f"NCCL: {error}"
        if not all_agree(comm, made is not None):
            return None, obstacle or "NCCL failed on another rank"
        return Nccl(library, made, binder), ""

    def carries(self, call: DeviceCall) -> bool:
        """Operations on blocks of one size that NCCL has, of the types it has, in the order of its own."""
        return (
            call.operation.name in _CARRIED
            and all(t is not None and t.dtype in _DTYPES and t.numel() > 0 for t in call.tensors)
            and call.value("counts") is None
            and call.value("algorithm", "auto") == "auto"
            and not call.value("reproducible", False)
            and (call.value("op") != "avg" or all(t.dtype.is_floating_point for t in call.present))
        )

    def perform(self, call: DeviceCall) -> None:
        """Perform the operation; see `Transport.perform`. It is asked of the current stream, and the host goes on."""
        own, operation = [flat(tensor) for tensor in call.present], call.operation
        root, op = call.value("root", 0), call.value("op")
        reduction = None if op is None else getattr(self._library, _OPERATIONS[op])
        comm, first = self._comm, own[0]
        calls: dict[str, Callable[..., None]] = {
            "all_reduce": partial(comm.allreduce, first, first, reduction),
            "reduce": partial(comm.reduce, first, first, reduction, root),
            "broadcast": partial(comm.broadcast, first, first, root),
            "all_gather": partial(comm.allgather, own[-1], first),
            "reduce_scatter": partial(comm.reduce_scatter, first, own[-1], reduction),
        }
        act = partial(calls[operation.name], stream=native_handle(current_stream(first.device)))
        topology, smallest = self._binder.topology, min(tensor.nbytes for tensor in own)
        blocks = [smallest] * topology.size if any(operation.by_rank) else smallest
        moved = moved_by_library(topology, operation.name, blocks, root)._replace(algorithm="nccl")
        self._binder.run(Compiled([act], moved=moved))

    def free(self) -> None:
        """Release NCCL's communicator. Collective."""
        self._comm.destroy()


def _library() -> tuple[Any, str]:
    """NCCL's bindings, else why they are not there."""
    try:
        library = importlib.import_module("nccl.core")
        library.get_unique_id()
    except ImportError:
        return None, "nccl4py is not installed (pip install mpitrain[nccl])"
    except Exception as error:  # the library itself is found at the first call
        return None, f"NCCL cannot be loaded: {error}"
    return library, ""
