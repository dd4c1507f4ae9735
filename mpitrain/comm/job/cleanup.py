"""`python -m mpitrain.doctor --clean [--dry-run]`: removal of files that the user's dead MPI jobs left on this node.

mpitrain's own shared memory has no name once it is in use, so the kernel frees it together with its last process.
MPI libraries keep some files under a name. mpirun removes them at the end of the job, but they stay if mpirun itself
is killed:

    /dev/shm,       sm_segment.*, vader_segment.*, osc_sm.*   Open MPI, up to 16 MiB a rank
                    mpich_shm_*, mpich_shar_tmp*              MPICH, 2 to 4 MiB a rank
                    ucx_shm_posix_*                           UCX, beneath either
    /tmp, $TMPDIR   ompi.PID/, ompi.HOST.UID/pid.PID/         session folders of Open MPI 5 and 4

A segment is removed only if it belongs to this user and no process has it open or mapped. A process that creates a
segment keeps it open or mapped from the beginning. The kernel checks this for all processes, including those in other
containers that share /dev/shm.

A session folder is removed only if it belongs to this user, no process has a file in it open or mapped, and its PID is
not a live process. This check covers only processes visible from here. Folders that may belong to processes outside of
this container, or to other hosts that share /tmp, are left alone, and a line of the output says so.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import EXIT_DONE, EXIT_FAILED
from mpitrain.storage import proc
from mpitrain.storage.disk import SHARED_MEMORY

_SEGMENT = re.compile(r"(sm_segment|vader_segment|osc_sm)\..+|(mpich_shm|ucx_shm_posix)_.+|mpich_shar_tmp.+")
_SESSION = re.compile(r"ompi\.\d+")
_PART = re.compile(r"pid\.\d+")
_MIB = 1 << 20
_WHOLE_MACHINE = 0xEFFFFFFC  # PID_NS_INIT_INO of linux/nsfs.h: the namespace that sees every process
_LOCAL_SYSTEMS = frozenset(("btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))


@dataclass(frozen=True)
class Leftover:
    """A shared-memory segment or session folder of an MPI job.

    Attributes:
        path: The segment or folder.
        files: All files and folders that it consists of.
        nbytes: Disk space or memory that these occupy, in bytes.
        skip_reason: Reason why its use cannot be determined from this process; empty if it can.
    """

    path: Path
    files: tuple[Path, ...]
    nbytes: int
    skip_reason: str = ""


def clean(*, dry: bool) -> int:
    """Remove the files of dead jobs on this machine, print each, and return the exit code.

    Args:
        dry: If true, remove nothing.
    """
    folders = list(dict.fromkeys([Path(SHARED_MEMORY), Path("/tmp"), Path(tempfile.gettempdir())]))
    leftovers = list(find_leftovers(folders))
    dead = find_unused(leftovers)
    failed, freed = 0, 0
    for leftover in dead:
        reason = "" if dry else _remove(leftover)
        failed, freed = failed + bool(reason), freed + (0 if reason else leftover.nbytes)
        print(f"{leftover.nbytes / _MIB:10.2f} MiB  {leftover.path}{reason}", flush=True)
    verb = "would remove" if dry else "removed"
    where = ", ".join(map(str, folders))
    skipped = Counter(leftover.skip_reason for leftover in leftovers if leftover.skip_reason)
    print(f"{verb} {len(dead) - failed} files and folders of dead jobs, {freed / _MIB:.2f} MiB, in {where}")
    print(f"kept {len(leftovers) - len(dead) - skipped.total()} that live processes use")
    for reason, number in skipped.items():
        print(f"kept session folders that may be in use ({number}): {reason}")
    return EXIT_FAILED if failed else EXIT_DONE


def find_leftovers(folders: Iterable[Path]) -> Iterator[Leftover]:
    """Yield the segments and session folders of this user's MPI jobs, dead or alive, in `folders`."""
    for folder in folders:
        for path in _matching_entries(folder, _SEGMENT, stat.S_ISREG):
            yield Leftover(path, (path,), _allocated_bytes(path))
        skip_reason = _reason_users_are_hidden(folder)
        sessions = [(path, skip_reason) for path in _matching_entries(folder, _SESSION, stat.S_ISDIR)]
        for parent in _matching_entries(folder, re.compile(rf"ompi\..+\.{os.getuid()}"), stat.S_ISDIR):
            host = parent.name.removeprefix("ompi.").rpartition(".")[0]
            is_local = host.partition(".")[0] == os.uname().nodename.partition(".")[0]
            reason = skip_reason or ("" if is_local else f"they belong to host {host}; run the command there")
            sessions += [(path, reason) for path in _matching_entries(parent, _PART, stat.S_ISDIR)]
        for path, reason in sessions:
            files = tuple(_tree(path))
            yield Leftover(path, files, sum(map(_allocated_bytes, files)), reason)


