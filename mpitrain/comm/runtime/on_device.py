"""Operations on device memory that go on while the caller computes.

An operation comes after what its caller had asked of the device when it asked for the operation, whatever the thread
that carries it out has on its own stream. And it is complete for whoever waits for it: what that one asks of its stream
afterwards comes after the operation. The host waits only until all of it has been asked of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from mpitrain.comm.memory.device import current_stream, recorded, stream_of_cupy, use
from mpitrain.comm.runtime.work import Queued, Work, Worker


def streams_of_caller(device: torch.device) -> list[torch.Stream]:
    """The streams that the calling thread uses: PyTorch's current one, and CuPy's where that is another."""
    other = stream_of_cupy(device)
    return [current_stream(device)] if other is None else [current_stream(device), other]


@contextmanager
def between(device: torch.device) -> Iterator[None]:
    """What is done inside comes after what was asked of the caller's streams, and before what is asked of them later.

    Inside, PyTorch's current stream is that of which all is asked.
    """
    own, *others = streams_of_caller(device)
    for stream in others:
        own.wait_event(recorded(device, stream))
    yield
    for stream in others:
        stream.wait_event(recorded(device, own))


class OnDevice(Work):
    """An operation of a `Worker` on device memory, asked of a stream of its own."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        act: Callable[[], object],
        stream: torch.Stream,
        worker: Worker[Queued],
    ) -> None:
        """Submit the operation.

        Args:
            name: Of the operation, for messages.
            tensors: What it is on, all on one device.
            act: Performs it, given that the current stream is `stream`.
            stream: Of which it is asked.
            worker: What carries it out.
        """
        self._device, self._tensors, self._act, self._stream = tensors[0].device, tensors, act, stream
        self._asked = [recorded(self._device, caller) for caller in streams_of_caller(self._device)]
        self._end: torch.Event | None = None
        self._queued = Queued(name, self._run, worker)

    def _run(self) -> None:
        use(self._device)
        for event in self._asked:
            self._stream.wait_event(event)
        with self._stream:
            self._act()
        self._end = recorded(self._device, self._stream)
        for tensor in self._tensors:
            tensor.record_stream(self._stream)  # its memory is not given out again before, whoever drops the tensor

    def wait(self, timeout: float | None = None) -> None:
        """Block until all of the operation was asked of the device; the caller's streams wait for the rest."""
        self._queued.wait(timeout)
        if self._end is not None:
            for stream in streams_of_caller(self._device):
                stream.wait_event(self._end)

    def done(self) -> bool:
        """Whether the operation is complete, on the device too."""
        return self._queued.done() and (self._end is None or self._end.query())
