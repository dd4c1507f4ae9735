"""The mpirun that started this process, if it runs on the same machine (Open MPI 5: prterun).

mpirun does not tolerate the loss of a host. When it notices the loss it ends the job; until then it waits for the ranks
of that host, even after all other ranks have ended. Therefore the remaining ranks end mpirun themselves (`end_soon`).

After the ranks have ended, mpirun prints that a rank exited with a code or called MPI_Abort, which hides the ranks' own
message. Therefore the cause of the failure is printed once more as the last line (`repeat_last`). A helper process
that MPI does not know waits for the end of mpirun and writes to mpirun's stderr:

    rank 0    mpitrain: command line: unknown key ...      ends
    mpirun    prterun detected that one or more ...        ends
    helper    the cause, from above: command line: ...     ends

This happens only if mpirun's stderr is a terminal or a pipe. In a file, a line written after the job could overwrite
those lines.

mpirun also decides whether MPI continues after processes die (User-Level Failure Mitigation, ULFM).
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.early import RANK_NAMES
from mpitrain.errors import InputError, printable
from mpitrain.storage import proc
from mpitrain.storage.proc import command_of, state_and_parent_of

_SETTING = "OMPI_MCA_mpi_ft_enable"  # what mpirun --with-ft ulfm sets
_COLLECTIVES = "OMPI_MCA_coll"  # Open MPI's components for collectives to use, or after ^ not to use
_ENABLED = ("1", "t", "true", "y", "yes", "enabled")  # values of a logical setting of Open MPI
_PATIENCE = 5  # seconds in which mpirun ends by itself if it knows that all ranks have ended
_TERM_SECONDS = (
    2  # seconds after SIGTERM for mpirun to end its daemons; it hangs if the lost host's daemon does not answer
)
_REPEAT_PREFIX = "the cause, from above: "
_MAX_WAIT = 60  # seconds in which mpirun ends, once a rank has failed
# The helper imports no site-packages and no mpitrain. A pidfd (Linux 5.3) signals the end of any process, not only of
# a child.
_HELPER = """
import os, select, signal, sys
mpirun, seconds, text = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
try:
    if not select.select([os.pidfd_open(mpirun)], [], [], seconds)[0]:
        sys.exit()
except ProcessLookupError:
    pass
signal.alarm(5)
os.write(2, text.encode(errors="replace"))
"""


def find_mpirun() -> int:
    """Return the pid of mpirun; 0 if it runs on another machine or does not exist."""
    named = re.fullmatch(r"prterun-.*-(\d+)@\d+", os.environ.get("PMIX_NAMESPACE", ""))
    mpirun, process = int(named[1]) if named else 0, os.getppid()
    while process > 1 and process != mpirun:
        if command_of(process) == "prted":  # mpirun's daemon on another machine
            return 0
        _, process = state_and_parent_of(process)
    return process if process == mpirun else 0


def notices_silent_hosts(process: int) -> bool:
    """Return True if mpirun ends the job when a host stops answering, which is its default."""
    settings = proc.read(f"{process}/cmdline") + proc.read(f"{process}/environ")
    # mpirun's setting: seconds before it probes a silent host; 0: never
    return re.search(r"oob_tcp_keepalive_time[\0=]0\0", settings) is None


def end_soon(process: int, unless: Sequence[int] = ()) -> None:
    """End mpirun in a few seconds, from a separate process, because this process is about to end.

    Args:
        process: Pid of mpirun.
        unless: Pids of processes; if one of them still runs then, mpirun is not ended.
    """
    name = command_of(process)
    living = "".join(f"kill -0 {other} 2>/dev/null && exit; " for other in unless)
    end = f'[ "$(cat /proc/{process}/comm 2>/dev/null)" = "{name}" ] && kill -%s {process}; '
    _start_detached(["sh", "-c", f"sleep {_PATIENCE}; {living}{end % 'TERM'}sleep {_TERM_SECONDS}; {end % 'KILL'}"])


def _start_detached(command: Sequence[str], stderr: int = subprocess.DEVNULL) -> None:
    """Start a process that outlives this one.

    It inherits none of mpirun's pipes, because mpirun waits until all of them are closed, and no rank, because it would
    be taken for a process of that rank when this one has ended.
    """
    nowhere = subprocess.DEVNULL
    environment = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=stderr, env=environment, start_new_session=True)


def repeat_last(text: str) -> None:
    """Print the first line of a message once more after mpirun's own output. Call this just before the process ends.

    Args:
        text: Message, which has already been printed.
    """
    with suppress(OSError, AttributeError):  # the message is printed already; AttributeError: no pidfd
        mpirun = find_mpirun()
        if not mpirun or not _is_terminal_or_pipe(mpirun) or not hasattr(os, "pidfd_open"):
            return
        line = printable(text.partition("\n")[0].removeprefix("mpitrain: "), None)
        # do not block on a pipe without a reader, and do not acquire a controlling terminal
        screen = os.open(f"/proc/{mpirun}/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.set_blocking(screen, True)
            helper = ["-I", "-S", "-c", _HELPER, str(mpirun), str(_MAX_WAIT), f"{_REPEAT_PREFIX}{line}\n"]
            _start_detached([sys.executable, *helper], screen)
        finally:
            os.close(screen)


def _is_terminal_or_pipe(mpirun: int) -> bool:
    """Return True if mpirun's stderr is a terminal or a pipe."""
    stderr = Path(f"/proc/{mpirun}/fd/2")
    kind = stderr.stat().st_mode
    return stat.S_ISFIFO(kind) or (stat.S_ISCHR(kind) and stderr.readlink() != Path(os.devnull))


def tolerates_faults() -> bool:
    """Return True if the job was started with fault tolerance (ULFM). This does not need MPI to be initialized."""
    return os.environ.get(_SETTING, "").strip().lower() in _ENABLED


def missing_for_faults() -> str:
    """Return the missing requirement for fault tolerance, as text for a message; empty if fault tolerance is on."""
    from mpi4py import MPI

    from mpitrain.comm.job.topology import library_name

    name, version = MPI.get_vendor()
    if name != "Open MPI" or version < (5, 0):
        return f"an MPI with fault tolerance (ULFM): Open MPI 5 or later; this is {library_name()}"
    if not tolerates_faults():
        return "fault tolerance to be switched on: start the job with mpirun --with-ft ulfm"
    return ""


def require_fault_tolerance(*, across_nodes: bool) -> None:
    """Raise an error unless the job survives the death of ranks.

    Args:
        across_nodes: True if the ranks are on several nodes. Then Open MPI's coll/han must be off, because it waits in
            communicators that cannot be revoked.

    Raises:
        InputError: Fault tolerance is not available or not switched on.
    """
    from mpi4py import MPI

    chosen = os.environ.get(_COLLECTIVES, "")
    if lacking := missing_for_faults():
        problem = f"needs {lacking}; or use elastic.mode off with checkpoints"
    elif MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        problem = "needs an MPI with THREAD_MULTIPLE; use another MPI"
    elif across_nodes and (not chosen or ("han" in chosen.lstrip("^").split(",")) != chosen.startswith("^")):
        problem = "across nodes needs Open MPI's coll/han switched off: start the job with "
        problem += "mpirun --with-ft ulfm --mca coll ^han"
    else:
        return
    raise InputError(f"elastic.mode shrink {problem}", agreed=True)
