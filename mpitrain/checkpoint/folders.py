"""Folder `checkpoints/` of a run: names of its entries, finished checkpoints, leftovers, and removal.

    step-00000100.tmp-<id>/   being written; contains a mark; never read, and removed at a start
    step-00000100/            complete since it was renamed to this name
    latest                    names the newest checkpoint, as a hint for people; mpitrain looks at the folders
    best                      names the checkpoint with the best held-out metric (checkpoint.best), never pruned

Only entries with one of these names whose content shows that mpitrain wrote them are ever removed or replaced: a folder
by its mark or manifest, `latest` by its content. If another entry is in the way, an error is raised; all others are
ignored.

This module does not know about ranks: its functions are called by the one process that manages a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mpitrain.checkpoint.manifest import FORMAT, MANIFEST, was_finite
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
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def finished_steps(root: Path) -> list[int]:
    """Return the steps whose folders have their final names, newest first. Their contents are not checked."""
    if not root.is_dir():
        return []
    matches = [_NAME.fullmatch(path.name) for path in root.iterdir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def newest_finite(root: Path) -> int | None:
    """Return the step of the newest checkpoint saved while training was still learning; None if there is none."""
    return next((step for step in finished_steps(root) if was_finite(root / folder_name(step))), None)


def find(path: Path) -> list[Path]:
    """Return the checkpoint folders that a path refers to: itself, or those of a run folder, newest first."""
    if (path / MANIFEST).exists() or _NAME.fullmatch(path.name):
        return [path]
    for root in (path, path / CHECKPOINTS):
        if steps := finished_steps(root):
            return [root / folder_name(step) for step in steps]
    return []


def require(path: Path, key: str = "") -> list[Path]:
    """Return the checkpoint folders that a path refers to. Raises InputError if there are none.

    Args:
        path: Path of a checkpoint or a run folder.
        key: Setting that has the path as its value, for the message; its other values are auto and never.
    """
    if checkpoints := find(path):
        return checkpoints
    named, other = (f"{key} {path}", "auto, never or ") if key else (path, "")
    problem = "is not a checkpoint or a run folder that has one" if path.exists() else "does not exist"
    raise InputError(f"{named} {problem}; give {other}the path of a checkpoint or run folder")


def best_step(root: Path) -> int | None:
    """Return the step of the checkpoint marked as the best; None if none is marked or it no longer exists."""
    pointer = root / BEST
    match = _NAME.fullmatch(pointer.read_text(encoding="utf-8").strip()) if _is_pointer(pointer) else None
    return int(match[1]) if match and is_checkpoint(root / match[0]) else None


def marked_best(run: Path) -> Path:
    """Return the checkpoint of a run folder that is marked as the best. Raises InputError if there is none."""
    for root in (run, run / CHECKPOINTS):
        if (step := best_step(root)) is not None:
            return root / folder_name(step)
    raise InputError(f"{run} has no checkpoint that is marked as the best; set checkpoint.best for training")


def locked_with(root: Path) -> list[Path]:
    """Return the folders to lock for saving into `root`: itself, and the run folder that contains it."""
    run = root.parent
    return [run, root] if root.name == CHECKPOINTS and (run / LOCK).exists() else [root]


def set_aside(folder: Path) -> Path:
    """Rename a folder to a free name and return the new path. Raises OSError."""
    target = disk.free_name(folder)
    os.rename(folder, target)
    return target


def remove_leftovers(root: Path) -> None:
    """Remove temporary files and folders of saves that were killed.

    The caller must hold the run's lock, so that no save is in progress.
    """
    for folder in list(disk.leftovers(root, _FOLDER, is_checkpoint)):
        remove(folder)
    for path in root.iterdir():
        if _FILE.fullmatch(path.name) and _is_pointer(path):
            path.unlink(missing_ok=True)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a manifest written by mpitrain, which may be damaged."""
    head = b"" if folder.is_symlink() else _read_head(folder / MANIFEST, 200)
    return head.startswith(b'{"crc32": ') or _HEAD in head


def _is_pointer(path: Path) -> bool:
    """Return whether a file has valid content for `latest`, or is empty."""
    try:
        return not path.is_symlink() and path.stat().st_size < 64 and bool(_POINTER.fullmatch(path.read_bytes()))
    except OSError:
        return False


def lacks_manifest(folder: Path) -> bool:
    """Return whether a folder has tensor files of a checkpoint but no manifest written by mpitrain."""
    files = () if folder.is_symlink() or is_checkpoint(folder) else folder.glob("*.h5")
    return any(_TENSORS.fullmatch(path.name) and _read_head(path) == SIGNATURE for path in files)


