"""Choice of the transport for device memory (the requested or the fastest possible one), and two of the transports.

Transports add the vectors of three or more ranks in different orders, and a restart may measure other times. Such
reductions therefore use the first possible transport of a fixed list, whatever was measured.
"""

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

from mpitrain.comm.collectives.binding import Binder, CollectiveOperation
from mpitrain.comm.collectives.transports.by_programs import DeviceCall, Peer, Staged, Transport, flat
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import all_gather_bytes
from mpitrain.comm.job.traffic import library_volume
from mpitrain.comm.memory.arena import all_agree
from mpitrain.comm.memory.buffers import shares_memory
from mpitrain.comm.memory.device import (
    current_stream,
    identity,
    memory_kind,
    mpi_reads,
    native_handle,
    record_event,
    synchronize,
    use,
)
from mpitrain.comm.memory.elements import DTYPES, HALVES, LARGEST_COUNT
from mpitrain.comm.runtime.executor import Compiled, make_scaling
from mpitrain.errors import refusal

_MEASURED_SIZES = (1 << 16, 1 << 20, 1 << 24)  # bytes
_PREFERENCE = ("nccl", "peer", "mpi", "staged")  # for reductions of three or more ranks


@dataclass
class DeviceMemory:
    """Settings of this process for communicating device memory.

    Attributes:
        way: Requested transport: "auto", "mpi", "staged", "peer" or "nccl".
        device: Device of this rank; None until device memory is first communicated.
        mpi_reads: True if MPI accepts addresses of the device's memory; None until this was checked.
    """

    way: str = "auto"
    device: torch.device | None = None
    mpi_reads: bool | None = None


@dataclass(frozen=True)
class Way:
    """Result of examining one transport on the ranks of a communicator.

    Attributes:
        name: Name of the transport, one of the values of `comm.device`.
        obstacle: Reason why it is not possible; "" if it is possible.
        seconds: Duration of an all_reduce in seconds, by size in bytes, if it was measured.
    """

    name: str
    obstacle: str
    seconds: dict[int, float]


