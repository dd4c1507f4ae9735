"""Model weights out of a checkpoint and into one: safetensors files and torch state dictionaries.

A safetensors file is the length of a header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
data_offsets after the header), and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors, "Format"). Neither way executes anything a file says.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.contents import load_tensor
from mpitrain.checkpoint.files import Part, Place, begin_file, bytes_of, make_structure, write_parts
from mpitrain.checkpoint.image import image_bytes
from mpitrain.checkpoint.manifest import DTYPES, MODEL, Manifest, TensorSpec, read_manifest, write_manifest
from mpitrain.checkpoint.view import VIEW, make_view
from mpitrain.disk import sync
from mpitrain.errors import InputError
from mpitrain.layout import Piece

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _KINDS.items()}
_LONGEST_HEADER = 100 << 20  # bytes


def export(folder: Path, out: Path) -> int:
    """Write the model's parameters and buffers into a new .safetensors or .pt file; returns how many.

    Tied parameters appear under all their names. Raises InputError, CheckpointError.
    """
    if os.path.lexists(out):
        raise InputError(f"{out} exists already; give another name, or remove it")
    manifest = read_manifest(folder)
    sources = {name.removeprefix(MODEL): name for name in manifest.tensors if name.startswith(MODEL)}
    if not sources:
        raise InputError(f"{folder} holds no model")
    ties = {alias: sources[name] for alias, name in manifest.values.get("tied", {}).items() if name in sources}
    write = {".safetensors": _write_safetensors}.get(out.suffix, _write_torch if out.suffix in _TORCH else None)
    if write is None:
        raise InputError(f"{out}: the kind of file is told by its ending; use .safetensors or .pt")
    with _os_errors(out):
        temporary = out.with_name(folders.temporary_name(out.name))
        try:
            write(temporary, folder, manifest, sources | ties)
            sync(temporary)
            os.rename(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)
    return len(sources | ties)


def _write_torch(path: Path, folder: Path, manifest: Manifest, sources: Mapping[str, str]) -> None:
    loaded = {source: load_tensor(folder, manifest, source) for source in set(sources.values())}
    torch.save({name: loaded[source] for name, source in sources.items()}, path)


def _write_safetensors(path: Path, folder: Path, manifest: Manifest, sources: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, source in sources.items():
        spec = manifest.tensors[source]
        kind = _NAMES.get(DTYPES[spec.dtype])
        if kind is None:
            raise InputError(f"{name} is {spec.dtype}, which safetensors does not know; export to .pt")
        end = begin + prod(spec.shape) * spec.itemsize
        header[name] = {"dtype": kind, "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for source in sources.values():
            file.write(bytes_of(load_tensor(folder, manifest, source).reshape(-1)))


def import_weights(file: Path, root: Path) -> Path:
    """Make a checkpoint of step 0 of a file's tensors, without optimizer state; returns its folder.

    root: the checkpoint folder of a run. Raises InputError for what is no such file, or a folder with checkpoints.
    """
    if folders.finished_steps(root):
        raise InputError(f"{root} has checkpoints already; give a new run folder")
    with _os_errors(file):
        tensors = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    tied: dict[str, str] = {}
    places: dict[tuple[Any, ...], str] = {}
    parts = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise InputError(f"{file}: {name} is {tensor.dtype}, which a checkpoint cannot hold")
        where = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype)
        if tensor.numel() and where in places:
            tied[name] = places[where]
            continue
        places[where] = name
        spec = TensorSpec(MODEL + name, tuple(tensor.shape), dtype)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        parts.append(Part(spec, Piece.whole(spec.name, flat.numel()), flat))
    values = {"position": 0, "data": None, "optimizer": {}, "tied": tied, "imported": file.name}
    final = root / folders.folder_name(0)
    with _os_errors(final):
        _make_checkpoint(final, parts, values)
    return final


def _make_checkpoint(final: Path, parts: list[Part], values: dict[str, Any]) -> None:
    """A checkpoint of whole tensors in one file, written by this process alone."""
    temporary = folders.begin(final)
    try:
        path = temporary / "rank-00000.h5"
        structure = make_structure([Place(part.spec, part.piece) for part in parts])
        begin_file(path, structure)
        extents = tuple(write_parts(path, parts, structure.offsets))
        tensors = {part.spec.name: part.spec for part in parts}
        view = image_bytes(make_view(tensors, extents, values["tied"]))
        (temporary / VIEW).write_bytes(view)
        sync(temporary / VIEW)
        manifest = Manifest(
            0,
            tensors,
            {path.name: structure.size},
            extents,
            values,
            {path.name: structure.rest},
            {VIEW: (len(view), zlib.crc32(view))},
        )
        write_manifest(temporary, manifest)
        folders.publish(temporary, final)
        folders.point_to(final)
    except BaseException:
        folders.remove(temporary)
        raise


def _read_torch(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # what a file that is something else makes it raise is nowhere written
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{file} is no file of plain tensors that torch.load reads: {text}") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded or not all(torch.is_tensor(t) for t in loaded.values()):
        raise InputError(f"{file} is no state dictionary: it must map names to tensors, and nothing else")
    return {str(name): tensor for name, tensor in loaded.items()}


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    size = file.stat().st_size
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(opened.read(length))
        data = np.memmap(file, dtype=np.uint8, mode="c", offset=8 + length) if size > 8 + length else np.empty(0, "u1")
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (lo, hi) = _KINDS[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not 0 <= lo <= hi <= len(data) or hi - lo != prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} does not fit into the file")
            raw = torch.from_numpy(data[lo:hi]) if hi > lo else torch.empty(0, dtype=torch.uint8)
            aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
            tensors[name] = aligned.view(dtype).view(shape)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no safetensors file: {error}") from None
    return tensors


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