def _read_head(path: Path, nbytes: int = len(SIGNATURE)) -> bytes:
    """Return the first bytes of a file, or b"" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except OSError:
        return b""


def require_free(final: Path) -> None:
    """Raise InputError if a save to this folder would replace something that mpitrain did not write."""
    pointer = final.with_name(LATEST)
    if os.path.lexists(final) and not is_checkpoint(final):
        what, lacks = final, f"has no {MANIFEST} of a checkpoint"
    elif os.path.lexists(pointer) and not _is_pointer(pointer):
        what, lacks = pointer, "does not name a checkpoint"
    else:
        return
    raise InputError(
        f"{what} exists already, but mpitrain did not write it: it {lacks}; move it away, or save into another folder"
    )


def publish(temporary: Path, final: Path, *, trusted: bool = False) -> None:
    """Rename a complete folder to its final name.

    Args:
        temporary: Path of the complete folder.
        final: Final path.
        trusted: If true, an existing entry of that name is known to be a checkpoint.

    Raises:
        InputError: The name is taken by something that mpitrain did not write.
        OSError: The disk fails.
    """
    disk.end_folder(temporary)
    if os.path.lexists(final):  # this step's checkpoint from before a restart, which was damaged or not resumed from
        if not trusted:
            require_free(final)
        discard(final)
    os.rename(temporary, final)
    try:
        disk.sync(final.parent)
    except OSError:  # a save that reports a failure leaves no checkpoint
        os.rename(final, temporary)
        raise


def point_to(final: Path, name: str = LATEST) -> None:
    """Make `latest` name this folder; if it cannot be written, remove it rather than leave a wrong one.

    Args:
        final: Checkpoint folder.
        name: Name of the file, such as `best` instead of `latest`.
    """
    latest = final.with_name(name)
    if os.path.lexists(latest) and not _is_pointer(latest):
        return
    try:
        with disk.replacing(latest, final.with_name(disk.temporary_name(name)), durable=False) as pointer:
            pointer.write_text(final.name + "\n", encoding="utf-8")
    except OSError:
        with suppress(OSError):  # a folder with that name stays
            latest.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a checkpoint, first hiding it so that it is never seen half removed. Raises OSError."""
    remove(hide(folder))


def hide(folder: Path) -> Path:
    """Rename a checkpoint to a temporary name, under which it is not read. Raises OSError."""
    hidden = folder.with_name(disk.temporary_name(folder.name))
    os.rename(folder, hidden)
    return hidden


def remove(*hidden: Path) -> None:
    """Remove hidden folders. If a part cannot be removed now, the next start of a job removes it.

    Files that mpitrain did not write are kept; their folder is then renamed, for example to step-00000100.1.
    """
    for folder in hidden:
        if disk.remove_folder(folder, (MANIFEST, disk.MARK), lambda name: bool(_OURS.fullmatch(name))):
            with suppress(OSError):
                os.rename(folder, disk.free_name(folder.with_name(folder.name.partition(".tmp-")[0])))


def steps_to_remove(
    steps: Sequence[int],
    keep: int,
    verified: Collection[int],
    unusable: Collection[int],
    finite: Callable[[int], bool] = lambda step: True,
    best: int | None = None,
) -> list[int]:
    """Return the steps of the checkpoints to remove.

    These stay: the newest `keep` usable checkpoints, the newest verified one, and the newest usable and the newest
    verified one saved while training was learning. Unusable checkpoints do not count towards `keep`, and are removed if
    they are older than all that stay.

    Args:
        steps: Steps of the checkpoints, newest first.
        keep: Number of usable checkpoints to keep.
        verified: Steps of checkpoints known to be whole.
        unusable: Steps of checkpoints known to be damaged.
        finite: Predicate that is true if the checkpoint of a step was saved while training was learning.
        best: Step of a further checkpoint to keep, or None.
    """
    usable = [step for step in steps if step not in unusable]
    whole = [step for step in usable if step in verified]
    staying = {*usable[:keep], *whole[:1]}
    staying.update(*(islice(filter(finite, some), 1) for some in (usable, whole)))
    oldest = min(staying, default=0)  # if nothing stays, no checkpoint is usable, and none is removed
    staying.add(best if best is not None else oldest)
    return [step for step in steps if step not in staying and (step not in unusable or step < oldest)]


def additional_bytes(size: int, saves: int, keep: int, existing: Sequence[int]) -> int:
    """Return the largest number of bytes that future saves need in addition to the existing checkpoints.

    Args:
        size: Size of a checkpoint in bytes.
        saves: Number of saves.
        keep: Number of checkpoints to keep; the others are removed after each save, not before it.
        existing: Sizes in bytes of the existing checkpoints, newest first.
    """
    there, more, most = list(existing), 0, 0
    for _ in range(min(saves, keep + 1)):
        more += size
        most = max(most, more)
        there.insert(0, size)
        more -= sum(there[keep:])
        del there[keep:]
    return most


def require_room(root: Path, what: str, size: int, saves: int, keep: int, fix: str) -> None:
    """Raise InputError if future saves do not fit on the disk.

    Args:
        root: Folder of the checkpoints.
        what: Name of the folder in messages.
        size: Size of a checkpoint in bytes.
        saves: Number of saves.
        keep: Number of checkpoints to keep.
        fix: Advice for the message.
    """
    with disk.reporting(f"{what} {root} cannot be used", "choose another folder"):
        saved_folders = [root / folder_name(step) for step in finished_steps(root)]
        sizes = [
            sum(path.stat().st_size for path in folder.iterdir()) for folder in saved_folders if is_checkpoint(folder)
        ]
        more_bytes = additional_bytes(size, saves, keep, sizes)
        shortage = disk.lack_of_room(root, more_bytes)
    if shortage:
        number, each = min(saves, keep + 1), bytes_text(size)
        many = f"{number} checkpoints of {each} at a time" if number > 1 else f"one checkpoint of {each}"
        raise InputError(
            f"{what} {root} must have room for {many}, which need {bytes_text(more_bytes)} more, but {shortage}; {fix}"
        )


def unreadable(folder: Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint folder that cannot be read.

    Args:
        folder: Folder of the checkpoint.
        error: Cause.
    """
    return CheckpointError(f"{folder} cannot be read: {error.strerror or error}")


def unwritable(folder: Path, error: OSError) -> InputError:
    """Return the error for a checkpoint folder that could not be saved.

    Args:
        folder: Folder of the checkpoint.
        error: Cause.
    """
    return InputError(f"{folder} could not be saved: {disk.reason(error)}; make room, or choose another run.dir")
