"""Contents of a checkpoint: texts of `ls`, `show` and `diff`, reading of whole tensors, and verification.

Verification compares every byte of every file with the hashes in the manifest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path

import torch

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.files import Part, gaps
from mpitrain.checkpoint.manifest import (
    DTYPES,
    HASHED,
    MANIFEST,
    MODEL,
    NON_FINITE_SINCE,
    Extent,
    Manifest,
    TensorSpec,
    grouped,
    missing_file,
    read_manifest,
    require_files,
)
from mpitrain.checkpoint.reading import check, covered, plan, read, read_exactly
from mpitrain.errors import CheckpointError, printable
from mpitrain.layout.boxes import Piece
from mpitrain.storage.disk import opened
from mpitrain.storage.text import bytes_text, counted


def resolve(path: Path) -> Path:
    """Return the checkpoint that a path refers to: the path itself, or the newest whole checkpoint of a run folder."""
    listed = folders.require(path)
    return next((folder for folder in listed if state(folder) == "whole"), listed[0])


def state(folder: Path) -> str:
    """Return "whole", or what is wrong with the manifest or the sizes of the files. No tensors are read."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    return missing_file(folder, manifest.files.items()) or "whole"


def load_tensor(folder: Path, manifest: Manifest, name: str) -> torch.Tensor:
    """Read a whole tensor.

    Args:
        folder: Folder of the checkpoint, whose files must have their full sizes.
        manifest: Contents of the checkpoint.
        name: Name of the tensor.

    Raises:
        CheckpointError: The tensor does not fit into memory, or its bytes are damaged or cannot be read.
    """
    spec = manifest.tensors[name]
    try:
        data = torch.empty(spec.numel, dtype=DTYPES[spec.dtype])
    except RuntimeError:  # torch's error if memory is exhausted
        raise CheckpointError(
            f"{folder}: {name} of {bytes_text(spec.nbytes)} does not fit into memory; use a machine with more"
        ) from None
    read_parts(folder, manifest, [Part(spec, Piece.whole(name, data.numel()), data)])
    return data.view(spec.shape)


def read_parts(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Fill parts from a checkpoint in this process, without other ranks. Raises CheckpointError.

    Args:
        folder: Folder of the checkpoint.
        manifest: Contents of the checkpoint.
        parts: Parts whose data is filled.
    """
    try:
        read(folder, plan(folder, manifest, parts))
    except OSError as error:
        raise folders.unreadable(folder, error) from None


def complete_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises CheckpointError unless all its files have their full sizes."""
    manifest = read_manifest(folder)
    require_files(folder, manifest.files.items())
    return manifest


def listing(path: Path) -> Iterator[str]:
    """Yield the lines that `ls` prints for a run folder: a header, and a line for each checkpoint."""
    yield f"{'step':>10}  {'size':>11}  {'files':>5}  {'written':19}  state"
    listed = folders.require(path)
    best = folders.best_step(listed[0].parent)
    for folder in listed:
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(folder)
            step = str(manifest.step)
            files, size = str(len(manifest.files)), bytes_text(sum(manifest.files.values()))
            time = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime).isoformat(" ", "seconds")
        except (CheckpointError, OSError):
            step = folder.name.partition("-")[2].lstrip("0") or "0"
            files = size = time = "?"
        since = manifest.values.get(NON_FINITE_SINCE) if manifest is not None else None
        remark = f", nothing learned since step {since}" if since else ""
        remark += ", best" if best is not None and folder.name == folders.folder_name(best) else ""
        yield f"{step:>10}  {size:>11}  {files:>5}  {time:19}  {state(folder)}{remark}"


def description(folder: Path, pattern: str = "*") -> Iterator[str]:
    """Yield the lines that `show` prints for a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        pattern: Pattern of the names of listed tensors, in which * matches any characters and ? matches one.
    """
    manifest = read_manifest(folder)
    numel = sum(spec.numel for name, spec in manifest.tensors.items() if name.startswith(MODEL))
    yield f"{folder}"
    yield f"step         {manifest.step}"
    yield f"model        {numel:,} numbers in parameters and buffers"
    yield f"files        {len(manifest.files)}, {bytes_text(sum(manifest.files.values()))}"
    for name, size in manifest.files.items():
        pieces = sum(extent.file == name for extent in manifest.extents)
        yield f"  {name}  {bytes_text(size):>11}  {counted(pieces, 'piece')}"
    names = sorted(name for name in manifest.tensors if fnmatch(name, pattern))
    yield f"tensors      {len(names)} of {len(manifest.tensors)}"
    shown = {name: printable(name) for name in names}
    width = max(map(len, shown.values()), default=0)
    for name in names:
        spec = manifest.tensors[name]
        nbytes = bytes_text(spec.nbytes)
        written = counted(len(manifest.extents_of.get(name, ())), "piece")
        yield f"  {shown[name]:{width}}  {_kind(spec):24}  {nbytes:>11}  {written}"
    yield "values"
    for key, value in manifest.values.items():
        text = json.dumps(value)
        yield f"  {key}: {text if len(text) <= 100 else f'{text[:97]}...'}"


