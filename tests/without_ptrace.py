"""Script `without_ptrace.py COMMAND...`: runs a command that may not access the memory of other processes.

This is so in many containers and with a strict ptrace_scope: process_vm_readv(2) and process_vm_writev(2)
fail with EPERM. Here a seccomp filter (prctl(2), PR_SET_SECCOMP) does that for the command and all it starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

NUMBERS = {"x86_64": (310, 311), "aarch64": (270, 271)}  # process_vm_readv, process_vm_writev
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def forbid(numbers: tuple[int, int]) -> None:
    """Make these system calls fail with EPERM from now on, in this process and its children."""
    rows = [
        (_LOAD, 0, 0, 0),  # the call's number
        (_JUMP_EQUAL, 1, 0, numbers[0]),
        (_JUMP_EQUAL, 0, 1, numbers[1]),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(rows), b"".join(struct.pack("HBBI", *row) for row in rows))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid(NUMBERS[platform.machine()])
    os.execvp(sys.argv[1], sys.argv[1:])
