"""The MPI world of this process: the one communicator over all ranks, created by `init()`."""

from __future__ import annotations

import atexit
import os
import time
from functools import partial
from typing import NoReturn

from mpitrain.comm.collectives.dispatch import ProcessServices
from mpitrain.comm.collectives.transports.choice import DeviceMemory
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.job import launcher
from mpitrain.comm.job.abort import Faults, abort
from mpitrain.comm.job.arrival import abort_start, require_all_ranks, start_timeout
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import all_gather_bytes, discover, find_share, ranks_in, spare_cores, this_machine
from mpitrain.comm.memory.arena import ArenaIndex
from mpitrain.comm.programs.verify import Proofs
from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.comm.runtime.watchdog import Watchdog
from mpitrain.comm.tuning import Tuning, load_tuning
from mpitrain.early import RANK_NAMES
from mpitrain.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommunicationError, InputError, refusal

_PATIENCE = 5.0  # seconds allowed to find out which rank died
WAYS = ("auto", "mpi", "staged", "peer", "nccl")


_world: Communicator | None = None


def init(
    *, comm: MPI.Comm | None = None, timeout: float = 600.0, abort_on_error: bool = True, debug: bool | None = None
) -> Communicator:
    """Return the communicator over all ranks. Collective the first time; later calls return the same one.

    Without mpirun or srun the world has one rank.

    Args:
        comm: mpi4py communicator whose ranks are the world, for instance one half of the job; None for all ranks of the
            job. It is duplicated, so the caller may free it.
        timeout: Seconds before an unfinished operation ends the job (`set_timeout` changes it).
        abort_on_error: If true, an uncaught exception on one rank ends the whole job with one message, instead of
            leaving the other ranks waiting.
        debug: If true, ranks compare their next operation before each collective (default: MPITRAIN_DEBUG).

    Raises:
        InputError: A launcher started several processes that do not see each other, or `comm` is not a communicator
            that contains this rank, or the world already exists with other ranks.
    """
    global _world
    if comm is not None and (not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
        raise InputError(f"init(comm=...) needs an mpi4py intracommunicator that contains this rank, not {comm!r:.80}")
    if _world is not None:
        if comm is not None and MPI.Comm.Compare(comm, _world._comm) not in (MPI.IDENT, MPI.CONGRUENT):
            raise InputError(
                f"init(comm=...): the world already exists with {_world.size} ranks, and this communicator has other "
                "ranks or another order; pass it to the first call of init, or use world.subgroup"
            )
        if abort_on_error:  # an earlier call may have passed False: the backend does
            _world.process.faults.install()
        return _world
    ranks = () if comm is None else ranks_in(comm, MPI.COMM_WORLD)
    with require_all_ranks(start_timeout(timeout), ranks):
        try:
            _world = _make_world(comm, timeout, abort_on_error, debug)
        except MPI.Exception as error:
            _exit_after_failed_init(error)
    if _world.size > 1:
        _world.process.watchdog.start()
    leave = partial(_leave, os.getpid())
    atexit.register(leave)
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: leave()), None)  # MPI-4.1, section 11.2.4
    return _world


def _make_world(base: MPI.Intracomm | None, timeout: float, abort_on_error: bool, debug: bool | None) -> Communicator:
    comm = (base or MPI.COMM_WORLD).Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    faults = Faults(comm.Dup(), leave=None if base is None else partial(abort, comm))
    if abort_on_error:
        faults.install()
    if MPI.COMM_WORLD.size == 1:
        _refuse_singletons(os.environ)
    if debug is None:
        debug = os.environ.get("MPITRAIN_DEBUG", "0") not in ("", "0")
    topology = discover(comm)
    watchdog = Watchdog(comm.Dup(), timeout, faults.end_job)
    arenas = ArenaIndex()
    cores = find_share(comm, topology)
    spare = spare_cores(comm, cores)
    progress = ProgressEngine(lambda: watchdog.records, naps=spare < 0)
    faults.before_leaving = partial(_end_together, watchdog, progress, arenas)
    own_table = load_tuning(this_machine()).to_json() if comm.rank == 0 else ""
    # all ranks use rank 0's table: ranks that chose algorithms from different tables would hang
    table = Tuning.from_json(all_gather_bytes(comm, own_table.encode())[0].decode())
    proofs = Proofs() if debug else None
    process = ProcessServices(arenas, table, watchdog, progress, faults, cores, spare, DeviceMemory(), debug, proofs)
    return Communicator(comm, topology, process, "world")