def differences(a: Path, b: Path) -> Iterator[str]:
    """Yield the lines that `diff` prints: one for each tensor that is not bitwise equal in both checkpoints.

    Args:
        a: Folder of the first checkpoint.
        b: Folder of the second checkpoint.
    """
    first, second = complete_manifest(a), complete_manifest(b)
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        if name not in second.tensors or name not in first.tensors:
            yield f"{name}: only in {a if name in first.tensors else b}"
            continue
        if first.tensors[name] != second.tensors[name]:
            yield f"{name}: {_kind(first.tensors[name])} and {_kind(second.tensors[name])}"
            continue
        x, y = load_tensor(a, first, name).reshape(-1), load_tensor(b, second, name).reshape(-1)
        if x.numel() and not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            yield f"{name}: {_distance(x, y)}"


def _distance(x: torch.Tensor, y: torch.Tensor) -> str:
    different = int((x != y).sum())
    wide = torch.complex128 if x.is_complex() else torch.float64
    gap = (x.to(wide) - y.to(wide)).abs()
    if bool(gap.isnan().any()):
        return f"{different} of {x.numel()} elements differ, some are NaN"
    if not different:
        return "equal numbers, but different bits (signs of zero)"
    return f"{different} of {x.numel()} elements differ, by at most {float(gap.max()):.3g}"


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def damaged_places(folder: Path) -> Iterator[str]:
    """Verify all hashes of a checkpoint.

    Yields:
        Sentence for each damaged place, with the file, the bytes and the tensor.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        yield str(error)
        return
    by_file = grouped(manifest.extents, lambda extent: extent.file)
    sizes = manifest.files | {name: size for name, (size, _) in manifest.views.items()}
    complete = True
    for name, size in sizes.items():
        if problem := missing_file(folder, [(name, size)]):
            yield problem
            complete = False
            continue
        try:
            yield from _damaged_places_in_file(folder, manifest, name, size, by_file.get(name, []))
        except OSError as error:
            yield f"{folder / name} cannot be read: {error.strerror or error}"
    for name, spec in manifest.tensors.items() if complete else ():  # only then do the pieces have their full sizes
        count = covered(extent.piece for extent in manifest.extents_of.get(name, ()))
        if count != spec.numel:
            yield f"{folder} contains only {count} of the {spec.numel} elements of {name}"


def has_intact_tensors(folder: Path, manifest: Manifest, name: str) -> bool:
    """Return whether the bytes of all tensors in a file match their hashes; the HDF5 structure is not checked.

    Args:
        folder: Folder of the checkpoint.
        manifest: Contents of the checkpoint.
        name: Name of the file.
    """
    scratch = memoryview(bytearray(HASHED))
    try:
        with opened(folder / name) as descriptor:
            extents = (extent for extent in manifest.extents if extent.file == name)
            return not any(check(folder, manifest, extent, descriptor, scratch) for extent in extents)
    except OSError:
        return False


def _damaged_places_in_file(
    folder: Path, manifest: Manifest, name: str, size: int, extents: list[Extent]
) -> Iterator[str]:
    scratch = memoryview(bytearray(HASHED))
    with opened(folder / name) as descriptor:
        occupied = []
        for extent in extents:
            occupied.append((extent.offset, extent.piece.numel * manifest.tensors[extent.piece.name].itemsize))
            yield from check(folder, manifest, extent, descriptor, scratch)
        crc, rest = 0, gaps(occupied, size)
        for lo, hi in rest:
            for first in range(lo, hi, HASHED):
                block = scratch[: min(HASHED, hi - first)]
                read_exactly(descriptor, block, first, folder / name)
                crc = zlib.crc32(block, crc)
        stored = manifest.rest[name] if name in manifest.files else manifest.views[name][1]
        if crc != stored:
            what = "the HDF5 structure around the tensors is" if extents else "its content is"
            yield f"{folder / name}: {what} damaged: its hash does not match (nothing is restored from it)"
