"""The MPI library as a user of mpi4py would call it, for benchmarks: nothing of ours in between."""

from __future__ import annotations

from functools import partial

import torch
from mpi4py import MPI

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.memory.buffers import MPI_TYPES
from mpitrain.comm.runtime.ordering import Call


class PlainMPI:
    """Calls on the ranks of a communicator, for CPU tensors, which the calls keep alive. Collective to make."""

    def __init__(self, world: Communicator) -> None:
        self._comm = world._comm.Dup()
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._requests: list[MPI.Prequest] = []

    def all_reduce(self, x: torch.Tensor) -> Call:
        """Sum in place. For fp32 mpi4py is given the array itself, and looks at it at each call."""
        if x.dtype == torch.float16:
            return partial(self._comm.Allreduce, MPI.IN_PLACE, [x.numpy(), x.numel(), MPI.FLOAT16_T], MPI.SUM)
        return partial(self._comm.Allreduce, MPI.IN_PLACE, x.numpy(), MPI.SUM)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Call:
        """Sum x; out becomes this rank's block of the sum."""
        return partial(self._comm.Reduce_scatter_block, x.numpy(), out.numpy(), MPI.SUM)

    def all_gather(self, out: torch.Tensor) -> Call:
        """Gather in place: this rank's block lies in out."""
        count = out.numel() // self._comm.size
        return partial(self._comm.Allgather, MPI.IN_PLACE, [out.numpy(), count, MPI_TYPES[out.dtype]])

    def node_barrier(self) -> Call:
        """The ranks of a node meet."""
        return self._node.Barrier

    def exchange(self, out: torch.Tensor, x: torch.Tensor, to: int, source: int) -> Call:
        """Send x and receive out, by persistent requests as programs do."""
        receive, send = self._comm.Recv_init(out.numpy(), source), self._comm.Send_init(x.numpy(), to)
        requests = [receive, send]
        self._requests += requests

        def run() -> None:
            MPI.Prequest.Startall(requests)
            MPI.Request.Waitall(requests)

        return run

    @property
    def adds_fp16(self) -> bool:
        """Whether the library can sum fp16 at all. Collective: it is tried."""
        if MPI.FLOAT16_T == MPI.DATATYPE_NULL:
            return False
        x = torch.full((4,), 1.5, dtype=torch.float16)
        try:
            self.all_reduce(x)()
        except MPI.Exception:
            return False
        return bool((x == 1.5 * self._comm.size).all())

    def free(self) -> None:
        """Release what was made. Collective."""
        for request in self._requests:
            request.Free()
        self._node.Free()
        self._comm.Free()
