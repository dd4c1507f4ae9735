"""manifest.json: what a checkpoint holds, where each element lies, and how to tell that it is whole.

    checkpoints/step-00000100/
      manifest.json      written last; {"crc32": of the payload's text, "payload": {...}}
      rank-00000.h5      one file per rank (or node-00000.h5 per node): each tensor's piece a contiguous data set
      rank-00001.h5
      model.h5           a view of the whole model for people and tools

The payload lists the tensors (name, shape, dtype), the files (bytes), and for every piece its place: which
elements of which tensor (`layout.Piece`), at which byte of which file, with a CRC-32 per `HASHED` bytes; and one
CRC-32 per file of all bytes that are no tensor's. The HDF5 structure is for people and tools; restoring uses the
manifest alone. A folder is a checkpoint only if its manifest is whole and its files have the sizes it says.

What a manifest's payload must look like before anything in it is believed: every type, every range, every name.

A payload with a right hash may still be wrong: made by hand, by another program, or to do harm. So names of files are
plain ones, a tensor is no larger than the stretches of files that hold it, and they fit into their files, whose sizes
are compared with those on the disk before anything is read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import le
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, StrictFloat, StrictInt, StrictStr, StringConstraints, ValidationError

from mpitrain.errors import CheckpointError, first_problem
from mpitrain.layout.boxes import Box, Piece
from mpitrain.storage.disk import from_json, read_plain, write_durably

MANIFEST = "manifest.json"
MODEL = "model/"  # what the names of parameters and buffers begin with
MASTER = "master/"  # and those of the optimizer's fp32 copies, in 16-bit training
FRUITLESS = "fruitless_since"  # a value: the step since which nothing was learned when this was saved; 0: it was
HASHED = 4 << 20  # bytes under one hash
_LARGEST = 1 << 30  # bytes of a manifest: millions of pieces

_NAMES = "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128"
Values = dict[str, Any]  # what a job needs beside the tensors, as JSON has it
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor, whatever any rank holds of it.

    Attributes:
        name: Its name in the checkpoint.
        shape: Its whole shape.
        dtype: Its type, a key of DTYPES.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return self.numel * self.itemsize

    @property
    def possible(self) -> bool:
        """Whether there can be such a tensor: an empty one may have other dimensions that are too large together."""
        return self.dtype in DTYPES and prod(max(1, length) for length in self.shape) < 1 << 63


@dataclass(frozen=True)
class Extent:
    """A piece of a tensor in a file.

    Attributes:
        piece: The piece.
        file: The name of the file.
        offset: Its first byte in the file.
        hashes: The CRC-32 of each HASHED bytes of it.
    """

    piece: Piece
    file: str
    offset: int
    hashes: tuple[int, ...]


@dataclass(frozen=True)
class ParitySet:
    """Files that protect each other, at most one per node; see `mpitrain.checkpoint.parity`.

    Attributes:
        files: The file of each member, empty where a member has none.
        parities: The file of each member that holds what it keeps for the others.
        chunk: How many bytes a parity has.
    """

    files: tuple[str, ...]
    parities: tuple[str, ...]
    chunk: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The step that it was saved at.
        tensors: The logical tensors, by their names.
        files: How many bytes each file with tensors in it has.
        extents: Where the pieces of the tensors lie.
        values: Whatever else the job needs to go on, as JSON has it.
        rest: The CRC-32 of each file's bytes outside of all extents.
        views: The bytes and the CRC-32 of files that nothing is restored from.
        parity: How files on lost nodes are rebuilt.
    """

    step: int
    tensors: dict[str, TensorSpec]
    files: dict[str, int]
    extents: tuple[Extent, ...]
    values: Values = field(default_factory=dict)
    rest: dict[str, int] = field(default_factory=dict)
    views: dict[str, tuple[int, int]] = field(default_factory=dict)
    parity: tuple[ParitySet, ...] = ()

    @cached_property
    def extents_of(self) -> dict[str, list[Extent]]:
        """The extents of each tensor."""
        return grouped(self.extents, lambda extent: extent.piece.name)

    def value(self, name: str) -> Any:
        """One of `values` without which a job cannot go on. Raises CheckpointError where it is missing."""
        if name not in self.values:
            raise CheckpointError(f"the checkpoint of step {self.step} has no {name!r} among its values")
        return self.values[name]


def source_of(manifest: Manifest, name: str, dtype: torch.dtype) -> str:
    """The tensor that one of the model, or an fp32 copy of one, is filled from, which may be neither there.

    Where fp32 is wanted that is the copy, if the checkpoint has one; else the parameter itself.
    """
    kind, _, rest = name.partition("/")
    if dtype == torch.float32 and kind + "/" in (MODEL, MASTER):
        return MASTER + rest if MASTER + rest in manifest.tensors else MODEL + rest
    return name


def grouped(extents: Iterable[Extent], key: Callable[[Extent], str]) -> dict[str, list[Extent]]:
    """The extents that have the same key, in their order, by it."""
    found: dict[str, list[Extent]] = {}
    for extent in extents:
        found.setdefault(key(extent), []).append(extent)
    return found