def _exit_after_failed_init(error: MPI.Exception) -> NoReturn:
    """End this process because ranks died before the world existed. Only MPI with fault tolerance names the dead."""
    time.sleep(_PATIENCE)  # if the dead rank ran on this host, the thread that watches the start names it
    failed = MPI.COMM_WORLD.Get_failed() if not launcher.missing_for_faults() else MPI.GROUP_EMPTY
    if not failed.size:
        raise CommunicationError(f"init failed in MPI: {error}") from error
    ranks = MPI.Group.Translate_ranks(failed, range(failed.size), MPI.COMM_WORLD.group)
    first = next(rank for rank in range(MPI.COMM_WORLD.size) if rank not in ranks)
    if MPI.COMM_WORLD.rank != first:
        time.sleep(_PATIENCE)
        os._exit(EXIT_FAILED)
    abort_start(
        f"mpitrain: rank {first}: ranks {ranks} died on another host during init; check it and start the job again"
    )


def _leave(process: int) -> None:
    """Leave the job at interpreter exit. `process` is the pid that called `init`; forked children do nothing."""
    if _world is not None and os.getpid() == process:
        _end_together(_world.process.watchdog, _world.process.progress, _world.process.arenas)


def _end_together(watchdog: Watchdog, progress: ProgressEngine, arenas: ArenaIndex, code: int | None = None) -> None:
    """Wait for all ranks before MPI is finalized; free shared memory if all came. `code`: exit code or None."""
    all_came = watchdog.stop_with_all(code)
    progress.stop()
    if all_came:
        arenas.free_windows()


def replace_world(world: Communicator) -> None:
    """Make `world` the world of this process, returned by later calls of `init`."""
    global _world
    _world = world


def set_timeout(seconds: float) -> None:
    """Change how long an operation may take before the job is ended.

    Args:
        seconds: Time limit of each operation from now on.
    """
    if _world is not None:
        _world.process.watchdog.timeout = seconds


def carry_device_memory(way: str) -> None:
    """Choose how device memory travels between ranks. Call it before the first operation on device memory.

    Args:
        way: "auto" (the fastest available), "mpi", "staged", "peer" or "nccl"; the same on all ranks.

    Raises:
        InputError: `way` is unknown, or an operation has already used another way.
    """
    if way not in WAYS:
        raise refusal(f"comm.device {way!r} is not known; use {', '.join(WAYS)}")
    if _world is not None:
        memory = _world.process.device_memory
        if memory.device is not None and memory.way != way:
            raise refusal(f"device memory already travels by {memory.way}; choose {way} before the first operation")
        memory.way = way
        _world.process.arenas.maps_devices = way in ("auto", "peer")


def _refuse_singletons(environment: os._Environ[str] | dict[str, str]) -> None:
    """Raise InputError if this world of one rank is one of several processes that were meant to be one job.

    Each process detects this alone. The first one raises the error, the others exit silently.
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
                f"mpirun started {launched} processes, but each is alone in its MPI world: mpi4py uses {library}, and "
                "mpirun belongs to another MPI; use the mpirun of the same installation (python -m mpitrain.doctor)"
            )
        return
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    if tasks > 1:
        refuse(
            f"Slurm has {tasks} tasks, but this process is alone in its MPI world: start it with srun --mpi=pmi2 "
            "(MPICH), srun --mpi=pmix (Open MPI) or mpirun, as the MPI library was built; srun --mpi=list shows what "
            "Slurm offers"
        )
