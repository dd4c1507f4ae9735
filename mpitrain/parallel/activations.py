"""Activations outside the memory where training computes, until backward needs them (train.offload_activations).

This is the offload of ZeRO-R (Rajbhandari et al. 2020, section 6.1, P_a+cpu), for all tensors that autograd saves: the
activations, or with train.recompute the inputs of segments. A group is the tensors that are saved in one block, or
between two blocks. On an accelerator, groups are copied behind the computation, on a stream for each direction:

    device         forward 0 | forward 1 | forward 2 | backward 2 | backward 1 | backward 0
    to the host              | group 0   | group 1   |
    to the device                                    | group 1    | group 0

When a group begins, the device waits until the one before the last has been copied, and frees it; the last two groups
of a forward pass stay. When backward needs a group, the one before it begins to come back. So the device holds two
groups at any time, besides small tensors (`_SMALLEST`) and views of much larger ones.

In a folder, each tensor is a mapped file, which an accelerator's rank writes and reads in a thread. On a CPU, a tensor
is written when it is saved, computed with in place, and read ahead by the system; "host" moves nothing there.

Reference:
    Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mpitrain.comm.memory import device as devices
from mpitrain.shard.flat import blocks_of
from mpitrain.shard.offload import HOST, MappedFiles, read_ahead

_SMALLEST = 1 << 10  # bytes; smaller tensors are not worth a copy
_weak_reference: Any = StorageWeakRef  # which has no types
_PART = 4  # a view of less than 1 / _PART of a tensor's memory stays, because the rest may be in use


class ActivationOffload:
    """Moves tensors that autograd saves out of the memory where training computes, and back for backward.

    Args:
        target: The setting train.offload_activations: "host" or a folder.
        module: Module whose blocks delimit the groups.
        device: Device that computes.

    Attributes:
        nbytes: Bytes moved in the last forward pass.

    Raises:
        InputError: No file can be created in the folder.
    """

    def __init__(self, target: str, module: nn.Module, device: torch.device) -> None:
        self.device, self.on_device, self.nbytes = device, devices.is_accelerator(device), 0
        self.files = MappedFiles(Path(target), "train.offload_activations") if target != HOST else None
        if self.on_device:
            self.to_host, self.to_device = devices.new_stream(device), devices.new_stream(device)
            # reads and writes files; the one thread keeps their order
            self.thread = ThreadPoolExecutor(1, initializer=devices.use, initargs=(device,))
        self._group: _Group | None = None
        self._before: weakref.ref[_Group] | None = None
        self._leaving: deque[_Group] = deque()  # groups of which the device still has a copy
        # by storage: the storage, the version of its values, and the copy of them
        self._moved: dict[int, tuple[Any, int, weakref.ref[_Moved]]] = {}
        itself = weakref.ref(self)  # so that copies of the module refer to no streams
        for block in blocks_of(module) or module.children():
            block.register_forward_pre_hook(partial(_end_group, itself))
            block.register_forward_hook(partial(_end_group, itself))

    def begin_pass(self) -> None:
        """Begin the count of bytes of a forward pass, and its first group."""
        self.nbytes, self._before, self._group = 0, None, None
        self._moved.clear()

    def end_group(self) -> None:
        """Let the next saved tensor begin a group."""
        if self._group is not None:
            self._before, self._group = weakref.ref(self._group), None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
        """Begin to move a tensor.

        Returns:
            Function that returns the tensor in backward; the tensor itself if it is not moved.
        """
        storage = tensor.untyped_storage()
        plain = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        if not plain or tensor.device != self.device or not _SMALLEST <= storage.nbytes() <= _PART * tensor.nbytes:
            return tensor
        if self.files is None and not self.on_device:
            return tensor  # is in host memory
        known = self._moved.get(storage._cdata)
        moved = None
        if known is not None and not known[0].expired() and known[1] == tensor._version:
            moved = known[2]()
        if moved is None:
            if self._group is None:
                self._group = self._begin_group()
            moved = _Moved(self, self._group, torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage))
            self._moved[storage._cdata] = _weak_reference(storage), tensor._version, weakref.ref(moved)
            self.nbytes += storage.nbytes()
        dtype, offset, shape, stride = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

        def unpack() -> torch.Tensor:
            values = moved.fetch().untyped_storage()
            return torch.empty(0, dtype=dtype, device=self.device).set_(values, offset, shape, stride)

        return unpack

    def _begin_group(self) -> _Group:
        """Return a new group, and free the groups that have been copied, but for the last."""
        group = _Group(self._before)
        if self.on_device:
            if self._leaving:
                self._leaving[-1].copied = devices.record_event(self.device, self.to_host)
            while len(self._leaving) > 1:
                self._leaving.popleft().free(self.device)
            self._leaving.append(group)
        return group


def unpack(saved: Any) -> torch.Tensor:
    """Return the tensor for which `ActivationOffload.pack` returned `saved`."""
    tensor: torch.Tensor = saved() if callable(saved) else saved
    return tensor


def _end_group(offload: weakref.ref[ActivationOffload], *_: Any) -> None:
    if (target := offload()) is not None:
        target.end_group()


class _Group:
    """Tensors that are moved together.

    Args:
        before: The group before it in the same forward pass.
    """

    def __init__(self, before: weakref.ref[_Group] | None) -> None:
        self._before = before
        self.members: list[weakref.ref[_Moved]] = []
        self.copied: torch.Event | None = None

    def free(self, device: torch.device) -> None:
        """Free the device's memory after it has been copied."""
        assert self.copied is not None
        devices.current_stream(device).wait_event(self.copied)
        for reference in self.members:
            if (moved := reference()) is not None:
                moved.source = None

    def begin_fetch(self) -> None:
        """Begin to bring the group back, and the one before it."""
        before = self._before() if self._before is not None else None
        for reference in (*self.members, *(before.members if before is not None else ())):
            if (moved := reference()) is not None:
                moved.begin_fetch()