def _reason_users_are_hidden(folder: Path) -> str:
    """Return why users of files in this folder may be invisible to this process; empty if all are visible."""
    try:
        whole = os.stat("/proc/self/ns/pid").st_ino == _WHOLE_MACHINE and os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        whole = False
    if not whole:
        return "processes outside this container are not visible here; run the command on the node itself"
    kind = _file_system(folder)
    if kind not in _LOCAL_SYSTEMS:
        kind = kind or "of unknown kind"
        return f"{folder} ({kind}) may be shared by other hosts; remove files of dead jobs there by hand"
    return ""


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, such as "ext4"; empty if unknown."""
    place, longest, kind = folder.resolve(), 0, ""
    # number parent device root POINT options tags... - KIND source options
    for line in proc.read("self/mountinfo").splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
        if len(point) >= longest and place.is_relative_to(point):
            longest, kind = len(point), line.partition(" - ")[2].split()[0]
    return kind


def _matching_entries(folder: Path, pattern: re.Pattern[str], kind: Callable[[int], bool]) -> Iterator[Path]:
    """Yield this user's entries of a folder whose name matches `pattern` and whose file mode satisfies `kind`."""
    for path in sorted(_entries(folder)):
        status = _status(path) if pattern.fullmatch(path.name) else None
        if status is not None and status.st_uid == os.getuid() and kind(status.st_mode):
            yield path


def find_unused(leftovers: Sequence[Leftover]) -> list[Leftover]:
    """Return those of the leftovers that no process uses. Collect `leftovers` before the call, not lazily."""
    open_files = find_open_files()

    def is_dead(one: Leftover) -> bool:
        if any(is_in_use(path, open_files) for path in one.files):
            return False
        if _SEGMENT.fullmatch(one.path.name):
            return not _is_open(one.path)
        return not (one.skip_reason or _is_launcher_alive(one.path))

    return [one for one in leftovers if is_dead(one)]


def _is_open(path: Path) -> bool:
    """Return True unless no process of this kernel, in any container, has the file open or mapped.

    The kernel grants a write lease (fcntl(2), F_SETLEASE) only if nobody else has the file open.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO, sent if somebody opens it now, would kill us
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def find_open_files() -> set[str | tuple[int, int]]:
    """Return the files that live processes have open or mapped, as paths and as (device, inode) pairs.

    Both forms are needed because a file's path or its device number may differ between mounts. Processes of other users
    cannot be read in /proc, but they could not open these files either.
    """
    files: set[str | tuple[int, int]] = set()
    for process in proc.processes():
        # open files before maps: a file is mapped before it is closed, so one of the two shows it
        for descriptor in _entries(Path(f"/proc/{process}/fd")):
            try:
                target = os.readlink(descriptor)
                if target.startswith("/"):
                    status = os.stat(descriptor)
                    files |= {target, (status.st_dev, status.st_ino)}
            except OSError:
                continue
        for line in proc.read(f"{process}/maps").splitlines():  # address permissions offset device inode path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                major, minor = fields[3].split(":")
                files |= {fields[5], (os.makedev(int(major, 16), int(minor, 16)), int(fields[4]))}
    return files


def _is_launcher_alive(path: Path) -> bool:
    """Return True if the process whose PID is in a session folder's name exists, even if /proc hides it."""
    try:
        with suppress(PermissionError):
            os.kill(int(path.name.rpartition(".")[2]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _tree(folder: Path) -> Iterator[Path]:
    """Yield the folder and everything in it, without following links."""
    yield folder
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in (*folders, *files))


def _status(path: Path) -> os.stat_result | None:
    """Return `path.lstat()`; None if the file no longer exists."""
    try:
        return path.lstat()
    except OSError:
        return None


def _allocated_bytes(path: Path) -> int:
    status = _status(path)
    return 0 if status is None else status.st_blocks * 512


def is_in_use(path: Path, open_files: set[str | tuple[int, int]]) -> bool:
    """Return True if a live process has a file open or mapped.

    Args:
        path: File to check.
        open_files: Files in use, as returned by `find_open_files`.
    """
    status = _status(path)
    return status is not None and (str(path) in open_files or (status.st_dev, status.st_ino) in open_files)


def _remove(leftover: Leftover) -> str:
    """Remove a leftover; return the reason if that fails, else an empty string."""
    try:
        with suppress(FileNotFoundError):  # another run of this command on the same node removed it
            shutil.rmtree(leftover.path) if leftover.path.is_dir() else leftover.path.unlink()
    except OSError as error:
        return f": cannot be removed: {error.strerror}"
    return ""
