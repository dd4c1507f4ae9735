"""Facts about this machine and its processes, from proc(5).

Nothing here raises. The result is empty if the system gives no answer: the process has ended or belongs to another
user, or there is no /proc.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PROC = Path("/proc")
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "hydra_pmi_proxy")
_DAEMONS = ("prted", "orted", "slurmstepd")  # start ranks on a machine where the launcher does not run


def read(name: str) -> str:
    """Return the content of a file below /proc."""
    try:
        return (PROC / name).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def nbytes_of(name: str, key: str) -> int | None:
    """Return the bytes in a line of a /proc file, such as `VmHWM:   1234 kB`; None if there is no such line.

    Args:
        name: File, relative to /proc.
        key: Text before the colon.
    """
    numbers = (line.split()[1] for line in read(name).splitlines() if line.startswith(f"{key}:"))
    return next((int(kibibytes) << 10 for kibibytes in numbers), None)


def processes() -> list[int]:
    """Return the process ids that are visible from here."""
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    except OSError:
        return []


def command_of(process: int) -> str:
    """Return the name of the program that a process runs."""
    return read(f"{process}/comm").strip()


def state_and_parent_of(process: int) -> tuple[str, int]:
    """Return the kernel's letter for the state of a process, and its parent; ("Z", 0) if the process has ended."""
    fields = _fields(process)
    return (fields[0], int(fields[1])) if fields else ("Z", 0)


def find_launcher() -> int:
    """Return the outermost launcher, or daemon of one, on this machine that started this process; 0 if there is none.

    Scripts may be between the launcher and this process.
    """
    launcher, process = 0, os.getppid()
    while process > 1:
        if command_of(process) in (*LAUNCHERS, *_DAEMONS):
            launcher = process
        elif launcher:
            break
        process = state_and_parent_of(process)[1]
    return launcher


def start_of(process: int) -> str:
    """Return the start time of a process in clock ticks since boot, as text."""
    fields = _fields(process)
    return fields[19] if fields else ""


def age_of(process: int) -> float:
    """Return the seconds since a process was started, in hundredths; 0.0 if the process has ended."""
    ticks = start_of(process)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def _fields(process: int) -> list[str]:
    """Return the fields of a process's stat file from the third on.

    The second field, the program's name, may contain spaces and brackets.
    """
    return read(f"{process}/stat").rpartition(")")[2].split()


def mapped(*parts: str) -> list[str]:
    """Return the paths of mapped files of this process that contain one of `parts`; a path may occur several times."""
    lines = (line.split() for line in read("self/maps").splitlines())
    return [fields[-1] for fields in lines if any(part in fields[-1] for part in parts)]
