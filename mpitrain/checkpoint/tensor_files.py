"""Files of tensors: those of safetensors, and state dictionaries that torch.save wrote.

A safetensors file is the length of a header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
data_offsets after the header), and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors, "Format"). Neither way executes anything a file says.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from mpitrain.checkpoint.files import bytes_of
from mpitrain.checkpoint.payload import Shape, Size
from mpitrain.errors import InputError, first_problem
from mpitrain.storage.disk import open_plain

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
    """The tensors of a file by their names, mapped from the disk where that can be done.

    Args:
        file: A .safetensors file, or one that torch.save made.

    Raises:
        InputError: It is none of these.
        OSError: It cannot be read.
    """
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)


def write_safetensors(
    path: Path, specs: Mapping[str, tuple[torch.dtype, Shape]], load: Callable[[str], torch.Tensor]
) -> None:
    """Write a new safetensors file.

    Args:
        path: The file.
        specs: The dtype and the shape of each tensor, by its name.
        load: Gives a tensor by its name; asked once for each, in order.

    Raises:
        InputError: safetensors does not know a dtype.
        OSError: It cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in specs.items():
        kind = _NAMES.get(dtype)
        if kind is None:
            told = str(dtype).removeprefix("torch.")
            raise InputError(f"{name} is {told}, which safetensors does not know; export to .pt")
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

    A full disk is a RuntimeError of torch's own writer, which does not say why it failed: here it is an OSError.

    Raises:
        OSError: It cannot be written.
    """
    failed: list[OSError] = []

    class Told(io.FileIO):
        def write(self, data: Any) -> int:
            view, done = memoryview(data).cast("B"), 0
            try:
                while done < len(view):
                    done += super().write(view[done:]) or 0
            except OSError as error:
                failed.append(error)
                raise
            return done

    try:
        with Told(path, "x") as file:
            torch.save(dict(state), file)
    except Exception:
        if failed:
            raise failed[0] from None
        raise


def _read_torch(file: Path) -> dict[str, torch.Tensor]:
    try:
        if zipfile.is_zipfile(file) and any(of.compress_type for of in zipfile.ZipFile(file).infolist()):
            raise ValueError("it is compressed, which torch.save never does")  # torch would map the bytes as they are
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # what a file that is something else makes it raise is nowhere written
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{file} is no file of plain tensors that torch.load reads: {text}") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    named = isinstance(loaded, dict) and all(isinstance(n, str) and torch.is_tensor(t) for n, t in loaded.items())
    if not named or not loaded:
        raise InputError(f"{file} is no state dictionary: it must map names to tensors, and nothing else")
    return dict(loaded)


class _TensorEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")

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
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = _entries(opened.read(length))
        data = np.memmap(file, dtype=np.uint8, mode="c", offset=8 + length) if size > 8 + length else np.empty(0, "u1")
        tensors, end = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            dtype, (lo, hi) = _KINDS[entry.dtype], entry.data_offsets
            if lo != end or not lo <= hi <= len(data) or hi - lo != prod(entry.shape) * dtype.itemsize:
                raise ValueError(f"{name!r:.100} is not where and as large as the header says")
            end = hi
            raw = torch.from_numpy(data[lo:hi]) if hi > lo else torch.empty(0, dtype=torch.uint8)
            aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
            tensors[name] = aligned.view(dtype).view(entry.shape)
        if end != len(data):
            raise ValueError(f"the header tells of {end} bytes, {len(data)} follow")
    except ValidationError as error:
        raise InputError(f"{file} is no safetensors file: {first_problem(error)}") from None
    except (ValueError, RuntimeError) as error:  # RuntimeError: a shape that torch does not take
        raise InputError(f"{file} is no safetensors file: {str(error).splitlines()[0]}") from None
    return {name: tensors[name] for name in entries}


def _entries(header: bytes) -> dict[str, _TensorEntry]:
    """The tensors that a header tells of. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("it names something twice")
        return dict(pairs)

    try:
        content = json.loads(header, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if isinstance(content, dict):
        content.pop("__metadata__", None)
    return _HEADER.validate_python(content)
