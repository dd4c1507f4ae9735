"""Optimizer states outside the memory where training computes: in host memory, or in files mapped into it.

This is ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity (Rajbhandari et al. 2021) for the part of the memory that is
read and written once a step. A mapped file costs page cache, which the system takes back when it needs the memory. On
a CPU, host memory is where the states are anyway.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from mpitrain.errors import InputError
from mpitrain.shard.flat_parameters import FlatParameter

HOST = "host"  # instead of a folder


class MappedFiles:
    """Tensors in files, one each, in a folder. The files have no names, so they are gone when the process ends.

    Args:
        folder: Where the files are made; made itself if it does not exist.

    Raises:
        InputError: No file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: set[int] = set()  # addresses of files
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InputError(
                f"parallel.offload {folder} cannot be used: {error.strerror}; give another folder"
            ) from None

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same values, shape and dtype in a mapped file. Raises InputError when the disk is full."""
        nbytes = tensor.numel() * tensor.element_size()
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        try:
            os.posix_fallocate(descriptor, 0, max(1, nbytes))  # a hole that cannot be filled later is a bus error
            mapped = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        except OSError as error:
            raise InputError(
                f"parallel.offload {self._folder} has no room for {nbytes} bytes: {error.strerror}; make room"
            ) from None
        finally:
            os.close(descriptor)
            os.unlink(name)
        return mapped.view(tensor.shape).copy_(tensor.detach())

    def take(self, flat_parameter: FlatParameter, state: dict[str, object]) -> None:
        """Move a flat parameter's fp32 copy and its optimizer states to files, as far as they are not there yet."""
        if flat_parameter.stored is not None:
            flat_parameter.value.data = self._moved(flat_parameter.value.data)
        for key, tensor in state.items():
            if torch.is_tensor(tensor) and tensor.numel() > 1:
                state[key] = self._moved(tensor)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it is in a file, else a copy of it in a file."""
        if tensor.untyped_storage().data_ptr() in self._places:
            return tensor
        mapped = self.move(tensor)
        self._places.add(mapped.untyped_storage().data_ptr())
        return mapped
