"""Messages that go from one process' memory straight into another's (process_vm_readv(2)), where the system allows it.

MPICH sends large messages inside a node that way without asking, and fails where it is forbidden: in containers whose
seccomp filter does not let the call through, and where Yama's ptrace_scope is strict. Only the environment of MPI_Init
can turn it off, so this is asked before mpi4py is imported. Open MPI finds out by itself.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MPICH_USES_IT = "MPIR_CVAR_CH4_CMA_ENABLE"
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_DECLARED_PROCESSES = 1  # ptrace_scope: a process may be read by those that it names
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def prepare() -> None:
    """Let the other ranks read this process where it may allow that, and keep MPICH from trying where it may not.

    A setting of the user's wins.
    """
    if _passes_filters() and _scope() <= _DECLARED_PROCESSES:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    else:
        os.environ.setdefault(_MPICH_USES_IT, "0")


def _passes_filters() -> bool:
    """Whether the call reaches the kernel's own checks, which always let a process read itself."""
    byte = ctypes.c_char(b"x")
    pair = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)  # struct iovec: address, length in bytes
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    readv.restype = ctypes.c_ssize_t
    return bool(readv(os.getpid(), pair, ctypes.c_ulong(1), pair, ctypes.c_ulong(1), ctypes.c_ulong(0)) == 1)


def _scope() -> int:
    try:
        return int(_SCOPE.read_text())
    except (OSError, ValueError):  # a kernel without Yama
        return 0
