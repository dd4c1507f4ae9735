"""Whether so many bytes more fit on a disk."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path

from mpitrain.storage.disk import reason
from mpitrain.storage.text import bytes_text

_IN_MEMORY = (0x01021994, 0x858458F6)  # of statfs(2): tmpfs, ramfs
_NOT_KNOWN = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EFBIG, errno.EINVAL, errno.EINTR)
_libc = ctypes.CDLL(None, use_errno=True)


def lack_of_room(folder: Path, nbytes: int) -> str:
    """Why so many bytes more do not fit into a folder, in a few words; empty where they do, or it cannot be known.

    The free space is asked for; quotas by reserving the bytes in a file without a name, which is gone at once.
    Raises OSError.
    """
    free = free_bytes(folder)
    if free < nbytes:
        return f"{bytes_text(free)} are free"
    if nbytes <= 0 or _is_in_memory(folder):  # there a reservation would take memory
        return ""
    with tempfile.TemporaryFile(dir=folder) as file:
        # not posix_fallocate: where the file system cannot, that writes into every block
        if _libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return ""
    error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "" if error.errno in _NOT_KNOWN else reason(error)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk of a folder, whatever quotas say. Raises OSError."""
    status = os.statvfs(folder)
    return (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize


def _is_in_memory(folder: Path) -> bool:
    status = (ctypes.c_long * 32)()  # struct statfs, which begins with the file system's type; larger than any
    return _libc.statfs(os.fsencode(folder), status) == 0 and status[0] in _IN_MEMORY
