"""Writing of one checkpoint folder by all ranks together, from creating it to renaming it."""

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

TAG = 32_000  # tag of messages between saving ranks, which no message of training uses
T = TypeVar("T")
Protect = Callable[[Path, dict[str, int], dict[str, int]], Sequence[ParitySet]]


@dataclass(frozen=True)
class Target:
    """Destination of a checkpoint.

    Attributes:
        final: Final folder, on this rank's file system.
        leader: True if this rank creates the folder, writes the manifest and renames the folder.
        single_leader: True if a single leader exists and the folder holds all files; false if each node has a leader,
            and a folder with the files of that node.
    """

    final: Path
    leader: bool
    single_leader: bool


def attempt(
    comm: Communicator, act: Callable[[], T] | None, folder: Path | None = None, *, saving: bool = False
) -> T | None:
    """Run a function that may fail on this rank alone, and raise its error on all ranks. Collective.

    Args:
        comm: Ranks that take part.
        act: Function to run; None if this rank has nothing to do.
        folder: Checkpoint to name in the message of an OSError; None if the error already names its file.
        saving: If true, the message says that the checkpoint is being written rather than read.

    Returns:
        Result of `act` on this rank.

    Raises:
        Exception: On all ranks, the exception that `act` raised on any rank.
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
    """Return the smallest of all ranks' numbers once every rank has called this. Collective.

    MPI's own reductions busy-wait, which would take a core from training. Messages are therefore exchanged by
    dissemination (Hensgen, Finkel and Manber, 1988): in round k every rank sends to the rank 2^k places further.

    Args:
        comm: Ranks that take part.
        number: Number of this rank.

    Raises:
        CommunicationError: A rank has not called this within the job's time limit.
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
    """Assignment of files to ranks, and the file structures and view, which are reused as long as they do not change.

    Creating one is collective.

    Args:
        comm: Ranks that save together.
        nodes: Node of each rank.
        files: "rank" for one file per rank, or "node" for one file per node.

    Attributes:
        comm: Ranks that save together; `free` releases this communicator.
        file: Name of this rank's file.
        owner: True if this rank creates its file.
        group: Ranks that share this file; None if each rank has its own.
    """

    def __init__(self, comm: Communicator, nodes: Sequence[int], files: str) -> None:
        self.comm = comm
        self.file = f"{files}-{comm.rank if files == 'rank' else nodes[comm.rank]:05d}.h5"
        self.group = comm.split(nodes[comm.rank], comm.rank, "checkpoint node") if files == "node" else None
        self.owner = self.group is None or self.group.rank == 0
        self._places: list[PlannedPiece] = []
        self._structure: Structure | None = None
        self._last_view: tuple[object, bytes] | None = None
        # The first message creates MPI's shared memory. If a rank dies during that, MPI leaves a file in /dev/shm.
        # So create it here rather than in a background save, which runs beside training, in which ranks may die.
        for communicator in (comm, self.group):
            if communicator is not None:
                communicator.broadcast_object(None)

    def free(self) -> None:
        """Release the communicators. Collective."""
        if self.group is not None:
            self.group.free()
        self.comm.free()

    def begin(self, path: Path, parts: Sequence[Part]) -> tuple[Sequence[int], int, int]:
        """Create this rank's file without its data. Collective over the ranks that share the file.

        Args:
            path: Path of the file.
            parts: Parts that this rank will write into it.

        Returns:
            Offsets of the parts in bytes; size of the file in bytes; CRC-32 of the bytes outside all parts.
        """
        if self.group is None:
            return self._make(path, [(part.spec, part.piece) for part in parts])
        specs = self.group.gather_objects([[p.spec.shape, p.spec.dtype, *encode_piece(p.piece)] for p in parts])

        def make() -> tuple[Sequence[int], int, int]:
            places = [
                (TensorSpec(name, tuple(shape), dtype), decode_piece(name, numbers))
                for shape, dtype, name, numbers in chain.from_iterable(specs)
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
        """Return the bytes of model.h5. Raises CheckpointError if elements of a tensor are missing on all ranks.

        Args:
            tensors: Logical tensors by name.
            extents: Locations of their pieces.
            tied: Other names of tied parameters, with the names they are saved under.
        """
        key = ([(e.piece, e.file) for e in extents], tensors, tied)
        if self._last_view is None or self._last_view[0] != key:
            of_tensor = grouped(extents, lambda extent: extent.piece.name)
            for name, spec in tensors.items():
                numel, count = spec.numel, covered(extent.piece for extent in of_tensor[name])
                if count != numel:
                    raise CheckpointError(
                        f"the ranks passed {count} of the {numel} elements of {name}; each must be passed by a rank"
                    )
            self._last_view = key, image_bytes(make_view(tensors, extents, tied))
        return self._last_view[1]


def write_checkpoint(
    layout: FileLayout,
    target: Target,
    step: int,
    parts: Sequence[Part],
    values: Values,
    protect: Protect | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint. Collective. If it fails on any rank, it raises on all ranks and leaves no files.

    Args:
        layout: Ranks that save together, with their files.
        target: Destination of the checkpoint.
        step: Step at which it is saved.
        parts: Parts that this rank writes.
        values: Values that the manifest stores beside the tensors; those of rank 0 are used.
        protect: Function that creates copies or parities of the written files, given the folder, the owner of each file
            and the size of each file. Collective.
        after: Function that the leaders call once the checkpoint is complete.

    Raises:
        InputError: The folder cannot be written.
        CheckpointError: Elements of a tensor are missing on all ranks.
    """
    comm = layout.comm
    temporary = _begin(comm, target)

    def write_file() -> list[Any]:
        path = temporary / layout.file
        offsets, size, rest = layout.begin(path, parts)
        extents = [encode_extent(extent) for extent in write_parts(path, parts, offsets)]
        tensors = [[p.spec.name, list(p.spec.shape), p.spec.dtype] for p in parts]
        return [layout.file if layout.owner else "", size, rest, tensors, extents]

    try:
        report = attempt(comm, write_file, target.final, saving=True)
        entries = comm.gather_objects(report) if target.single_leader else comm.all_gather_object(report)
        if not target.single_leader:
            values = comm.broadcast_object(values)
        sizes = {name: size for name, size, *_ in entries if name}
        parity: Sequence[ParitySet] = ()
        if protect is not None:
            owners = {of[0]: rank for rank, of in enumerate(entries) if of[0]}
            parity = attempt(comm, partial(protect, temporary, owners, sizes), target.final, saving=True) or ()

        def commit() -> None:
            tensors = {name: TensorSpec(name, tuple(shape), kind) for *_, of, _ in entries for name, shape, kind in of}
            extents = tuple(decode_extent(e) for *_, of in entries for e in of)
            view = layout.view(tensors, extents, values.get("tied", {})) if target.single_leader else None
            rest = {name: of for name, _, of, *_ in entries if name}
            manifest = Manifest(step, tensors, sizes, extents, values, rest, parity=tuple(parity))
            finish_folder(temporary, target.final, manifest, view)
            after()

        attempt(comm, commit if target.leader else None, target.final, saving=True)
    except BaseException:
        if target.leader:
            folders.remove(temporary)
        raise


def _begin(comm: Communicator, target: Target) -> Path:
    """Create the folder under a temporary name, and return its path. Collective."""
    name, why = temporary_name(target.final.name), ""
    if not target.single_leader:
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
    """Turn a folder that has the tensor files into a checkpoint: write view and manifest, and rename it.

    Args:
        temporary: Folder with the tensor files.
        final: Final path of the folder.
        manifest: Contents of the checkpoint; the view is added to it.
        view: Bytes of model.h5; None for a folder with only some of the files, in which case an existing folder of the
            final name is known to be a checkpoint and is replaced.

    Raises:
        InputError: The final name is taken by something that mpitrain did not write.
        OSError: The disk is full or fails.
    """
    if view is not None:
        write_durably(temporary / VIEW, view)
        manifest = replace(manifest, views={VIEW: (len(view), zlib.crc32(view))})
    write_manifest(temporary, manifest)
    folders.publish(temporary, final, trusted=view is None)
