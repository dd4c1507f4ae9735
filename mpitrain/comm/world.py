"""The one piece of state a process has: its place in the MPI world, made by `init()`."""

from __future__ import annotations

import atexit
import os
from functools import partial

import numpy as np

from mpitrain.comm.collectives.process import DeviceMemory, Process
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.process.abort import Faults
from mpitrain.comm.process.cores import find_share, spare_cores
from mpitrain.comm.process.mpi import MPI
from mpitrain.comm.process.starting import limit, watched
from mpitrain.comm.process.topology import discover, this_machine
from mpitrain.comm.programs.proofs import Proofs
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.watchdog import Watchdog
from mpitrain.comm.selection import tuning
from mpitrain.comm.selection.tuning import Tuning
from mpitrain.early import RANK_NAMES
from mpitrain.errors import EXIT_BAD_INPUT, InputError, refusal

DEFAULT_TIMEOUT = 600.0  # seconds
WAYS = ("auto", "mpi", "staged", "peer", "nccl")


_world: Communicator | None = None


def init(*, timeout: float = DEFAULT_TIMEOUT, abort_on_error: bool = True, debug: bool | None = None) -> Communicator:
    """The communicator over all ranks. Collective the first time; later calls return the same one.

    Without mpirun or srun it is a world of one rank.

    Args:
        timeout: Seconds before an unfinished operation ends the job (`set_timeout` changes it).
        abort_on_error: Whether an exception that nobody catches ends the whole job with one message, instead of leaving
            the other ranks to wait.
        debug: Whether to compare what the ranks are about to do before each collective (default: MPITRAIN_DEBUG).

    Raises:
        InputError: A launcher started several processes that do not see each other.
    """
    global _world
    if _world is not None:
        if abort_on_error:  # the backend, which does not ask for it, may have come first
            _world.process.faults.install()
        return _world
    with watched(limit(timeout)):
        _world = _make(timeout, abort_on_error, debug)
    if _world.size > 1:
        _world.process.watchdog.start()
    atexit.register(_leave, os.getpid())
    return _world


def _make(timeout: float, abort_on_error: bool, debug: bool | None) -> Communicator:
    comm = MPI.COMM_WORLD
    faults = Faults(comm.Dup())
    if abort_on_error:
        faults.install()
    if comm.size == 1:
        _refuse_singletons(os.environ)
    if debug is None:
        debug = os.environ.get("MPITRAIN_DEBUG", "0") not in ("", "0")
    topology = discover(comm)
    watchdog = Watchdog(comm.Dup(), timeout, faults.end_job)
    arenas = ArenaIndex()
    progress = ProgressEngine(lambda: watchdog.records)
    faults.before_leaving = partial(_end_together, watchdog, progress, arenas)
    table = Tuning.from_json(_same_text(comm, tuning.load(this_machine()).to_json()))
    cores = find_share(comm, topology)
    spare = spare_cores(comm, cores)
    proofs = Proofs() if debug else None
    process = Process(arenas, table, watchdog, progress, faults, cores, spare, DeviceMemory(), debug, proofs)
    return Communicator(comm.Dup(), topology, process, "world")


def _leave(process: int) -> None:
    """The interpreter ends. process: which was made part of the world; not its forks."""
    if _world is not None and os.getpid() == process:
        _end_together(_world.process.watchdog, _world.process.progress, _world.process.arenas)


def _end_together(watchdog: Watchdog, progress: ProgressEngine, arenas: ArenaIndex, code: int | None = None) -> None:
    """What all ranks do at their end, before MPI is finalized. code: the exit code, where it is known."""
    all_came = watchdog.stop_with_all(code)
    progress.stop()
    if all_came:
        arenas.free_windows()


def replace(world: Communicator) -> None:
    """Make this the world of the process, as `init` gives it."""
    global _world
    _world = world


def set_timeout(seconds: float) -> None:
    """Change how long an operation may take before the job is ended.

    Args:
        seconds: How long, from now on.
    """
    if _world is not None:
        _world.process.watchdog.timeout = seconds


def carry_device_memory(way: str) -> None:
    """Choose how the memory of devices is carried between ranks, before any of it is.

    Args:
        way: auto (what is fastest of what is possible), mpi, staged, peer or nccl; the same on all ranks.

    Raises:
        InputError: There is no such way, or device memory was carried already.
    """
    if way not in WAYS:
        raise refusal(f"comm.device {way!r} is not known; use {', '.join(WAYS)}")
    if _world is not None:
        memory = _world.process.device_memory
        if memory.device is not None and memory.way != way:
            raise refusal(f"device memory is carried by {memory.way} already; choose {way} before the first operation")
        memory.way = way
        _world.process.arenas.maps_devices = way in ("auto", "peer")


def _same_text(comm: MPI.Intracomm, text: str) -> str:
    """Rank 0's text on all ranks: ranks that chose algorithms from different tables would hang."""
    data = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    length = np.array([data.size])
    comm.Bcast(length)
    if comm.rank:
        data = np.empty(int(length[0]), dtype=np.uint8)
    comm.Bcast(data)
    return bytes(data).decode()


def _refuse_singletons(environment: os._Environ[str] | dict[str, str]) -> None:
    """Raise InputError if this world of one rank is one of several processes that were meant to be one job.

    Each of them finds that out alone; the first one says it, the others just leave.
    """
    number = next((environment[n] for n in RANK_NAMES if n in environment), "0")

    def refuse(message: str) -> None:
        if number != "0":
            raise SystemExit(EXIT_BAD_INPUT)
        raise InputError(message)

    if "OMPI_COMM_WORLD_SIZE" in environment or "PMI_SIZE" in environment:
        launched = int(environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("PMI_SIZE") or 1)
        if launched > 1:
            library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
            refuse(
                f"mpirun started {launched} processes, but each sees itself alone: mpi4py uses {library}, mpirun "
                "belongs to another MPI; use the mpirun of the same installation (python -m mpitrain.doctor)"
            )
        return
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    if tasks > 1:
        refuse(
            f"Slurm has {tasks} tasks, but this process sees itself alone: start it with srun --mpi=pmi2 (MPICH), "
            "srun --mpi=pmix (Open MPI) or mpirun, whichever the MPI was built for; srun --mpi=list shows the kinds"
        )
