"""Optimizer states outside the memory where training computes: in host memory, or in files mapped into it.

This is ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity (Rajbhandari et al. 2021) for the part of the memory that is
read and written once a step. A mapped file costs page cache, which the system takes back when it needs the memory. On
a CPU, host memory is where the states are anyway.

Parameters that lie on a device are then updated on the host (`HostUpdate`), where their fp32 copies are as well.
Gradients leave the device on a stream of their own, each bucket as soon as it is reduced, and updated parameters come
back on another, while the host updates the next ones:

    leaving     | gradients 0 | gradients 1 | gradients 2 |
    host                      | update 0    | update 1    | update 2    |
    returning                               | parameters 0| parameters 1| parameters 2 |

Nobody but the host waits for the first, which needs the gradients, and the caller's stream waits for the last.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mpitrain.comm.memory import device as devices
from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.storage.disk import reporting

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
        with reporting(f"parallel.offload {folder} cannot be used", "give another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same values, shape and dtype in a mapped file. Raises InputError when the disk is full."""
        nbytes = tensor.nbytes
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        try:
            with reporting(f"parallel.offload {self._folder} cannot take {nbytes} bytes", "make room there"):
                os.posix_fallocate(descriptor, 0, max(1, nbytes))  # a hole that cannot be filled later is a bus error
                mapped = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
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


class HostUpdate:
    """The way of gradients to the host, and of updated parameters back.

    Args:
        flat_parameters: What the host updates; their values are on the host, what they are copies of on the device, or,
            where that keeps no parameters between their uses, on the host as well.
        device: The device.
        wanted: Whether a bucket that is reduced now is to be copied at once, because no further passes are expected.
            Whatever changes later is copied again.
    """

    def __init__(
        self, flat_parameters: Sequence[FlatParameter], device: torch.device, wanted: Callable[[], bool]
    ) -> None:
        self._device, self._wanted = device, wanted
        self._leaving, self._returning = devices.new_stream(device), devices.new_stream(device)
        self._gradients: dict[int, torch.Tensor] = {}  # by id of the flat parameter, pinned
        self._rounded: dict[int, torch.Tensor] = {}  # the same for updated values in the parameter's dtype
        self._arrived: dict[int, torch.Event] = {}  # when the gradients of this step are on the host
        self._begun = False
        written = [s.value if s.stored is None else s.stored for s in flat_parameters]
        self._in_place = any(not devices.is_accelerator(each.device) for each in written)
        self._returned: torch.Event | None = None  # when what was last sent back has left the host's memory
        self.follow(flat_parameters)

    def follow(self, flat_parameters: Sequence[FlatParameter]) -> None:
        """Update these flat parameters from now on; some may be pieces of those before."""
        self._flat_parameters = list(flat_parameters)
        self._of_bucket: dict[int, list[FlatParameter]] = {}
        for flat_parameter in self._flat_parameters:
            self._of_bucket.setdefault(flat_parameter.bucket, []).append(flat_parameter)
        known = {id(flat_parameter) for flat_parameter in self._flat_parameters}
        for kept in (self._gradients, self._rounded, self._arrived):
            for stranger in kept.keys() - known:
                del kept[stranger]

    def nbytes(self) -> int:
        """Bytes of pinned memory that gradients and parameters pass through."""
        return sum(t.nbytes for held in (self._gradients, self._rounded) for t in held.values())

    def reduced(self, bucket: int) -> None:
        """Told when a bucket's share is reduced: copy it to the host, or forget the copy there is."""
        chosen = self._of_bucket.get(bucket, [])
        for flat_parameter in chosen:
            self._arrived.pop(id(flat_parameter), None)
        if chosen and self._wanted():
            self._copy(chosen)

    def begin(self) -> None:
        """Begin to copy the gradients that are not on their way yet, in the order in which they are asked for."""
        if self._begun:  # there was no update since the last time: what came then is of another step
            self._arrived.clear()
        self._begun = True
        self._copy([s for s in self._flat_parameters if id(s) not in self._arrived])

    def _copy(self, chosen: Sequence[FlatParameter]) -> None:
        """Copy gradients to the host, behind what the current stream was asked so far."""
        self._leaving.wait_event(devices.recorded(self._device))
        for flat_parameter in chosen:
            gradient = flat_parameter.gradient()
            if gradient is None:
                self._gradients.pop(id(flat_parameter), None)
                continue
            into = self._like(gradient, self._gradients, flat_parameter)
            with self._leaving:
                into.copy_(gradient, non_blocking=True)
            self._arrived[id(flat_parameter)] = devices.recorded(self._device, self._leaving)

    def _like(self, tensor: torch.Tensor, kept: dict[int, torch.Tensor], of: FlatParameter) -> torch.Tensor:
        """Return the pinned memory of a flat parameter that is kept for tensors like this one."""
        if id(of) not in kept:
            kept[id(of)] = devices.pinned(tensor.shape, tensor.dtype, self._device)
        return kept[id(of)]

    def gradient(self, flat_parameter: FlatParameter) -> torch.Tensor | None:
        """A flat parameter's gradient on the host, in its value's dtype, once it is there; it may be overwritten."""
        arrived = self._arrived.pop(id(flat_parameter), None)
        if arrived is None:
            return None
        arrived.synchronize()
        return self._gradients[id(flat_parameter)].to(flat_parameter.value.dtype)

    def before_update(self) -> None:
        """Return when the values may be changed: what was last sent back has left them."""
        self._begun = False
        if self._returned is not None:
            self._returned.synchronize()
            self._returned = None
        if self._in_place:
            devices.recorded(self._device).synchronize()  # the device may still read what is updated
        self._returning.wait_event(devices.recorded(self._device))  # the parameters are read until then

    def store(self, flat_parameter: FlatParameter) -> None:
        """Begin to copy an updated value into the parameter that it is a copy of, rounded to its dtype."""
        stored, value = flat_parameter.stored, flat_parameter.value.detach()
        if stored is None:  # the update was made in place
            return
        if value.dtype != stored.dtype:
            value = self._like(stored, self._rounded, flat_parameter).copy_(value)
        with self._returning:
            stored.copy_(value, non_blocking=True)

    def end(self) -> None:
        """Let the current stream wait for the parameters."""
        self._returned = devices.recorded(self._device, self._returning)
        devices.current_stream(self._device).wait_event(self._returned)
