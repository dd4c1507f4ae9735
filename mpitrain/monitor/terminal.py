"""Whether what a rank writes ends on a person's terminal, and how wide that is.

Under a launcher isatty() tells nothing: Open MPI's mpirun gives a rank a pseudo-terminal as stdout even when its own
output goes to a file, and a pipe as stderr even when its own goes to a terminal; MPICH's gives pipes always. What
counts is where the launcher's own stream goes, which /proc tells on the launcher's node:

    rank 0 --pipe--> [hydra_pmi_proxy --pipe-->] mpirun --> terminal, file or pipe

Never writes to that terminal itself: bytes go by the launcher, in the order of everybody's.
"""

from __future__ import annotations

import os
import stat

from mpitrain.storage import proc

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "hydra_pmi_proxy")
# options by which mpirun writes something before each line, or puts it elsewhere
TAGGING = ("-output", "--output", "-tag-output", "--tag-output", "-timestamp-output", "--timestamp-output")
LABELLING = ("-l", "-prepend-rank", "--prepend-rank", "-xterm", "--xterm")


def terminal_behind(descriptor: int) -> str | None:
    """Path of the terminal on which bytes written to a descriptor appear.

    Args:
        descriptor: The descriptor.

    Returns:
        None where they go to a file, a pipe, another node, or through a launcher that marks each line.
    """
    launcher, parent = None, os.getppid()
    while os.path.basename(_command(parent)[0]) in LAUNCHERS:
        launcher, parent = parent, proc.state_and_parent_of(parent)[1]
    if launcher is None or descriptor not in (1, 2):  # the launcher passes on these two
        return os.ttyname(descriptor) if os.isatty(descriptor) else None
    if not _reaches_launcher(descriptor) or _marks_lines(_command(launcher)):
        return None
    try:
        path = os.readlink(f"/proc/{launcher}/fd/{descriptor}")
        with open(path, opener=_without_taking_it) as device:
            return path if device.isatty() else None
    except OSError:  # such as pipe:[123], or not ours to see
        return None


def _without_taking_it(path: str, flags: int) -> int:
    """Open a terminal, which does not become that of this process by being opened."""
    return os.open(path, flags | os.O_NOCTTY)


def terminal_columns(path: str) -> int:
    """Width of the terminal at `path` now; 80 where it does not say."""
    try:
        with open(path, opener=_without_taking_it) as device:
            return os.get_terminal_size(device.fileno()).columns or 80
    except OSError:
        return 80


def _reaches_launcher(descriptor: int) -> bool:
    """A pipe or a pseudo-terminal leads to the launcher; a file is where somebody redirected the rank itself to."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def _marks_lines(command: list[str]) -> bool:
    return any(word.startswith(TAGGING) or word in LABELLING for word in command)


def _command(process: int) -> list[str]:
    """The process's argument list; [""] where the system does not tell."""
    return proc.read(f"{process}/cmdline").split("\0")
