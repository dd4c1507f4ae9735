"""Locks on file systems without flock: leases that are renewed, and taken over from dead holders."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from mpitrain.storage import locks

HOLD = (
    "import sys, time; from pathlib import Path; from mpitrain.storage import locks;"
    "print(locks.take(Path(sys.argv[1])))"
)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Return a lock file on a file system without flock, for this process and those that it starts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import fcntl, errno\ndef flock(*_): raise OSError(errno.ENOLCK, 'no locks')\nfcntl.flock = flock\n"
        "from mpitrain.storage import locks\nlocks.BEAT = 0.1\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    monkeypatch.setattr(locks, "BEAT", 0.1)
    monkeypatch.setattr(locks, "STALE", 1.5)
    return tmp_path / "lock"


def _no_flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")


def _hold(path, then):
    code = f"{HOLD}; sys.stdout.flush(); {then}"
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert "Lock" in process.stdout.readline()
    return process


def test_a_lease_is_held_by_one_process_and_released(lock):
    first = locks.take(lock)
    with pytest.raises(locks.LockHeld):
        locks.take(lock)
    locks.hold_until_exit(lock)  # this process has it
    first.close()
    assert os.listdir(lock.parent) in (["lock", "sitecustomize.py"], ["sitecustomize.py", "lock"])
    holder = _hold(lock, "time.sleep(60)")
    try:
        with pytest.raises(locks.LockHeld):
            locks.take(lock)
        lease = lock.with_name("lock.held")
        lease.write_text(lease.read_text().replace('["', '["another machine ', 1))  # whose processes nobody sees here
        with pytest.raises(locks.LockHeld):
            locks.take(lock)
        holder.kill()
        holder.wait()
        began = time.monotonic()
        taken_over = locks.take(lock)  # once it was not touched for STALE seconds
        assert time.monotonic() - began > 1
        taken_over.close()
    finally:
        holder.kill()
        holder.communicate()


def test_a_lease_of_a_dead_process_is_taken_over_at_once(lock, monkeypatch):
    monkeypatch.setattr(locks, "STALE", 60.0)
    process = _hold(lock, "import os; os._exit(1)")
    process.communicate()
    began = time.monotonic()
    locks.take(lock).close()
    assert time.monotonic() - began < 5
