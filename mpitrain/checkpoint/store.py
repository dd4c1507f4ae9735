"""The folder `checkpoints/` of a run: commit, choose, prune.

    step-00000100.tmp-<id>/   being written; never read, removed when found at a start
    step-00000100/            after the rename: whole
    latest                    a hint for people; the folders themselves decide

The order of a commit: every rank's file written and fsynced; all ranks agree that it went well; the manifest
written and fsynced; the folder fsynced, renamed, its parent fsynced; only then are older checkpoints removed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.files import OpenFiles, Part, read_part, write_file
from mpitrain.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorSpec,
    decode_extent,
    encode_extent,
    read_manifest,
    write_manifest,
)
from mpitrain.comm import Communicator
from mpitrain.errors import CheckpointError, InputError

_NAME = re.compile(r"step-(\d{8,})")
LATEST = "latest"


class Store:
    """The checkpoints of a run. Every method is collective over `comm`."""

    def __init__(self, root: Path, comm: Communicator, keep: int) -> None:
        self.root, self.comm, self.keep = root, comm, keep

    def prepare(self, set_aside: bool) -> None:
        """Make the folder, and remove what killed saves left.

        set_aside: checkpoints that are there belong to a run that is not gone on with; they are kept under
        another name. Raises InputError when the folder cannot be used.
        """

        def make() -> None:
            try:
                if set_aside and finished_steps(self.root):
                    number = 1
                    while (aside := self.root.with_name(f"{self.root.name}.{number}")).exists():
                        number += 1
                    os.rename(self.root, aside)
                self.root.mkdir(parents=True, exist_ok=True)
                for path in self.root.iterdir():
                    if ".tmp-" in path.name:
                        shutil.rmtree(path, ignore_errors=True)
            except OSError as error:
                raise InputError(
                    f"checkpoint folder {self.root} cannot be used: {error.strerror}; choose another run.dir"
                ) from None

        self.comm.on_root(make)

    def newest_first(self) -> list[Path]:
        """The folders of the finished checkpoints."""
        return [self.folder(step) for step in self.comm.on_root(lambda: finished_steps(self.root))]

    def at(self, path: Path) -> list[Path]:
        """The checkpoint folders a path means: itself, or those of a run folder, newest first.

        Raises InputError when there are none.
        """

        def find() -> list[str]:
            if (path / MANIFEST).exists():
                return [str(path)]
            for root in (path, path / "checkpoints"):
                if steps := finished_steps(root):
                    return [str(root / f"step-{step:08d}") for step in steps]
            raise InputError(
                f"checkpoint.resume {path} is no checkpoint and no run folder with one; give auto, never "
                "or the path of either"
            )

        return [Path(found) for found in self.comm.on_root(find)]

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def save(self, step: int, parts: Sequence[Part], values: dict[str, Any]) -> Path:
        """Write a checkpoint of what the ranks hold together. parts: this rank's; values: JSON, rank 0's count.

        Raises CheckpointError on every rank, and leaves no trace, when any rank cannot write its part.
        """
        rank, final = self.comm.rank, self.folder(step)
        temporary = self.root / self.comm.broadcast_object(f"{final.name}.tmp-{secrets.token_hex(4)}")
        self.comm.on_root(lambda: temporary.mkdir())
        file = temporary / f"rank-{rank:05d}.h5"
        try:
            error: BaseException | None = None
            told: list[Any] = []
            try:
                extents = write_file(file, parts)
                tensors = [[p.spec.name, list(p.spec.shape), p.spec.dtype] for p in parts]
                told = [file.stat().st_size, tensors, [encode_extent(e) for e in extents]]
            except OSError as caught:
                error = unwritable(final, caught)
            self.comm.agree(error)
            everyone = self.comm.gather_objects(told)
            self.comm.on_root(lambda: _commit(temporary, final, step, everyone, values))
        except BaseException:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.comm.on_root(self._prune)
        return final

    def load(self, folder: Path, parts_for: Callable[[Manifest], Sequence[Part]]) -> Manifest:
        """Fill this rank's parts from a checkpoint, written by any number of ranks in any layout.

        parts_for: gives the parts to fill, once it is known what the checkpoint holds.
        Raises CheckpointError on every rank when any byte any rank needs is missing or damaged.
        """
        error: BaseException | None = None
        manifest = None
        try:
            manifest = read_manifest(folder)
            with OpenFiles(folder) as files:
                for part in parts_for(manifest):
                    _check_spec(folder, manifest, part.spec)
                    read_part(folder, manifest.extents_of.get(part.spec.name, []), part, files)
        except CheckpointError as caught:
            error = caught
        except OSError as caught:
            error = CheckpointError(f"{folder} cannot be read: {caught.strerror or caught}")
        self.comm.agree(error)
        assert manifest is not None
        return manifest

    def _prune(self) -> None:
        """Keep the newest `keep`."""
        for step in finished_steps(self.root)[self.keep :]:
            doomed = self.folder(step)
            hidden = doomed.with_name(f"{doomed.name}.tmp-old")  # never half a checkpoint under a whole one's name
            os.rename(doomed, hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def finished_steps(root: Path) -> list[int]:
    """Steps whose folders have their final name, newest first. Whether they are whole is another question."""
    if not root.is_dir():
        return []
    found = [_NAME.fullmatch(path.name) for path in root.iterdir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _commit(temporary: Path, final: Path, step: int, everyone: Sequence[Any], values: dict[str, Any]) -> None:
    tensors = {name: TensorSpec(name, tuple(shape), dtype) for _, specs, _ in everyone for name, shape, dtype in specs}
    files = {f"rank-{rank:05d}.h5": size for rank, (size, _, _) in enumerate(everyone)}
    extents = tuple(decode_extent(values) for _, _, extents in everyone for values in extents)
    try:
        write_manifest(temporary, Manifest(step, tensors, files, extents, values))
        _sync(temporary)
        if final.exists():  # a checkpoint of this step from before a restart: damaged, or this would not be saved again
            aside = final.with_name(f"{final.name}.tmp-replaced-{secrets.token_hex(4)}")
            os.rename(final, aside)
            shutil.rmtree(aside, ignore_errors=True)
        os.rename(temporary, final)
        _sync(final.parent)
        pointer = final.parent / f"{LATEST}.tmp-{secrets.token_hex(4)}"
        pointer.write_text(final.name + "\n", encoding="utf-8")
        os.replace(pointer, final.parent / LATEST)
    except OSError as error:
        raise unwritable(final, error) from None


def unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder} could not be saved: {error.strerror or error}; make room, or choose another run.dir")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_spec(folder: Path, manifest: Manifest, wanted: TensorSpec) -> None:
    found = manifest.tensors.get(wanted.name)
    if found is None:
        raise CheckpointError(f"{folder} holds no {wanted.name}; it belongs to another model or optimizer")
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise CheckpointError(
            f"{folder}: {wanted.name} is {found.dtype} {list(found.shape)} there and {wanted.dtype} "
            f"{list(wanted.shape)} here; the model must be the one that was saved"
        )
