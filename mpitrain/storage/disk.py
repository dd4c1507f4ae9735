"""Acts on files that data sets, checkpoints, logs and settings have in common; without MPI, without torch.

Folders are whole or not there at all: filled under a temporary name with a mark in them, then renamed.

NAME.tmp-…/    being filled: MARK lies in it, so what is in it may be removed
NAME/          after the rename: all of it is there, and durable

A folder that one process makes, and nobody looks for leftovers of, needs no mark: `new_folder`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mpitrain.errors import InputError
from mpitrain.storage.text import bytes_text

MARK = ".mpitrain-unfinished"  # a file in a folder that is being filled
SHARED_MEMORY = "/dev/shm"  # of a node
_REASONS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_IN_MEMORY = (0x01021994, 0x858458F6)  # of statfs(2): tmpfs, ramfs
_NOT_KNOWN = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EFBIG, errno.EINVAL, errno.EINTR)
_libc = ctypes.CDLL(None, use_errno=True)


def reason(error: OSError) -> str:
    """Why the operating system refused, in a few words."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


@contextmanager
def reporting(what: str, mend: str) -> Iterator[None]:
    """Raise InputError where the operating system refuses what is done inside.

    Args:
        what: What cannot be done, as "page x.html cannot be written".
        mend: How to fix it.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} ({reason(error)}); {mend}") from None


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


@contextmanager
def replacing(path: Path, aside: Path | None = None, *, durable: bool = True) -> Iterator[Path]:
    """Give a name beside `path` to write a new version of the file under; afterwards that version takes its place.

    The new version is on the disk before it is renamed, so a full disk or a kill leaves the earlier file whole. Where
    anything fails inside, the new version is removed. A link stays: what it points to is replaced. What is no plain
    file, as /dev/stdout, cannot be replaced, and is written itself.

    Args:
        path: The file.
        aside: The name to give, where those who clean up are to know it.
        durable: Whether to wait for the disk before the rename; without, a crash of the machine may lose both versions.

    Raises:
        OSError: The disk refuses.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    mode = os.stat(path).st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        yield path
        return
    aside = aside or path.with_name(f".{path.stem[:40]}.{secrets.token_hex(4)}{path.suffix[:16]}")
    try:
        yield aside
        if mode is not None:
            os.chmod(aside, stat.S_IMODE(mode))
        if durable:
            sync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file, or its new version, so that it is there whole or not at all (see `replacing`). Raises OSError.

    Args:
        path: The file.
        data: The content; text is written in UTF-8.
    """
    with replacing(path) as aside, open(aside, "wb") as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def require_new(path: Path) -> None:
    """Raise InputError where something has a name already under which something new is to be written."""
    if os.path.lexists(path):
        raise InputError(f"{path} exists already; give another name, or remove it")


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
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        return file.read(size)  # not `most`: a read reserves as many bytes as it is asked for


def from_json(text: str | bytes) -> Any:
    """Return what JSON text says. Raises ValueError where it is none, nested too deeply, or has a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the key {twice!r:.80} is there twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lack_of_room(folder: Path, nbytes: int) -> str:
    """Why so many bytes more do not fit into a folder, in a few words; empty where they do, or it cannot be known.

    The free space is asked for; quotas by reserving the bytes in a file without a name, which is gone at once.
    Raises OSError.
    """
    free = free_bytes(folder)
    if free < nbytes:
        return f"{bytes_text(free)} are free"
    status = (ctypes.c_long * 32)()  # struct statfs, which begins with the file system's type; larger than any
    in_memory = _libc.statfs(os.fsencode(folder), status) == 0 and status[0] in _IN_MEMORY
    if nbytes <= 0 or in_memory:  # there a reservation would take memory
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


def temporary_name(name: str) -> str:
    """Return a name for what is to be called `name` when it is whole."""
    return f"{name}.tmp-{secrets.token_hex(4)}"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder, which afterwards gets the name `path`; where anything fails inside, it is removed.

    Raises OSError.
    """
    temporary = path.with_name(temporary_name(path.name))
    temporary.mkdir()
    try:
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def begin_folder(path: Path) -> None:
    """Make a folder to be filled, with the mark in it. Raises OSError."""
    path.mkdir(parents=True)
    (path / MARK).touch()


def end_folder(path: Path) -> None:
    """Take the mark away: the folder is filled, and durable. Raises OSError."""
    (path / MARK).unlink(missing_ok=True)
    sync(path)


def leftovers(parent: Path, name: re.Pattern[str], ours: Callable[[Path], bool]) -> Iterator[Path]:
    """What folders that were never finished left behind. For whoever knows that nobody is filling one there.

    Args:
        parent: Where to look.
        name: What such folders are called.
        ours: Whether a folder without the mark, of which only the renaming was missing, is known by its content.
    """
    for path in parent.iterdir():
        folder = bool(name.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
        if folder and ((path / MARK).is_file() or not any(path.iterdir()) or ours(path)):
            yield path


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
