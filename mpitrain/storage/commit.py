"""Folders that are whole or not there at all: filled under a temporary name with a mark in them, then renamed.

NAME.tmp-…/    being filled: MARK lies in it, so what is in it may be removed
NAME/          after the rename: all of it is there, and durable

A folder that one process makes, and nobody looks for leftovers of, needs no mark: `new_folder`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpitrain.storage.disk import sync

MARK = ".mpitrain-unfinished"


def temporary_name(name: str) -> str:
    """Return a name for what is to be called `name` when it is whole."""
    return f"{name}.tmp-{secrets.token_hex(4)}"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder, which afterwards gets the name `path`; where anything fails inside, it is removed.

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
    """Make a folder to be filled, with the mark in it. Raises OSError."""
    path.mkdir(parents=True)
    (path / MARK).touch()


def end_folder(path: Path) -> None:
    """Take the mark away: the folder is filled, and durable. Raises OSError."""
    (path / MARK).unlink(missing_ok=True)
    sync(path)


def is_unfinished(path: Path) -> bool:
    """Whether this is a folder that was begun by `begin_folder`: it has the mark, or nothing at all in it."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / MARK).is_file() or not any(path.iterdir())


def leftovers(parent: Path, name: re.Pattern[str], ours: Callable[[Path], bool]) -> Iterator[Path]:
    """What folders that were never finished left behind. For whoever knows that nobody is filling one there.

    Args:
        parent: Where to look.
        name: What such folders are called.
        ours: Whether a folder without the mark, of which only the renaming was missing, is known by its content.
    """
    for path in parent.iterdir():
        if name.fullmatch(path.name) and (is_unfinished(path) or ours(path)):
            yield path


def remove_folder(path: Path, last: Collection[str] = (MARK,), ours: Callable[[str], bool] = lambda name: True) -> bool:
    """Remove a folder and what is in it; what cannot be removed stays. Returns whether only what is not ours did.

    last: names by which it is known whose it is; they go last, so that a removal that is killed can be ended later.
    ours: whether an entry of this name may be removed.
    """
    with suppress(OSError):
        entries = [entry for entry in path.iterdir() if ours(entry.name)]
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
