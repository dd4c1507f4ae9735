"""File operations shared by data sets, checkpoints, logs and settings, without MPI and without torch.

A folder appears complete or not at all: it is filled under a temporary name with a mark file in it, then renamed.

NAME.tmp-…/    being filled; as long as the file MARK is in it, its content may be removed
NAME/          after the rename; complete and durable

A folder that only one process makes, and that needs no cleanup of leftovers, needs no mark: use `new_folder`.
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
SHARED_MEMORY = "/dev/shm"  # shared memory of a node
ENLARGE = f"to enlarge {SHARED_MEMORY}: mount -o remount,size=50% /dev/shm; in a container: --shm-size"
_REASONS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_IN_MEMORY = (0x01021994, 0x858458F6)  # file system types in statfs(2): tmpfs, ramfs
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EFBIG, errno.EINVAL, errno.EINTR)
_libc = ctypes.CDLL(None, use_errno=True)


def reason(error: OSError) -> str:
    """Return a short reason why the operating system refused an operation."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


@contextmanager
def reporting(what: str, fix: str) -> Iterator[None]:
    """Turn an OSError raised in the `with` block into an InputError.

    Args:
        what: The operation that fails, such as "page x.html cannot be written".
        fix: Advice on what to do.

    Raises:
        InputError: The block raised OSError. The message consists of both arguments and the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} ({reason(error)}); {fix}") from None


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file descriptor for positioned reads and writes, and close it at the end of the `with` block.

    Args:
        path: File or folder to open.
        flags: Flags of `os.open`; `os.O_CLOEXEC` is always added.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk. Raises OSError."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file and flush it to the disk. Raises OSError.

    Args:
        path: File to write; an existing one is overwritten in place.
        data: Content of the file.
    """
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, temporary: Path | None = None, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; at the end of the `with` block, the file written there replaces `path`.

    The new version is flushed to the disk before the rename, so a full disk or a kill leaves the old file intact. If
    the block raises, the new version is removed. A symbolic link is kept, and its target is replaced. A path that is
    not a regular file, such as /dev/stdout, cannot be replaced; it is yielded itself and written directly.

    Args:
        path: File to replace.
        temporary: Temporary path to use, if cleanup code must recognize it; by default a random hidden name.
        durable: If false, do not wait for the disk before the rename; a machine crash may then lose both versions.

    Raises:
        OSError: The disk refuses an operation.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    mode = os.stat(path).st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        yield path
        return
    temporary = temporary or path.with_name(f".{path.stem[:40]}.{secrets.token_hex(4)}{path.suffix[:16]}")
    try:
        yield temporary
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file, or a new version of it, that appears complete or not at all (see `replacing`). Raises OSError.

    Args:
        path: File to write.
        data: Content; text is encoded as UTF-8.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def require_new(path: Path) -> None:
    """Raise InputError if `path` already exists."""
    if os.path.lexists(path):
        raise InputError(f"{path} exists already; choose another name, or remove it")


def free_name(path: Path) -> Path:
    """Return `path` with .1, .2, … appended: the first such name that does not exist yet."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return free


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading; refuse folders, pipes and devices, where reading may never end.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_plain(path: Path, most: int = 64 << 20) -> bytes:
    """Return the content of a regular file.

    Args:
        path: File to read.
        most: Largest allowed size in bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than `most`.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        return file.read(size)  # not `most`: read(n) allocates n bytes at once


def from_json(text: str | bytes) -> Any:
    """Parse JSON text. Raises ValueError if it is invalid, nested too deeply, or repeats a key."""

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the key {twice!r:.80} occurs twice")
        return mapping

    try:
        return json.loads(text, object_pairs_hook=reject_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lack_of_room(folder: Path, nbytes: int) -> str:
    """Return a short reason why `nbytes` more bytes do not fit into a folder.

    First the free space is queried. Then quotas are tested by reserving the bytes in an unnamed temporary file, which
    is deleted at once.

    Args:
        folder: Existing folder on the file system in question.
        nbytes: Bytes to be written.

    Returns:
        The reason; empty if the bytes fit, or if that cannot be determined.

    Raises:
        OSError: The file system cannot be queried, or the temporary file cannot be made.
    """
    free = free_bytes(folder)
    if free < nbytes:
        return f"only {bytes_text(free)} are free"
    status = (ctypes.c_long * 32)()  # larger than any struct statfs; its first field is the file system type
    in_memory = _libc.statfs(os.fsencode(folder), status) == 0 and status[0] in _IN_MEMORY
    if nbytes <= 0 or in_memory:  # in tmpfs, a reservation would use memory
        return ""
    with tempfile.TemporaryFile(dir=folder) as file:
        # not posix_fallocate: without support by the file system, it writes to every block
        if _libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return ""
    error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "" if error.errno in _UNSUPPORTED else reason(error)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the file system of `folder`, ignoring quotas.

    Raises OSError.
    """
    status = os.statvfs(folder)
    return (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize


def temporary_name(name: str) -> str:
    """Return a random temporary name for a file or folder that will be renamed to `name` when complete."""
    return f"{name}.tmp-{secrets.token_hex(4)}"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, which is renamed to `path` at the end; if the block raises, it is removed.

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
    """Create a folder to fill, with the mark file in it. Raises OSError."""
    path.mkdir(parents=True)
    (path / MARK).touch()


def end_folder(path: Path) -> None:
    """Remove the mark file of a filled folder, and flush the folder to the disk. Raises OSError."""
    (path / MARK).unlink(missing_ok=True)
    sync(path)


def leftovers(parent: Path, name: re.Pattern[str], is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the folders in `parent` that were never finished. Call this only when no process is filling one there.

    Args:
        parent: Folder to search.
        name: Pattern of the names of temporary folders.
        is_ours: Function that returns True if the content of a folder without the mark shows that mpitrain wrote it;
            such a folder was complete, but not renamed.
    """
    for path in parent.iterdir():
        folder = bool(name.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
        if folder and ((path / MARK).is_file() or not any(path.iterdir()) or is_ours(path)):
            yield path


def remove_folder(
    path: Path, last: Collection[str] = (MARK,), removable: Callable[[str], bool] = lambda name: True
) -> bool:
    """Remove a folder and its content, as far as possible; what cannot be removed stays.

    Args:
        path: Folder to remove.
        last: Names of the entries that identify the folder. They are removed last, so that an interrupted removal can
            be completed later.
        removable: Function that returns True if the entry of that name may be removed.

    Returns:
        True if all permitted entries were removed, but others remain in the folder.
    """
    with suppress(OSError):
        entries = [entry for entry in path.iterdir() if removable(entry.name)]
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
