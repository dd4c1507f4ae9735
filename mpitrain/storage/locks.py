"""Locks that give a run folder, a checkpoint folder or a data set being made one worker at a time.

We use flock where the file system supports it: the kernel frees the lock when its holder ends, for whatever reason.
Elsewhere (Lustre mounted without flock, some NFS) we use a lease:

    NAME           the lock file
    NAME.held      only without flock: names the holder, which updates the modification time every BEAT seconds

A lease is taken over at once if its holder is a process of this machine that has ended; otherwise after it has not been
updated for STALE seconds. An update seen in that time shows that the holder is alive. No clocks are compared.
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
_POLL_SECONDS = 0.25  # seconds
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_own_locks: dict[tuple[int, int], Lock] = {}  # the locks of this process, by device and inode of the lock file


class LockHeld(Exception):
    """Error raised when another process holds the lock."""


class Lock:
    """A lock that this process holds until `close`, or until the process ends. Create it with `take`."""

    def __init__(self, descriptor: int, lease: _Lease | None) -> None:
        self._descriptor, self._lease = descriptor, lease
        self._key = _identity(os.fstat(descriptor))
        _own_locks[self._key] = self

    def close(self) -> None:
        """Release the lock. Calling it again does nothing."""
        if _own_locks.pop(self._key, None) is not None:
            if self._lease is not None:
                self._lease.close()
            os.close(self._descriptor)


def take(path: Path) -> Lock:
    """Acquire the lock of a lock file, creating the file if needed. Raises LockHeld, OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        lease = None if _flock(descriptor, fcntl.LOCK_NB) else _Lease(path.with_name(f"{path.name}.held"))
        return Lock(descriptor, lease)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise LockHeld(str(path)) from None
        raise


def hold_until_exit(path: Path) -> None:
    """Acquire the lock of a lock file until this process ends; do nothing if this process already has it.

    Raises LockHeld, OSError.
    """
    with suppress(FileNotFoundError):
        if _identity(os.stat(path)) in _own_locks:
            return
    take(path)


def is_held(path: Path) -> bool | None:
    """Return whether a process of this machine holds the lock of a lock file.

    The lock is not taken, not even for a moment.

    Returns:
        None if that cannot be determined: a process of another machine may hold it.
    """
    lease = path.with_name(f"{path.name}.held")
    try:
        if (lease_data := _read(lease)) is not None:
            return False if _is_dead(lease_data[0]) else None
        status = os.stat(path)
        locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    # 1: FLOCK  ADVISORY  WRITE 4711 08:01:130829 0 EOF
    holders = [f[4] for f in locks if len(f) > 5 and f[1] == "FLOCK" and f[5].endswith(f":{status.st_ino}")]
    return any(_may_have_open(pid, status) for pid in holders)


def _may_have_open(pid: str, status: os.stat_result) -> bool:
    """Return True if a process has a file open, or if we may not look.

    The check is needed because inode numbers are unique only within one file system.
    """
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), status):
                    return True
    except FileNotFoundError:
        return False
    except OSError:  # a process of another user
        return True
    return False


@contextmanager
def wait_for(path: Path) -> Iterator[bool]:
    """Wait for the lock of a lock file and hold it during the `with` block; afterwards the file is removed.

    Yields:
        True if the lock is held; False if the file system supports no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            is_held = _flock(descriptor)
            # The holder before us may have removed the file: then our lock is on a file that others cannot see.
            if not is_held or _is_open_file(path, descriptor):
                try:
                    yield is_held
                finally:
                    if is_held:
                        path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _flock(descriptor: int, how: int = 0) -> bool:
    """Call flock; return False if the file system does not support it.

    Raises:
        BlockingIOError: Another process holds the lock, and `how` says not to wait.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


class _Lease:
    """A lock made of a file, which its holder updates as long as it lives. Raises LockHeld, OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        while True:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                break
            except FileExistsError:
                _wait_until_free(path)
        os.write(self._descriptor, json.dumps([*_this_process(), secrets.token_hex(8)]).encode())
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="mpitrain-lease", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(OSError):  # the file system may be unavailable for a while
                os.utime(self._descriptor)
        os.close(self._descriptor)

    def close(self) -> None:
        if _is_open_file(self._path, self._descriptor):
            self._path.unlink(missing_ok=True)
        self._ended.set()


def _wait_until_free(path: Path) -> None:
    """Wait until the lease is free or stale, and remove a stale one. Raises LockHeld if its holder is alive."""
    first = _read(path)
    if first is None:
        return
    if not _is_dead(first[0]):
        deadline = time.monotonic() + STALE
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = _read(path)
            if now is None:
                return
            if now != first:
                raise LockHeld(str(path))
    old = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):  # another process was faster
        os.rename(path, old)
        lease = _read(old)
        if lease is not None and lease[0] != first[0]:  # another process already took over; give its lease back
            with suppress(OSError):
                os.link(old, path)
        old.unlink(missing_ok=True)


def _read(path: Path) -> tuple[bytes, int] | None:
    """Return the content and the modification time of a lease file; None if there is none."""
    try:
        with open(path, "rb") as file:  # opened anew, so that a network file system asks its server
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _is_dead(content: bytes) -> bool:
    """Return True if the lease's holder is known to have ended.

    Only processes in the same PID namespace can be seen.
    """
    try:
        boot, namespace, pid, start, _ = json.loads(content)
    except (ValueError, TypeError):
        return False
    here = _this_process()
    return (boot, namespace) == here[:2] and proc.start_of(pid) != start


def _this_process() -> tuple[str, int, int, str]:
    """Return (boot id of the machine, PID namespace, process id, start time) of this process."""
    boot = proc.read("sys/kernel/random/boot_id").strip()
    return boot, os.stat("/proc/self/ns/pid").st_ino, os.getpid(), proc.start_of(os.getpid())


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
