"""Device memory by an MPI library that takes its addresses.

MPI knows nothing of streams: the host waits for what was asked of the caller's stream before it calls, and when a call
returns the data are there. Only blocking reductions are called, because those of Open MPI that do not block crash on
device memory (mpi4py issue 164). 16-bit sums and averages, which the library does not
compute, are computed on the device.
"""

from __future__ import annotations

import os

from mpitrain.comm.collectives.arguments import overlap
from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.collectives.transports.transport import DeviceCall
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.device import memory_kind, mpi_reads, recorded
from mpitrain.comm.memory.elements import HALVES, LARGEST_COUNT
from mpitrain.comm.runtime.executor import scaling

_OVERRIDES = ("MPITRAIN_DEVICE_AWARE", "MPITRAIN_CUDA_AWARE")  # the second is the older name


def takes_addresses(kind: str) -> bool:
    """Whether the MPI library takes addresses of a kind of device memory. MPITRAIN_DEVICE_AWARE=0|1 overrides it.

    The library is asked by its own function for the kind, or by the kinds of memory that it says it was built or
    started for (MPI-4.1, section 12.4.3).
    """
    for name in _OVERRIDES:
        override = os.environ.get(name)
        if override is not None:
            return override not in ("0", "", "no", "false")
    answer = mpi_reads(kind)
    if answer is not None:
        return answer
    kinds = (MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or "").split(",")
    return memory_kind(kind) in [named.split(":")[0] for named in kinds]


class Direct:
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

    def free(self) -> None:
        """Nothing is held."""
