"""Supervision of MPI's start, which is collective: ranks that do not reach it are named in an error message.

Before MPI runs, ranks cannot exchange messages, so each rank inspects the processes of its host in /proc. Processes of
the same job carry their rank in their environment. A rank that has reached MPI's start has a thread with a known name,
which ends when the start is complete:

    rank 0  S  mpitrain:start      waits in MPI_Init
    rank 1  T  mpitrain:start      is stopped
    rank 2  D                      has not reached MPI's start: its imports hang

A rank whose process has ended is named within seconds. Usually mpirun ends the job in this case, but not if it
tolerates dead ranks (`launcher`), and not if the process ended with code 0. Therefore each rank counts the processes
that the launcher's daemon started on this host, once a second, until the start is complete.

This module writes no files and sends no messages.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mpitrain.comm.job import launcher
from mpitrain.early import MIN_START_TIMEOUT, RANK_NAMES, START_TIMEOUT
from mpitrain.errors import EXIT_FAILED, InputError
from mpitrain.storage import proc
from mpitrain.storage.proc import command_of, state_and_parent_of

_DEFAULT = 600.0  # seconds
_TURN = 1.0  # seconds between the turns of ranks to print: ranks that know less print later
_LOOK = 1.0  # seconds between checks for ended processes; a process must be missing in two checks
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_THREAD = "mpitrain:start"  # at most 15 characters
_STATES = {"T": "is stopped", "t": "is stopped", "D": "waits for a disk", "Z": "has ended"}


def is_due() -> bool:
    """Return True if MPI is not started yet and the job has other ranks, which must start it too."""
    return "mpi4py.MPI" not in sys.modules and _read_number(os.environ, _SIZES) > 1


def is_on_one_host() -> bool:
    """Return True if the launcher says that all ranks run on this host, or if there is no other rank."""
    size = _read_number(os.environ, _SIZES)
    return size < 2 or _read_number(os.environ, (_LOCAL_SIZE,)) == size


def launched_rank() -> int:
    """Return the rank that the launcher gave this process, without starting MPI; 0 if there is no launcher."""
    return max(0, _read_number(os.environ, RANK_NAMES))


def start_mpi() -> None:
    """Import mpi4py.MPI and initialize MPI as that import does, but report ranks that do not arrive."""
    with require_all_ranks(start_timeout(_DEFAULT)):
        import mpi4py

        rc = mpi4py.rc
        if rc.initialize is not True:
            return
        rc.initialize, rc.finalize = False, True if rc.finalize is None else rc.finalize
        try:
            from mpi4py import MPI
        finally:
            rc.initialize = True
        if not MPI.Is_initialized():
            _initialize(MPI.THREAD_SINGLE if not rc.threads else getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
            for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as mpi4py does
                comm.Set_errhandler(MPI.ERRORS_RETURN)


def _initialize(level: int) -> None:
    """Call MPI_Init_thread without the GIL: mpi4py holds it during the call, and the watching thread could not run."""
    from mpi4py import MPI

    library = ctypes.CDLL(None)  # profiling tools put their own MPI_Init_thread before MPI's
    if not hasattr(library, "MPI_Init_thread"):
        library = ctypes.CDLL(MPI.__file__)
    if not hasattr(library, "MPI_Init_thread"):
        MPI.Init_thread(level)
        return
    code = library.MPI_Init_thread(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise InputError(
            f"MPI_Init_thread failed with code {code}; check that mpirun belongs to the MPI library that mpi4py uses"
        )


@contextmanager
def require_all_ranks(seconds: float, ranks: Collection[int] = ()) -> Iterator[None]:
    """End this process with an error message unless all ranks complete the body of the `with` statement in time.

    Args:
        seconds: Time limit of the body.
        ranks: Ranks that must arrive, as the launcher numbers them; empty for all ranks of the job.
    """
    if _read_number(os.environ, _SIZES) < 2:
        yield
        return
    complete = threading.Event()
    thread = threading.Thread(target=_watch, args=(complete, seconds, ranks), daemon=True)
    thread.start()
    try:
        yield
    finally:
        complete.set()
        thread.join()  # a thread of this name would mean that the start is not complete


def start_timeout(timeout: float) -> float:
    """Return how many seconds ranks have to reach the start of MPI.

    Args:
        timeout: Seconds that an operation may take; used unless the environment sets a start timeout.
    """
    try:
        return float(os.environ[START_TIMEOUT])
    except (KeyError, ValueError):
        return max(timeout, MIN_START_TIMEOUT)


def _watch(complete: threading.Event, seconds: float, ranks: Collection[int]) -> None:
    me = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    try:
        me.write_text(_THREAD)
    except OSError:
        return
    size, deadline = _read_number(os.environ, _SIZES), time.monotonic() + seconds
    absent: list[str] = []
    siblings = Siblings(os.getpid(), ranks or range(size))
    while not complete.wait(max(0.0, min(_LOOK, deadline - time.monotonic()))):
        before, absent = absent, siblings.missing()
        confirmed = [name for name in absent if name in before]
        if confirmed:
            names, host = " and ".join(confirmed), os.uname().nodename
            message = f"{names} of {size} ended (possibly killed) on {host} before all ranks reached the start of MPI"
            _report(complete, f"{message}; start the job again")
            return
        if time.monotonic() >= deadline:
            break
    else:
        return
    places = [place for place in neighbours(os.getpid()) if not ranks or place.rank in ranks]
    missing = [place for place in places if not place.is_waiting]
    message = f"not all {len(ranks) or size} ranks reached the start of MPI in {seconds:.0f} s (comm.timeout): "
    if missing:
        message += "; ".join(place.text() for place in missing)
    else:
        arrived = ", ".join(str(place.rank) for place in places)
        message += f"the visible ranks of this host did ({arrived}); check the other hosts"
    _report(complete, message, later=not missing)


def _report(complete: threading.Event, what: str, *, later: bool = False) -> None:
    """Print why the start is not complete, unless another rank of this host does, and end this process.

    Args:
        complete: Event that is set if the start completes after all.
        what: Reason to print.
        later: If true, let ranks with more information print first.
    """
    rank = _read_number(os.environ, RANK_NAMES)
    waiting = [place.rank for place in neighbours(os.getpid()) if place.is_waiting]
    turn = (waiting.index(rank) if rank in waiting else 0) + (len(waiting) if later else 0)
    if complete.wait(_TURN * min(turn, 5)):
        return
    if not turn or waiting[0] in [place.rank for place in neighbours(os.getpid())]:
        abort_start(f"mpitrain: rank {rank}: {what}")
    os._exit(EXIT_FAILED)  # the other rank has printed its message and ended; mpirun has not ended this one yet


def abort_start(text: str) -> NoReturn:
    """Print why the start failed and end this process. With fault tolerance, also end mpirun.

    Args:
        text: Message for stderr.
    """
    os.write(2, (text + "\n").encode())
    launcher.repeat_last(text)
    if launcher.tolerates_faults() and (mpirun := launcher.find_mpirun()):
        launcher.end_soon(mpirun)
    time.sleep(0.2)
    os._exit(EXIT_FAILED)


class Siblings:
    """Processes that the launcher's daemon started on this host as ranks of the same job, as far as /proc shows."""

    def __init__(self, process: int, expected: Collection[int]) -> None:
        """Find the launcher's daemon.

        Args:
            process: Pid of any rank on this host.
            expected: Ranks that must be running.
        """
        self._expected = expected
        self._daemon = _find_daemon(process)
        self._children = f"{self._daemon}/task/{self._daemon}/children"  # proc_pid_children(5)
        self._text = ""
        self._size = 0  # ranks that were started here; 0 where that is not known
        self._started: set[int] = set()  # ranks
        self._running: set[int] = set()

    def missing(self) -> list[str]:
        """Return the names of this host's ranks whose process has ended; empty if that cannot be determined."""
        text = proc.read(self._children)
        if text and text != self._text:
            self._text = text
            environments = [_read_environment(child) for child in map(int, text.split())]
            ranks = [environment for environment in environments if _read_number(environment, RANK_NAMES) >= 0]
            self._running = {_read_number(environment, RANK_NAMES) for environment in ranks}
            self._size = max((_read_number(environment, (_LOCAL_SIZE,)) for environment in ranks), default=0)
            self._started |= self._running
            if ranks and self._size == _read_number(ranks[0], _SIZES):
                self._started |= set(range(self._size))
        names = [f"rank {rank}" for rank in sorted(self._started - self._running) if rank in self._expected]
        of_whole_job = len(self._expected) == _read_number(os.environ, _SIZES)
        unseen = of_whole_job and self._running and self._size > len(self._started)
        return [*names, "a rank"] if unseen else names


