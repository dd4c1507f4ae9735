"""Time of a training step, divided into parts that add up to the whole time of the main thread.

    with clock.forward:        time spent here counts as forward,
        with clock.data:       time spent here counts as data instead,
            ...                and time spent waiting for other ranks counts as communication

Nothing is estimated. The clock reads the time at each beginning and end of a part and adds the interval since the last
reading to the innermost part that was open. Time outside all parts counts as `other`.

An accelerator executes its work later than the host launches it, so its parts are timed on the device. Each boundary is
an event recorded in the main stream, and a part lasts from one event to the next, whether the device computed or was
idle. The events are read once they have completed, usually after the host has waited for the device anyway, as it does
in each step. The host's waits for other ranks say nothing about the device, so on an accelerator communication is
included in the other parts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mpitrain.monitor.timeline.spans import Spans

PARTS = ("data", "forward", "backward", "communication", "optimizer", "evaluation", "checkpoint", "other")
_MANY = 4096


class TimedPart:
    """Context manager that counts time as one of a clock's parts. It may be entered inside itself or another part."""

    __slots__ = ("_clock", "name")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self.name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self.name)

    def __exit__(self, *error: object) -> None:
        self._clock.leave()


class StepClock:
    """Seconds of the main thread by part, since the clock was created or last read.

    Args:
        waited: Function that returns the seconds this thread has waited for other ranks so far.
        device: Device that the thread computes on; None for the CPU.
        now: Function that returns the time in seconds.

    Attributes:
        data, forward, backward, communication, optimizer, evaluation, checkpoint: Context managers of the parts.
        listener: Object whose `part` method is called when a part ends, or None.
        steps: List of (step number, begin in seconds, seconds by part until then) while a timeline is recorded; else
            None.
    """

    def __init__(
        self,
        waited: Callable[[], float] = lambda: 0.0,
        device: torch.device | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._waited, self._now = waited, now
        self._stamp: Callable[[], Any] = now
        self._device_times: _DeviceTimes | None = None
        if device is not None:
            from mpitrain.comm.memory.device import is_accelerator

            if is_accelerator(device):
                self._device_times = _DeviceTimes(device, now)
                self._stamp = self._device_times.stamp
        self.listener: Spans | None = None
        self.steps: list[tuple[int, float, dict[str, float]]] | None = None
        self._open: list[
            tuple[str, Any, float]
        ] = []  # open parts, outermost first: name, stamp and waited at its beginning
        self._pending: deque[tuple[str, Any, float]] = (
            deque()
        )  # intervals not yet counted: innermost part, stamp and waited at its end
        self._told: deque[tuple[str, Any, Any, float]] = deque()  # finished parts that the listener has not got yet
        self._seconds = dict.fromkeys(PARTS, 0.0)  # since the clock was created
        self._before = dict.fromkeys(PARTS, 0.0)  # the part of `_seconds` that `read` has returned
        self._at: tuple[Any, float] = (self._stamp(), waited())
        self.data, self.forward, self.backward = (TimedPart(self, name) for name in PARTS[:3])
        self.communication, self.optimizer, self.evaluation, self.checkpoint = (TimedPart(self, n) for n in PARTS[3:7])

    def enter(self, name: str) -> None:
        """Begin a part; see `TimedPart`."""
        stamp, waited = self._stamp(), self._waited()
        self._pending.append((self._open[-1][0] if self._open else "other", stamp, waited))
        self._open.append((name, stamp, waited))

    def leave(self) -> None:
        """End the innermost part."""
        stamp, waited = self._stamp(), self._waited()
        name, begin, before = self._open.pop()
        self._pending.append((name, stamp, waited))
        if self.listener is not None:
            self._told.append((name, begin, stamp, waited - before))
            if self._device_times is None:
                self._tell()
        if len(self._pending) > _MANY:  # this many accumulate only if nobody reads the clock
            self.settle()

    def step(self, number: int) -> None:
        """Begin a step.

        Args:
            number: Number of the step, starting at 1.
        """
        if self.steps is not None:
            self.settle(wait=True)
            totals = self.totals()
            self.steps.append((number, self._now(), totals))

    def settle(self, *, wait: bool = False) -> None:
        """Add the completed intervals to the seconds of their parts.

        Args:
            wait: If true, wait for the device first, so that all intervals are completed.
        """
        device = self._device_times
        if device is not None and wait:
            device.synchronize()
        pending = self._pending
        while pending and (device is None or pending[0][1].query()):
            part, stamp, waited = pending.popleft()
            since, before = self._at
            if device is None:
                took, came = stamp - since, waited - before
                self._seconds["communication"] += came
                self._seconds[part] += took - came
            else:  # the host's waits in this interval say nothing about the device
                self._seconds[part] += device.seconds(since, stamp)
            self._at = stamp, waited
        self._tell()

    def read(self) -> dict[str, float]:
        """Return the seconds by part since the last call, up to now; on a device, up to its last completed event."""
        before, self._before = self._before, self.totals()
        return {part: seconds - before[part] for part, seconds in self._before.items()}

    def totals(self) -> dict[str, float]:
        """Return the seconds by part since the clock was created, up to now."""
        part = self._open[-1][0] if self._open else "other"
        self._pending.append((part, self._stamp(), self._waited()))
        self.settle()
        return dict(self._seconds)

    def leave_out(self) -> None:
        """Discard the time since the last boundary, so that no part counts it. Call it outside all parts."""
        self.settle(wait=True)
        self._at = (self._stamp(), self._waited())

    def begin_anew(self) -> None:
        """Discard the time that was not read yet, and close parts that an error has left open."""
        self._open.clear()
        self._pending.clear()
        self._told.clear()
        self._before = dict(self._seconds)
        self._at = (self._stamp(), self._waited())

    def _tell(self) -> None:
        """Call the listener for each part that has ended."""
        parts, device = self._told, self._device_times
        while parts and (device is None or parts[0][2].query()):
            name, begin, end, waited = parts.popleft()
            if self.listener is not None:
                if device is not None:
                    begin, end = device.host_time(begin), device.host_time(end)
                self.listener.part(name, begin, end, waited)


class _DeviceTimes:
    """Part boundaries recorded as events in the main stream of a device."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        from mpitrain.comm.memory import device as devices

        self._devices, self._device = devices, device
        self._origin = devices.record_event(device, timed=True)
        self._origin.synchronize()
        self._began = now()  # host time at which the first event completed

    def stamp(self) -> torch.Event:
        """Return an event recorded after all work launched on the device so far."""
        return self._devices.record_event(self._device, timed=True)

    def seconds(self, first: torch.Event, last: torch.Event) -> float:
        """Return the seconds between two completed events.

        Args:
            first: Earlier event.
            last: Later event.
        """
        return first.elapsed_time(last) / 1e3

    def host_time(self, event: torch.Event) -> float:
        """Return the time on the host's clock at which the device reached an event."""
        return self._began + self.seconds(self._origin, event)

    def synchronize(self) -> None:
        """Wait until the device has finished all launched work."""
        self._devices.synchronize(self._device)
