"""The mpirun that started this process, as far as it runs on the same machine (Open MPI 5: prterun).

It cannot do without a host: once it notices that it lost one it ends the job, and until then it waits for the ranks
there, also when all others have ended. So these end it (`end_soon`).

It says that a rank ended with a code, or that one called MPI_Abort, after the ranks have spoken and when they are gone.
So what ended a job is said once more after that, as the last thing on the screen (`repeat_last`): a process of its own,
which MPI knows nothing of, waits for the end of mpirun and writes to what mpirun wrote to:

    rank 0    mpitrain: command line: unknown key ...      ends
    mpirun    prterun detected that one or more ...        ends
    helper    the cause, from above: command line: ...     ends

Only where mpirun's stderr is a screen: a terminal or a pipe. In a file what is written after the job could come to lie
over these lines.

Whether MPI goes on without processes that die, it is told by mpirun as well: User-Level Failure Mitigation, ULFM.
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

from mpitrain.errors import InputError, printable
from mpitrain.storage import proc
from mpitrain.storage.proc import command_of, state_and_parent_of

_SETTING = "OMPI_MCA_mpi_ft_enable"  # what mpirun --with-ft ulfm sets
_COLLECTIVES = "OMPI_MCA_coll"  # which of its components for collectives are used, or after ^ not used
_ENABLED = ("1", "t", "true", "y", "yes", "enabled")  # values of a logical setting of Open MPI
_PATIENCE = 5  # seconds in which mpirun ends by itself if it knows that all ranks have ended
_ORDERLY = 2  # seconds after SIGTERM in which it ends its daemons; it does not end itself without that of the lost host
_AGAIN = "the cause, from above: "
_LONGEST = 60  # seconds in which mpirun ends, once a rank has failed
# without site-packages or anything of ours; a pidfd (Linux 5.3) tells the end also of a process that nobody waits for
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


def find() -> int:
    """Its process number; 0 where it runs elsewhere, or there is none."""
    named = re.fullmatch(r"prterun-.*-(\d+)@\d+", os.environ.get("PMIX_NAMESPACE", ""))
    wanted, process = int(named[1]) if named else 0, os.getppid()
    while process > 1 and process != wanted:
        if command_of(process) == "prted":  # what starts ranks on other machines for it
            return 0
        _, process = state_and_parent_of(process)
    return process if process == wanted else 0


def notices_silent_hosts(process: int) -> bool:
    """Whether mpirun looks for hosts that are silent, and then ends the job, as it does unless it is told not to."""
    told = proc.read(f"{process}/cmdline") + proc.read(f"{process}/environ")
    # its setting: seconds before it asks whether a silent host is there; 0: never
    return re.search(r"oob_tcp_keepalive_time[\0=]0\0", told) is None


def end_soon(process: int, unless: Sequence[int] = ()) -> None:
    """End mpirun in a few seconds, from outside this process, which is about to end.

    Args:
        process: Mpirun's number.
        unless: Processes of which one that is still there then prevents that.
    """
    name = command_of(process)
    living = "".join(f"kill -0 {other} 2>/dev/null && exit; " for other in unless)
    end = f'[ "$(cat /proc/{process}/comm 2>/dev/null)" = "{name}" ] && kill -%s {process}; '
    _begin_apart(["sh", "-c", f"sleep {_PATIENCE}; {living}{end % 'TERM'}sleep {_ORDERLY}; {end % 'KILL'}"])


def _begin_apart(command: Sequence[str], stderr: int = subprocess.DEVNULL) -> None:
    """Start a process that outlives this one. It is given no pipe of mpirun's, which would wait for its end."""
    nowhere = subprocess.DEVNULL
    subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=stderr, start_new_session=True)


def repeat_last(text: str) -> None:
    """Have the first line of a message come once more after what mpirun says. For a process that is about to end.

    Args:
        text: The message, which has been said.
    """
    with suppress(OSError, AttributeError):  # the message is there; AttributeError: no pidfd
        mpirun = find()
        if not mpirun or not _is_screen(mpirun) or not hasattr(os, "pidfd_open"):
            return
        line = printable(text.partition("\n")[0].removeprefix("mpitrain: "), None)
        # not to wait for somebody who reads a pipe, and not to be given a terminal of one's own
        screen = os.open(f"/proc/{mpirun}/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.set_blocking(screen, True)
            helper = ["-I", "-S", "-c", _HELPER, str(mpirun), str(_LONGEST), f"{_AGAIN}{line}\n"]
            _begin_apart([sys.executable, *helper], screen)
        finally:
            os.close(screen)


def _is_screen(mpirun: int) -> bool:
    """Whether mpirun's stderr is a terminal or a pipe."""
    stderr = Path(f"/proc/{mpirun}/fd/2")
    kind = stderr.stat().st_mode
    return stat.S_ISFIFO(kind) or (stat.S_ISCHR(kind) and stderr.readlink() != Path(os.devnull))


def tolerates_faults() -> bool:
    """Whether it was asked for when the job was started. Known before MPI is."""
    return os.environ.get(_SETTING, "").strip().lower() in _ENABLED


def lacks_for_faults() -> str:
    """What there has to be for it; empty where it is on."""
    from mpi4py import MPI

    from mpitrain.comm.job.topology import library_name

    name, version = MPI.get_vendor()
    if name != "Open MPI" or version < (5, 0):
        return f"an MPI with fault tolerance (ULFM): Open MPI 5 or later; this is {library_name()}"
    if not tolerates_faults():
        return "fault tolerance to be switched on: start the job with mpirun --with-ft ulfm"
    return ""


def require_fault_tolerance(*, across_nodes: bool) -> None:
    """Make sure that ranks which die do not take the job with them.

    Args:
        across_nodes: Whether the ranks are on several nodes. Open MPI's coll/han, which waits in communicators that
            nobody can revoke, may then not be used.

    Raises:
        InputError: They would.
    """
    from mpi4py import MPI

    chosen = os.environ.get(_COLLECTIVES, "")
    if lacking := lacks_for_faults():
        problem = f"needs {lacking}; or use elastic.mode off, and checkpoints"
    elif MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        problem = "needs an MPI with THREAD_MULTIPLE; use another MPI"
    elif across_nodes and (not chosen or ("han" in chosen.lstrip("^").split(",")) != chosen.startswith("^")):
        problem = "across nodes must do without Open MPI's coll/han: start the job with "
        problem += "mpirun --with-ft ulfm --mca coll ^han"
    else:
        return
    raise InputError(f"elastic.mode shrink {problem}", agreed=True)
