"""One checkpoint folder from nothing to whole, by all ranks together."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.files import VIEW, Part, PlannedPiece, Structure, make_structure, make_view, write_parts
from mpitrain.checkpoint.manifest import (
    Extent,
    Manifest,
    ParitySet,
    TensorSpec,
    Values,
    decode_extent,
    decode_piece,
    encode_extent,
    encode_piece,
    grouped,
    write_manifest,
)
from mpitrain.checkpoint.reading import covered
from mpitrain.errors import CheckpointError, InputError, refusal
from mpitrain.storage.disk import begin_folder, temporary_name, write_durably
from mpitrain.storage.hdf5 import begin_file, image_bytes

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

TAG = 32_000  # of messages between the ranks that save, apart from those of the training's
T = TypeVar("T")
Protect = Callable[[Path, dict[str, int], dict[str, int]], Sequence[ParitySet]]


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Attributes:
        final: The final folder, on this rank's file system.
        leader: Whether this rank makes the folder, writes the manifest and renames the folder.
        alone: Whether there is one leader, and the folder holds all files; else there is one leader on each node, with
            the files of its node.
    """

    final: Path
    leader: bool
    alone: bool


def attempt(
    comm: Communicator, act: Callable[[], T] | None, folder: Path | None = None, *, saving: bool = False
) -> T | None:
    """Do something that may fail on this rank alone. Collective.

    Args:
        comm: The ranks.
        act: What this rank does; None where it has nothing to do.
        folder: The checkpoint that an OSError is said to be of; None for one that says it itself.
        saving: Whether the checkpoint is written, and not read.

    Returns:
        What `act` returned on this rank.

    Raises:
        Exception: On all ranks what `act` raised on any.
    """
    value: T | None = None
    error: Exception | None = None
    if act is not None:
        try:
            value = act()
        except Exception as caught:
            error = caught
            if isinstance(caught, OSError) and folder is not None:
                error = folders.unwritable(folder, caught) if saving else folders.unreadable(folder, caught)
    if quiet_min(comm, comm.rank if error is not None else comm.size) < comm.size:
        comm.agree(error)
    return value


def quiet_min(comm: Communicator, number: int) -> int:
    """The smallest of all ranks' numbers, when every rank has come here. Collective.

    MPI's own reductions spin while they wait, which would take a core from the training. So this is dissemination
    (Hensgen, Finkel and Manber, 1988): in round k every rank tells the one 2^k places on.

    Raises:
        CommunicationError: A rank has not come within the job's time limit.
    """
    distance, mine = 1, torch.tensor([number])
    while distance < comm.size:
        other = torch.empty_like(mine)
        receive = comm.irecv(other, (comm.rank - distance) % comm.size, TAG)
        send = comm.isend(mine, (comm.rank + distance) % comm.size, TAG)
        receive.wait(comm.process.watchdog.timeout)
        send.wait(comm.process.watchdog.timeout)
        mine = torch.minimum(mine, other)
        distance *= 2
    return int(mine)


class FileLayout:
    """Whose file is whose, and what is the same from save to save: the files' structures, and the view.

    Making one is collective.

    Args:
        comm: The ranks that save together.
        nodes: The node of each rank.
        files: Whose file it is: "rank" or "node".

    Attributes:
        comm: The ranks that save together; it is released with what they share.
        file: The name of this rank's file.
        owner: Whether this rank makes its file.
        group: The ranks that share this file; None where each has its own.
    """

    def __init__(self, comm: Communicator, nodes: Sequence[int], files: str) -> None:
        self.comm = comm
        self.file = f"{files}-{comm.rank if files == 'rank' else nodes[comm.rank]:05d}.h5"
        self.group = comm.split(nodes[comm.rank], comm.rank, "checkpoint node") if files == "node" else None
        self.owner = self.group is None or self.group.rank == 0
        self._places: list[PlannedPiece] = []
        self._structure: Structure | None = None
        self._shown: tuple[object, bytes] | None = None
        # The first message makes the memory in which ranks meet. MPI leaves a file in /dev/shm where a rank dies in
        # the midst of that; a save in the background would do it beside the training, in which ranks die.
        for made in (comm, self.group):
            if made is not None:
                made.broadcast_object(None)

    def free(self) -> None:
        """Release what the ranks share. Collective."""
        if self.group is not None:
            self.group.free()
        self.comm.free()

    def begin(self, path: Path, parts: Sequence[Part]) -> tuple[Sequence[int], int, int]:
        """Make this rank's file. Collective over the ranks that share it.

        Args:
            path: The file.
            parts: What this rank will write into it.

        Returns:
            The offsets of the parts; the bytes of the file; and its CRC-32 outside of all parts.
        """
        if self.group is None:
            return self._make(path, [(part.spec, part.piece) for part in parts])
        told = self.group.gather_objects([[p.spec.shape, p.spec.dtype, *encode_piece(p.piece)] for p in parts])

        def make() -> tuple[Sequence[int], int, int]:
            places = [
                (TensorSpec(name, tuple(shape), dtype), decode_piece(name, numbers))
                for shape, dtype, name, numbers in chain.from_iterable(told)
            ]
            return self._make(path, places)

        offsets, size, rest = self.group.on_root(make)
        first = sum(self.group.all_gather_object(len(parts))[: self.group.rank])
        return offsets[first : first + len(parts)], size, rest

    def _make(self, path: Path, places: list[PlannedPiece]) -> tuple[Sequence[int], int, int]:
        if self._structure is None or places != self._places:
            self._places, self._structure = places, make_structure(places)
        begin_file(path, self._structure.image)
        return self._structure.offsets, self._structure.image.size, self._structure.rest

    def view(self, tensors: dict[str, TensorSpec], extents: Sequence[Extent], tied: dict[str, str]) -> bytes:
        """The bytes of model.h5. Raises CheckpointError where the ranks together lack elements of a tensor."""
        key = ([(e.piece, e.file) for e in extents], tensors, tied)
        if self._shown is None or self._shown[0] != key:
            of_tensor = grouped(extents, lambda extent: extent.piece.name)
            for name, spec in tensors.items():
                numel, found = spec.numel, covered(extent.piece for extent in of_tensor[name])
                if found != numel:
                    raise CheckpointError(
                        f"the ranks hold {found} of the {numel} elements of {name}; together they must hold them all"
                    )
            self._shown = key, image_bytes(make_view(tensors, extents, tied))
        return self._shown[1]


