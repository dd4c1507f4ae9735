"""Data set folders: made whole or not at all, those that are made on first use, and copies on the nodes' own disks.

    .NAME.lock                     one maker per node at a time (flock: the kernel frees it when a maker dies)
    .NAME.tmp-HOST-PID-RANDOM/     being filled: a mark lies in it
    NAME/                          after the rename: complete and durable

Nothing ever fills a folder under its final name, and nobody waits for a process that is dead. Where the file
system knows no locks, or makers sit on several nodes, two may fill folders side by side: the first rename wins.

`data.path` names a folder, or one of two embedded data sets, which are made on first use: `digits`, and, where it is
empty, Python's own source as text. `data.stage` has each node copy a data set to a disk of its own:

    STAGE/mpitrain-data-<identity>/     the same files, named by their content: any job with this data uses them
      dataset.json                      written last; the folder gets its name when all is there
      train-00000.h5 ...                every extent of the copy hashed before that

One process per node copies, the whole set each, from the shared path; jobs that start together on a node wait for one
of them. Nothing is removed afterwards: the next job finds it. A reader treats the copy as any data set, and hashes
what it reads for the first time once more.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.data.format import MANIFEST, TOKENIZER, DatasetManifest, is_dataset, read_manifest
from mpitrain.data.shards import verify
from mpitrain.errors import InputError
from mpitrain.storage import locks
from mpitrain.storage.disk import MARK, begin_folder, end_folder, free_bytes, leftovers, remove_folder, sync

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.data.sources import Source


def make_dataset(
    target: Path, fill: Callable[[Path], None], *, once: bool, whole: Callable[[Path], bool] = is_dataset
) -> None:
    """Make a data set folder: it is filled under a temporary name, and then renamed.

    Args:
        target: The folder to make.
        fill: Writes the data set into the temporary folder.
        once: Whether a finished data set under that name, also one that another process makes meanwhile, is what is
            wanted; else it is an error.
        whole: Says whether a data set is fit for use. With `once`, one that is not is replaced.

    Raises:
        InputError: The name is taken, the folder may not be written, or the disk is full.
    """
    with os_errors(f"data set {target} cannot be written"):
        if once and whole(target):  # asked without a lock: works on a read-only file system too
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with locks.waiting(target.parent / f".{target.name}.lock") as held:
            if once and whole(target):
                return
            prefix = f".{target.name}.tmp-{os.uname().nodename}-"
            if once and is_dataset(target):
                os.rename(target, target.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
            if os.path.lexists(target):
                raise InputError(f"output folder {target} exists already; give another --out, or remove it")
            if held:  # so that temporary folders of other makers on this node are of makers that died
                made = re.compile(re.escape(prefix) + r"\d+-[0-9a-f]{8}")
                for path in list(leftovers(target.parent, made, is_dataset)):
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


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turn what the operating system refuses inside into an InputError of one line, which begins with `what`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        reason = _MENDS.get(error.errno or 0, f"{reason} ({error.filename})" if error.filename else reason)
        raise InputError(f"{what}: {reason}") from error


@contextmanager
def needing(what: str, package: str, extra: str = "data") -> Iterator[None]:
    """Turn a missing package into an InputError that begins with `what` and names the extra that installs it."""
    try:
        yield
    except ImportError:
        raise InputError(f'{what} the package {package}; pip install "mpitrain[{extra}]"') from None


_MENDS = {
    errno.ENOSPC: "the disk is full; free some space, or use another place",
    errno.EDQUOT: "the disk quota is used up; free some space, or use another place",
    errno.EFBIG: "a file grew over the allowed size (ulimit -f); use a smaller --shard-mb",
    errno.EACCES: "no permission; ask its owner for access, or use another place",
    errno.EPERM: "no permission; ask its owner for access, or use another place",
    errno.EEXIST: "a file lies where a folder is needed; use another place",
    errno.ENOTDIR: "a file lies where a folder is needed; use another place",
    errno.EROFS: "the file system is read-only; use another place",
}


def _rename(temporary: Path, target: Path, once: bool) -> None:
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not is_dataset(target):
            raise
        if not once:
            raise InputError(f"output folder {target} was made by another process meanwhile; use that one") from None


DIGITS = "digits"

# other people's packages, and tests: half of the tree, and mostly tables
_NOT_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))


def resolve(data_path: str, root: Path = Path("data")) -> Path:
    """Find the data set folder that `data.path` names. Any number of processes may ask at once.

    Args:
        data_path: A folder, the word `digits`, or nothing for Python's own source. A folder of your own called digits
            is reached as ./digits.
        root: Where the embedded data sets are made, if they are not there.

    Raises:
        InputError: There is no data set, or the embedded one cannot be made.
    """
    embedded = {"": ("python-source", _python_source, 0.05), DIGITS: (DIGITS, _digits, 0.1)}
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
    """The file of the tokenizer that the data set of `data.path` was made with; None where there is none."""
    path = Path(data_path) / TOKENIZER
    return path if data_path not in ("", DIGITS) and path.is_file() else None


def _python_source() -> tuple[Source, str]:
    from mpitrain.data.sources import PrepareOptions
    from mpitrain.data.sources.documents import text_source

    library = Path(sysconfig.get_paths()["stdlib"])
    files = python_files(library)
    if not files:
        raise InputError(f"Python's standard library has no source in {library}; give data.path")
    return text_source(files, PrepareOptions()), f"Python {sys.version.split()[0]} standard library"


def python_files(library: Path) -> list[Path]:
    """The .py files of a standard library, in the order of their paths, without packages of others and tests."""
    found: list[Path] = []
    for top, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_TEXT]
        found += [Path(top, name) for name in files if name.endswith(".py")]
    return sorted(path for path in found if path.is_file())


def _digits() -> tuple[Source, str]:
    from mpitrain.data.format import FieldSpec
    from mpitrain.data.sources import Source, partition

    with needing("data.path digits needs", "scikit-learn", "digits"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    x = (digits.images / 16.0).astype(np.float32)[:, None]  # grey values are 0 to 16
    y = digits.target.astype(np.int32)
    x_field = FieldSpec(name="x", dtype="float32", shape=x.shape[1:], given="float")
    y_field = FieldSpec(name="y", dtype="int32", shape=(), given="integer")
    source = Source("arrays", (x_field, y_field), partition(iter, [(x, y)]), files=1)
    return source, "scikit-learn's bundled digits (UCI optical recognition of handwritten digits)"


_LEFT = 64 << 20  # bytes that stay free
_PAUSE = 0.1  # seconds


def staged_folder(source: Path, stage: Path) -> Path:
    """Where under the folder `stage` the copy of a data set is, or will be."""
    return stage / f"mpitrain-data-{read_manifest(source).identity}"


def stage(source: Path, stage: Path) -> None:
    """Have a whole, checked copy of a data set. Any number of processes may ask at once.

    Args:
        source: The data set's folder.
        stage: Where the copy is made, unless it is there already.

    Raises:
        InputError: There is no room, the folder may not be written, or shards are damaged.
    """
    manifest = read_manifest(source)
    target, fill, whole = staged_folder(source, stage), partial(_copy, source, manifest), partial(_is_whole, manifest)
    make_dataset(target, fill, once=True, whole=whole)


def stage_on_nodes(world: Communicator, path: str, stage_path: Path) -> None:
    """Have the first rank of each node make a copy, and return when all have one. Collective.

    However long the copying takes, the ranks meet all the while, so that none of them waits in an operation for longer
    than `comm.timeout`, and one that dies is missed at once.

    Args:
        world: All ranks.
        path: What `data.path` names.
        stage_path: Where each node's copy is made.

    Raises:
        InputError: On all ranks what `stage` raised on any.
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
    """At first sight: the same shards, and all there in their size. Their content is hashed when it is read."""
    try:
        found = read_manifest(folder)
        sizes = all((folder / shard.file).stat().st_size == shard.bytes for shard in found.shards)
    except (OSError, InputError):
        return False
    return sizes and (found.kind, found.fields, found.splits) == (manifest.kind, manifest.fields, manifest.splits)


def _copy(source: Path, manifest: DatasetManifest, into: Path) -> None:
    needed, free = sum(shard.bytes for shard in manifest.shards) + _LEFT, free_bytes(into)
    if free < needed:
        raise InputError(
            f"data.stage {into.parent} has {free / 1e9:.1f} GB free and the data set needs {needed / 1e9:.1f} GB; make "
            "room, give another folder, or leave data.stage empty to read the shared one"
        )
    for name in [shard.file for shard in manifest.shards] + [TOKENIZER] * (source / TOKENIZER).exists():
        sync(Path(shutil.copyfile(source / name, into / name)))
    for problem in verify(into, manifest):
        raise InputError(f"{problem.replace(str(into), str(source))} (found in its copy for data.stage {into.parent})")
    sync(Path(shutil.copyfile(source / MANIFEST, into / MANIFEST)))
