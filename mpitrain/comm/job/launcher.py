"""The mpirun that started this process, as far as it runs on the same machine (Open MPI 5: prterun).

It cannot do without a host: once it notices that it lost one it ends the job, and until then it waits for the ranks
there, also when all others have ended. So these end it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from mpitrain.storage import proc
from mpitrain.storage.proc import command_of, state_and_parent_of

_DAEMON = "prted"  # what starts ranks on other machines for it
_PATIENCE = 5  # seconds in which mpirun ends by itself if it knows that all ranks have ended
_ORDERLY = 2  # seconds after SIGTERM in which it ends its daemons; it does not end itself without that of the lost host
_KEEPALIVE = "oob_tcp_keepalive_time"  # its setting: seconds before it asks whether a silent host is there; 0: never


def find() -> int:
    """Its process number; 0 where it runs elsewhere, or there is none."""
    named = re.fullmatch(r"prterun-.*-(\d+)@\d+", os.environ.get("PMIX_NAMESPACE", ""))
    wanted, process = int(named[1]) if named else 0, os.getppid()
    while process > 1 and process != wanted:
        if command_of(process) == _DAEMON:
            return 0
        _, process = state_and_parent_of(process)
    return process if process == wanted else 0


def notices_silent_hosts(process: int) -> bool:
    """Whether mpirun looks for hosts that are silent, and then ends the job, as it does unless it is told not to."""
    told = proc.read(f"{process}/cmdline") + proc.read(f"{process}/environ")
    return re.search(_KEEPALIVE + r"[\0=]0\0", told) is None


def end_soon(process: int, unless: Sequence[int] = ()) -> None:
    """End mpirun in a few seconds, from outside this process, which is about to end.

    Args:
        process: Mpirun's number.
        unless: Processes of which one that is still there then prevents that.
    """
    name = command_of(process)
    living = "".join(f"kill -0 {other} 2>/dev/null && exit; " for other in unless)
    end = f'[ "$(cat /proc/{process}/comm 2>/dev/null)" = "{name}" ] && kill -%s {process}; '
    nowhere = subprocess.DEVNULL  # mpirun would wait for the end of what it forwards
    subprocess.Popen(
        ["sh", "-c", f"sleep {_PATIENCE}; {living}{end % 'TERM'}sleep {_ORDERLY}; {end % 'KILL'}"],
        stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True,
    )  # fmt: skip
