"""The folder `checkpoints/` of a run: names, what is finished, what is left over, what may go.

    step-00000100.tmp-<id>/   being written: a mark lies in it; never read, removed when found at a start
    step-00000100/            after the rename: whole
    latest                    a hint for people; the folders themselves decide
    best                      names the one with the best held-out figure (checkpoint.best), which is never pruned

Only what has one of these names and is known by its content to be ours is ever removed or replaced: a folder by the
mark or by a manifest, `latest` by what it says. Other things in the way are refused, and others are left alone.

Nothing here knows of ranks: these are the acts of the one process that looks after a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mpitrain.checkpoint.manifest import FORMAT, MANIFEST, is_fruitful
from mpitrain.errors import CheckpointError, InputError
from mpitrain.storage import disk
from mpitrain.storage.hdf5 import SIGNATURE
from mpitrain.storage.locks import LOCK
from mpitrain.storage.run_folder import CHECKPOINTS
from mpitrain.storage.text import bytes_text

LATEST, BEST = "latest", "best"
PROBE = "probe"
_NAME = re.compile(r"step-(\d{8,})")
_FOLDER = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]{8}")
_FILE = re.compile(rf"({LATEST}|{BEST}|{PROBE}-\d+)\.tmp-[0-9a-f]{{8}}")
_POINTER = re.compile(rb"(step-\d{8,}\n?)?")
_TENSORS = re.compile(r"(rank|node)-\d{5,}\.h5")
_OURS = re.compile(
    re.escape(disk.MARK)
    + r"|manifest\.json|model\.h5|(rank|node)-\d{5,}\.h5(\.tmp-brought)?|parity-\d{5,}-\d{5,}\.bin|\.tmp-brought"
)
_HEAD = f'"format": "{FORMAT.rpartition(" ")[0]}'.encode()


def folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def finished_steps(root: Path) -> list[int]:
    """The steps whose folders have their final name, newest first. Whether they are whole is another question."""
    if not root.is_dir():
        return []
    found = [_NAME.fullmatch(path.name) for path in root.iterdir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest_fruitful(root: Path) -> int | None:
    """The step of the newest checkpoint that was made while training learned something; None where there is none."""
    return next((step for step in finished_steps(root) if is_fruitful(root / folder_name(step))), None)


def find(path: Path) -> list[Path]:
    """The checkpoint folders that a path means, if there are any: itself, or those of a run folder, newest first."""
    if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
        return [path]
    for root in (path, path / CHECKPOINTS):
        if steps := finished_steps(root):
            return [root / folder_name(step) for step in steps]
    return []


def require(path: Path, key: str = "") -> list[Path]:
    """Return the checkpoint folders that a path means. Raises InputError where there are none.

    key: The setting that the path is the value of, for which it may also be auto or never.
    """
    if found := find(path):
        return found
    named, other = (f"{key} {path}", "auto, never or ") if key else (path, "")
    what = "" if path.exists() else "does not exist: it "
    raise InputError(f"{named} {what}is no checkpoint and no run folder with one; give {other}the path of either")


def best_step(root: Path) -> int | None:
    """The step of the checkpoint that is marked as the best; None where none is, or it is gone."""
    pointer = root / BEST
    match = _NAME.fullmatch(pointer.read_text(encoding="utf-8").strip()) if _is_pointer(pointer) else None
    return int(match[1]) if match and is_checkpoint(root / match[0]) else None


def marked_best(run: Path) -> Path:
    """Return the checkpoint of a run folder that is marked as the best. Raises InputError where none is."""
    for root in (run, run / CHECKPOINTS):
        if (step := best_step(root)) is not None:
            return root / folder_name(step)
    raise InputError(f"{run} has no checkpoint that is marked as the best; train with checkpoint.best")


def locked_with(root: Path) -> list[Path]:
    """The folders whose locks belong to whoever saves into `root`: it, and the run folder that it is part of."""
    run = root.parent
    return [run, root] if root.name == CHECKPOINTS and (run / LOCK).exists() else [root]


def set_aside(folder: Path) -> Path:
    """Move a folder out of the way; returns where it is now. Raises OSError."""
    kept = disk.free_name(folder)
    os.rename(folder, kept)
    return kept


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves left. Only for whoever holds the run's lock: nobody else is saving there."""
    for folder in list(disk.leftovers(root, _FOLDER, is_checkpoint)):
        remove(folder)
    for path in root.iterdir():
        if _FILE.fullmatch(path.name) and _is_pointer(path):
            path.unlink(missing_ok=True)


def is_checkpoint(folder: Path) -> bool:
    """Whether a manifest of ours lies in a folder; it may be damaged."""
    head = b"" if folder.is_symlink() else _beginning(folder / MANIFEST, 200)
    return head.startswith(b'{"crc32": ') or _HEAD in head


def _is_pointer(path: Path) -> bool:
    """Whether a file says what `latest` may say, or nothing yet."""
    try:
        return not path.is_symlink() and path.stat().st_size < 64 and bool(_POINTER.fullmatch(path.read_bytes()))
    except OSError:
        return False


def are_remains(folder: Path) -> bool:
    """Whether a folder holds a checkpoint's tensors, but no manifest of ours."""
    files = () if folder.is_symlink() or is_checkpoint(folder) else folder.glob("*.h5")
    return any(_TENSORS.fullmatch(path.name) and _beginning(path) == SIGNATURE for path in files)


def _beginning(path: Path, nbytes: int = len(SIGNATURE)) -> bytes:
    """The first bytes of a file, as far as it can be read."""
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except OSError:
        return b""


