"""Model weights out of a checkpoint and into one: safetensors files and torch state dictionaries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.commit import finish_folder
from mpitrain.checkpoint.contents import load_tensor, whole
from mpitrain.checkpoint.files import Part, make_structure, write_parts
from mpitrain.checkpoint.manifest import DTYPES, MODEL, Manifest, TensorSpec, Values
from mpitrain.checkpoint.tensor_files import read_tensors, save_torch, write_safetensors
from mpitrain.checkpoint.view import make_view
from mpitrain.errors import InputError
from mpitrain.layout import Piece
from mpitrain.storage.disk import open_plain, reason, replacing
from mpitrain.storage.hdf5 import begin_file, image_bytes
from mpitrain.storage.text import bytes_text

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_LONGEST_NAME = 1000
_DIMENSIONS = 32  # of an HDF5 data set, at most
_REPEATED = 16  # times the bytes of a file that tensors may take which share some of them


def export(folder: Path, out: Path) -> int:
    """Write the model's parameters and buffers into a file. Tied parameters appear under all their names.

    Args:
        folder: The checkpoint.
        out: A new file, whose ending says what it is: .safetensors, or .pt for one that torch.load reads.

    Returns:
        How many tensors were written.

    Raises:
        InputError: The file is there already, cannot be written, or is of no known kind.
        CheckpointError: The checkpoint is not whole.
    """
    if os.path.lexists(out):
        raise InputError(f"{out} exists already; give another name, or remove it")
    manifest = whole(folder)
    sources = {name.removeprefix(MODEL): name for name in manifest.tensors if name.startswith(MODEL)}
    if not sources:
        raise InputError(f"{folder} holds no model")
    ties = {alias: sources[name] for alias, name in manifest.values.get("tied", {}).items() if name in sources}
    write = {".safetensors": _write_safetensors}.get(out.suffix, _write_torch if out.suffix in _TORCH else None)
    if write is None:
        raise InputError(f"{out}: the kind of file is told by its ending; use .safetensors or .pt")
    with os_errors(out), replacing(out) as temporary:
        write(temporary, folder, manifest, sources | ties)
    return len(sources | ties)


def _write_torch(path: Path, folder: Path, manifest: Manifest, sources: Mapping[str, str]) -> None:
    loaded = {source: load_tensor(folder, manifest, source) for source in set(sources.values())}
    save_torch({name: loaded[source] for name, source in sources.items()}, path)


def _write_safetensors(path: Path, folder: Path, manifest: Manifest, sources: Mapping[str, str]) -> None:
    specs = {name: manifest.tensors[source] for name, source in sources.items()}
    told = {name: (DTYPES[spec.dtype], spec.shape) for name, spec in specs.items()}
    write_safetensors(path, told, lambda name: load_tensor(folder, manifest, sources[name]))


def import_weights(
    file: Path, root: Path, check: Callable[[Mapping[str, torch.Tensor]], None] = lambda tensors: None
) -> Path:
    """Make a checkpoint of step 0 of a file's tensors, without states of an optimizer.

    Args:
        file: A .safetensors file, or one that torch.save made.
        root: The checkpoint folder of a run.
        check: Raises InputError for tensors that the run's model cannot have.

    Returns:
        The folder of the checkpoint.

    Raises:
        InputError: The file is none of these, or the folder has checkpoints already.
    """
    with os_errors(file):
        with open_plain(file) as opened:
            size = os.fstat(opened.fileno()).st_size
        tensors = read_tensors(file)
    check(tensors)
    return make_first(root, file, tensors, size, {})


def make_first(root: Path, origin: Path, tensors: Mapping[str, torch.Tensor], size: int, values: Values) -> Path:
    """Make the checkpoint of step 0 that a run begins with.

    Args:
        root: The checkpoint folder of a run.
        origin: Where the tensors are from.
        tensors: The model's parameters and buffers by their names.
        size: Of the files that they are from, in bytes.
        values: What is to be said beside them.

    Returns:
        The folder of the checkpoint.

    Raises:
        InputError: The folder has checkpoints already, or there is a tensor that a checkpoint cannot hold.
    """
    if folders.finished_steps(root):
        raise InputError(f"{root} has checkpoints already; give a new run folder")
    parts, tied = _parts(origin, tensors, size)
    own = {"position": 0, "data": None, "optimizer": {}, "tied": tied, "imported": origin.name}
    final = root / folders.folder_name(0)
    with os_errors(final):
        _make_checkpoint(final, parts, own | values)
    return final


def _parts(file: Path, tensors: Mapping[str, torch.Tensor], size: int) -> tuple[list[Part], dict[str, str]]:
    """What goes into the checkpoint, and the further names of tensors that have several. size: of the file, in bytes.

    Raises InputError for what a checkpoint cannot hold, and for tensors that are made large only by repeating what is
    in the file.
    """
    tied: dict[str, str] = {}
    places: dict[tuple[Any, ...], str] = {}
    parts: list[Part] = []
    total = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or dtype not in DTYPES:
            kind = f"{tensor.layout} {tensor.dtype} on {tensor.device}".replace("torch.", "")
            raise InputError(f"{file}: {name} is {kind}, which a checkpoint cannot hold")
        spec = TensorSpec(MODEL + name, tuple(tensor.shape), dtype)
        if problem := _unusable(name, spec):
            raise InputError(f"{file}: the tensor {name!r:.100} {problem}; give it another form")
        where = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype)
        if tensor.numel() and where in places:
            tied[name] = places[where]
            continue
        places[where] = name
        total += spec.nbytes
        if total > _REPEATED * size:
            raise InputError(
                f"{file}: its tensors would take more than {bytes_text(total)}, and it has {bytes_text(size)}: {name} "
                "is expanded; save contiguous copies"
            )
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        parts.append(Part(spec, Piece.whole(spec.name, flat.numel()), flat))
    return parts, tied


def _unusable(name: str, spec: TensorSpec) -> str:
    """Why HDF5 would not take a tensor or its name, a path in the file; empty if it does."""
    if not name.isprintable() or len(name) > _LONGEST_NAME or {"", ".", ".."} & set(name.split("/")):
        return "has no name that a tensor can have"
    if len(spec.shape) > _DIMENSIONS:
        return f"has {len(spec.shape)} dimensions, more than {_DIMENSIONS}"
    return "" if spec.possible else f"has the shape {list(spec.shape)}"


def _make_checkpoint(final: Path, parts: list[Part], values: Values) -> None:
    """A checkpoint of whole tensors in one file, written by this process alone."""
    temporary = folders.begin(final)
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


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Inside, what the system refuses to do with a file is an InputError that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: {reason(error)}") from None