class Transports:
    """Transports of device memory for one thread of a communicator."""

    def __init__(self, binder: Binder, memory: DeviceMemory, device: torch.device, probe: CollectiveOperation) -> None:
        """Find the possible transports and, if there is a choice, measure all of them. Collective.

        Args:
            binder: Binds operations for the thread.
            memory: Settings of this process.
            device: This rank's device.
            probe: The all_reduce operation, which is measured.

        Raises:
            InputError: The requested transport is not possible; raised on all ranks.
        """
        self._binder, self._device, self._probe = binder, device, probe
        self._staged = Staged(binder, device)
        self._possible, self._obstacles = dict[str, Transport](), dict[str, str]()
        for name in _PREFERENCE if memory.way == "auto" else dict.fromkeys((memory.way, "staged")):
            transport, self._obstacles[name] = self._make(name)
            if transport is not None:
                self._possible[name] = transport
        if memory.way != "auto" and self._obstacles[memory.way]:
            self.free()
            raise refusal(f"comm.device {memory.way} is not possible: {self._obstacles[memory.way]}; use auto")
        self._seconds = self._measure() if memory.way == "auto" and len(self._possible) > 1 else {}
        self._default = next(iter(self._possible))

    @property
    def ways(self) -> list[Way]:
        """All transports that were examined; the first possible one performs reductions of three or more ranks."""
        return [Way(name, why, self._seconds.get(name, {})) for name, why in self._obstacles.items()]

    def perform(self, call: DeviceCall) -> None:
        """Perform an operation on the rank's device; see `Transport.perform`."""
        name = self._default
        if self._seconds and (call.value("op") is None or self._binder.topology.size == 2):
            near = min(_MEASURED_SIZES, key=lambda size: abs(np.log(size / max(1, call.nbytes))))
            name = min(self._seconds, key=lambda name: self._seconds[name][near])
        transport = self._possible[name]
        if not transport.carries(call):
            transport = self._staged
        counted = self._binder.volume
        start = 0 if counted is None else len(counted)
        transport.perform(call)
        if counted is not None:
            counted[start:] = [volume.with_way(transport.name) for volume in counted[start:]]

    def free(self) -> None:
        """Release the memory of all transports. Collective."""
        for transport in self._possible.values():
            transport.free()

    def _make(self, name: str) -> tuple[Transport | None, str]:
        """Return the transport of a name, or None and the reason why it is not possible; equal on all ranks."""
        binder, device = self._binder, self._device
        if name == "staged":
            return self._staged, ""
        if name == "mpi":
            accepts = all_agree(binder.comm, accepts_addresses(device.type))
            return (Direct(binder), "") if accepts else (None, f"this MPI accepts no addresses of {device.type} memory")
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
        """Return the seconds of an all_reduce by transport and bytes: the best of three runs, on the slowest rank."""
        seconds: dict[str, dict[int, float]] = {name: {} for name in self._possible}
        counted, self._binder.volume = self._binder.volume, None  # the measurement is not counted
        for nbytes in _MEASURED_SIZES:
            x = torch.zeros(nbytes // 4, device=self._device)
            measured = DeviceCall(self._probe, (x,), (True,), ("sum", "auto", False))
            for name, transport in self._possible.items():
                times = []
                for _ in range(4):  # the first run is a warm-up
                    synchronize(self._device)
                    self._binder.comm.Barrier()
                    begin = time.perf_counter()
                    transport.perform(measured)
                    synchronize(self._device)
                    times.append(time.perf_counter() - begin)
                best = np.array([min(times[1:])])
                self._binder.comm.Allreduce(MPI.IN_PLACE, best, MPI.MAX)
                seconds[name][nbytes] = float(best[0])
        self._binder.volume = counted
        return seconds


def perform_on_one_rank(call: DeviceCall) -> None:
    """Perform an operation on a communicator of one rank: copy the only block to its destination."""
    present = call.present
    call.reduction(1)  # checks the operation and the dtype
    if len(present) == 2:
        target, source = (
            reversed(present) if call.operation.name in ("reduce_scatter", "gather", "all_to_all") else present
        )
        target.detach().view(-1).copy_(source.detach().view(-1))


# -- Device memory through an MPI library that accepts its addresses.
#
# MPI knows nothing of streams: the host waits for the caller's stream before it calls MPI, and the data have arrived
# when the call returns. Only blocking reductions are used, because Open MPI's nonblocking reductions crash on device
# memory (mpi4py issue 164). MPI does not compute 16-bit sums and averages: 16-bit data are widened and averages are
# scaled on the device.


def accepts_addresses(kind: str) -> bool:
    """Return True if the MPI library accepts addresses of a kind of device memory. MPITRAIN_DEVICE_AWARE=0|1 overrides.

    The answer comes from the library's own query function for this kind, or else from the memory kinds that the library
    says it supports (MPI-4.1, section 12.4.3).
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
    """Transport that passes device memory to calls of the MPI library."""

    name = "mpi"

    def __init__(self, binder: Binder) -> None:
        self._binder = binder

    def carries(self, call: DeviceCall) -> bool:
        """Return True if the MPI library can perform the call in one operation; the library orders the reduction."""
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
        operation, tensors, written, arguments = call
        first, op, reduction = call.present[0], call.value("op"), call.reduction(self._binder.topology.size)
        arguments = operation.replace_arguments(arguments, algorithm="mpi", op="sum" if op == "avg" else op)
        wide = op is not None and first.dtype in HALVES
        passed = [None if t is None else t.detach().float() if wide else t.detach() for t in tensors]
        if len(passed) == 2 and passed[0] is not None and passed[1] is not None and shares_memory(passed[0], passed[1]):
            passed = [t if changed or t is None else t.clone() for t, changed in zip(passed, written, strict=True)]
        record_event(first.device).synchronize()
        self._binder.run(operation.bind(self._binder, *passed, *arguments))
        for tensor, result, changed in zip(tensors, passed, written, strict=True):
            if changed and tensor is not None and result is not None:
                for scale in make_scaling(result, reduction.scale if reduction is not None else None):
                    scale()
                if wide:
                    tensor.detach().copy_(result)


# -- Device memory through NCCL, or RCCL on ROCm: the library's own calls, through NVIDIA's Python bindings (nccl4py).
#
# The id of a communicator is sent over MPI, so that no port and no environment variable is needed. NCCL allows one rank
# per device in a communicator; if ranks share a device, another transport is used.

_NCCL_REDUCTIONS = {"sum": "SUM", "avg": "AVG", "product": "PROD", "min": "MIN", "max": "MAX"}
_NCCL_DTYPES = DTYPES - {torch.bool, torch.int16, torch.complex64, torch.complex128}  # NCCL has none of these
_NCCL_OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")


class Nccl(Transport):
    """Transport through NCCL, created by `make`."""

    name = "nccl"

    def __init__(self, library: Any, comm: Any, binder: Binder) -> None:
        self._library, self._comm, self._binder = library, comm, binder

    @staticmethod
    def make(binder: Binder, device: torch.device) -> tuple[Nccl | None, str]:
        """Create the transport for the ranks of a binder's communicator; return it, or None and the reason. Collective.

        Args:
            binder: Its communicator sends the NCCL id.
            device: This rank's device.
        """
        comm = binder.comm
        library, obstacle = _library()
        uid = np.zeros(128, dtype=np.uint8)  # an NCCL id has 128 bytes
        if library is not None and comm.rank == 0:
            uid[:] = np.frombuffer(bytes(library.get_unique_id()), dtype=np.uint8)
        if not all_agree(comm, library is not None):
            return None, obstacle or "nccl4py is not installed on every node"
        place = f"{MPI.Get_processor_name()} {identity(device)}".encode()
        if not all_agree(comm, all_gather_bytes(comm, place).count(place) == 1):
            return None, "several ranks share a device, which NCCL does not allow"
        comm.Bcast(uid)
        use(device)
        try:
            communicator = library.Communicator.init(comm.size, comm.rank, library.UniqueId.from_bytes(uid.tobytes()))
        except Exception as error:  # NCCL has its own exception classes
            communicator, obstacle = None, f"NCCL: {error}"
        if not all_agree(comm, communicator is not None):
            return None, obstacle or "NCCL failed on another rank"
        return Nccl(library, communicator, binder), ""

    def carries(self, call: DeviceCall) -> bool:
        """Return True if NCCL has the operation for the dtype, with equal blocks and in its own order of reduction."""
        return (
            call.operation.name in _NCCL_OPERATIONS
            and all(t is not None and t.dtype in _NCCL_DTYPES and t.numel() > 0 for t in call.tensors)
            and call.value("counts") is None
            and call.value("algorithm", "auto") == "auto"
            and not call.value("reproducible", False)
            and (call.value("op") != "avg" or all(t.dtype.is_floating_point for t in call.present))
        )

    def perform(self, call: DeviceCall) -> None:
        """Queue the operation on the current stream; see `Transport.perform`. The host does not wait."""
        vectors, operation = [flat(tensor) for tensor in call.present], call.operation
        root, op = call.value("root", 0), call.value("op")
        reduction = None if op is None else getattr(self._library, _NCCL_REDUCTIONS[op])
        comm, first = self._comm, vectors[0]
        calls: dict[str, Callable[..., None]] = {
            "all_reduce": partial(comm.allreduce, first, first, reduction),
            "reduce": partial(comm.reduce, first, first, reduction, root),
            "broadcast": partial(comm.broadcast, first, first, root),
            "all_gather": partial(comm.allgather, vectors[-1], first),
            "reduce_scatter": partial(comm.reduce_scatter, first, vectors[-1], reduction),
        }
        act = partial(calls[operation.name], stream=native_handle(current_stream(first.device)))
        topology, smallest = self._binder.topology, min(tensor.nbytes for tensor in vectors)
        blocks = [smallest] * topology.size if any(operation.by_rank) else smallest
        volume = library_volume(topology, operation.name, blocks, root)._replace(algorithm="nccl")
        self._binder.run(Compiled([act], volume=volume))

    def free(self) -> None:
        """Destroy NCCL's communicator. Collective."""
        self._comm.destroy()


def _library() -> tuple[Any, str]:
    """Return NCCL's Python bindings, or None and the reason why they cannot be used."""
    try:
        library = importlib.import_module("nccl.core")
        library.get_unique_id()
    except ImportError:
        return None, "nccl4py is not installed (pip install mpitrain[nccl])"
    except Exception as error:  # the first call loads the library
        return None, f"NCCL cannot be loaded: {error}"
    return library, ""
