"""`python -m mpitrain.doctor --clean [--dry-run]`: what the MPI library left on this node of the user's dead jobs.

mpitrain's own shared memory has no name by the time it is used, so the kernel frees it with its last process.
The MPI libraries keep some files under a name; mpirun removes them at the end, and they stay when mpirun itself
is killed:

    /dev/shm,       sm_segment.*, vader_segment.*, osc_sm.*   Open MPI, up to 16 MiB a rank
                    mpich_shm_*, mpich_shar_tmp*              MPICH, 2 to 4 MiB a rank
                    ucx_shm_posix_*                           UCX, beneath either
    /tmp, $TMPDIR   ompi.PID/, ompi.HOST.UID/pid.PID/         session folders of Open MPI 5 and 4

A file goes only if it is this user's and no live process has it open or mapped; a session folder, if that is so
of everything in it, and its PID is no live process. A file is held by the process that made it from its creation
on, so one that was seen before the processes were looked at, and is held by none of them, is nobody's.
Processes are seen within this container and node only: do not run it in one of several containers that
share a /dev/shm.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.comm.arena import SHARED_MEMORY
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError

_SEGMENT = re.compile(r"(sm_segment|vader_segment|osc_sm)\..+|(mpich_shm|ucx_shm_posix)_.+|mpich_shar_tmp.+")
_SESSION = re.compile(r"ompi\.(\d+)")
_PART = re.compile(r"pid\.(\d+)")
_MIB = 1 << 20


@dataclass(frozen=True)
class Leftover:
    """A file or session folder. files: what it consists of; nbytes: what they occupy."""

    path: Path
    files: tuple[Path, ...]
    nbytes: int


@dataclass(frozen=True)
class Held:
    """What live processes have open or mapped."""

    paths: frozenset[str]
    inodes: frozenset[tuple[int, int]]  # device, inode

    def holds(self, path: Path) -> bool:
        try:
            status = path.lstat()
        except OSError:
            return False
        return str(path) in self.paths or (status.st_dev, status.st_ino) in self.inodes


def clean(arguments: Sequence[str]) -> int:
    """The command. Raises InputError for arguments it does not have."""
    unknown = [a for a in arguments if a not in ("--clean", "--dry-run")]
    if unknown:
        raise InputError(f"mpitrain.doctor has no {unknown[0]}; use --clean [--dry-run]")
    dry = "--dry-run" in arguments
    folders = list(dict.fromkeys([Path(SHARED_MEMORY), Path("/tmp"), Path(tempfile.gettempdir())]))
    found = list(candidates(folders))
    dead = unused(found)
    failed, freed = 0, 0
    for leftover in dead:
        reason = "" if dry else _remove(leftover)
        failed, freed = failed + bool(reason), freed + (0 if reason else leftover.nbytes)
        print(f"{leftover.nbytes / _MIB:10.2f} MiB  {leftover.path}{reason}", flush=True)
    verb = "would remove" if dry else "removed"
    where = ", ".join(map(str, folders))
    print(f"{verb} {len(dead) - failed} of dead jobs, {freed / _MIB:.2f} MiB, in {where}")
    print(f"left {len(found) - len(dead)} that live processes use")
    return EXIT_FAILED if failed else EXIT_DONE


def candidates(folders: Iterable[Path]) -> Iterator[Leftover]:
    """What this user's MPI jobs, dead or alive, have under a name of the MPI library's in these folders."""
    for folder in folders:
        for path in _named(folder, _SEGMENT, stat.S_ISREG):
            yield Leftover(path, (path,), _occupied(path))
        sessions = list(_named(folder, _SESSION, stat.S_ISDIR))
        for parent in _named(folder, re.compile(rf"ompi\..+\.{os.getuid()}"), stat.S_ISDIR):
            sessions += _named(parent, _PART, stat.S_ISDIR)
        for path in sessions:
            files = tuple(_tree(path))
            yield Leftover(path, files, sum(map(_occupied, files)))


def _named(folder: Path, pattern: re.Pattern[str], kind: Callable[[int], bool]) -> Iterator[Path]:
    """This user's entries of a folder that have such a name and are of that kind."""
    for path in sorted(_entries(folder)):
        if pattern.fullmatch(path.name):
            try:
                status = path.lstat()
            except OSError:  # a job ended meanwhile
                continue
            if status.st_uid == os.getuid() and kind(status.st_mode):
                yield path


def unused(found: Sequence[Leftover]) -> list[Leftover]:
    """Those that no live process holds; `found` was made before."""
    held = held_by_processes()
    return [one for one in found if not any(map(held.holds, one.files)) and not _launcher_lives(one.path)]


def held_by_processes() -> Held:
    """Looks through /proc; processes of other users cannot be read, nor could they open these files."""
    paths: set[str] = set()
    inodes: set[tuple[int, int]] = set()
    for process in _entries(Path("/proc")):
        if not process.name.isdigit():
            continue
        # open files first: a file is mapped before it is closed, so it is seen in one of the two
        for descriptor in _entries(process / "fd"):
            try:
                target = os.readlink(descriptor)
                if target.startswith("/"):
                    status = os.stat(descriptor)
                    paths.add(target)
                    inodes.add((status.st_dev, status.st_ino))
            except OSError:
                continue
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:  # address permissions offset device inode path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                major, minor = fields[3].split(":")
                paths.add(fields[5])
                inodes.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return Held(frozenset(paths), frozenset(inodes))


def _launcher_lives(path: Path) -> bool:
    """Whether there is a process of the number that a session folder's name tells."""
    match = _SESSION.fullmatch(path.name) or _PART.fullmatch(path.name)
    return match is not None and Path(f"/proc/{match[1]}").exists()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _tree(folder: Path) -> Iterator[Path]:
    """The folder and everything in it; links are not followed."""
    yield folder
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in (*folders, *files))


def _occupied(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _remove(leftover: Leftover) -> str:
    """Why it could not be removed, or nothing."""
    try:
        if leftover.path.is_dir():
            shutil.rmtree(leftover.path)
        else:
            leftover.path.unlink()
    except FileNotFoundError:  # another one of us, on this node
        return ""
    except OSError as error:
        return f": cannot be removed: {error.strerror}"
    return ""
