"""Export and import of model weights: safetensors files and torch state dictionaries.

A safetensors file consists of the length of the header (8 bytes, little endian), the header (JSON: name -> dtype,
shape, data_offsets after the header), and the bytes of the tensors one after the other
(https://github.com/huggingface/safetensors, "Format"). Reading either kind of file executes no code from it.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.commit import finish_folder
from mpitrain.checkpoint.contents import complete_manifest, load_tensor
from mpitrain.checkpoint.files import Part, bytes_of, make_structure, make_view, write_parts
from mpitrain.checkpoint.manifest import DTYPES, MODEL, Manifest, Shape, Size, TensorSpec, Values, trained_source
from mpitrain.errors import InputError, first_problem, refusing
from mpitrain.layout.boxes import Piece
from mpitrain.storage.disk import begin_folder, from_json, open_plain, replacing, reporting, require_new, temporary_name
from mpitrain.storage.hdf5 import begin_file, image_bytes
from mpitrain.storage.text import bytes_text

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_LONGEST_NAME = 1000
_DIMENSIONS = 32  # largest number of dimensions of an HDF5 data set
_REPEATED = 16  # largest ratio of the tensors' bytes to the file's, for tensors that share memory


def export(folder: Path, out: Path) -> int:
    """Write the model's parameters and buffers to a file. Tied parameters are written under all their names.

    Args:
        folder: Folder of the checkpoint.
        out: Path of a new file; its suffix selects the format: .safetensors, or .pt for torch.load.

    Returns:
        Number of tensors written.

    Raises:
        InputError: The file exists, cannot be written, or has an unknown suffix.
        CheckpointError: The checkpoint is not whole.
    """
    require_new(out)
    manifest = complete_manifest(folder)
    names = [name.removeprefix(MODEL) for name in manifest.tensors if name.startswith(MODEL)]
    sources = {name: trained_source(manifest, name) for name in names}
    if not sources:
        raise InputError(f"{folder} contains no model; give a checkpoint of a training run")
    ties = {alias: sources[name] for alias, name in manifest.values.get("tied", {}).items() if name in sources}
    if out.suffix not in (".safetensors", *_TORCH):
        raise InputError(f"{out}: unknown file ending; use .safetensors or .pt")
    sources |= ties
    with os_errors(out), replacing(out) as temporary:
        if out.suffix == ".safetensors":
            specs = {name: manifest.tensors[source] for name, source in sources.items()}
            layouts = {name: (DTYPES[spec.dtype], spec.shape) for name, spec in specs.items()}
            write_safetensors(temporary, layouts, lambda name: load_tensor(folder, manifest, sources[name]))
        else:
            loaded = {source: load_tensor(folder, manifest, source) for source in set(sources.values())}
            save_torch({name: loaded[source] for name, source in sources.items()}, temporary)
    return len(sources)


def import_weights(
    file: Path, root: Path, check: Callable[[Mapping[str, torch.Tensor]], None] = lambda tensors: None
) -> Path:
    """Create a checkpoint of step 0 from a file's tensors, without optimizer state.

    Args:
        file: Path of a .safetensors file, or of one written by torch.save.
        root: Checkpoint folder of a run.
        check: Function that raises InputError for tensors that do not fit the run's model.

    Returns:
        Folder of the checkpoint.

    Raises:
        InputError: The file has neither format, or the folder already has checkpoints.
    """
    with os_errors(file), open_plain(file) as opened:
        size, tensors = os.fstat(opened.fileno()).st_size, read_tensors(file)
    check(tensors)
    return make_first_checkpoint(root, file, tensors, size, {})


def make_first_checkpoint(
    root: Path, origin: Path, tensors: Mapping[str, torch.Tensor], size: int, values: Values
) -> Path:
    """Create the checkpoint of step 0 that a run starts from.

    Args:
        root: Checkpoint folder of a run.
        origin: File or folder that the tensors come from.
        tensors: Parameters and buffers of the model by name.
        size: Total size in bytes of the files that they come from.
        values: Further values to store beside the tensors.

    Returns:
        Folder of the checkpoint.

    Raises:
        InputError: The folder already has checkpoints, or a checkpoint cannot hold one of the tensors.
    """
    if folders.finished_steps(root):
        raise InputError(f"{root} already has checkpoints; give a new run folder")
    parts, tied = _parts(origin, tensors, size)
    defaults = {"position": 0, "data": None, "optimizer": {}, "tied": tied, "imported": origin.name}
    final = root / folders.folder_name(0)
    with os_errors(final):
        _make_checkpoint(final, parts, defaults | values)
    return final


def _parts(file: Path, tensors: Mapping[str, torch.Tensor], size: int) -> tuple[list[Part], dict[str, str]]:
    """Return the parts of the checkpoint, and for each alias of a tensor, the name under which it is saved.

    Args:
        file: Path of the file, for messages.
        tensors: Tensors by name.
        size: Size of the file in bytes.

    Raises:
        InputError: A checkpoint cannot hold a tensor, or tensors are large only because they repeat parts of the file.
    """
    tied: dict[str, str] = {}
    places: dict[tuple[Any, ...], str] = {}
    parts: list[Part] = []
    total = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or dtype not in DTYPES:
            kind = f"{tensor.layout} {tensor.dtype} on {tensor.device}".replace("torch.", "")
            raise InputError(f"{file}: {name} is {kind}, which a checkpoint cannot store; convert it before saving")
        spec = TensorSpec(MODEL + name, tuple(tensor.shape), dtype)
        if problem := _storage_problem(name, spec):
            raise InputError(f"{file}: the tensor {name!r:.100} {problem}; rename or reshape it")
        where = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype)
        if tensor.numel() and where in places:
            tied[name] = places[where]
            continue
        places[where] = name
        total += spec.nbytes
        if total > _REPEATED * size:
            raise InputError(
                f"{file}: its tensors would need more than {bytes_text(total)}, but it has {bytes_text(size)}, because "
                f"{name} is an expanded view; save contiguous copies"
            )
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        parts.append(Part(spec, Piece.whole(spec.name, flat.numel()), flat))
    return parts, tied


def _storage_problem(name: str, spec: TensorSpec) -> str:
    """Return why HDF5 cannot store a tensor, or its name as a path in the file; empty if it can."""
    if not name.isprintable() or len(name) > _LONGEST_NAME or {"", ".", ".."} & set(name.split("/")):
        return "has an invalid name"
    if len(spec.shape) > _DIMENSIONS:
        return f"has {len(spec.shape)} dimensions, more than {_DIMENSIONS}"
    return "" if spec.possible else f"has the invalid shape {list(spec.shape)}"


def _make_checkpoint(final: Path, parts: list[Part], values: Values) -> None:
    """Write a checkpoint of whole tensors in one file, in this process without other ranks."""
    folders.require_free(final)
    temporary = final.with_name(temporary_name(final.name))
    begin_folder(temporary)
    try:
        path = temporary / "rank-00000.h5"
        structure = make_structure([(part.spec, part.piece) for part in parts])
        begin_file(path, structure.image)
        extents = tuple(write_parts(path, parts, structure.offsets))
        tensors = {part.spec.name: part.spec for part in parts}
        view = image_bytes(make_view(tensors, extents, values["tied"]))
        size, rest = {path.name: structure.image.size}, {path.name: structure.rest}
        finish_folder(temporary, final, Manifest(0, tensors, size, extents, values, rest), view)
        folders.point_to(final)
    except BaseException:
        folders.remove(temporary)
        raise


def os_errors(path: Path) -> AbstractContextManager[None]:
    """Return a context that turns an OSError about a file into an InputError."""
    return reporting(f"{path} cannot be used", "choose another path, or make room")


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


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, memory-mapped if possible.

    Args:
        file: Path of a .safetensors file, or of one written by torch.save.

    Raises:
        InputError: The file has neither format.
        OSError: The file cannot be read.
    """
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)


