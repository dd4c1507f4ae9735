"""Data set folders: made completely or not at all, made on first use, or copied to the nodes' own disks.

    .NAME.lock                     one maker per node at a time (flock: the kernel frees it if a maker dies)
    .NAME.tmp-HOST-PID-RANDOM/     being filled, with a mark file in it
    NAME/                          after the rename: complete and durable

No folder is filled under its final name, and no process waits for a dead one. If the file system has no locks, or the
makers run on several nodes, two of them may fill folders at the same time; the first rename wins.

`data.path` names a folder, or one of two embedded data sets that are made on first use: `digits`, and, if `data.path`
is empty, Python's own source as text. With `data.stage`, each node copies the data set to its own disk:

    STAGE/mpitrain-data-<identity>/     the same files, named by their content, so any job with this data uses them
      dataset.json                      written last; then the folder gets its final name
      train-00000.h5 ...                all extents of the copy are hashed before that

One process per node copies the whole set from the shared path; jobs that start at the same time on a node wait for one
of them. The copy is not removed afterwards, so the next job finds it. A reader treats it like any data set, and hashes
again what it reads for the first time.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import sys
import sysconfig
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from mpitrain.data.format import MANIFEST, TOKENIZER, DatasetManifest, is_dataset, read_manifest
from mpitrain.data.shards import verify
from mpitrain.errors import InputError, MpitrainError
from mpitrain.storage import locks
from mpitrain.storage.disk import MARK, begin_folder, end_folder, free_bytes, leftovers, remove_folder, sync

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.data.sources import Source

T = TypeVar("T")
K = TypeVar("K")
OPEN_FILES = 64


class OpenFiles(Generic[K, T]):
    """The files that were used last, at most OPEN_FILES of them, by key. Any number of threads may use it."""

    def __init__(self) -> None:
        self._files: OrderedDict[K, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, open_file: Callable[[], T]) -> T:
        """Return an open file.

        Args:
            key: Key of the file.
            open_file: Function that opens the file if needed; it is closed when the last reference to it is dropped.
        """
        with self._lock:
            if key not in self._files:
                self._files[key] = open_file()
                if len(self._files) > OPEN_FILES:
                    self._files.popitem(last=False)  # stays open while a thread still reads it
            self._files.move_to_end(key)
            return self._files[key]

    def close(self) -> None:
        """Close the files that no thread reads. A later `get` opens them again."""
        with self._lock:
            self._files.clear()


def make_dataset(
    target: Path, fill: Callable[[Path], None], *, once: bool, is_usable: Callable[[Path], bool] = is_dataset
) -> None:
    """Make a data set folder: fill it under a temporary name, then rename it.

    Args:
        target: Folder to make.
        fill: Function that writes the data set into the temporary folder.
        once: If true, accept a complete data set of that name, even if another process makes it meanwhile; if false, an
            existing one is an error.
        is_usable: Function that returns True if a data set can be used. With `once`, an unusable data set is replaced.

    Raises:
        InputError: The name is taken, the folder is not writable, or the disk is full.
    """
    with os_errors(f"data set {target} cannot be written"):
        if once and is_usable(target):  # checked without a lock, so that it works on a read-only file system too
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with locks.wait_for(target.parent / f".{target.name}.lock") as locked:
            if once and is_usable(target):
                return
            prefix = f".{target.name}.tmp-{os.uname().nodename}-"
            if once and is_dataset(target):
                os.rename(target, target.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
            if os.path.lexists(target):
                raise InputError(f"output folder {target} exists already; use another --out, or remove it")
            if locked:  # then other temporary folders of this node belong to makers that died
                pattern = re.compile(re.escape(prefix) + r"\d+-[0-9a-f]{8}")
                for path in list(leftovers(target.parent, pattern, is_dataset)):
                    remove_folder(path, (MANIFEST, MARK))
            temporary = target.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
            begin_folder(temporary)
            try:
                fill(temporary)
                end_folder(temporary)
                _rename(temporary, target, once)
            finally:
                remove_folder(temporary, (MANIFEST, MARK))
            sync(target.parent)


def agree_on_errors(world: Communicator | None, act: Callable[[], T]) -> T:
    """Return `act()`, or raise on all ranks if it raises MpitrainError on any. Collective if there are ranks.

    Args:
        world: Ranks that call this; None for this process alone.
        act: Function without arguments.
    """
    if world is None:
        return act()
    try:
        value = act()
    except MpitrainError as error:
        world.agree(error)
        raise
    world.agree(None)
    return value


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turn an OSError raised in the `with` block into an InputError of one line that begins with `what`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        reason = _FIXES.get(error.errno or 0, f"{reason} ({error.filename})" if error.filename else reason)
        raise InputError(f"{what}: {reason}") from error


@contextmanager
def require_package(what: str, package: str, extra: str = "data") -> Iterator[None]:
    """Turn an ImportError raised in the `with` block into an InputError that says what to install.

    Args:
        what: Beginning of the message, such as "images need".
        package: Name of the missing package.
        extra: Extra of mpitrain that installs it.
    """
    try:
        yield
    except ImportError:
        raise InputError(f'{what} the package {package}; pip install "mpitrain[{extra}]"') from None


_FIXES = {
    errno.ENOSPC: "the disk is full; free some space, or use another place",
    errno.EDQUOT: "the disk quota is used up; free some space, or use another place",
    errno.EFBIG: "a file would exceed the size limit (ulimit -f); use a smaller --shard-mb",
    errno.EACCES: "no permission; ask its owner for access, or use another place",
    errno.EPERM: "no permission; ask its owner for access, or use another place",
    errno.EEXIST: "a file exists where a folder is needed; use another place",
    errno.ENOTDIR: "a file exists where a folder is needed; use another place",
    errno.EROFS: "the file system is read-only; use another place",
}


def _rename(temporary: Path, target: Path, once: bool) -> None:
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not is_dataset(target):
            raise
        if not once:
            raise InputError(f"output folder {target} was made by another process in the meantime; use it") from None


DIGITS = "digits"

# installed packages and tests: half of the tree, and mostly tables
_NOT_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))


def resolve(data_path: str, root: Path = Path("data")) -> Path:
    """Return the data set folder that `data.path` names. Any number of processes may call it at once.

    Args:
        data_path: A folder, the word `digits`, or an empty text for Python's own source. Write ./digits for a folder of
            that name.
        root: Folder in which the embedded data sets are made, unless they exist.

    Raises:
        InputError: There is no data set, or the embedded one cannot be made.
    """
    embedded = {"": ("python-source", _python_source, 0.05), DIGITS: (DIGITS, _digits_source, 0.1)}
    if data_path not in embedded:
        read_manifest(Path(data_path))
        return Path(data_path)
    name, describe, held_out = embedded[data_path]

    def fill(folder: Path) -> None:
        from mpitrain.data.writer import write_dataset

        source, title = describe()
        write_dataset(folder, source, names=(title,), held_out=held_out, shard_bytes=256 << 20)

    make_dataset(root / name, fill, once=True)
    return root / name


def tokenizer_of(data_path: str) -> Path | None:
    """Return the tokenizer file of the data set that `data.path` names; None if it has none."""
    path = Path(data_path) / TOKENIZER
    return path if data_path not in ("", DIGITS) and path.is_file() else None


def _python_source() -> tuple[Source, str]:
    from mpitrain.data.sources import PrepareOptions
    from mpitrain.data.sources.documents import text_source

    library = Path(sysconfig.get_paths()["stdlib"])
    files = python_files(library)
    if not files:
        raise InputError(f"Python's standard library has no source files in {library}; set data.path to other data")
    return text_source(files, PrepareOptions()), f"Python {sys.version.split()[0]} standard library"


def python_files(library: Path) -> list[Path]:
    """Return the .py files of a standard library, sorted by path, without installed packages and tests."""
    paths: list[Path] = []
    for top, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_TEXT]
        paths += [Path(top, name) for name in files if name.endswith(".py")]
    return sorted(path for path in paths if path.is_file())


def _digits_source() -> tuple[Source, str]:
    from mpitrain.data.format import FieldSpec
    from mpitrain.data.sources import Source, partition

    with require_package("data.path digits needs", "scikit-learn", "digits"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    x = (digits.images / 16.0).astype(np.float32)[:, None]  # grey values are 0 to 16
    y = digits.target.astype(np.int32)
    x_field = FieldSpec(name="x", dtype="float32", shape=x.shape[1:], given="float")
    y_field = FieldSpec(name="y", dtype="int32", shape=(), given="integer")
    source = Source("arrays", (x_field, y_field), partition(iter, [(x, y)]), files=1)
    return source, "scikit-learn's bundled digits (UCI optical recognition of handwritten digits)"


_SPARE_BYTES = 64 << 20  # bytes to leave free
_PAUSE = 0.1  # seconds


def staged_folder(source: Path, stage: Path) -> Path:
    """Return the folder of a data set's copy, which need not exist yet.

    Args:
        source: Folder of the data set.
        stage: Folder that contains the copies.
    """
    return stage / f"mpitrain-data-{read_manifest(source).identity}"


def stage(source: Path, stage: Path) -> None:
    """Make a complete, verified copy of a data set, unless it exists. Any number of processes may call it at once.

    Args:
        source: Folder of the data set.
        stage: Folder in which the copy is made.

    Raises:
        InputError: There is not enough space, the folder is not writable, or shards are damaged.
    """
    manifest = read_manifest(source)
    if manifest.in_place or manifest.images:
        raise InputError(
            f"data.stage copies shards, but data set {source} reads files where they lie; leave data.stage empty, or "
            "prepare the data set without --in-place"
        )
    target, fill, is_usable = (
        staged_folder(source, stage),
        partial(_copy, source, manifest),
        partial(_is_whole, manifest),
    )
    make_dataset(target, fill, once=True, is_usable=is_usable)


def stage_on_nodes(world: Communicator, path: str, stage_path: Path) -> None:
    """Copy a data set to every node, by the first rank of each, and return when all copies exist. Collective.

    The ranks communicate regularly while the copies are made. So no rank waits in one operation for longer than
    `comm.timeout`, and a rank that dies is noticed at once.

    Args:
        world: All ranks.
        path: Value of `data.path`.
        stage_path: Folder in which each node's copy is made.

    Raises:
        InputError: `stage` raised it on some rank; it is then raised on all ranks.
    """
    failure: list[BaseException] = []

    def work() -> None:
        try:
            stage(resolve(path), stage_path)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="data-stage", daemon=True)
    if world.local_rank == 0:
        thread.start()
    busy = np.ones(1, dtype=np.int32)
    while busy[0]:
        thread.join(_PAUSE) if world.local_rank == 0 else time.sleep(_PAUSE)
        busy[0] = thread.is_alive()
        world.all_reduce(busy, "max")
    world.agree(failure[0] if failure else None)


def _is_whole(manifest: DatasetManifest, folder: Path) -> bool:
    """Return True if a folder has the shards of a manifest in their full size.

    Their content is not checked here, but hashed when it is read.
    """
    try:
        on_disk = read_manifest(folder)
        sizes = all((folder / shard.file).stat().st_size == shard.bytes for shard in on_disk.shards)
    except (OSError, InputError):
        return False
    return sizes and (on_disk.kind, on_disk.fields, on_disk.splits) == (manifest.kind, manifest.fields, manifest.splits)


def _copy(source: Path, manifest: DatasetManifest, into: Path) -> None:
    needed, free = sum(shard.bytes for shard in manifest.shards) + _SPARE_BYTES, free_bytes(into)
    if free < needed:
        raise InputError(
            f"data.stage {into.parent} has {free / 1e9:.1f} GB free, but the data set needs {needed / 1e9:.1f} GB; "
            "free some space, use another folder, or leave data.stage empty to read the data set in place"
        )
    for name in [shard.file for shard in manifest.shards] + [TOKENIZER] * (source / TOKENIZER).exists():
        sync(Path(shutil.copyfile(source / name, into / name)))
    for problem in verify(into, manifest):
        raise InputError(f"{problem.replace(str(into), str(source))} (found in its copy for data.stage {into.parent})")
    sync(Path(shutil.copyfile(source / MANIFEST, into / MANIFEST)))
