"""One checkpoint folder from nothing to whole, by all ranks together."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.exchange import quiet_min
from mpitrain.checkpoint.files import Part, PlannedPiece, Structure, begin_file, make_structure, write_parts
from mpitrain.checkpoint.image import image_bytes
from mpitrain.checkpoint.manifest import (
    Extent,
    Manifest,
    ParitySet,
    TensorSpec,
    decode_extent,
    encode_extent,
    write_manifest,
)
from mpitrain.checkpoint.reading import covered
from mpitrain.checkpoint.view import VIEW, make_view
from mpitrain.errors import CheckpointError, InputError
from mpitrain.layout import Box, Piece
from mpitrain.storage.commit import begin_folder
from mpitrain.storage.extents import write_at

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

T = TypeVar("T")
Protect = Callable[[Path, dict[str, int], dict[str, int]], Sequence[ParitySet]]


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes: the final folder on this rank's file system.

    leader: this rank makes the folder, writes the manifest and renames. alone: it is the only one that does, and
    the folder holds all files; else there is one leader per node, with the files of its node.
    """

    final: Path
    leader: bool
    alone: bool


def attempt(comm: Communicator, act: Callable[[], T] | None, folder: Path | None = None) -> T | None:
    """Do something that may fail on this rank alone; raises on all ranks what it raised on any.

    act: None for ranks with nothing to do. folder: of the checkpoint, for errors of reading; OSErrors mean a failed
    save without it.
    """
    value: T | None = None
    error: Exception | None = None
    if act is not None:
        try:
            value = act()
        except OSError as caught:
            reason = caught.strerror or str(caught)
            error = CheckpointError(f"{folder} cannot be read: {reason}") if folder is not None else caught
        except Exception as caught:
            error = caught
    if quiet_min(comm, comm.rank if error is not None else comm.size) < comm.size:
        comm.agree(error)
    return value


class FileLayout:
    """Whose file is whose, and what is the same from save to save: the files' structures, the view."""

    def __init__(self, comm: Communicator, nodes: Sequence[int], files: str) -> None:
        """files: "rank" or "node". Collective."""
        self._prefix = files
        self.number = comm.rank if files == "rank" else nodes[comm.rank]
        self.group = comm.split(nodes[comm.rank], comm.rank, "checkpoint node") if files == "node" else None
        self._places: list[PlannedPiece] = []
        self._structure: Structure | None = None
        self._shown: tuple[object, bytes] | None = None

    def free(self) -> None:
        """Release what the ranks of a node share. Collective."""
        if self.group is not None:
            self.group.free()

    @property
    def file(self) -> str:
        """The name of this rank's file."""
        return f"{self._prefix}-{self.number:05d}.h5"

    @property
    def owner(self) -> bool:
        """Whether this rank makes its file."""
        return self.group is None or self.group.rank == 0

    def begin(self, path: Path, parts: Sequence[Part]) -> tuple[Sequence[int], int, int]:
        """Make this rank's file; returns (offsets of the parts, size and rest of the file)."""
        places = [PlannedPiece(part.spec, part.piece) for part in parts]
        if self.group is None:
            structure = self._made(places)
            begin_file(path, structure)
            return structure.offsets, structure.size, structure.rest
        told = self.group.gather_objects([_encode_place(place) for place in places])

        def make() -> list[Any]:
            structure = self._made([_decode_place(values) for of in told for values in of])
            begin_file(path, structure)
            return [structure.offsets, structure.size, structure.rest]

        offsets, size, rest = self.group.on_root(make)
        counts = self.group.all_gather_object(len(places))
        first = sum(counts[: self.group.rank])
        return offsets[first : first + len(places)], size, rest

    def _made(self, places: list[PlannedPiece]) -> Structure:
        if self._structure is None or places != self._places:
            self._places, self._structure = places, make_structure(places)
        return self._structure

    def view(self, tensors: dict[str, TensorSpec], extents: Sequence[Extent], tied: dict[str, str]) -> bytes:
        """The bytes of model.h5. Raises CheckpointError when the ranks together lack elements of a tensor."""
        key = ([(e.piece, e.file) for e in extents], tensors, tied)
        if self._shown is None or self._shown[0] != key:
            pieces: dict[str, list[Piece]] = {}
            for extent in extents:
                pieces.setdefault(extent.piece.name, []).append(extent.piece)
            for name, spec in tensors.items():
                numel, found = spec.numel, covered(pieces[name])
                if found != numel:
                    raise CheckpointError(
                        f"the ranks hold {found} of the {numel} elements of {name}; together they must hold them all"
                    )
            self._shown = key, image_bytes(make_view(tensors, extents, tied))
        return self._shown[1]


