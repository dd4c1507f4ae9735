"""What commands do before they import torch and MPI, which takes seconds.

A signal that asks it to save and stop is kept until the run can honour it; Python's own answer would be to die. And the
time that the other ranks have to come to the start of MPI, which an import starts, is taken from the settings.
A package that is not installed is one line.
"""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

START_TIMEOUT = "MPITRAIN_START_TIMEOUT"  # seconds that ranks have to come to the start of MPI
LEAST = 20.0  # seconds: a limit for operations is not for imports, which take longer on some hosts than on others
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")  # what launchers call the rank
_NEEDED = ("h5py", "numpy", "pydantic", "rich", "scipy", "tomli", "tomli_w", "torch", "zlib_ng")  # beside MPI's
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


def launched_first() -> bool:
    """Whether a launcher gave this process the number 0, or there was none: it speaks for a job without MPI."""
    return next((os.environ[name] for name in RANK_NAMES if name in os.environ), "0") == "0"


def explain_missing_packages() -> None:
    """Have this process, a command of ours, end with one line where a package that mpitrain needs is not installed."""
    sys.excepthook = _say_what_is_missing


def _say_what_is_missing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ModuleNotFoundError) or error.name not in _NEEDED:
        sys.__excepthook__(kind, error, trace)
        return
    if launched_first():
        name = error.name.replace("_", "-")
        print(
            f"mpitrain: the package {name} is not installed for {sys.executable}: pip install {name}, or load the "
            "environment that has it",
            file=sys.stderr,
        )
    raise SystemExit(2)
