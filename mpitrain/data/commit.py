"""How a data set folder comes to be: whole, or not at all, however many processes try at once.

    .NAME.lock                     one maker per node at a time (flock: the kernel frees it when a maker dies)
    .NAME.tmp-HOST-PID-RANDOM/     being filled: a mark lies in it
    NAME/                          after the rename: complete and durable

Nothing ever fills a folder under its final name, and nobody waits for a process that is dead. Where the file
system knows no locks, or makers sit on several nodes, two may fill folders side by side: the first rename wins.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mpitrain.data.format import MANIFEST, is_dataset
from mpitrain.errors import InputError
from mpitrain.storage import locks
from mpitrain.storage.commit import MARK, begin_folder, end_folder, leftovers, remove_folder
from mpitrain.storage.disk import sync


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
            if held:
                _remove_leftovers(target.parent, prefix)
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
        raise InputError(f"{what}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    mends = {
        errno.ENOSPC: "the disk is full; free some space, or use another place",
        errno.EDQUOT: "the disk quota is used up; free some space, or use another place",
        errno.EFBIG: "a file grew over the allowed size (ulimit -f); use a smaller --shard-mb",
        errno.EACCES: "no permission; ask its owner for access, or use another place",
        errno.EPERM: "no permission; ask its owner for access, or use another place",
        errno.EEXIST: "a file lies where a folder is needed; use another place",
        errno.ENOTDIR: "a file lies where a folder is needed; use another place",
        errno.EROFS: "the file system is read-only; use another place",
    }
    if error.errno in mends:
        return mends[error.errno]
    text = error.strerror or str(error).splitlines()[0]
    return f"{text} ({error.filename})" if error.filename else text


def _rename(temporary: Path, target: Path, once: bool) -> None:
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not is_dataset(target):
            raise
        if not once:
            raise InputError(f"output folder {target} was made by another process meanwhile; use that one") from None


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Temporary folders of makers that died on this node: we hold the lock, so none of them is alive."""
    made = re.compile(re.escape(prefix) + r"\d+-[0-9a-f]{8}")
    for path in list(leftovers(parent, made, is_dataset)):
        remove_folder(path, (MANIFEST, MARK))
