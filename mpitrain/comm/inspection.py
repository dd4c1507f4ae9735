"""Properties of the MPI library underneath, for `mpitrain.doctor`."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.runtime.agreement import Call
from mpitrain.storage import proc

_LEVELS = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}


def thread_level() -> str:
    """Return the thread level of MPI: SINGLE, FUNNELED, SERIALIZED or MULTIPLE."""
    return _LEVELS.get(MPI.Query_thread(), "unknown")


def library_path() -> str:
    """Return the path of the loaded MPI library."""
    return next(iter(proc.mapped("/libmpi.so", "/libmpich")), "unknown")


def reads_neighbours(world: Communicator) -> bool:
    """Return True if every rank may read and write the memory of the other ranks of its node. Collective."""
    return world.binder.neighbours() is not None


def bandwidth(world: Communicator, other: int, seconds: float, nbytes: int = 4 << 20) -> float:
    """Return the bandwidth of messages from rank 0 to another rank, in bytes per second. Collective.

    Args:
        world: Communicator of all ranks.
        other: Rank that receives.
        seconds: Approximate duration of the measurement.
        nbytes: Bytes of each message.
    """
    data = np.zeros(nbytes, dtype=np.uint8)
    reply = np.zeros(1, dtype=np.uint8)
    world.barrier()
    if world.rank == 0:
        deadline, rounds = time.perf_counter() + seconds, 0
        begin = time.perf_counter()
        reply[0] = True
        while reply[0]:
            reply[0] = time.perf_counter() < deadline
            world.send(data, other, tag=1)
            world.send(reply, other, tag=2)
            world.recv(reply, other, tag=3)
            rounds += 1
        rate = rounds * nbytes / (time.perf_counter() - begin)
    else:
        reply[0], rate = world.rank == other, 0.0
        while reply[0]:
            world.recv(data, 0, tag=1)
            world.recv(reply, 0, tag=2)
            world.send(reply, 0, tag=3)
    return float(world.broadcast_object(rate))


def launcher_name() -> str:
    """Return the name of the launcher that started this process."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "mpirun of Open MPI"
    if "SLURM_STEP_ID" in os.environ and "PMI_SIZE" not in os.environ:
        return "srun"
    if "PMI_SIZE" in os.environ:
        return "srun with PMI" if "SLURM_STEP_ID" in os.environ else "mpiexec of MPICH or a library based on it"
    return "none (one process)"


# -- Messages and barriers of the MPI library, as a user of mpi4py would call them, without mpitrain's own layers.


class PlainMPI:
    """Plain MPI calls on the ranks of a communicator, for CPU tensors, which the calls keep alive. Collective to make.

    Attributes:
        node_barrier: Call of a barrier over the ranks of this node.
    """

    def __init__(self, world: Communicator) -> None:
        self._comm = world._comm.Dup()
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._requests: list[MPI.Prequest] = []
        self.node_barrier: Call = self._node.Barrier

    def exchange(self, out: torch.Tensor, x: torch.Tensor, to: int, source: int) -> Call:
        """Return a call that sends x and receives out, by persistent requests, as mpitrain's programs do.

        Args:
            out: Tensor to receive into.
            x: Tensor to send.
            to: Rank that receives x.
            source: Rank that sends the data for out.
        """
        receive, send = self._comm.Recv_init(out.numpy(), source), self._comm.Send_init(x.numpy(), to)
        requests = [receive, send]
        self._requests += requests

        def run() -> None:
            MPI.Prequest.Startall(requests)
            MPI.Request.Waitall(requests)

        return run

    def free(self) -> None:
        """Free the requests and communicators. Collective."""
        for request in self._requests:
            request.Free()
        self._node.Free()
        self._comm.Free()
