"""Where an operation stands among what its caller asks of devices, though another thread may carry it out.

issued                    an event on the caller's current stream: the operation comes after it
carried out               on a side stream of the group's, in whichever thread; at its end a second event
waited for                the stream that is then current comes after that; the host does not wait for the device
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mpitrain.comm.memory.device import current_stream, is_accelerator, new_stream, on_stream, recorded

Streams = dict[torch.device, torch.Stream]  # the side streams of a group


def order_of(values: Sequence[Any], streams: Streams) -> Order | None:
    """The place of an operation that is issued now; None where its tensors are all in host memory.

    Args:
        values: The operation's arguments, its tensors among them, in lists of any depth.
        streams: The group's side streams; lacking ones are made.
    """
    tensors = list(_on_devices(values))
    return Order(tensors, streams) if tensors else None


class Order:
    """The place of one operation on device memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        """Record what the calling thread has asked of the devices so far.

        Args:
            tensors: The operation's, on devices.
            streams: The group's side streams; lacking ones are made.
        """
        self._tensors = list(tensors)
        self._issued = {device: recorded(device) for device in {t.device for t in self._tensors}}
        self._streams = streams
        self._complete: dict[torch.device, torch.Event] = {}
        for device in self._issued.keys() - streams.keys():
            streams[device] = new_stream(device)

    @contextmanager
    def after_caller(self) -> Iterator[None]:
        """Inside, operations are carried out: the side streams are the current ones, and have waited for the caller."""
        with self.beside():
            for device, event in self._issued.items():
                self._streams[device].wait_event(event)
            try:
                yield
            finally:
                for tensor in self._tensors:  # whose memory is not given out again before the side stream is through
                    tensor.record_stream(self._streams[tensor.device])
                self._tensors = []
                self._complete = {device: recorded(device, self._streams[device]) for device in self._issued}

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, the side streams are the current ones: a future that is resolved there stands for their work."""
        with ExitStack() as stack:
            for device in self._issued:
                stack.enter_context(on_stream(self._streams[device]))
            yield

    def wait(self) -> None:
        """Let the calling thread's current streams come after the operation, which has been carried out."""
        for device, event in self._complete.items():
            current_stream(device).wait_event(event)


def devices_of(tensors: Iterable[Any]) -> list[torch.device]:
    """The accelerators that tensors lie on."""
    return sorted({t.device for t in _on_devices(tensors)}, key=str)


def _on_devices(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values that are not in host memory."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_cpu and is_accelerator(value.device):
                yield value
        elif isinstance(value, list | tuple):
            yield from _on_devices(value)
