"""What can be asked of the MPI underneath, for `mpitrain.doctor`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import mpi4py
import numpy as np
from mpi4py import MPI

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.process.topology import host_names, library_name

_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


@dataclass(frozen=True)
class MpiFacts:
    """library: name and version. thread_level: MPI's word."""

    library: str
    library_path: str
    mpi4py: str
    thread_level: str
    cuda_aware: bool
    launcher: str


def mpi_facts(world: Communicator) -> MpiFacts:
    return MpiFacts(
        library_name(),
        _library_path(),
        mpi4py.__version__,
        _LEVELS.get(MPI.Query_thread(), "unknown"),
        world.process.cuda_aware,
        _launcher(),
    )


def hosts(world: Communicator) -> list[str]:
    """The host name of every rank. Collective."""
    return host_names(MPI.COMM_WORLD)


def reads_neighbours(world: Communicator) -> bool:
    """Whether every rank may read and write the memory of those on its node. Collective."""
    return world.binder.neighbours() is not None


def bandwidth(world: Communicator, other: int, seconds: float, nbytes: int = 4 << 20) -> float:
    """Bytes per second of messages from rank 0 to rank `other`, measured for about `seconds`. Collective."""
    data = np.zeros(nbytes, dtype=np.uint8)
    reply = np.zeros(1, dtype=np.uint8)
    world.barrier()
    if world.rank == 0:
        deadline, rounds = time.perf_counter() + seconds, 0
        begin = time.perf_counter()
        going = True
        while going:
            going = time.perf_counter() < deadline
            reply[0] = going
            world.send(data, other, tag=1)
            world.send(reply, other, tag=2)
            world.recv(reply, other, tag=3)
            rounds += 1
        rate = rounds * nbytes / (time.perf_counter() - begin)
    else:
        going, rate = world.rank == other, 0.0
        while going:
            world.recv(data, 0, tag=1)
            world.recv(reply, 0, tag=2)
            going = bool(reply[0])
            world.send(reply, 0, tag=3)
    return float(world.broadcast_object(rate))


def all_reduce_seconds(world: Communicator, nbytes: int, algorithm: str, repeats: int = 5) -> float:
    """The best time of an all-reduce of float32 in an arena. Collective."""
    arena = world.arena(nbytes // 4)
    best = float("inf")
    for _ in range(repeats):
        world.barrier()
        begin = time.perf_counter()
        world.all_reduce(arena.tensor, algorithm=algorithm)
        best = min(best, time.perf_counter() - begin)
    arena.free()
    slowest = np.array([best])
    world.all_reduce(slowest, "max")
    return float(slowest[0])


def _library_path() -> str:
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return next((line.split()[-1] for line in maps if "/libmpi.so" in line or "/libmpich" in line), "unknown")
    except OSError:
        return "unknown"


def _launcher() -> str:
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "mpirun of Open MPI"
    if "SLURM_STEP_ID" in os.environ and "PMI_SIZE" not in os.environ:
        return "srun"
    if "PMI_SIZE" in os.environ:
        return "srun with PMI" if "SLURM_STEP_ID" in os.environ else "mpiexec of MPICH or its kin"
    return "none (one process)"