def require_free(final: Path) -> None:
    """Raise InputError where what a save of this folder would replace is not ours."""
    pointer = final.with_name(LATEST)
    if os.path.lexists(final) and not is_checkpoint(final):
        what, lacks = final, f"has no {MANIFEST} of a checkpoint"
    elif os.path.lexists(pointer) and not _is_pointer(pointer):
        what, lacks = pointer, "does not name a checkpoint"
    else:
        return
    raise InputError(
        f"{what} is in the way of a checkpoint and not known as mpitrain's: it {lacks}; move it away, or save into "
        "another folder"
    )


def publish(temporary: Path, final: Path, *, trusted: bool = False) -> None:
    """Give a complete folder its final name, which it has for good.

    Args:
        temporary: The folder.
        final: Its final name.
        trusted: Whether whatever has that name already is ours.

    Raises:
        InputError: Something that is not ours has the name.
        OSError: The disk fails.
    """
    disk.end_folder(temporary)
    if os.path.lexists(final):  # a checkpoint of this step from before a restart: damaged, or not to be saved again
        if not trusted:
            require_free(final)
        discard(final)
    os.rename(temporary, final)
    try:
        disk.sync(final.parent)
    except OSError:  # a save that is said to have failed leaves no checkpoint
        os.rename(final, temporary)
        raise


def point_to(final: Path, name: str = LATEST) -> None:
    """Make `latest` name this folder; where there is no room for it, let there be none rather than a wrong one.

    name: of another such file, in place of `latest`.
    """
    latest = final.with_name(name)
    if os.path.lexists(latest) and not _is_pointer(latest):
        return
    try:
        with disk.replacing(latest, final.with_name(disk.temporary_name(name)), durable=False) as pointer:
            pointer.write_text(final.name + "\n", encoding="utf-8")
    except OSError:
        with suppress(OSError):  # a folder of that name stays
            latest.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a checkpoint; it is never half there under a whole one's name. Raises OSError."""
    remove(hide(folder))


def hide(folder: Path) -> Path:
    """Give a checkpoint a name under which nobody reads it. Raises OSError."""
    hidden = folder.with_name(disk.temporary_name(folder.name))
    os.rename(folder, hidden)
    return hidden


def remove(*hidden: Path) -> None:
    """Remove hidden folders. What cannot be removed now is a leftover for the next start.

    What somebody has put beside our files stays, as step-00000100.1.
    """
    for folder in hidden:
        if disk.remove_folder(folder, (MANIFEST, disk.MARK), lambda name: bool(_OURS.fullmatch(name))):
            with suppress(OSError):
                os.rename(folder, disk.free_name(folder.with_name(folder.name.partition(".tmp-")[0])))


def doomed(
    steps: Sequence[int],
    keep: int,
    verified: Collection[int],
    unusable: Collection[int],
    fruitful: Callable[[int], bool] = lambda step: True,
    spared: int | None = None,
) -> list[int]:
    """Which checkpoints are removed.

    The newest usable ones stay, and, whatever its place, the newest verified one. The same goes for the newest ones
    that were made while training learned something. Unusable ones do not count, and go when they are older than all
    that stay.

    Args:
        steps: The steps of the checkpoints, newest first.
        keep: How many usable ones stay.
        verified: The steps of those that are known to be whole.
        unusable: The steps of those that are known not to be.
        fruitful: Whether the checkpoint of a step was made while training learned something.
        spared: The step of one that stays beside them.
    """
    usable = [step for step in steps if step not in unusable]
    whole = [step for step in usable if step in verified]
    staying = {*usable[:keep], *whole[:1]}
    staying.update(*(islice(filter(fruitful, some), 1) for some in (usable, whole)))
    oldest = min(staying, default=0)  # where nothing stays, nothing is usable, and nothing goes
    staying.add(spared if spared is not None else oldest)
    return [step for step in steps if step not in staying and (step not in unusable or step < oldest)]


def more_room(size: int, saves: int, keep: int, held: Sequence[int]) -> int:
    """The bytes that saves need beside what is there, at their worst moment.

    Args:
        size: The bytes of a checkpoint.
        saves: How many saves there will be.
        keep: How many checkpoints stay. All others are removed after each save, not before.
        held: The bytes of the checkpoints that are there, newest first.
    """
    there, more, most = list(held), 0, 0
    for _ in range(min(saves, keep + 1)):
        more += size
        most = max(most, more)
        there.insert(0, size)
        more -= sum(there[keep:])
        del there[keep:]
    return most


def require_room(root: Path, what: str, size: int, saves: int, keep: int, mend: str) -> None:
    """Raise InputError where saves to come do not fit.

    Args:
        root: The folder that they go into.
        what: What messages call it.
        size: The bytes of a checkpoint.
        saves: How many saves there will be.
        keep: How many checkpoints stay.
        mend: What can be done about it.
    """
    with disk.reporting(f"{what} {root} cannot be used", "choose another folder"):
        there = [root / folder_name(step) for step in finished_steps(root)]
        held = [sum(path.stat().st_size for path in folder.iterdir()) for folder in there if is_checkpoint(folder)]
        needed = more_room(size, saves, keep, held)
        lacks = disk.lack_of_room(root, needed)
    if lacks:
        number, each = min(saves, keep + 1), bytes_text(size)
        many = f"{number} checkpoints of {each} at a time" if number > 1 else f"a checkpoint of {each}"
        raise InputError(
            f"{what} {root} is to hold {many}, for which {bytes_text(needed)} more are needed, but {lacks}; {mend}"
        )


def unreadable(folder: Path, error: OSError) -> CheckpointError:
    """The error of a checkpoint folder that could not be read."""
    return CheckpointError(f"{folder} cannot be read: {error.strerror or error}")


def unwritable(folder: Path, error: OSError) -> InputError:
    """The error of a checkpoint folder that could not be saved."""
    return InputError(f"{folder} could not be saved: {disk.reason(error)}; make room, or choose another run.dir")
