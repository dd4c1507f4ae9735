"""manifest.json: the tensors of a checkpoint, the location of each element, and hashes to verify them.

    checkpoints/step-00000100/
      manifest.json      written last; {"crc32": of the payload's text, "payload": {...}}
      rank-00000.h5      one file per rank (or node-00000.h5 per node): each tensor's piece a contiguous data set
      rank-00001.h5
      model.h5           a view of the whole model for people and tools

The payload lists the tensors (name, shape, dtype), the files (bytes), and the location of every piece: its elements
(`layout.Piece`), its file and byte offset, and a CRC-32 for each `HASHED` bytes. For each file it has a CRC-32 of all
bytes outside the tensors. The HDF5 structure is for people and tools; restoring uses only the manifest. A folder is a
checkpoint only if its manifest is whole and its files have the listed sizes.

A payload with a correct hash may still be invalid or malicious, so every type, range and name is validated before use.
File names are plain names; a tensor is not larger than the ranges of files that hold it; and these lie within their
files, whose sizes are compared with those on disk before anything is read.
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
MODEL = "model/"  # prefix of the names of parameters and buffers
MASTER = "master/"  # prefix of the optimizer's fp32 copies in 16-bit training
AVERAGE = "average/"  # prefix of the averages of parameters and buffers over several steps
PREVIOUS = "previous/"  # prefix of the parameters before the last step, for parallel.schedule 2bw
NON_FINITE_SINCE = "fruitless_since"  # key of a value: step since which nothing was learned, 0 if training was learning
HASHED = 4 << 20  # bytes covered by one hash
_LARGEST = 1 << 30  # largest manifest in bytes, enough for millions of pieces

_NAMES = "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128"
Values = dict[str, Any]  # state of a job other than tensors, as JSON values
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


@dataclass(frozen=True)
class TensorSpec:
    """Logical tensor, independent of which ranks hold it.

    Attributes:
        name: Name in the checkpoint.
        shape: Full shape.
        dtype: Key of `DTYPES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def possible(self) -> bool:
        """True if such a tensor can exist; the dimensions of an empty tensor are checked as well."""
        return self.dtype in DTYPES and prod(max(1, length) for length in self.shape) < 1 << 63


@dataclass(frozen=True)
class Extent:
    """Location of a piece of a tensor in a file.

    Attributes:
        piece: Piece of the tensor.
        file: Name of the file.
        offset: First byte of the piece in the file.
        hashes: CRC-32 of each `HASHED` bytes of the piece.
    """

    piece: Piece
    file: str
    offset: int
    hashes: tuple[int, ...]


@dataclass(frozen=True)
class ParitySet:
    """Files that protect each other, at most one per node; see `mpitrain.checkpoint.parity`.

    Attributes:
        files: File of each member, or "" if a member has none.
        parities: Parity file of each member.
        chunk: Size of a parity in bytes.
    """

    files: tuple[str, ...]
    parities: tuple[str, ...]
    chunk: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        step: Step at which it was saved.
        tensors: Logical tensors by name.
        files: Size in bytes of each file that holds tensors.
        extents: Locations of the pieces of the tensors.
        values: Further state that the job needs to resume, as JSON values.
        rest: CRC-32 of each file's bytes outside all extents.
        views: Size in bytes and CRC-32 of files from which nothing is restored.
        parity: Parity sets from which files of lost nodes are rebuilt.
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
        """Extents of each tensor, by name."""
        return grouped(self.extents, lambda extent: extent.piece.name)

    def value(self, name: str) -> Any:
        """Return one of `values` that is required to resume. Raises CheckpointError if it is missing."""
        if name not in self.values:
            raise CheckpointError(f"the checkpoint of step {self.step} has no {name!r} among its values")
        return self.values[name]


def source_of(manifest: Manifest, name: str, dtype: torch.dtype) -> str:
    """Return the name of the saved tensor from which to fill a model tensor or its fp32 copy.

    For fp32 this is the saved fp32 copy if the checkpoint has one, else the parameter. The checkpoint may have neither.
    A checkpoint without the parameters before the last step has the parameters.

    Args:
        manifest: Contents of the checkpoint.
        name: Name of the tensor to fill.
        dtype: Dtype of the tensor to fill.
    """
    kind, _, rest = name.partition("/")
    if kind + "/" == PREVIOUS and name not in manifest.tensors:
        kind, name = MODEL.rstrip("/"), MODEL + rest
    if dtype == torch.float32 and kind + "/" in (MODEL, MASTER):
        return MASTER + rest if MASTER + rest in manifest.tensors else MODEL + rest
    return name


def trained_source(manifest: Manifest, name: str) -> str:
    """Return the name of the saved tensor that a model uses after training: an average if there is one.

    Args:
        manifest: Contents of the checkpoint.
        name: Name of a parameter or buffer, without prefix.
    """
    return AVERAGE + name if AVERAGE + name in manifest.tensors else MODEL + name


def grouped(extents: Iterable[Extent], key: Callable[[Extent], str]) -> dict[str, list[Extent]]:
    """Return the extents in groups of equal key, by key, keeping their order.

    Args:
        extents: Extents to group.
        key: Function that returns the key of an extent.
    """
    groups: dict[str, list[Extent]] = {}
    for extent in extents:
        groups.setdefault(key(extent), []).append(extent)
    return groups


def distinct(extents: Iterable[Extent]) -> list[Extent]:
    """Return the extents without repetitions of pieces that were written more than once."""
    return list({extent.piece: extent for extent in reversed(list(extents))}.values())


def encode_piece(piece: Piece) -> list[Any]:
    """Return a piece as a JSON value: the name of its tensor, followed by numbers.

    The numbers are [outer, dim, inner, start, stop, lo, hi] if the box restricts one dimension to the range [start,
    stop), and [shape, start, stop, lo, hi] if it restricts several. Only the format `NEWER` supports the second form.
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
    """Return the piece encoded by `encode_piece`. Raises ValueError if its box is not valid.

    Args:
        name: Name of the tensor.
        numbers: Numbers after the name.
    """
    *place, lo, hi = numbers
    if len(place) == 3:
        return Piece(name, Box(*place), lo, hi)
    outer, dim, inner, start, stop = place
    return Piece(name, Box((outer, dim, inner), (0, start, 0), (outer, stop, inner)), lo, hi)


def encode_extent(extent: Extent) -> list[Any]:
    """Return an extent as a JSON value."""
    return [*encode_piece(extent.piece), extent.file, extent.offset, list(extent.hashes)]


def decode_extent(values: Sequence[Any]) -> Extent:
    """Return the extent encoded by `encode_extent`."""
    name, numbers, file, offset, hashes = values
    return Extent(decode_piece(name, numbers), file, offset, tuple(hashes))


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest's file."""
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
    """Manifest in a format that this version does not support, written by another version of mpitrain."""


def decode(data: bytes) -> Manifest:
    """Return the manifest in the bytes of its file.

    Raises:
        ValueError: The bytes are not a manifest, or it contradicts itself.
        UnknownFormat: The manifest has another format, for example that of a later version.
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
    """Raise ValueError if a small file claims to hold a large tensor, or an extent lies outside its tensor or file."""
    for name, spec in manifest.tensors.items():
        if not spec.possible:
            raise ValueError(f"{name!r:.100} has the impossible dtype or shape {spec.dtype!r:.40} {spec.shape!s:.100}")
    element_counts = dict.fromkeys(manifest.tensors, 0)  # of the pieces of each tensor
    byte_counts = dict.fromkeys(manifest.files, 0)  # of the pieces in each file
    for extent in manifest.extents:
        piece, box = extent.piece, extent.piece.box
        if piece.name not in element_counts or extent.file not in byte_counts:
            raise ValueError(
                f"a piece of {piece.name!r:.100} in {extent.file} belongs to a tensor or file that is not listed"
            )
        spec = manifest.tensors[piece.name]
        nbytes = piece.numel * spec.itemsize
        within = all(map(le, box.start, box.stop)) and all(map(le, box.stop, box.shape))
        if not within or not piece.lo <= piece.hi <= box.numel or prod(box.shape) != spec.numel:
            raise ValueError(f"a piece of {piece.name!r:.100} lies outside the tensor")
        if len(extent.hashes) != -(-nbytes // HASHED) or extent.offset + nbytes > manifest.files[extent.file]:
            raise ValueError(f"a piece of {piece.name!r:.100} lies outside {extent.file}")
        element_counts[piece.name] += piece.numel
        byte_counts[extent.file] += nbytes
    for name, spec in manifest.tensors.items():
        if element_counts[name] < spec.numel:
            raise ValueError(
                f"its files contain only {element_counts[name]} of the {spec.numel} elements of {name!r:.100}"
            )
    for file, size in manifest.files.items():
        if byte_counts[file] > size:
            raise ValueError(f"{file} has {size} bytes, but its pieces have {byte_counts[file]}")
        if file not in manifest.rest:
            raise ValueError(f"it has no hash of the bytes between the pieces in {file}")
    for one in manifest.parity:
        if len(one.files) != len(one.parities) or not {file for file in one.files if file} <= set(manifest.files):
            raise ValueError("a parity set names files that are not listed")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest and fsync it. Raises OSError.

    Args:
        folder: Folder of the checkpoint.
        manifest: Contents of the checkpoint.
    """
    write_durably(folder / MANIFEST, encode(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. No other file is read.

    Raises:
        CheckpointError: The manifest is missing, damaged or of another step; the message names the folder.
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
        raise CheckpointError(
            f"{folder / MANIFEST} is the manifest of step {manifest.step}; it does not belong in this folder"
        )
    return manifest


def was_finite(folder: Path) -> bool:
    """Return whether a checkpoint was saved while training was still learning; False if its manifest cannot be read."""
    try:
        return not read_manifest(folder).values.get(NON_FINITE_SINCE)
    except CheckpointError:
        return False


def missing_file(folder: Path, files: Iterable[tuple[str, int]]) -> str:
    """Return a sentence about the first file that is missing or has the wrong size; empty if there is none.

    Args:
        folder: Folder of the files.
        files: Name and expected size in bytes of each file.
    """
    for name, size in files:
        try:
            actual = (folder / name).stat().st_size
        except OSError:
            return f"{folder / name} is missing"
        if actual != size:
            return f"{folder / name} has {actual} bytes, but its manifest says {size}"
    return ""


def require_files(folder: Path, files: Iterable[tuple[str, int]]) -> None:
    """Raise CheckpointError if a file is missing or has the wrong size; see `missing_file`.

    Args:
        folder: Folder of the files.
        files: Name and expected size in bytes of each file.
    """
    if problem := missing_file(folder, files):
        raise CheckpointError(problem)


FORMAT = "mpitrain checkpoint 2"  # every tensor is divided along one dimension at most
NEWER = "mpitrain checkpoint 3"  # some tensors are divided along several dimensions

Size = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Crc = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
FileName = Annotated[StrictStr, StringConstraints(pattern=r"^[a-z]+(-[0-9]+)*\.(h5|bin)$", max_length=100)]
Shape = Annotated[tuple[Size, ...], Field(max_length=64)]
Scalar = StrictInt | StrictFloat | bool | StrictStr | None
PieceNumbers = tuple[Size, Size, Size, Size, Size, Size, Size]  # outer, dim, inner, start, stop, lo, hi
SlabNumbers = tuple[Shape, Shape, Shape, Size, Size]  # shape, start, stop, lo, hi


class LossScalePayload(BaseModel, extra="allow"):
    """Saved state of a loss scale."""

    scale: Annotated[StrictFloat, Field(gt=0)] | Annotated[StrictInt, Field(gt=0)]
    good: Size


class EnginePayload(BaseModel, extra="allow"):
    """Saved state of the engine of `mpitrain.initialize`."""

    steps: Size
    skipped: Size
    values: dict[str, Any]


class ValuesPayload(BaseModel, extra="allow"):
    """Values that mpitrain defines, each of which may be missing; a job may store others."""

    position: Size = 0
    data: StrictStr | None = None
    tied: dict[str, StrictStr] = {}
    optimizer: dict[str, dict[str, Scalar]] = {}
    data_ranks: Size = 0
    loss_scale: LossScalePayload = LossScalePayload(scale=1, good=0)
    engine: EnginePayload = EnginePayload(steps=0, skipped=0, values={})


class Payload(BaseModel, extra="forbid", frozen=True):
    """JSON object of a manifest, with lists in place of tuples; see `mpitrain.checkpoint.manifest`."""

    format: Literal["mpitrain checkpoint 2", "mpitrain checkpoint 3"]
    step: Size
    tensors: tuple[tuple[StrictStr, Shape, StrictStr], ...]
    files: dict[FileName, Annotated[Size, Field(ge=1)]]
    rest: dict[FileName, Crc]
    views: dict[FileName, tuple[Size, Crc]]
    parity: tuple[tuple[tuple[FileName | Literal[""], ...], tuple[FileName, ...], Size], ...]
    extents: tuple[tuple[StrictStr, PieceNumbers | SlabNumbers, FileName, Size, tuple[Crc, ...]], ...]
    values: ValuesPayload
