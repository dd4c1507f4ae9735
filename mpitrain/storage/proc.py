"""Facts that proc(5) has about this machine and its processes.

Nothing here raises: where the system does not tell (a process that is gone or not ours to see, no /proc), the answer is
empty.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def read(name: str) -> str:
    """Return the content of a file below /proc."""
    try:
        return (PROC / name).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def nbytes_of(name: str, key: str) -> int | None:
    """Return the bytes that a line of a file tells, such as `VmHWM:   1234 kB`; None where there is none."""
    found = (line.split()[1] for line in read(name).splitlines() if line.startswith(f"{key}:"))
    return next((int(kibibytes) << 10 for kibibytes in found), None)


def processes() -> list[int]:
    """Return the numbers of the processes that can be seen from here."""
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    except OSError:
        return []


def command_of(process: int) -> str:
    """Return the name of the program that a process runs."""
    return read(f"{process}/comm").strip()


def state_and_parent_of(process: int) -> tuple[str, int]:
    """Return the kernel's letter for the state of a process, Z where it is gone, and its parent, then 0."""
    fields = _fields(process)
    return (fields[0], int(fields[1])) if fields else ("Z", 0)


def start_of(process: int) -> str:
    """Return when a process was started, in ticks since the machine was."""
    fields = _fields(process)
    return fields[19] if fields else ""


def _fields(process: int) -> list[str]:
    """Return the fields of a process's stat, from the third on: the name before may hold spaces and brackets."""
    return read(f"{process}/stat").rpartition(")")[2].split()


def mapped(*parts: str) -> list[str]:
    """Return the files that this process has mapped, and whose paths hold one of these; some several times."""
    lines = (line.split() for line in read("self/maps").splitlines())
    return [fields[-1] for fields in lines if any(part in fields[-1] for part in parts)]
