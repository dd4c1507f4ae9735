"""The folder `checkpoints/` of a run: names, what is finished, what is left over, what may go.

    step-00000100.tmp-<id>/   being written; never read, removed when found at a start
    step-00000100/            after the rename: whole
    latest                    a hint for people; the folders themselves decide

Nothing here knows of ranks: these are the acts of the one process that looks after a folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path

from mpitrain.checkpoint.manifest import MANIFEST
from mpitrain.disk import free_name, sync
from mpitrain.errors import InputError

LATEST = "latest"
_TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8,})")
_REASONS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_name(name: str) -> str:
    return f"{name}{_TEMPORARY}{secrets.token_hex(4)}"


def finished_steps(root: Path) -> list[int]:
    """Steps whose folders have their final name, newest first. Whether they are whole is another question."""
    if not root.is_dir():
        return []
    found = [_NAME.fullmatch(path.name) for path in root.iterdir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def find(path: Path) -> list[Path]:
    """The checkpoint folders a path means: itself, or those of a run folder, newest first; none: empty."""
    if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
        return [path]
    for root in (path, path / "checkpoints"):
        if steps := finished_steps(root):
            return [root / folder_name(step) for step in steps]
    return []


def set_aside(root: Path) -> None:
    """Move a folder with checkpoints out of the way, under another name. Raises OSError."""
    if finished_steps(root):
        os.rename(root, free_name(root))


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves left. Only for whoever holds the run's lock: nobody else is saving there."""
    for path in root.iterdir():
        if _TEMPORARY in path.name:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def publish(temporary: Path, final: Path) -> None:
    """Give a complete folder its final name, durable. Raises OSError."""
    sync(temporary)
    if final.exists():  # a checkpoint of this step from before a restart: damaged, or this would not be saved again
        discard(final)
    os.rename(temporary, final)
    sync(final.parent)


def point_to(final: Path) -> None:
    """Make `latest` name this folder; where there is no room for it, let there be none rather than a wrong one."""
    pointer = final.with_name(temporary_name(LATEST))
    try:
        pointer.write_text(final.name + "\n", encoding="utf-8")
        os.replace(pointer, final.parent / LATEST)
    except OSError:
        pointer.unlink(missing_ok=True)
        (final.parent / LATEST).unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a checkpoint; it is never half there under a whole one's name. Raises OSError."""
    remove(hide(folder))


def hide(folder: Path) -> Path:
    """Give a checkpoint a name under which nobody reads it. Raises OSError."""
    hidden = folder.with_name(temporary_name(folder.name))
    os.rename(folder, hidden)
    return hidden


def remove(*hidden: Path) -> None:
    """Remove hidden folders; what cannot be removed now is a leftover for the next start."""
    for folder in hidden:
        shutil.rmtree(folder, ignore_errors=True)


def doomed(
    steps: Sequence[int],
    keep: int,
    verified: Collection[int],
    unusable: Collection[int],
    fruitful: Callable[[int], bool] = lambda step: True,
) -> list[int]:
    """Which of these steps (newest first) retention removes.

    The newest `keep` usable ones stay, and, whatever its place, the newest verified one. The same goes for those that
    were made while training learned something (`fruitful`). Unusable ones do not count, and go when they are older
    than all that stay.
    """
    usable = [step for step in steps if step not in unusable]
    staying = set(usable[:keep]) | set([step for step in usable if step in verified][:1])
    staying |= set(islice(filter(fruitful, usable), 1))
    staying |= set(islice(filter(fruitful, [step for step in usable if step in verified]), 1))
    if not staying:
        return []
    oldest = min(staying)
    return [step for step in steps if step not in staying and (step not in unusable or step < oldest)]


def unwritable(folder: Path, error: OSError) -> InputError:
    reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
    return InputError(f"{folder} could not be saved: {reason}; make room, or choose another run.dir")
