"""The start of MPI, which is collective: ranks that do not come to it are named, instead of being awaited for ever.

Nothing can be asked of a rank before MPI runs, so the processes of this host are looked at: those that the launcher
started for the same job tell their rank by their environment, in /proc. A rank that has come to the start has a thread
of a certain name, which ends when the start is complete:

    rank 0  S  mpitrain:start      waits in MPI_Init
    rank 1  T  mpitrain:start      is stopped
    rank 2  D                      has not come so far: its imports hang

A rank whose process is gone is named within seconds: mpirun ends the job for it, but not where it was told to go on
without ranks that die (`launcher`), and not for one that ended with code 0. The processes that the launcher's
daemon started here are counted for that, now and then, until the start is complete.

No files, no messages.
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
from mpitrain.early import LEAST, RANK_NAMES, START_TIMEOUT
from mpitrain.errors import EXIT_FAILED, InputError
from mpitrain.storage import proc
from mpitrain.storage.proc import command_of, state_and_parent_of

_DEFAULT = 600.0  # seconds
_TURN = 1.0  # seconds by which ranks that know less speak later
_LOOK = 1.0  # seconds between looks for processes that are gone; one has to be missing twice
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_THREAD = "mpitrain:start"  # at most 15 characters
_STATES = {"T": "is stopped", "t": "is stopped", "D": "waits for a disk", "Z": "has ended"}


def is_due() -> bool:
    """Whether MPI is still to be started, and there are other ranks that have to come to that."""
    return "mpi4py.MPI" not in sys.modules and _number(os.environ, _SIZES) > 1


def launched_rank() -> int:
    """The rank that a launcher gave this process, which need not start MPI to know it; 0 without one."""
    return max(0, _number(os.environ, RANK_NAMES))


def start_mpi() -> None:
    """Import mpi4py.MPI and initialize MPI, as importing it does, but with the other ranks watched."""
    with watched(limit(_DEFAULT)):
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
    """MPI_Init_thread without Python's lock, which mpi4py holds meanwhile: no other thread could look at the time."""
    from mpi4py import MPI

    library = ctypes.CDLL(None)  # tools that measure put theirs before MPI's
    if not hasattr(library, "MPI_Init_thread"):
        library = ctypes.CDLL(MPI.__file__)
    if not hasattr(library, "MPI_Init_thread"):
        MPI.Init_thread(level)
        return
    code = library.MPI_Init_thread(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise InputError(f"MPI_Init_thread failed with code {code}; does mpirun belong to the MPI of mpi4py?")


@contextmanager
def watched(seconds: float, among: Collection[int] = ()) -> Iterator[None]:
    """End this process, and say why, unless all ranks come together in the body.

    Args:
        seconds: Time that they have.
        among: The ranks that have to come, by the launcher's numbers; all of the job if there are none.
    """
    if _number(os.environ, _SIZES) < 2:
        yield
        return
    complete = threading.Event()
    thread = threading.Thread(target=_watch, args=(complete, seconds, among), daemon=True)
    thread.start()
    try:
        yield
    finally:
        complete.set()
        thread.join()  # its name must be gone


def limit(timeout: float) -> float:
    """Seconds that ranks have to come to the start of MPI.

    Args:
        timeout: Seconds that an operation may take.
    """
    try:
        return float(os.environ[START_TIMEOUT])
    except (KeyError, ValueError):
        return max(timeout, LEAST)


def _watch(complete: threading.Event, seconds: float, among: Collection[int]) -> None:
    me = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    try:
        me.write_text(_THREAD)
    except OSError:
        return
    size, deadline = _number(os.environ, _SIZES), time.monotonic() + seconds
    gone: list[str] = []
    siblings = Siblings(os.getpid(), among or range(size))
    while not complete.wait(max(0.0, min(_LOOK, deadline - time.monotonic()))):
        before, gone = gone, siblings.gone()
        confirmed = [name for name in gone if name in before]
        if confirmed:
            what = (
                f"{' and '.join(confirmed)} of {size} is gone from {os.uname().nodename}: ended or killed before all "
            )
            _speak(complete, f"{what}ranks had come to the start of MPI; start the job again")
            return
        if time.monotonic() >= deadline:
            break
    else:
        return
    places = [place for place in neighbours(os.getpid()) if not among or place.rank in among]
    missing = [place for place in places if not place.waits]
    what = f"not all {len(among) or size} ranks came to the start of MPI in {seconds:.0f} s (comm.timeout): "
    if missing:
        what += "; ".join(place.text() for place in missing)
    else:
        there = ", ".join(str(place.rank) for place in places)
        what += f"those of this host that can be seen did ({there}); look at the other hosts"
    _speak(complete, what, later=not missing)


def _speak(complete: threading.Event, what: str, *, later: bool = False) -> None:
    """Say why the start is not complete, unless another rank of this host does, and end this process.

    Args:
        complete: Set where the start is complete after all.
        what: The reason.
        later: Whether ranks that know more are to speak first.
    """
    rank = _number(os.environ, RANK_NAMES)
    there = [place.rank for place in neighbours(os.getpid()) if place.waits]
    turn = (there.index(rank) if rank in there else 0) + (len(there) if later else 0)
    if complete.wait(_TURN * min(turn, 5)):
        return
    if not turn or there[0] in [place.rank for place in neighbours(os.getpid())]:
        end(f"mpitrain: rank {rank}: {what}")
    os._exit(EXIT_FAILED)  # that one has spoken, and left; mpirun is late to end this one


def end(text: str) -> NoReturn:
    """Say what is wrong and end this process, whose start did not succeed. With fault tolerance mpirun is ended, too.

    Args:
        text: What stderr gets.
    """
    os.write(2, (text + "\n").encode())
    launcher.repeat_last(text)
    if launcher.tolerates_faults() and (mpirun := launcher.find()):
        launcher.end_soon(mpirun)
    time.sleep(0.2)
    os._exit(EXIT_FAILED)


class Siblings:
    """The processes that the launcher's daemon on this host started as ranks of the same job, as far as it is seen."""

    def __init__(self, process: int, expected: Collection[int]) -> None:
        """Find the daemon.

        Args:
            process: The process of a rank.
            expected: The ranks of interest.
        """
        self._expected = expected
        self._daemon = _daemon(process)
        self._children = f"{self._daemon}/task/{self._daemon}/children"  # proc_pid_children(5)
        self._text = ""
        self._size = 0  # ranks that were started here; 0 where that is not known
        self._started: set[int] = set()  # ranks
        self._running: set[int] = set()

    def gone(self) -> list[str]:
        """Name the ranks of this host that have no process; none where that cannot be told."""
        text = proc.read(self._children)
        if text and text != self._text:
            self._text = text
            environments = [_environment(child) for child in map(int, text.split())]
            ranks = [environment for environment in environments if _number(environment, RANK_NAMES) >= 0]
            self._running = {_number(environment, RANK_NAMES) for environment in ranks}
            self._size = max((_number(environment, (_LOCAL_SIZE,)) for environment in ranks), default=0)
            self._started |= self._running
            if ranks and self._size == _number(ranks[0], _SIZES):
                self._started |= set(range(self._size))
        found = [f"rank {rank}" for rank in sorted(self._started - self._running) if rank in self._expected]
        of_whole_job = len(self._expected) == _number(os.environ, _SIZES)
        unseen = of_whole_job and self._running and self._size > len(self._started)
        return [*found, "a rank"] if unseen else found


@dataclass(frozen=True)
class StartingRank:
    """A rank on this host.

    Attributes:
        rank: Its number.
        process: That of its process.
        state: The state of its process, by the kernel's letter.
        arrived: Whether it has come to the start of MPI.
    """

    rank: int
    process: int
    state: str
    arrived: bool

    @property
    def waits(self) -> bool:
        """Whether it is at the start, and runs."""
        return self.arrived and self.state not in "TtZ"

    def text(self) -> str:
        """What it does instead of coming, in words."""
        doing = _STATES.get(self.state, "has not come so far")
        command = command_of(self.process) or "gone"
        return f"rank {self.rank} ({command}, process {self.process} on {os.uname().nodename}) {doing}"


def neighbours(process: int) -> list[StartingRank]:
    """The ranks on this host of the job that a process belongs to, in order."""
    daemon = _daemon(process)
    found: dict[int, StartingRank] = {}
    for entry in sorted(proc.processes(), reverse=True):
        rank = _number(_environment(entry), RANK_NAMES)
        if rank < 0 or _daemon(entry) != daemon:
            continue
        place = StartingRank(rank, entry, state_and_parent_of(entry)[0], _arrived(entry))
        known = found.get(rank)  # a rank may be a shell, its python, and what that started
        if known is None or place.arrived or (not known.arrived and known.state not in "Tt"):
            found[rank] = place
    return [found[rank] for rank in sorted(found)]


def _daemon(process: int) -> int:
    """What started the rank on this host: the first process above it that has no rank."""
    while process > 1 and _number(_environment(process), RANK_NAMES) >= 0:
        _, process = state_and_parent_of(process)
    return process


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int:
    """The first of the variables that is a number; -1: none is."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), -1)


def _environment(process: int) -> dict[str, str]:
    """What the process was started with; empty where that is not to be seen."""
    entries = proc.read(f"{process}/environ").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _arrived(process: int) -> bool:
    try:
        names = [task.read_text().strip() for task in Path(f"/proc/{process}/task").glob("*/comm")]
    except OSError:
        return False
    return _THREAD in names
