"""Copies between device memory and checkpoint files, through a few pinned buffers on a separate stream.

    device -> buffer    | load 0 | load 1 | load 2 |                  saving: further loads are copied
    buffer -> file               | load 0 | load 1 | load 2 |         while the previous one is hashed and written

    file -> buffer      | block 0 | block 1 | block 2 |               loading: a thread reads into one buffer
    buffer -> device              | block 0 | block 1 | block 2 |     while the other one is copied

A buffer is reused only after its copy has finished. Nothing waits for other work on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
import torch

from mpitrain.comm.memory import device as devices
from mpitrain.storage.hdf5 import evenly

_BUFFER = 8 << 20  # bytes
_BUFFERS = 3  # buffers for saving
_ALIGNMENT = 64  # bytes
_Interval = tuple[int, int, int, int]  # tensor number, bytes [first, last) of the tensor, offset in the buffer


def host_pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, memoryview]]:
    """Copy flat tensors on one device to the host, piece by piece in order.

    The pieces include the effects of all work launched on the caller's current stream before. The tensors must not
    change until the last piece has been yielded.

    Yields:
        (tensor number, first byte of the piece in the tensor, bytes). The bytes are valid until the next piece is
        requested.
    """
    loads = _pack([t.nbytes for t in tensors])
    raws = [t.detach().view(torch.uint8) for t in tensors]
    device = raws[0].device
    stream = devices.new_stream(device)
    stream.wait_event(devices.record_event(device))
    free = [devices.empty_pinned((_BUFFER,), torch.uint8, device) for _ in range(min(_BUFFERS, len(loads)))]
    coming: deque[tuple[list[_Interval], torch.Tensor, torch.Event]] = deque()
    waiting = iter(loads)
    while True:
        while free and (load := next(waiting, None)) is not None:
            buffer = free.pop()
            with stream:
                for number, first, last, at in load:
                    buffer[at : at + last - first].copy_(raws[number][first:last], non_blocking=True)
            coming.append((load, buffer, devices.record_event(device, stream)))
        if not coming:
            return
        load, buffer, copied = coming.popleft()
        copied.synchronize()
        memory = buffer.numpy().data
        for number, first, last, at in load:
            yield number, first, memory[at : at + last - first]
        free.append(buffer)


def _pack(sizes: Sequence[int]) -> list[list[_Interval]]:
    """Divide tensors of these sizes in bytes into intervals, and pack the intervals into buffers."""
    loads: list[list[_Interval]] = []
    end = _BUFFER
    for number, size in enumerate(sizes):
        first = 0
        while first < size:
            if end >= _BUFFER:
                loads.append([])
                end = 0
            last = min(size, first + _BUFFER - end)
            loads[-1].append((number, first, last, end))
            end = -(-(end + last - first) // _ALIGNMENT) * _ALIGNMENT
            first = last
    return loads


class CopyStream:
    """Stream on which data is copied to a device, after all work launched on the current stream so far."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, devices.new_stream(device)
        self.stream.wait_event(devices.record_event(device))


class DeviceBytes:
    """Bytes of a flat tensor on a device, which readers of a checkpoint fill.

    Args:
        tensor: Tensor to fill.
        stream: Stream on which the bytes are copied.
    """

    def __init__(self, tensor: torch.Tensor, stream: CopyStream) -> None:
        self.stream, self._bytes = stream, tensor.detach().view(torch.uint8)

    def put(self, block: np.ndarray, firsts: np.ndarray, places: np.ndarray, lengths: np.ndarray) -> None:
        """Start copying intervals of a block to their places in the tensor.

        Several intervals are copied as one block to the device and distributed there. Pinned memory of the block must
        not change until the copies have finished.

        Args:
            block: Bytes of the block, on the host.
            firsts: First byte of each interval in the block.
            places: First byte of each interval in the tensor.
            lengths: Bytes of each interval.
        """
        begin, end = int(firsts.min()), int((firsts + lengths).max())
        source = torch.from_numpy(block[begin:end])
        with devices.on_stream(self.stream.stream):  # several threads use this stream
            if len(firsts) == 1:
                self._bytes.narrow(0, int(places[0]), int(lengths[0])).copy_(source, non_blocking=True)
                return
            there = source.to(self.stream.device, non_blocking=True)
            for rows in evenly(firsts - begin, places, lengths):
                first, place, height, width, from_step, to_step = rows
                into = self._bytes.as_strided((height, width), (to_step, 1), place)
                into.copy_(there.as_strided((height, width), (from_step, 1), first))


def read_buffers(nbytes: int, stream: CopyStream) -> Iterator[np.ndarray]:
    """Yield two pinned buffers alternately, for a thread that reads blocks for a device.

    Before requesting the next buffer, the caller must have started all copies from the last one.

    Args:
        nbytes: Size of a buffer in bytes.
        stream: Stream on which the caller copies to the device.
    """
    memory = [devices.empty_pinned((nbytes,), torch.uint8, stream.device).numpy() for _ in range(2)]
    left: deque[torch.Event] = deque()  # events after the copies from each buffer, the older one first
    for buffer in cycle(memory):
        if len(left) == len(memory):
            left.popleft().synchronize()
        yield buffer
        left.append(devices.record_event(stream.device, stream.stream))