class _Moved:
    """Copy of the memory of a tensor that autograd saved.

    Args:
        offload: Streams and files.
        group: Group to which the copy is added.
        source: The tensor's memory, as a flat tensor of bytes.

    Attributes:
        source: The tensor's memory until the accelerator frees it.
    """

    source: torch.Tensor | None = None

    def __init__(self, offload: ActivationOffload, group: _Group, source: torch.Tensor) -> None:
        self._offload, self._group, self._shape = offload, group, source.shape
        self._fetched: torch.Tensor | None = None
        self._arrival: Callable[[], torch.Event] | None = None  # until the current stream has waited for it
        group.members.append(weakref.ref(self))
        if not offload.on_device:
            assert offload.files is not None
            mapped = offload.files.move(source)
            self._copy: Callable[[], torch.Tensor] = lambda: mapped
            return
        self.source = source
        pinned = devices.empty_pinned(source.shape, source.dtype, offload.device)
        offload.to_host.wait_event(devices.record_event(offload.device))
        with devices.on_stream(offload.to_host):
            pinned.copy_(source, non_blocking=True)
        if offload.files is None:
            self._copy = lambda: pinned
        else:
            copied = devices.record_event(offload.device, offload.to_host)
            self._copy = offload.thread.submit(_write, offload.files.move, pinned, copied).result

    def __del__(self) -> None:
        if self.source is not None:  # may still be read by the copy to the host
            copied = devices.record_event(self._offload.device, self._offload.to_host)
            devices.current_stream(self._offload.device).wait_event(copied)
        if self._arrival is not None:
            devices.current_stream(self._offload.device).wait_event(self._arrival())

    def begin_fetch(self) -> None:
        """Begin to bring the memory back, unless it is already there."""
        offload = self._offload
        if self.source is not None or self._fetched is not None:
            return
        if not offload.on_device:
            self._fetched = self._copy()
            read_ahead(self._fetched)
            return
        self._fetched = torch.empty(self._shape, dtype=torch.uint8, device=offload.device)
        usable = devices.record_event(offload.device)  # by the other stream
        arguments = (self._copy, self._fetched, usable, offload.to_device)
        if offload.files is None:
            arrived = _copy_back(*arguments)
            self._arrival = lambda: arrived
        else:
            self._arrival = offload.thread.submit(_copy_back, *arguments).result

    def fetch(self) -> torch.Tensor:
        """Return the memory, and begin to bring back what backward needs next."""
        self._group.begin_fetch()
        if self._arrival is not None:
            devices.current_stream(self._offload.device).wait_event(self._arrival())
            self._arrival = None
        values = self.source if self.source is not None else self._fetched
        assert values is not None
        return values


def _write(move: Callable[[torch.Tensor], torch.Tensor], pinned: torch.Tensor, copied: torch.Event) -> torch.Tensor:
    """Return a mapped file with the values of pinned memory, once they have been copied there."""
    copied.synchronize()
    return move(pinned)


def _copy_back(
    copy: Callable[[], torch.Tensor], into: torch.Tensor, usable: torch.Event, stream: torch.Stream
) -> torch.Event:
    """Begin to copy host memory or a mapped file to the device, and return the event of its arrival.

    Args:
        copy: Function that returns the host memory.
        into: Memory of the device.
        usable: Event after which it may be written.
        stream: Stream that copies.
    """
    source = copy()
    if not source.is_pinned():
        source = devices.empty_pinned(source.shape, source.dtype, into.device).copy_(source)
    stream.wait_event(usable)
    with devices.on_stream(stream):
        into.copy_(source, non_blocking=True)
    return devices.record_event(into.device, stream)
