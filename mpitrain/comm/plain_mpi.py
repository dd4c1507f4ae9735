"""Messages and meetings by the MPI library as a user of mpi4py would call it: nothing of ours in between."""

from __future__ import annotations

import torch

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.runtime.executor import Call


class PlainMPI:
    """Calls on the ranks of a communicator, for CPU tensors, which the calls keep alive. Collective to make."""

    def __init__(self, world: Communicator) -> None:
        self._comm = world._comm.Dup()
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._requests: list[MPI.Prequest] = []

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

    def free(self) -> None:
        """Release what was made. Collective."""
        for request in self._requests:
            request.Free()
        self._node.Free()
        self._comm.Free()