def distinct(extents: Iterable[Extent]) -> list[Extent]:
    """The extents without those whose pieces were written twice."""
    return list({extent.piece: extent for extent in reversed(list(extents))}.values())


def encode_piece(piece: Piece) -> list[Any]:
    """Return a piece as JSON has it: the name of its tensor, and numbers.

    These are [outer, dim, inner, start, stop, lo, hi] where the box has the range [start, stop) of one dimension, and
    [shape, start, stop, lo, hi] where it has ranges of several, which FORMAT has no room for and NEWER has.
    """
    box, divided = piece.box, piece.box.divided
    if len(divided) > 1:
        return [piece.name, [list(box.shape), list(box.start), list(box.stop), piece.lo, piece.hi]]
    if not divided:
        return [piece.name, [1, box.numel, 1, 0, box.numel, piece.lo, piece.hi]]
    [d] = divided
    outer, inner = prod(box.shape[:d]), prod(box.shape[d + 1 :])
    return [piece.name, [outer, box.shape[d], inner, box.start[d], box.stop[d], piece.lo, piece.hi]]


def decode_piece(name: str, numbers: Sequence[Any]) -> Piece:
    """Return the piece that `encode_piece` has encoded. Raises ValueError where its box has no such dimensions."""
    *place, lo, hi = numbers
    if len(place) == 3:
        return Piece(name, Box(*place), lo, hi)
    outer, dim, inner, start, stop = place
    return Piece(name, Box((outer, dim, inner), (0, start, 0), (outer, stop, inner)), lo, hi)


def encode_extent(extent: Extent) -> list[Any]:
    """An extent as JSON has it."""
    return [*encode_piece(extent.piece), extent.file, extent.offset, list(extent.hashes)]


def decode_extent(values: Sequence[Any]) -> Extent:
    """An extent that `encode_extent` has encoded."""
    name, numbers, file, offset, hashes = values
    return Extent(decode_piece(name, numbers), file, offset, tuple(hashes))


