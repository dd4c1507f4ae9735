"""Batches on their way to a device: copied while the device works on those before.

    host thread      batch k is read into pinned memory
    side stream      batch k+1 is copied      batch k+2 is copied       at most `ahead` batches before they are used
    current stream   batch k is computed with, after its copy's event

Copies of pinned memory go on beside computation. A pinned tensor is kept until its copy is done, and a batch's memory
on the device is not given to another before what was asked of the consumer's stream with it is done.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from mpitrain.comm.memory import device

T = TypeVar("T")


def on_device(batches: Iterable[T], to: torch.device, ahead: int = 2) -> Iterator[T]:
    """The same batches, with their tensors on a device.

    Args:
        batches: Tensors, or tuples, lists, mappings and dataclasses of them; what else is in them stays as it is.
        to: The device. For the CPU, the batches are given as they are.
        ahead: Batches that are copied before they are asked for.

    Raises:
        BaseException: What `batches` raised, where the batch it would have been is asked for.
    """
    if not device.is_accelerator(to):
        yield from batches
        return
    stream, source = device.new_stream(to), iter(batches)
    coming: deque[tuple[T, torch.Event]] = deque()
    copying: deque[tuple[T, torch.Event]] = deque()  # pinned batches, each until its copy is done
    end: BaseException | None = None
    while True:
        while end is None and len(coming) <= ahead:
            try:
                host = pin(next(source), to)
            except BaseException as error:  # raised below, in its turn
                end = error
                break
            with stream:
                there = mapped(lambda t: t.to(to, non_blocking=True), host)
            copied = device.recorded(to, stream)
            coming.append((there, copied))
            copying.append((host, copied))
        if not coming:
            if isinstance(end, StopIteration):
                return
            assert end is not None
            raise end
        batch, copied = coming.popleft()
        device.current_stream(to).wait_event(copied)
        mapped(_used, batch)
        while copying and copying[0][1].query():
            copying.popleft()
        yield batch
        del batch


def pin(batch: T, to: torch.device) -> T:
    """The batch in memory that the device copies from while the host goes on; for the CPU, as it is.

    Any thread may do it.
    """
    if not device.is_accelerator(to):
        return batch
    device.use(to)  # else a thread begins with device 0, where memory is taken for it

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        if device.is_accelerator(tensor.device) or tensor.is_pinned():
            return tensor
        return device.pinned(tensor.shape, tensor.dtype, to).copy_(tensor)

    return mapped(pinned, batch)


def _used(tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(device.current_stream(tensor.device))  # torch's types want its older kind of stream
    return tensor


def mapped(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """A batch with every tensor in it changed, in tuples, lists, mappings and dataclasses."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(change, each) for key, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = (mapped(change, each) for each in batch)
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: mapped(change, getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **values)
    return batch