def write_safetensors(
    path: Path, specs: Mapping[str, tuple[torch.dtype, Shape]], load: Callable[[str], torch.Tensor]
) -> None:
    """Write a new safetensors file.

    Args:
        path: Path of the file.
        specs: Dtype and shape of each tensor by name.
        load: Function that returns a tensor by name; called once for each, in order.

    Raises:
        InputError: safetensors does not support a dtype.
        OSError: The file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in specs.items():
        kind = _NAMES.get(dtype)
        if kind is None:
            dtype_name = str(dtype).removeprefix("torch.")
            raise InputError(f"{name} is {dtype_name}, which safetensors does not support; export to .pt")
        end = begin + prod(shape) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in specs:
            file.write(bytes_of(load(name).reshape(-1)))


def save_torch(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file that torch.load reads.

    torch's own writer reports a full disk as a RuntimeError without the reason; this function raises an OSError
    instead.

    Args:
        state: Tensors by name.
        path: Path of a new file.

    Raises:
        OSError: The file cannot be written.
    """
    failed: list[OSError] = []

    class RecordingWriter(io.BufferedWriter):
        def write(self, data: Any) -> int:
            try:
                return super().write(data)
            except OSError as error:
                failed.append(error)
                raise

    try:
        with RecordingWriter(io.FileIO(path, "x")) as file:
            torch.save(dict(state), file)
    except Exception:
        if failed:
            raise failed[0] from None
        raise


