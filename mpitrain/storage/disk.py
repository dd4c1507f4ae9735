"""Single acts on files that data sets, checkpoints, logs and settings have in common; without MPI, without torch."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

SHARED_MEMORY = "/dev/shm"  # of a node
_REASONS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def reason(error: OSError) -> str:
    """Why the operating system refused, in a few words."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """The descriptor of a file, for positioned reads and writes, closed at the end. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable. Raises OSError."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file, which is on the disk afterwards. Raises OSError."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def free_name(path: Path) -> Path:
    """The path with the first of .1, .2, … appended under which there is nothing yet."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return free


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
