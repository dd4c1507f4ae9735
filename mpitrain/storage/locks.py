"""Locks on folders: a run, a folder of checkpoints and a data set in the making have one worker at a time.

flock, where the file system has it: the kernel frees the lock when its holder ends, however that happens. Where it
has none (Lustre mounted without it, some NFS) a lease:

    NAME           the lock file
    NAME.held      only without flock: who holds it; its time of change is moved on every BEAT seconds

A lease of a process that this machine knows to be dead is taken over at once, any other when it was not touched for
STALE seconds. Whoever finds it touched meanwhile knows that the holder lives. No clocks are compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpitrain.storage import proc

LOCK = "lock"  # the name of the lock file in a folder
BEAT, STALE = 2.0, 12.0  # seconds
_LOOK_EVERY = 0.25  # seconds
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_mine: dict[tuple[int, int], Lock] = {}  # the locks of this process, by device and inode of the lock file


class LockHeld(Exception):
    """Another process holds the lock."""


class Lock:
    """A lock that this process holds until `close`, or until it ends. Made by `take`."""

    def __init__(self, descriptor: int, lease: _Lease | None) -> None:
        self._descriptor, self._lease = descriptor, lease
        self._key = _identity(os.fstat(descriptor))
        _mine[self._key] = self

    def close(self) -> None:
        """Give the lock back; again is fine."""
        if _mine.pop(self._key, None) is not None:
            if self._lease is not None:
                self._lease.close()
            os.close(self._descriptor)


def take(path: Path) -> Lock:
    """Take the lock of this file, which is made if it is not there. Raises LockHeld, OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        lease = None if _flock(descriptor, fcntl.LOCK_NB) else _Lease(path.with_name(f"{path.name}.held"))
        return Lock(descriptor, lease)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise LockHeld(str(path)) from None
        raise


def keep(path: Path) -> None:
    """Have the lock of this file until this process ends; it may have it already. Raises LockHeld, OSError."""
    with suppress(FileNotFoundError):
        if _identity(os.stat(path)) in _mine:
            return
    take(path)


def seen_held(path: Path) -> bool | None:
    """Whether a process of this machine holds the lock of this file. Nothing is locked for that, not even for a moment.

    Returns:
        None where it cannot be told: another machine's process may hold it.
    """
    lease = path.with_name(f"{path.name}.held")
    try:
        if (found := _read(lease)) is not None:
            return False if _is_dead(found[0]) else None
        wanted = os.stat(path)
        held = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4711 08:01:130829 0 EOF
    holders = [f[4] for f in held if len(f) > 5 and f[1] == "FLOCK" and f[5].endswith(f":{wanted.st_ino}")]
    return any(_may_have_open(pid, wanted) for pid in holders)


def _may_have_open(pid: str, wanted: os.stat_result) -> bool:
    """Whether a process has a file open, as far as we may see: numbers of files are unique in one file system only."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                    return True
    except FileNotFoundError:
        return False
    except OSError:  # of another user
        return True
    return False


@contextmanager
def waiting(path: Path) -> Iterator[bool]:
    """Wait for the lock of this file and hold it; False where the file system has no locks. Leaves no file behind."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            held = _flock(descriptor)
            # Whoever held it before us removed the file: then our lock is on a file that others cannot see.
            if not held or _is_open_file(path, descriptor):
                try:
                    yield held
                finally:
                    if held:
                        path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _flock(descriptor: int, how: int = 0) -> bool:
    """Whether the file system has such locks. Raises BlockingIOError where it is held, and not to be waited for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


class _Lease:
    """A lock by a file that is there, and touched as long as its holder lives. Raises LockHeld, OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        while True:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                break
            except FileExistsError:
                _await_end(path)
        os.write(self._descriptor, json.dumps([*_this_process(), secrets.token_hex(8)]).encode())
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="mpitrain-lease", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(OSError):  # the file system may be away for a while
                os.utime(self._descriptor)
        os.close(self._descriptor)

    def close(self) -> None:
        if _is_open_file(self._path, self._descriptor):
            self._path.unlink(missing_ok=True)
        self._ended.set()


def _await_end(path: Path) -> None:
    """Return when nobody has the lease any more. Raises LockHeld when its holder lives."""
    first = _read(path)
    if first is None:
        return
    if not _is_dead(first[0]):
        deadline = time.monotonic() + STALE
        while time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
            now = _read(path)
            if now is None:
                return
            if now != first:
                raise LockHeld(str(path))
    old = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):  # another one was faster
        os.rename(path, old)
        found = _read(old)
        if found is not None and found[0] != first[0]:  # it was, and has the lease now
            with suppress(OSError):
                os.link(old, path)
        old.unlink(missing_ok=True)


def _read(path: Path) -> tuple[bytes, int] | None:
    """What a lease says, and when it was touched; None where there is none."""
    try:
        with open(path, "rb") as file:  # opened anew, so that a network file system asks its server
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _is_dead(said: bytes) -> bool:
    """Whether the holder is known to have ended: only where its processes can be seen from here."""
    try:
        boot, namespace, pid, start, _ = json.loads(said)
    except (ValueError, TypeError):
        return False
    here = _this_process()
    return (boot, namespace) == here[:2] and proc.start_of(pid) != start


def _this_process() -> tuple[str, int, int, str]:
    """The machine since it was started, the space of its process numbers, this process' number and start."""
    boot = proc.read("sys/kernel/random/boot_id").strip()
    return boot, os.stat("/proc/self/ns/pid").st_ino, os.getpid(), proc.start_of(os.getpid())


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
