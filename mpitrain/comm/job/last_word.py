"""What ended a job is said once more after mpirun's own lines about it, as the last thing on the screen.

Open MPI's mpirun says that a rank ended with a code, or that one called MPI_Abort, after the ranks have spoken and
when they are gone. So a process of its own, which MPI knows nothing of, waits for the end of mpirun and writes to what
mpirun wrote to:

    rank 0    mpitrain: command line: unknown key ...      ends
    mpirun    prterun detected that one or more ...        ends
    helper    the cause, from above: command line: ...     ends

Only where mpirun runs on this host and its stderr is a screen: a terminal or a pipe. In a file what is written after
the job could come to lie over these lines.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from mpitrain.comm.job import launcher
from mpitrain.errors import printable

_AGAIN = "the cause, from above: "
_PATIENCE = 60  # seconds in which mpirun ends, once a rank has failed
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


def repeat(text: str) -> None:
    """Have the first line of a message come once more after what mpirun says. For a process that is about to end.

    Args:
        text: The message, which has been said.
    """
    with suppress(OSError, AttributeError):  # the message is there; AttributeError: no pidfd
        mpirun = launcher.find()
        if not mpirun or not _is_screen(mpirun) or not hasattr(os, "pidfd_open"):
            return
        line = printable(text.partition("\n")[0].removeprefix("mpitrain: "), None)
        # not to wait for somebody who reads a pipe, and not to be given a terminal of one's own
        screen = os.open(f"/proc/{mpirun}/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.set_blocking(screen, True)
            nowhere = subprocess.DEVNULL
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _HELPER, str(mpirun), str(_PATIENCE), f"{_AGAIN}{line}\n"],
                stdin=nowhere, stdout=nowhere, stderr=screen, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(screen)


def _is_screen(mpirun: int) -> bool:
    """Whether mpirun's stderr is a terminal or a pipe."""
    stderr = Path(f"/proc/{mpirun}/fd/2")
    kind = stderr.stat().st_mode
    return stat.S_ISFIFO(kind) or (stat.S_ISCHR(kind) and stderr.readlink() != Path(os.devnull))
