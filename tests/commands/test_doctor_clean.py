"""Files that killed jobs leave in /dev/shm and /tmp, and `mpitrain.doctor --clean`, which removes them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support import PATIENCE, clean_environment, job, launcher, one_line
from warm import Warm

from mpitrain.comm.job.cleanup import find_leftovers, find_open_files, find_unused, is_in_use

SHM = Path("/dev/shm")
CLEAN = ("doctor", "--clean")
SEES_ALL = os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC  # the first PID namespace of Linux: not a container
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]  # a PID namespace with a /proc of its own; root may
RANK = """
import os, sys, time
import torch
import mpitrain as mt
world = mt.init()
arena = world.arena(1 << 18)  # shared windows of ours: an arena, and what tensors outside it need
arena.tensor.fill_(1.0)
world.all_reduce(arena.tensor)
x = torch.ones(1 << 20)
world.all_reduce(x, algorithm="shared")
assert arena.tensor[0] == x[0] == world.size
open(f"{sys.argv[1]}/{world.rank}", "w").write(str(os.getpid()))
time.sleep(600)
"""


class Job:
    """A job of two ranks that communicate and then wait. pids: mpirun's, and those of all processes it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "rank.py").write_text(RANK)
        self.process = subprocess.Popen(
            [*launcher(2), sys.executable, str(folder / "rank.py"), str(folder)],
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def communicated(self) -> None:
        """Wait until both ranks have communicated, and record the job's processes and files."""
        reports = [self.folder / str(rank) for rank in range(2)]
        deadline = time.monotonic() + 60 * PATIENCE
        while not all(path.exists() and path.read_text() for path in reports):
            assert self.process.poll() is None, "the job ended too early"
            assert time.monotonic() < deadline, "the job did not start"
            time.sleep(0.02)
        self.ranks = [int(path.read_text()) for path in reports]
        self.pids = _with_descendants(self.process.pid)
        assert set(self.ranks) < set(self.pids)
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in self.ranks)
        self.files = {path for path in SHM.iterdir() if f"{path}\n" in maps}
        sessions = (Path(tempfile.gettempdir()) / f"ompi.{pid}" for pid in self.pids)
        self.files |= {path for path in sessions if path.exists()}

    def kill(self) -> None:
        """Kill mpirun, its daemons and the ranks with SIGKILL, mpirun first so that it cannot clean up."""
        for pid in _with_descendants(self.process.pid):
            _kill(pid)
        for pid in getattr(self, "pids", ()):
            _kill(pid)
        self.process.wait(30)
        _wait_until(lambda: not any(map(_runs, getattr(self, "pids", ()))))


def of_nobody() -> set[str]:
    """Return the files in /dev/shm that no live process has open or mapped."""
    there = list(SHM.iterdir())
    in_use = find_open_files()
    return {path.name for path in there if not is_in_use(path, in_use)}


def _with_descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        below = [int(child) for child in children.read_text().split()]
    except OSError:
        below = []
    return [pid, *(p for child in below for p in _with_descendants(child))]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(condition) -> None:
    deadline = time.monotonic() + 30 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def running(forked: Warm, *folders: Path) -> Iterator[list[Job]]:
    """Start a job in each folder at once; at the end kill the jobs and remove their files."""
    jobs: list[Job] = []
    try:
        jobs.extend(map(Job, folders))
        for started in jobs:
            started.communicated()
        yield jobs
    finally:
        for started in jobs:
            started.kill()
        forked.run(*CLEAN)