def _read_torch(file: Path) -> dict[str, torch.Tensor]:
    fix = "save a state dictionary with torch.save"
    with refusing(f"{file} is not a file of plain tensors that torch.load reads", fix), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if zipfile.is_zipfile(file) and any(of.compress_type for of in zipfile.ZipFile(file).infolist()):
            raise ValueError("it is compressed, which torch.save never does")  # torch would map the compressed bytes
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    named = isinstance(loaded, dict) and all(isinstance(n, str) and torch.is_tensor(t) for n, t in loaded.items())
    if not named or not loaded:
        raise InputError(f"{file} is not a state dictionary: it must map names to tensors, and contain nothing else")
    return dict(loaded)


class _TensorEntry(BaseModel, extra="forbid"):
    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "C64"]
    shape: Shape
    data_offsets: tuple[Size, Size]


_HEADER = TypeAdapter(dict[str, _TensorEntry])


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    size = file.stat().st_size
    try:
        with open_plain(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes, but the file has {size}")
            content = from_json(opened.read(length))
        if isinstance(content, dict):
            content.pop("__metadata__", None)
        entries = _HEADER.validate_python(content)
        data = np.memmap(file, dtype=np.uint8, mode="c", offset=8 + length) if size > 8 + length else np.empty(0, "u1")
        tensors, end = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            dtype, (lo, hi) = _KINDS[entry.dtype], entry.data_offsets
            if lo != end or not lo <= hi <= len(data) or hi - lo != prod(entry.shape) * dtype.itemsize:
                raise ValueError(f"{name!r:.100} does not have the position or the size that the header gives")
            end = hi
            raw = torch.from_numpy(data[lo:hi]) if hi > lo else torch.empty(0, dtype=torch.uint8)
            aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
            tensors[name] = aligned.view(dtype).view(entry.shape)
        if end != len(data):
            raise ValueError(f"the header describes {end} bytes, but {len(data)} follow")
    except ValidationError as error:
        raise InputError(f"{file} is not a valid safetensors file: {first_problem(error)}") from None
    except (ValueError, RuntimeError) as error:  # RuntimeError: a shape that torch does not accept
        raise InputError(f"{file} is not a valid safetensors file: {str(error).splitlines()[0]}") from None
    return {name: tensors[name] for name in entries}