def write_checkpoint(
    comm: Communicator,
    layout: FileLayout,
    target: Target,
    step: int,
    parts: Sequence[Part],
    values: dict[str, Any],
    protect: Protect | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Write, agree, commit. Raises on every rank, and leaves no trace, when it fails on any.

    protect(folder, owner of each file, its size): makes copies or parities of the files written. Collective.
    after: called by the leaders when the checkpoint is there.
    """
    temporary = _begin(comm, target)
    try:
        told = _attempt_save(comm, target, lambda: _write_own(layout, temporary, parts))
        everyone = comm.gather_objects(told) if target.alone else comm.all_gather_object(told)
        if not target.alone:
            values = comm.broadcast_object(values)
        parity: Sequence[ParitySet] = ()
        if protect is not None:
            owners = {of[0]: rank for rank, of in enumerate(everyone) if of[0]}
            sizes = {of[0]: of[1] for of in everyone if of[0]}
            parity = _attempt_save(comm, target, partial(protect, temporary, owners, sizes)) or ()

        def commit() -> None:
            _commit(layout, target, temporary, step, everyone, values, parity)
            after()

        _attempt_save(comm, target, commit if target.leader else None)
    except BaseException:
        if target.leader:
            folders.remove(temporary)
        raise


def _begin(comm: Communicator, target: Target) -> Path:
    """Make the folder to write into, under a temporary name."""
    if not target.alone:
        temporary = target.final.parent / comm.broadcast_object(folders.temporary_name(target.final.name))
        _attempt_save(comm, target, partial(begin_folder, temporary) if target.leader else None)
        return temporary
    name = refusal = ""
    if target.leader:
        try:
            name = folders.begin(target.final).name
        except OSError as error:
            refusal = str(folders.unwritable(target.final, error))
        except InputError as error:
            refusal = str(error)
    name, refusal = comm.broadcast_object([name, refusal])
    if refusal:
        raise InputError(refusal, agreed=True)
    return target.final.parent / name


def _attempt_save(comm: Communicator, target: Target, act: Callable[[], T] | None) -> T | None:
    def saving() -> T:
        assert act is not None
        try:
            return act()
        except OSError as error:
            raise folders.unwritable(target.final, error) from error

    return attempt(comm, saving if act is not None else None)


def _write_own(layout: FileLayout, temporary: Path, parts: Sequence[Part]) -> list[Any]:
    path = temporary / layout.file
    offsets, size, rest = layout.begin(path, parts)
    extents = write_parts(path, parts, offsets)
    tensors = [[p.spec.name, list(p.spec.shape), p.spec.dtype] for p in parts]
    return [layout.file if layout.owner else "", size, rest, tensors, [encode_extent(e) for e in extents]]


def _commit(
    layout: FileLayout,
    target: Target,
    temporary: Path,
    step: int,
    everyone: Sequence[Any],
    values: dict[str, Any],
    parity: Sequence[ParitySet],
) -> None:
    tensors = {name: TensorSpec(name, tuple(shape), dtype) for *_, of, _ in everyone for name, shape, dtype in of}
    extents = tuple(decode_extent(e) for *_, of in everyone for e in of)
    views: dict[str, tuple[int, int]] = {}
    if target.alone:
        data = layout.view(tensors, extents, values.get("tied", {}))
        _write_file(temporary / VIEW, data)
        views[VIEW] = (len(data), zlib.crc32(data))
    files = {name: size for name, size, *_ in everyone if name}
    rest = {name: of for name, _, of, *_ in everyone if name}
    write_manifest(temporary, Manifest(step, tensors, files, extents, values, rest, views, tuple(parity)))
    folders.publish(temporary, target.final, trusted=not target.alone)


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        write_at(file.fileno(), memoryview(data), 0)
        os.fsync(file.fileno())


def _encode_place(place: PlannedPiece) -> list[Any]:
    box, spec = place.piece.box, place.spec
    of_box = [box.outer, box.dim, box.inner, box.start, box.stop, place.piece.lo, place.piece.hi]
    return [spec.name, list(spec.shape), spec.dtype, of_box]


def _decode_place(values: Sequence[Any]) -> PlannedPiece:
    name, shape, dtype, (outer, dim, inner, start, stop, lo, hi) = values
    piece = Piece(name, Box(outer, dim, inner, start, stop), lo, hi)
    return PlannedPiece(TensorSpec(name, tuple(shape), dtype), piece)
