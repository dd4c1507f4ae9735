"""Acts on files and folders that data sets, checkpoints and logs have in common; without MPI, without torch."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MARK = ".mpitrain-unfinished"  # lies in a folder that is being filled: what is in it may be removed
_IN_MEMORY = (0x01021994, 0x858458F6)  # of statfs(2): tmpfs, ramfs
_NOT_KNOWN = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EFBIG, errno.EINVAL, errno.EINTR)
_libc = ctypes.CDLL(None, use_errno=True)
_REASONS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def reason(error: OSError) -> str:
    """Why the operating system refused, in a few words."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(path: Path) -> Path:
    """The path with the first of .1, .2, … appended under which there is nothing yet."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return free


def begin_folder(path: Path) -> None:
    """Make a folder to be filled, with the mark in it. Raises OSError."""
    path.mkdir(parents=True)
    (path / MARK).touch()


def end_folder(path: Path) -> None:
    """Take the mark away: the folder is filled, and durable. Raises OSError."""
    (path / MARK).unlink(missing_ok=True)
    sync(path)


def is_unfinished(path: Path) -> bool:
    """Whether this is a folder that was begun by `begin_folder`: it has the mark, or nothing at all in it."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / MARK).is_file() or not any(path.iterdir())


def remove_folder(path: Path, last: Collection[str] = (MARK,), ours: Callable[[str], bool] = lambda name: True) -> bool:
    """Remove a folder and what is in it; what cannot be removed stays. Returns whether only what is not ours did.

    last: names by which it is known whose it is; they go last, so that a removal that is killed can be ended later.
    ours: whether an entry of this name may be removed.
    """
    with suppress(OSError):
        entries = [entry for entry in path.iterdir() if ours(entry.name)]
        for entry in sorted(entries, key=lambda entry: entry.name in last):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                os.unlink(entry)
        with suppress(OSError):  # not empty
            path.rmdir()
            return False
        return True
    return False


def lack_of_room(folder: Path, nbytes: int) -> str:
    """Why so many bytes more do not fit into a folder, in a few words; empty where they do, or it cannot be known.

    The free space is asked for; quotas by reserving the bytes in a file without a name, which is gone at once.
    Raises OSError.
    """
    status = os.statvfs(folder)
    free = (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize
    if free < nbytes:
        return f"{readable(free)} are free"
    if nbytes <= 0 or _is_in_memory(folder):  # there a reservation would take memory
        return ""
    with tempfile.TemporaryFile(dir=folder) as file:
        # not posix_fallocate: where the file system cannot, that writes into every block
        if _libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return ""
    error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "" if error.errno in _NOT_KNOWN else reason(error)


def _is_in_memory(folder: Path) -> bool:
    status = (ctypes.c_long * 32)()  # struct statfs, which begins with the file system's type; larger than any
    return _libc.statfs(os.fsencode(folder), status) == 0 and status[0] in _IN_MEMORY


def readable(nbytes: int) -> str:
    """Bytes, with a unit."""
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading, unless it is a folder, a pipe or a device, where reading may never end.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no plain file", str(path))


def read_plain(path: Path, most: int = 64 << 20) -> bytes:
    """The bytes of a plain file. most: how many there may be. Raises OSError."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        return file.read(most)
