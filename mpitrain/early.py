"""What the main job does before it imports torch and MPI, which takes seconds.

A signal that asks it to save and stop is kept until the run can honour it; Python's own answer would be to die. And the
time that the other ranks have to come to the start of MPI, which an import starts, is taken from the settings.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

START_TIMEOUT = "MPITRAIN_START_TIMEOUT"  # seconds that ranks have to come to the start of MPI
LEAST = 20.0  # seconds: a limit for operations is not for imports, which take longer on some hosts than on others
_came: list[int] = []


def begin(arguments: Sequence[str]) -> None:
    """Keep SIGUSR1 from now on, and read the command line's settings. Wrong ones are told later, by rank 0."""
    signal.signal(signal.SIGUSR1, lambda number, frame: _came.append(number))
    from mpitrain.config.settings import Config
    from mpitrain.errors import InputError

    try:
        timeout = Config.from_args(arguments).comm.timeout
        os.environ.setdefault(START_TIMEOUT, str(max(timeout, LEAST)))
    except InputError:
        return


def asked() -> str:
    """The name of the signal that came, or nothing."""
    return signal.Signals(_came[0]).name if _came else ""
