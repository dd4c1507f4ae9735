"""Where an operation stands among what its caller asks of devices, though another thread may carry it out.

issued                    an event on the caller's current streams: the operation comes after it
carried out               on a side stream, in whichever thread; at its end a second event
waited for                the streams that are then current come after that; the host does not wait for the device

So the host waits only until all of an operation has been asked of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from mpitrain.comm.memory.device import current_stream, new_stream, on_stream, recorded, stream_of_cupy
from mpitrain.comm.runtime.work import Queued, Work, Worker

Streams = dict[torch.device, torch.Stream]  # side streams


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


class Order:
    """The place of one operation on device memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        """Record what the calling thread has asked of the devices so far.

        Args:
            tensors: The operation's, on devices.
            streams: Side streams that operations are carried out on; lacking ones are made.
        """
        self._tensors = list(tensors)
        devices = {tensor.device for tensor in tensors}
        self._issued = {device: [recorded(device, s) for s in streams_of_caller(device)] for device in devices}
        self._streams = streams
        self._complete: dict[torch.device, torch.Event] = {}
        for device in devices - streams.keys():
            streams[device] = new_stream(device)

    @contextmanager
    def after_caller(self) -> Iterator[None]:
        """Make the side streams current, after all that the caller has asked for so far."""
        with self.beside():
            for device, events in self._issued.items():
                for event in events:
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
        """Make the side streams current: a future resolved inside completes when their work is done."""
        with ExitStack() as stack:
            for device in self._issued:
                stack.enter_context(on_stream(self._streams[device]))
            yield

    def wait(self) -> None:
        """Let the calling thread's current streams come after the operation, which has been carried out."""
        for device, event in self._complete.items():
            for stream in streams_of_caller(device):
                stream.wait_event(event)

    def done(self) -> bool:
        """Return whether the devices have done the operation, which has been carried out."""
        return all(event.query() for event in self._complete.values())


class OnDevice(Work):
    """An operation of a `Worker` on device memory, which goes on while the caller computes."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        act: Callable[[], object],
        streams: Streams,
        worker: Worker[Queued],
    ) -> None:
        """Submit the operation.

        Args:
            name: Name of the operation, for messages.
            tensors: The operation's, on devices.
            act: Performs it on the current stream.
            streams: Side streams; see `Order`.
            worker: What carries it out.
        """
        self._act, self._order = act, Order(tensors, streams)
        self._queued = Queued(name, self._run, worker)

    def _run(self) -> None:
        with self._order.after_caller():
            self._act()

    def wait(self, timeout: float | None = None) -> None:
        """Block until all of the operation was asked of the device; the caller's streams wait for the rest."""
        self._queued.wait(timeout)
        self._order.wait()

    def done(self) -> bool:
        """Whether the operation is complete, on the device too."""
        return self._queued.done() and self._order.done()
