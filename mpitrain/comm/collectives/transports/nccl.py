"""Device memory by NCCL, or RCCL on ROCm: the library's own calls, through NVIDIA's bindings of it (nccl4py).

The id of a communicator travels over MPI, so that there is no port and no environment variable. A device may carry one
rank of a communicator only; where ranks share one, the other ways serve.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mpitrain.comm.collectives.arguments import moved_by_library
from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.collectives.transports.transport import DeviceCall, flat
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.device import current_stream, identity, native_handle, use
from mpitrain.comm.memory.sharing import all_agree
from mpitrain.comm.runtime.executor import Compiled

_MODULE = "nccl.core"
_OPERATIONS = {"sum": "SUM", "avg": "AVG", "product": "PROD", "min": "MIN", "max": "MAX"}
_DTYPES = frozenset(
    [
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ]
)
_CARRIED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
_ID = 128  # bytes


class Nccl:
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
        uid = np.zeros(_ID, dtype=np.uint8)
        if library is not None and comm.rank == 0:
            uid[:] = np.frombuffer(bytes(library.get_unique_id()), dtype=np.uint8)
        if not all_agree(comm, library is not None):
            return None, obstacle or "nccl4py is not installed on every node"
        if not all_agree(comm, _alone_on_its_device(comm, device)):
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
        }
        if operation.name == "all_gather":
            calls["all_gather"] = partial(comm.allgather, own[1], own[0])
        elif operation.name == "reduce_scatter":
            calls["reduce_scatter"] = partial(comm.reduce_scatter, own[0], own[1], reduction)
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
        library = importlib.import_module(_MODULE)
        library.get_unique_id()
    except ImportError:
        return None, "nccl4py is not installed (pip install mpitrain[nccl])"
    except Exception as error:  # the library itself is found at the first call
        return None, f"NCCL cannot be loaded: {error}"
    return library, ""


def _alone_on_its_device(comm: MPI.Intracomm, device: torch.device) -> bool:
    mine = np.zeros(256, dtype=np.uint8)
    told = f"{MPI.Get_processor_name()} {identity(device)}".encode()[:256]
    mine[: len(told)] = np.frombuffer(told, dtype=np.uint8)
    all_of_them = np.empty((comm.size, 256), dtype=np.uint8)
    comm.Allgather(mine, all_of_them)
    return sum(np.array_equal(mine, other) for other in all_of_them) == 1