def write_checkpoint(
    layout: FileLayout,
    target: Target,
    step: int,
    parts: Sequence[Part],
    values: Values,
    protect: Protect | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint. Collective; where it fails on any rank it raises on all, and leaves no trace.

    Args:
        layout: The ranks that save together, and whose file is whose.
        target: Where the checkpoint goes.
        step: The step that it is saved at.
        parts: What this rank writes.
        values: What the manifest holds beside the tensors; rank 0's count.
        protect: Makes copies or parities of the files that were written, given the folder, and the owner and the size
            of each file. Collective.
        after: Called by the leaders when the checkpoint is there.

    Raises:
        InputError: The folder cannot be written.
        CheckpointError: The ranks together lack elements of a tensor.
    """
    comm = layout.comm
    temporary = _begin(comm, target)

    def write_own() -> list[Any]:
        path = temporary / layout.file
        offsets, size, rest = layout.begin(path, parts)
        extents = [encode_extent(extent) for extent in write_parts(path, parts, offsets)]
        tensors = [[p.spec.name, list(p.spec.shape), p.spec.dtype] for p in parts]
        return [layout.file if layout.owner else "", size, rest, tensors, extents]

    try:
        told = attempt(comm, write_own, target.final, saving=True)
        everyone = comm.gather_objects(told) if target.alone else comm.all_gather_object(told)
        if not target.alone:
            values = comm.broadcast_object(values)
        sizes = {name: size for name, size, *_ in everyone if name}
        parity: Sequence[ParitySet] = ()
        if protect is not None:
            owners = {of[0]: rank for rank, of in enumerate(everyone) if of[0]}
            parity = attempt(comm, partial(protect, temporary, owners, sizes), target.final, saving=True) or ()

        def commit() -> None:
            tensors = {name: TensorSpec(name, tuple(shape), kind) for *_, of, _ in everyone for name, shape, kind in of}
            extents = tuple(decode_extent(e) for *_, of in everyone for e in of)
            view = layout.view(tensors, extents, values.get("tied", {})) if target.alone else None
            rest = {name: of for name, _, of, *_ in everyone if name}
            manifest = Manifest(step, tensors, sizes, extents, values, rest, parity=tuple(parity))
            finish_folder(temporary, target.final, manifest, view)
            after()

        attempt(comm, commit if target.leader else None, target.final, saving=True)
    except BaseException:
        if target.leader:
            folders.remove(temporary)
        raise


def _begin(comm: Communicator, target: Target) -> Path:
    """Make the folder to write into, under a temporary name."""
    name, why = temporary_name(target.final.name), ""
    if not target.alone:
        temporary = target.final.parent / comm.broadcast_object(name)
        attempt(comm, partial(begin_folder, temporary) if target.leader else None, target.final, saving=True)
        return temporary
    if target.leader:
        try:
            folders.require_free(target.final)
            begin_folder(target.final.with_name(name))
        except OSError as error:
            why = str(folders.unwritable(target.final, error))
        except InputError as error:
            why = str(error)
    name, why = comm.broadcast_object([name, why])
    if why:
        raise refusal(why)
    return target.final.parent / name


def finish_folder(temporary: Path, final: Path, manifest: Manifest, view: bytes | None) -> None:
    """Make a checkpoint of a folder that has the files with the tensors.

    Args:
        temporary: The folder.
        final: The name it gets.
        manifest: What it holds; the view is added to it.
        view: The bytes of model.h5; None in a folder that has only some of the files, where whatever has the final
            name already is ours.

    Raises:
        InputError: Something that is not ours has the final name.
        OSError: The disk is full, or fails.
    """
    if view is not None:
        write_durably(temporary / VIEW, view)
        manifest = replace(manifest, views={VIEW: (len(view), zlib.crc32(view))})
    write_manifest(temporary, manifest)
    folders.publish(temporary, final, trusted=view is None)