def test_clean_removes_only_leftovers_of_killed_jobs(tmp_path, forked):
    before = of_nobody()
    with running(forked, tmp_path / "live", tmp_path / "dead") as (live, dead):
        assert any(path.parent == SHM for path in live.files)
        dead.kill()
        _assert_only_the_librarys(of_nobody() - before)
        left = {path for path in dead.files if path.exists()}
        assert left, "the MPI library left nothing: this test shows nothing"
        tried = forked.run(*CLEAN, "--dry-run")
        assert tried.returncode == 0 and all(str(path) in tried.stdout for path in left)
        assert all(path.exists() for path in left)

        sessions = {path for path in left if path.parent != SHM}
        if os.geteuid() == 0:
            blind = job(0, [*CONTAINER, sys.executable, "-m", "mpitrain.doctor", "--clean"])
            assert blind.returncode == 0, blind.stderr
            assert all(path.exists() for path in live.files | sessions), blind.stdout
            assert all(map(_runs, live.ranks))
            if sessions:
                assert re.search(
                    r"may be in use \(\d+\): processes outside this container are not visible", blind.stdout
                )
            assert not any(path.exists() for path in left - sessions)  # of segments the kernel knows, everywhere
            left = {path for path in left if path.exists()} | _new_segment()

        result = forked.run(*CLEAN)
        assert result.returncode == 0, result.stderr
        if not SEES_ALL:
            left -= sessions
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in live.files)
        assert all(map(_runs, live.ranks))
        listed = re.findall(r"^ *(\d+\.\d\d) MiB  (\S+)$", result.stdout, re.MULTILINE)
        assert left <= {Path(path) for _, path in listed} and not live.files & {Path(path) for _, path in listed}
        total = re.search(r"removed (\d+) files and folders of dead jobs, (\d+\.\d\d) MiB", result.stdout)
        assert int(total[1]) == len(listed)
        assert float(total[2]) == pytest.approx(sum(float(size) for size, _ in listed), abs=0.01 * len(listed))

        before = of_nobody()  # when the ranks alone are killed, nothing of ours is left at all
        for pid in live.ranks:
            _kill(pid)
        live.process.wait(30)
        _assert_only_the_librarys(of_nobody() - before)


def _new_segment() -> set[Path]:
    path = SHM / f"mpich_shm_new{os.getpid()}"
    path.write_bytes(b"x" * 5000)
    return {path}


def _assert_only_the_librarys(left: set[str]) -> None:
    """Assert that only MPI's own files (16 and 2 MiB of queues) are left; mpitrain's windows have other names."""
    others = {name for name in left if not re.fullmatch(r"sm_segment\..+|mpich_shm_.+", name)}
    assert not others, f"shared windows left: {others}"


def test_clean_removes_only_files_of_this_user_with_library_names(tmp_path, forked):
    mine = [SHM / f"mpich_shm_test{os.getpid()}", SHM / f"sm_segment.here.{os.getpid()}"]
    not_the_librarys = [SHM / f"sm_segment{os.getpid()}", tmp_path / "ompi.source"]
    open_one = SHM / f"mpich_shm_open{os.getpid()}"
    others = [SHM / f"mpich_shm_other{os.getpid()}"] if os.geteuid() == 0 else []
    sessions = [tmp_path / "ompi.4194305", tmp_path / f"ompi.{os.getpid()}"]  # no process can have the first number
    of_hosts = [tmp_path / f"ompi.{host}.{os.getuid()}" for host in (os.uname().nodename, "another-host")]
    for path in (*mine, not_the_librarys[0], open_one, *others):
        path.write_bytes(b"x" * 5000)
    for folder in (*sessions, not_the_librarys[1], *(parent / "pid.4194305" for parent in of_hosts)):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 5000)
    for path in others:
        os.chown(path, 12345, 12345)
    try:
        with open(open_one):
            result = forked.run(*CLEAN, TMPDIR=str(tmp_path))
        assert result.returncode == 0, result.stderr
        removed = [*mine, *((sessions[0], of_hosts[0] / "pid.4194305") if SEES_ALL else ())]
        remaining = [*not_the_librarys, open_one, *others, sessions[1], of_hosts[1] / "pid.4194305"]
        assert [path.exists() for path in removed] == [False] * len(removed)
        assert [path.exists() for path in remaining] == [True] * len(remaining)
        if SEES_ALL:
            assert "in use (1): they belong to host another-host; run the command there" in result.stdout
    finally:
        for path in (*mine, not_the_librarys[0], open_one, *others):
            path.unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.skipif(not SEES_ALL, reason="in a container no session folder goes, whatever it lies on")
def test_clean_keeps_session_folders_that_other_hosts_may_use(tmp_path):
    mounted = subprocess.run(["mount", "-t", "hugetlbfs", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:  # any kind will do that is not known as one host's own
        pytest.skip(f"no file system to mount: {mounted.stderr!r}")
    try:
        (tmp_path / "ompi.4194305").mkdir()
        [candidate] = find_leftovers([tmp_path])
        assert "(hugetlbfs) may be shared by other hosts" in candidate.skip_reason and not find_unused([candidate])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_doctor_refuses_unknown_arguments(forked):
    result = forked.run(*CLEAN, "--all")
    one_line(result, "unrecognized arguments: --all", "--help")