def encode(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file."""
    newer = any(len(extent.piece.box.divided) > 1 for extent in manifest.extents)
    payload = {
        "format": NEWER if newer else FORMAT,
        "step": manifest.step,
        "tensors": [[t.name, list(t.shape), t.dtype] for t in manifest.tensors.values()],
        "files": manifest.files,
        "rest": manifest.rest,
        "views": manifest.views,
        "parity": [[s.files, s.parities, s.chunk] for s in manifest.parity],
        "extents": [encode_extent(extent) for extent in manifest.extents],
        "values": manifest.values,
    }
    text = json.dumps(payload)
    return f'{{"crc32": {zlib.crc32(text.encode())}, "payload": {text}}}\n'.encode()


class UnknownFormat(ValueError):
    """Another version of mpitrain wrote the manifest, in a format that this one does not know."""


def decode(data: bytes) -> Manifest:
    """Read the bytes of a manifest's file.

    Raises:
        ValueError: These are not the bytes of a manifest, or it contradicts itself.
        UnknownFormat: It says that it has another format, as that of a later version has.
    """
    head, _, body = data.decode("utf-8").rstrip("\n").partition(', "payload": ')
    stored, payload_text = int(head.removeprefix('{"crc32": ')), body.removesuffix("}")
    if zlib.crc32(payload_text.encode()) != stored:
        raise ValueError("its hash does not match")
    content = from_json(payload_text)
    if isinstance(content, dict) and content.get("format") not in (FORMAT, NEWER):
        raise UnknownFormat(
            f"its format is {content.get('format')!r:.40}, and this version reads {FORMAT!r} and {NEWER!r}; use the "
            "version of mpitrain that wrote it"
        )
    try:
        payload = Payload.model_validate(content)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    manifest = Manifest(
        payload.step,
        {name: TensorSpec(name, shape, dtype) for name, shape, dtype in payload.tensors},
        payload.files,
        tuple(decode_extent(values) for values in payload.extents),
        content["values"],
        payload.rest,
        payload.views,
        tuple(ParitySet(*values) for values in payload.parity),
    )
    if len(manifest.tensors) != len(payload.tensors):
        raise ValueError("it names a tensor twice")
    _require_consistent(manifest)
    return manifest


def _require_consistent(manifest: Manifest) -> None:
    """Raise ValueError where a small file would stand for a large tensor, or bytes be read that are not a tensor's."""
    for name, spec in manifest.tensors.items():
        if not spec.possible:
            raise ValueError(f"{name!r:.100} is {spec.dtype!r:.40} {spec.shape!s:.100}, which no tensor is")
    held = dict.fromkeys(manifest.tensors, 0)  # elements
    taken = dict.fromkeys(manifest.files, 0)  # bytes
    for extent in manifest.extents:
        piece, box = extent.piece, extent.piece.box
        if piece.name not in held or extent.file not in taken:
            raise ValueError(f"a piece of {piece.name!r:.100} in {extent.file} is of no tensor or file that it lists")
        spec = manifest.tensors[piece.name]
        nbytes = piece.numel * spec.itemsize
        within = all(map(le, box.start, box.stop)) and all(map(le, box.stop, box.shape))
        if not within or not piece.lo <= piece.hi <= box.numel or prod(box.shape) != spec.numel:
            raise ValueError(f"a piece of {piece.name!r:.100} is no part of it")
        if len(extent.hashes) != -(-nbytes // HASHED) or extent.offset + nbytes > manifest.files[extent.file]:
            raise ValueError(f"a piece of {piece.name!r:.100} does not lie in {extent.file}")
        held[piece.name] += piece.numel
        taken[extent.file] += nbytes
    for name, spec in manifest.tensors.items():
        if held[name] < spec.numel:
            raise ValueError(f"its files hold {held[name]} of the {spec.numel} elements of {name!r:.100}")
    for file, size in manifest.files.items():
        if taken[file] > size:
            raise ValueError(f"{file} has {size} bytes, and pieces of {taken[file]}")
        if file not in manifest.rest:
            raise ValueError(f"it has no hash of the rest of {file}")
    for one in manifest.parity:
        if len(one.files) != len(one.parities) or not {file for file in one.files if file} <= set(manifest.files):
            raise ValueError("a set of parities is of other files than it lists")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest, which is on the disk afterwards. Raises OSError."""
    write_durably(folder / MANIFEST, encode(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. No other file is looked at.

    Raises:
        CheckpointError: There is no manifest, or it is damaged; the message names the folder.
    """
    try:
        manifest = decode(read_plain(folder / MANIFEST, _LARGEST))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error.strerror or error}") from None
    except UnknownFormat as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from None
    named = folder.name.removeprefix("step-")
    if named != folder.name and named.isdecimal() and int(named) != manifest.step:
        raise CheckpointError(f"{folder / MANIFEST} is that of step {manifest.step}; it does not belong here")
    return manifest


def is_fruitful(folder: Path) -> bool:
    """Whether a checkpoint was made while training still learned something. False for one that cannot be read."""
    try:
        return not read_manifest(folder).values.get(FRUITLESS)
    except CheckpointError:
        return False


def missing_file(folder: Path, files: Iterable[tuple[str, int]]) -> str:
    """Return a sentence for the first file that is not there in its full size; empty where all are.

    Args:
        folder: Where they are to be.
        files: Their names, and the bytes that each is to have.
    """
    for name, size in files:
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{folder / name} is missing"
        if found != size:
            return f"{folder / name} has {found} bytes, its manifest says {size}"
    return ""


def require_files(folder: Path, files: Iterable[tuple[str, int]]) -> None:
    """Raise CheckpointError for the first of some files that is not there in its full size; see `missing_file`."""
    if problem := missing_file(folder, files):
        raise CheckpointError(problem)


FORMAT = "mpitrain checkpoint 2"  # every tensor is divided along one dimension
NEWER = "mpitrain checkpoint 3"  # some are along several

Size = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Crc = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
FileName = Annotated[StrictStr, StringConstraints(pattern=r"^[a-z]+(-[0-9]+)*\.(h5|bin)$", max_length=100)]
Shape = Annotated[tuple[Size, ...], Field(max_length=64)]
Scalar = StrictInt | StrictFloat | bool | StrictStr | None
PieceNumbers = tuple[Size, Size, Size, Size, Size, Size, Size]  # outer, dim, inner, start, stop, lo, hi
SlabNumbers = tuple[Shape, Shape, Shape, Size, Size]  # shape, start, stop, lo, hi


class LossScalePayload(BaseModel, extra="allow"):
    """What is kept of a loss scale."""

    scale: Annotated[StrictFloat, Field(gt=0)] | Annotated[StrictInt, Field(gt=0)]
    good: Size


class EnginePayload(BaseModel, extra="allow"):
    """What `mpitrain.initialize`'s engine keeps."""

    steps: Size
    skipped: Size
    values: dict[str, Any]


class ValuesPayload(BaseModel, extra="allow"):
    """The values that are known here, each of which may be missing; a job may have others."""

    position: Size = 0
    data: StrictStr | None = None
    tied: dict[str, StrictStr] = {}
    optimizer: dict[str, dict[str, Scalar]] = {}
    data_ranks: Size = 0
    loss_scale: LossScalePayload = LossScalePayload(scale=1, good=0)
    engine: EnginePayload = EnginePayload(steps=0, skipped=0, values={})


class Payload(BaseModel, extra="forbid", frozen=True):
    """What a manifest holds as JSON has it, where lists stand for tuples; see `mpitrain.checkpoint.manifest`."""

    format: Literal["mpitrain checkpoint 2", "mpitrain checkpoint 3"]
    step: Size
    tensors: tuple[tuple[StrictStr, Shape, StrictStr], ...]
    files: dict[FileName, Annotated[Size, Field(ge=1)]]
    rest: dict[FileName, Crc]
    views: dict[FileName, tuple[Size, Crc]]
    parity: tuple[tuple[tuple[FileName | Literal[""], ...], tuple[FileName, ...], Size], ...]
    extents: tuple[tuple[StrictStr, PieceNumbers | SlabNumbers, FileName, Size, tuple[Crc, ...]], ...]
    values: ValuesPayload
