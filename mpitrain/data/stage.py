"""Copies of a data set on the nodes' own disks: `data.stage`.

    STAGE/mpitrain-data-<identity>/     the same files, named by their content: any job with this data uses them
      dataset.json                      written last; the folder gets its name when all is there (commit.py)
      train-00000.h5 ...                every extent of the copy hashed before that

One process per node copies, the whole set each, from the shared path; jobs that start together on a node wait for one
of them. Nothing is removed afterwards: the next job finds it. A reader treats the copy as any data set, and hashes
what it reads for the first time once more.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.data.commit import make_dataset
from mpitrain.data.dataset import verify
from mpitrain.data.defaults import resolve
from mpitrain.data.format import MANIFEST, TOKENIZER, DatasetManifest, read_manifest
from mpitrain.errors import InputError
from mpitrain.storage.disk import free_bytes, sync

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

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
    make_dataset(
        staged_folder(source, stage),
        lambda into: _copy(source, manifest, into),
        once=True,
        whole=lambda folder: _is_whole(folder, manifest),
    )


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


def _is_whole(folder: Path, manifest: DatasetManifest) -> bool:
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
        _copy_file(source / name, into / name)
    for problem in verify(into, manifest):
        raise InputError(f"{problem.replace(str(into), str(source))} (found in its copy for data.stage {into.parent})")
    _copy_file(source / MANIFEST, into / MANIFEST)


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    sync(target)