@dataclass(frozen=True)
class StartingRank:
    """A rank on this host during the start of MPI.

    Attributes:
        rank: Rank number.
        process: Pid.
        state: Process state, as the kernel's letter (R, S, D, T, t or Z).
        has_arrived: True if the rank has reached the start of MPI.
    """

    rank: int
    process: int
    state: str
    has_arrived: bool

    @property
    def is_waiting(self) -> bool:
        """True if the rank has reached the start of MPI and its process runs."""
        return self.has_arrived and self.state not in "TtZ"

    def text(self) -> str:
        """Return a description, for error messages, of what keeps the rank from the start of MPI."""
        doing = _STATES.get(self.state, "has not reached it yet")
        command = command_of(self.process) or "gone"
        return f"rank {self.rank} ({command}, process {self.process} on {os.uname().nodename}) {doing}"


def neighbours(process: int) -> list[StartingRank]:
    """Return the ranks on this host that belong to the same job as a process, in order of rank."""
    daemon = _find_daemon(process)
    ranks: dict[int, StartingRank] = {}
    for entry in sorted(proc.processes(), reverse=True):
        rank = _read_number(_read_environment(entry), RANK_NAMES)
        if rank < 0 or _find_daemon(entry) != daemon:
            continue
        place = StartingRank(rank, entry, state_and_parent_of(entry)[0], _has_arrived(entry))
        previous = ranks.get(rank)  # several processes may carry one rank: a shell, its Python, and their children
        if previous is None or place.has_arrived or (not previous.has_arrived and previous.state not in "Tt"):
            ranks[rank] = place
    return [ranks[rank] for rank in sorted(ranks)]


def _find_daemon(process: int) -> int:
    """Return the pid of the launcher's daemon on this host: the nearest ancestor of `process` without a rank."""
    while process > 1 and _read_number(_read_environment(process), RANK_NAMES) >= 0:
        _, process = state_and_parent_of(process)
    return process


def _read_number(environment: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Return the value of the first variable that is a number; -1 if none is."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), -1)


def _read_environment(process: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    entries = proc.read(f"{process}/environ").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _has_arrived(process: int) -> bool:
    try:
        names = [task.read_text().strip() for task in Path(f"/proc/{process}/task").glob("*/comm")]
    except OSError:
        return False
    return _THREAD in names
