"""What a checkpoint moves between a device's memory and the host, through a few pinned buffers on a stream of its own.

    device -> buffer    | load 0 | load 1 | load 2 |                  to a file: the next loads come
    buffer -> file               | load 0 | load 1 | load 2 |         while the last one is hashed and written

    file -> buffer      | block 0 | block 1 | block 2 |               from one: a thread reads into one buffer
    buffer -> device              | block 0 | block 1 | block 2 |     while the other one leaves

A buffer is used again only when its copy is over; nobody waits for anything else that the device does.
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
_BUFFERS = 3  # in the way to a file
_ALIGNMENT = 64  # bytes
_Stretch = tuple[int, int, int, int]  # the number of a tensor, bytes [first, last) of it, where they lie in a buffer


def host_pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, memoryview]]:
    """Bring flat tensors that lie on one device to the host, piece by piece in their order.

    They must not change before the last piece has come; what the caller's current stream was asked before is in them.

    Yields:
        (number of the tensor, the first byte of the piece in it, the bytes, until the next piece is asked for).
    """
    loads = _loads([t.nbytes for t in tensors])
    raws = [t.detach().view(torch.uint8) for t in tensors]
    device = raws[0].device
    stream = devices.new_stream(device)
    stream.wait_event(devices.recorded(device))
    free = [devices.pinned((_BUFFER,), torch.uint8, device) for _ in range(min(_BUFFERS, len(loads)))]
    coming: deque[tuple[list[_Stretch], torch.Tensor, torch.Event]] = deque()
    waiting = iter(loads)
    while True:
        while free and (load := next(waiting, None)) is not None:
            buffer = free.pop()
            with stream:
                for number, first, last, at in load:
                    buffer[at : at + last - first].copy_(raws[number][first:last], non_blocking=True)
            coming.append((load, buffer, devices.recorded(device, stream)))
        if not coming:
            return
        load, buffer, copied = coming.popleft()
        copied.synchronize()
        memory = buffer.numpy().data
        for number, first, last, at in load:
            yield number, first, memory[at : at + last - first]
        free.append(buffer)


def _loads(sizes: Sequence[int]) -> list[list[_Stretch]]:
    """Tensors of so many bytes cut into stretches, which go into buffers as they fit."""
    loads: list[list[_Stretch]] = []
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


class Arrivals:
    """The stream on which what is read comes to a device, behind what the current stream was asked so far."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, devices.new_stream(device)
        self.stream.wait_event(devices.recorded(device))


class DeviceBytes:
    """The bytes of a flat tensor on a device, as those who read a checkpoint fill them.

    Args:
        tensor: The tensor.
        arrivals: On which stream they come.
    """

    def __init__(self, tensor: torch.Tensor, arrivals: Arrivals) -> None:
        self.arrivals, self._bytes = arrivals, tensor.detach().view(torch.uint8)

    def put(self, block: np.ndarray, firsts: np.ndarray, places: np.ndarray, lengths: np.ndarray) -> None:
        """Begin to copy stretches of a block to their places; pinned memory must not change before they are there.

        Several stretches go as the block that they lie in, and are put in their places there.
        """
        begin, end = int(firsts.min()), int((firsts + lengths).max())
        source = torch.from_numpy(block[begin:end])
        with devices.on_stream(self.arrivals.stream):  # of which several threads ask
            if len(firsts) == 1:
                self._bytes.narrow(0, int(places[0]), int(lengths[0])).copy_(source, non_blocking=True)
                return
            there = source.to(self.arrivals.device, non_blocking=True)
            for rows in evenly(firsts - begin, places, lengths):
                first, place, height, width, from_step, to_step = rows
                into = self._bytes.as_strided((height, width), (to_step, 1), place)
                into.copy_(there.as_strided((height, width), (from_step, 1), first))


def read_buffers(nbytes: int, arrivals: Arrivals) -> Iterator[np.ndarray]:
    """Give a thread that reads blocks for a device two pinned buffers to read into, by turns.

    Whoever asks for the next one has begun everything that is to go to the device from the last.
    """
    memory = [devices.pinned((nbytes,), torch.uint8, arrivals.device).numpy() for _ in range(2)]
    left: deque[torch.Event] = deque()  # when what was put from each has left it, the older one first
    for buffer in cycle(memory):
        if len(left) == len(memory):
            left.popleft().synchronize()
        yield buffer
        left.append(devices.recorded(arrivals.device, arrivals.stream))
