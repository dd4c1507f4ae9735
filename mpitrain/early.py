"""What the main job does before it imports torch and MPI, which takes seconds.

A signal that asks it to save and stop is kept until the run can honour it; Python's own answer would be to die. And the
time that the other ranks have to come to the start of MPI, which an import starts, is taken from the settings.
"""

from __future__ import annotations

import os
import signal

START_TIMEOUT = "MPITRAIN_START_TIMEOUT"  # seconds that ranks have to come to the start of MPI
LEAST = 20.0  # seconds: a limit for operations is not for imports, which take longer on some hosts than on others
_came: list[int] = []


def keep_signals() -> None:
    """Keep a SIGUSR1 that comes from now on, for `asked`."""
    signal.signal(signal.SIGUSR1, lambda number, frame: _came.append(number))


def asked() -> str:
    """The name of the signal that came, or nothing."""
    return signal.Signals(_came[0]).name if _came else ""


def allow(seconds: float) -> None:
    """Give the other ranks so long to come to the start of MPI, unless the environment says how long they have."""
    os.environ.setdefault(START_TIMEOUT, str(max(seconds, LEAST)))
