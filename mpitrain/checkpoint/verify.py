"""Whether a checkpoint is what was saved: every byte of every file against the manifest."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from mpitrain.checkpoint.files import gaps
from mpitrain.checkpoint.manifest import HASHED, Extent, Manifest, grouped, missing_files, read_manifest
from mpitrain.checkpoint.reading import check, covered, read_exactly
from mpitrain.errors import CheckpointError
from mpitrain.storage.disk import opened


def damages(folder: Path) -> Iterator[str]:
    """Hash everything in a checkpoint again.

    Yields:
        A sentence for each damage: the file, the bytes and the tensor.
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
        problem = next(iter(missing_files(folder, [(name, size)])), None)
        if problem is not None:
            yield problem
            complete = False
            continue
        try:
            yield from _file_damages(folder, manifest, name, size, by_file.get(name, []))
        except OSError as error:
            yield f"{folder / name} cannot be read: {error.strerror or error}"
    for name, spec in manifest.tensors.items() if complete else ():  # only then are the pieces as large as they say
        found = covered(extent.piece for extent in manifest.extents_of.get(name, ()))
        if found != spec.numel:
            yield f"{folder} holds {found} of the {spec.numel} elements of {name}"


def has_whole_tensors(folder: Path, manifest: Manifest, name: str) -> bool:
    """Whether every byte of the tensors in a file is what was saved; the structure around them is not looked at."""
    scratch = memoryview(bytearray(HASHED))
    try:
        with opened(folder / name) as descriptor:
            extents = (extent for extent in manifest.extents if extent.file == name)
            return not any(check(folder, manifest, extent, descriptor, scratch) for extent in extents)
    except OSError:
        return False


def _file_damages(folder: Path, manifest: Manifest, name: str, size: int, extents: list[Extent]) -> Iterator[str]:
    scratch = memoryview(bytearray(HASHED))
    with opened(folder / name) as descriptor:
        stretches = []
        for extent in extents:
            stretches.append((extent.offset, extent.piece.numel * manifest.tensors[extent.piece.name].itemsize))
            yield from check(folder, manifest, extent, descriptor, scratch)
        crc, rest = 0, gaps(stretches, size)
        for lo, hi in rest:
            for first in range(lo, hi, HASHED):
                block = scratch[: min(HASHED, hi - first)]
                read_exactly(descriptor, block, first, folder / name)
                crc = zlib.crc32(block, crc)
        stored = manifest.rest[name] if name in manifest.files else manifest.views[name][1]
        if crc != stored:
            what = "the HDF5 structure around the tensors is" if extents else "its content is"
            yield f"{folder / name}: {what} damaged: its hash does not match (nothing is restored from it)"
