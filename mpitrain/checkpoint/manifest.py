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
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint.payload import FORMAT, checked
from mpitrain.errors import CheckpointError
from mpitrain.layout import Box, Piece
from mpitrain.storage.disk import read_plain

MANIFEST = "manifest.json"
MODEL = "model/"  # what the names of parameters and buffers begin with
FRUITLESS = "fruitless_since"  # a value: the step since which nothing was learned when this was saved; 0: it was
HASHED = 4 << 20  # bytes under one hash
_LARGEST = 1 << 30  # bytes of a manifest: millions of pieces

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor: its whole shape, whatever any rank holds of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def possible(self) -> bool:
        """Whether a tensor can be so: an empty one may have other dimensions that are too large together."""
        return self.dtype in DTYPES and prod(max(1, length) for length in self.shape) < 1 << 63


@dataclass(frozen=True)
class Extent:
    """A piece of a tensor in a file. offset: its first byte. hashes: CRC-32 of each HASHED bytes of it."""

    piece: Piece
    file: str
    offset: int
    hashes: tuple[int, ...]


@dataclass(frozen=True)
class ParitySet:
    """Files that protect each other, at most one per node; see `mpitrain.checkpoint.parity`.

    files: of each member, empty where a member has none. parities: what each member holds for the others.
    chunk: bytes of a parity.
    """

    files: tuple[str, ...]
    parities: tuple[str, ...]
    chunk: int


@dataclass(frozen=True)
class Manifest:
    """values: whatever else the job needs to go on (JSON).

    files: bytes of each file with tensors in it. rest: CRC-32 of each file's bytes outside of all extents.
    views: (bytes, CRC-32) of files that nothing is restored from. parity: how files on lost nodes are rebuilt.
    """

    step: int
    tensors: dict[str, TensorSpec]
    files: dict[str, int]
    extents: tuple[Extent, ...]
    values: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, int] = field(default_factory=dict)
    views: dict[str, tuple[int, int]] = field(default_factory=dict)
    parity: tuple[ParitySet, ...] = ()

    @cached_property
    def extents_of(self) -> dict[str, list[Extent]]:
        """The extents of each tensor."""
        found: dict[str, list[Extent]] = {}
        for extent in self.extents:
            found.setdefault(extent.piece.name, []).append(extent)
        return found

    def value(self, name: str) -> Any:
        """One of `values` without which a job cannot go on. Raises CheckpointError."""
        if name not in self.values:
            raise CheckpointError(f"the checkpoint of step {self.step} has no {name!r} among its values")
        return self.values[name]


def encode_extent(extent: Extent) -> list[Any]:
    box = extent.piece.box
    place = [box.outer, box.dim, box.inner, box.start, box.stop, extent.piece.lo, extent.piece.hi]
    return [extent.piece.name, place, extent.file, extent.offset, list(extent.hashes)]


def decode_extent(values: Sequence[Any]) -> Extent:
    name, (outer, dim, inner, start, stop, lo, hi), file, offset, hashes = values
    return Extent(Piece(name, Box(outer, dim, inner, start, stop), lo, hi), file, offset, tuple(hashes))


def encode(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file."""
    payload = {
        "format": FORMAT,
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


def decode(data: bytes) -> Manifest:
    """Raises ValueError when these are not the bytes of a manifest, or it contradicts itself."""
    text = data.decode("utf-8")
    head, _, body = text.rstrip("\n").partition(', "payload": ')
    stored, payload_text = int(head.removeprefix('{"crc32": ')), body.removesuffix("}")
    if zlib.crc32(payload_text.encode()) != stored:
        raise ValueError("its hash does not match")
    try:
        content = json.loads(payload_text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    payload = checked(content)
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
    for problem in _contradictions(manifest):
        raise ValueError(problem)
    return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Whatever would let a small file stand for a large tensor, or bytes be read that are not a tensor's."""
    for name, spec in manifest.tensors.items():
        if not spec.possible:
            yield f"{name!r:.100} is {spec.dtype!r:.40} {spec.shape!s:.100}, which no tensor is"
    held = dict.fromkeys(manifest.tensors, 0)  # elements
    taken = dict.fromkeys(manifest.files, 0)  # bytes
    for extent in manifest.extents:
        piece, box = extent.piece, extent.piece.box
        if piece.name not in held or extent.file not in taken:
            yield f"a piece of {piece.name!r:.100} in {extent.file} is of no tensor or file that it lists"
            continue
        spec = manifest.tensors[piece.name]
        nbytes = piece.numel * spec.itemsize
        within = box.start <= box.stop <= box.dim and piece.lo <= piece.hi <= box.numel
        if not within or box.outer * box.dim * box.inner != spec.numel:
            yield f"a piece of {piece.name!r:.100} is no part of it"
        if len(extent.hashes) != -(-nbytes // HASHED) or extent.offset + nbytes > manifest.files[extent.file]:
            yield f"a piece of {piece.name!r:.100} does not lie in {extent.file}"
        held[piece.name] += piece.numel
        taken[extent.file] += nbytes
    for name, spec in manifest.tensors.items():
        if held[name] < spec.numel:
            yield f"its files hold {held[name]} of the {spec.numel} elements of {name!r:.100}"
    for file, size in manifest.files.items():
        if taken[file] > size:
            yield f"{file} has {size} bytes, and pieces of {taken[file]}"
        if file not in manifest.rest:
            yield f"it has no hash of the rest of {file}"
    for one in manifest.parity:
        if len(one.files) != len(one.parities) or not {file for file in one.files if file} <= set(manifest.files):
            yield "a set of parities is of other files than it lists"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, durable. Raises OSError."""
    with open(folder / MANIFEST, "xb") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError naming the folder and what is wrong with its manifest. Looks at no other file."""
    try:
        manifest = decode(read_plain(folder / MANIFEST, _LARGEST))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error.strerror or error}") from None
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


def missing_files(folder: Path, files: Iterable[tuple[str, int]]) -> Iterator[str]:
    """A sentence for each file that is not there in its full size."""
    for name, size in files:
        try:
            found = (folder / name).stat().st_size
        except OSError:
            yield f"{folder / name} is missing"
            continue
        if found != size:
            yield f"{folder / name} has {found} bytes, its manifest says {size}"


def require_files(folder: Path, files: Iterable[tuple[str, int]]) -> None:
    """Raises CheckpointError for the first file that is not there in its full size."""
    for problem in missing_files(folder, files):
        raise CheckpointError(problem)
