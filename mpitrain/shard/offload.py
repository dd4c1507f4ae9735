"""Optimizer states outside the memory where training computes: in host memory, or in files mapped into it.

This is ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity (Rajbhandari et al. 2021), applied to the data that is read and
written once per step. A mapped file uses page cache, which the system reclaims when it needs the memory. When training
runs on a CPU, host memory is where the states already are.

Parameters on a device are then updated on the host (`HostUpdate`), which also keeps their fp32 copies. Gradients are
copied from the device on a stream of their own, each bucket as soon as it is reduced. Updated parameters are copied
back on another stream while the host updates the next ones:

    to the host   | gradients 0 | gradients 1 | gradients 2 |
    host                        | update 0    | update 1    | update 2    |
    to the device                             | parameters 0| parameters 1| parameters 2 |

Only the host waits for the gradients that it needs, and only the caller's stream waits for the last parameters.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mpitrain.comm.memory import device as devices
from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.storage.disk import reporting

HOST = "host"  # setting for host memory, instead of a folder
_LIBC = ctypes.CDLL(None)


class MappedFiles:
    """Tensors in files in a folder, one file each. The files are deleted when the process ends.

    They have no names in the folder, so nothing is left behind if the process is killed.

    Args:
        folder: Folder of the files; created if it does not exist.
        setting: Setting that names the folder, for messages.

    Raises:
        InputError: No file can be created there.
    """

    def __init__(self, folder: Path, setting: str = "parallel.offload") -> None:
        self._folder, self._setting = folder, setting
        self._addresses: set[int] = set()  # addresses of the mapped tensors
        with reporting(f"{setting} {folder} cannot be used", "use another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in a mapped file, with the same values, shape and dtype.

        Raises:
            InputError: The disk is full.
        """
        nbytes = tensor.nbytes
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        try:
            with reporting(f"{self._setting} {self._folder} has no space for {nbytes} bytes", "free space there"):
                os.posix_fallocate(descriptor, 0, max(1, nbytes))  # else a full disk is a bus error later
                mapped = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        finally:
            os.close(descriptor)
            os.unlink(name)
        return mapped.view(tensor.shape).copy_(tensor.detach())

    def move_states(self, flat_parameter: FlatParameter, state: dict[str, object]) -> None:
        """Move a flat parameter's fp32 copy and its optimizer states to files, unless they are already there.

        Args:
            flat_parameter: Flat parameter whose value is moved in place.
            state: State of the optimizer for this flat parameter; its tensors are replaced.
        """
        if flat_parameter.stored is not None:
            flat_parameter.value.data = self._move_once(flat_parameter.value.data)
        for key, tensor in state.items():
            if torch.is_tensor(tensor) and tensor.numel() > 1:
                state[key] = self._move_once(tensor)

    def _move_once(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it is already in a file; otherwise a copy of it in a file."""
        if tensor.untyped_storage().data_ptr() in self._addresses:
            return tensor
        mapped = self.move(tensor)
        self._addresses.add(mapped.untyped_storage().data_ptr())
        return mapped


def read_ahead(mapped: torch.Tensor) -> None:
    """Ask the system to read a whole mapped file into memory in the background."""
    _LIBC.madvise(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes), mmap.MADV_WILLNEED)


class HostUpdate:
    """Copies of gradients from a device to the host, and of updated parameters back to the device.

    Args:
        flat_parameters: Flat parameters that the host updates. Their values are on the host; the memory that they are
            copies of is on the device, or also on the host if the device keeps no parameters between uses.
        device: Device that computes.
        is_last_pass: Function that returns whether no further backward pass is expected before the step, so that a
            reduced bucket is copied immediately. A gradient that changes later is copied again.
    """

    def __init__(
        self, flat_parameters: Sequence[FlatParameter], device: torch.device, is_last_pass: Callable[[], bool]
    ) -> None:
        self._device, self._is_last_pass = device, is_last_pass
        self._to_host, self._to_device = devices.new_stream(device), devices.new_stream(device)
        self._gradients: dict[int, torch.Tensor] = {}  # by id of the flat parameter; pinned
        self._rounded_values: dict[int, torch.Tensor] = {}  # by id, pinned; updated values in the parameter's dtype
        self._host_copied: dict[int, torch.Event] = {}  # when the gradients of this step are on the host
        self._begun = False
        written = [s.value if s.stored is None else s.stored for s in flat_parameters]
        self._in_place = any(not devices.is_accelerator(each.device) for each in written)
        self._device_copied: torch.Event | None = None  # when the last copies to the device are complete
        self.set_flat_parameters(flat_parameters)

    def set_flat_parameters(self, flat_parameters: Sequence[FlatParameter]) -> None:
        """Update these flat parameters from now on; some may be pieces of the earlier ones."""
        self._flat_parameters = list(flat_parameters)
        self._by_bucket: dict[int, list[FlatParameter]] = {}
        for flat_parameter in self._flat_parameters:
            self._by_bucket.setdefault(flat_parameter.bucket, []).append(flat_parameter)
        known = {id(flat_parameter) for flat_parameter in self._flat_parameters}
        for buffers in (self._gradients, self._rounded_values, self._host_copied):
            for stranger in buffers.keys() - known:
                del buffers[stranger]

    def nbytes(self) -> int:
        """Return the bytes of the pinned memory through which gradients and parameters are copied."""
        return sum(t.nbytes for buffers in (self._gradients, self._rounded_values) for t in buffers.values())

    def copy_bucket(self, bucket: int) -> None:
        """Start to copy a bucket whose share has just been reduced, or drop an outdated copy of it."""
        chosen = self._by_bucket.get(bucket, [])
        for flat_parameter in chosen:
            self._host_copied.pop(id(flat_parameter), None)
        if chosen and self._is_last_pass():
            self._copy(chosen)

    def begin(self) -> None:
        """Start to copy the gradients that are not yet being copied, in the order in which they are needed."""
        if self._begun:  # no update since the last call: the copies belong to an earlier step
            self._host_copied.clear()
        self._begun = True
        self._copy([s for s in self._flat_parameters if id(s) not in self._host_copied])

    def _copy(self, chosen: Sequence[FlatParameter]) -> None:
        """Copy gradients to the host, after all work that is queued on the current stream."""
        self._to_host.wait_event(devices.record_event(self._device))
        for flat_parameter in chosen:
            gradient = flat_parameter.gradient()
            if gradient is None:
                self._gradients.pop(id(flat_parameter), None)
                continue
            into = self._pinned_like(gradient, self._gradients, flat_parameter)
            with self._to_host:
                into.copy_(gradient, non_blocking=True)
            self._host_copied[id(flat_parameter)] = devices.record_event(self._device, self._to_host)

    def _pinned_like(self, tensor: torch.Tensor, buffers: dict[int, torch.Tensor], of: FlatParameter) -> torch.Tensor:
        """Return the pinned memory of a flat parameter in the shape and dtype of `tensor`, allocated on first use."""
        if id(of) not in buffers:
            buffers[id(of)] = devices.empty_pinned(tensor.shape, tensor.dtype, self._device)
        return buffers[id(of)]

    def gradient(self, flat_parameter: FlatParameter) -> torch.Tensor | None:
        """Wait for a flat parameter's gradient and return it on the host, in the dtype of its value.

        The result may be overwritten. It is None if there is no gradient.
        """
        self._begun = False
        arrived = self._host_copied.pop(id(flat_parameter), None)
        if arrived is None:
            return None
        arrived.synchronize()
        return self._gradients[id(flat_parameter)].to(flat_parameter.value.dtype)

    def before_update(self) -> None:
        """Wait until the values may be changed, because their last copies to the device are complete."""
        if self._device_copied is not None:
            self._device_copied.synchronize()
            self._device_copied = None
        if self._in_place:
            devices.record_event(self._device).synchronize()  # the device may still read the values
        self._to_device.wait_event(devices.record_event(self._device))  # the parameters are read until then

    def store(self, flat_parameter: FlatParameter) -> None:
        """Start to copy an updated value into the parameter that it is a copy of, rounded to the parameter's dtype."""
        stored, value = flat_parameter.stored, flat_parameter.value.detach()
        if stored is None:  # the update was made in place
            return
        if value.dtype != stored.dtype:
            value = self._pinned_like(stored, self._rounded_values, flat_parameter).copy_(value)
        with self._to_device:
            stored.copy_(value, non_blocking=True)

    def end(self) -> None:
        """Make the current stream wait for the updated parameters."""
        self._device_copied = devices.record_event(self._device, self._to_device)
        devices.current_stream(self._device).wait_event(self._device_copied)
