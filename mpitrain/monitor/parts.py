"""Time of a training step by category; the categories add up to the whole time of the main thread.

    with clock.forward:        time spent here counts as forward,
        with clock.data:       time spent here counts as data instead,
            ...                and time spent waiting for other ranks counts as communication

Nothing is estimated. The clock reads the time at each beginning and end of a category and adds the interval since the
last reading to the innermost category that was open. Time outside all of them counts as `other`.

An accelerator executes its work later than the host launches it, so its categories are timed on the device. Each
boundary is an event recorded in the main stream, and a category lasts from one event to the next, whether the device
computed or was idle. The events are read once they have completed, usually after the host has waited for the device
anyway, as it does in each step. The host's waits for other ranks say nothing about the device, so on an accelerator
communication is included in the other categories.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mpitrain.monitor.timeline.spans import Spans

TIME_CATEGORIES = ("data", "forward", "backward", "communication", "optimizer", "evaluation", "checkpoint", "other")
_MOST_PENDING = 4096


class TimeCategory:
    """Context manager that counts time as one of a clock's categories. It may be nested in itself or another one."""

    __slots__ = ("_clock", "name")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self.name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self.name)

    def __exit__(self, *error: object) -> None:
        self._clock.leave()


class StepClock:
    """Seconds of the main thread by category, since the clock was created or last read.

    Args:
        waited: Function that returns the seconds this thread has waited for other ranks so far.
        device: Device that the thread computes on; None for the CPU.
        now: Function that returns the time in seconds.

    Attributes:
        data, forward, backward, communication, optimizer, evaluation, checkpoint: Context managers of the categories.
        listener: Object whose `at_boundary` is called when a category begins or ends, and its `add_category` with each
            category that has ended; or None.
        steps: List of (step number, begin in seconds, seconds by category until then) while a timeline is recorded;
            else None.
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
        # open categories, outermost first: name, stamp and waited at its beginning
        self._open: list[tuple[str, Any, float]] = []
        # intervals not yet counted: innermost category, stamp and waited at its end
        self._pending: deque[tuple[str, Any, float]] = deque()
        self._ended: deque[tuple[str, Any, Any, float]] = deque()  # ended, but the listener was not called yet
        self._seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)  # since the clock was created
        self._read_seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)  # the share of `_seconds` that `read` has returned
        self._boundary: tuple[Any, float] = (self._stamp(), waited())
        self.data, self.forward, self.backward = (TimeCategory(self, name) for name in TIME_CATEGORIES[:3])
        self.communication, self.optimizer, self.evaluation, self.checkpoint = (
            TimeCategory(self, n) for n in TIME_CATEGORIES[3:7]
        )

    def enter(self, name: str) -> None:
        """Begin a category; see `TimeCategory`."""
        if self.listener is not None:
            self.listener.at_boundary()
        stamp, waited = self._stamp(), self._waited()
        self._pending.append((self._open[-1][0] if self._open else "other", stamp, waited))
        self._open.append((name, stamp, waited))

    def leave(self) -> None:
        """End the innermost category."""
        if self.listener is not None:
            self.listener.at_boundary()
        stamp, waited = self._stamp(), self._waited()
        name, begin, before = self._open.pop()
        self._pending.append((name, stamp, waited))
        if self.listener is not None:
            self._ended.append((name, begin, stamp, waited - before))
            if self._device_times is None:
                self._notify_listener()
        if len(self._pending) > _MOST_PENDING:  # this many accumulate only if nobody reads the clock
            self.settle()

    def step(self, number: int) -> None:
        """Begin a step; the first one has the number 1."""
        if self.steps is not None:
            self.settle(wait=True)
            totals = self.totals()
            self.steps.append((number, self._now(), totals))

    def settle(self, *, wait: bool = False) -> None:
        """Add the completed intervals to the seconds of their categories; with `wait`, all of them complete first."""
        device = self._device_times
        if device is not None and wait:
            device.synchronize()
        pending = self._pending
        while pending and (device is None or pending[0][1].query()):
            category, stamp, waited = pending.popleft()
            since, before = self._boundary
            if device is None:
                took, came = stamp - since, waited - before
                self._seconds["communication"] += came
                self._seconds[category] += took - came
            else:  # the host's waits in this interval say nothing about the device
                self._seconds[category] += device.seconds(since, stamp)
            self._boundary = stamp, waited
        self._notify_listener()

    def read(self) -> dict[str, float]:
        """Return the seconds by category since the last call, up to now, or to the device's last completed event."""
        before, self._read_seconds = self._read_seconds, self.totals()
        return {category: seconds - before[category] for category, seconds in self._read_seconds.items()}

    def totals(self) -> dict[str, float]:
        """Return the seconds by category since the clock was created, up to now."""
        category = self._open[-1][0] if self._open else "other"
        self._pending.append((category, self._stamp(), self._waited()))
        self.settle()
        return dict(self._seconds)

    def skip(self) -> None:
        """Discard the time since the last boundary, so that no category counts it. Call it outside all of them."""
        self.settle(wait=True)
        self._boundary = (self._stamp(), self._waited())

    def reset(self) -> None:
        """Discard the time that was not read yet, and close categories that an error has left open."""
        self._open.clear()
        self._pending.clear()
        self._ended.clear()
        self._read_seconds = dict(self._seconds)
        self._boundary = (self._stamp(), self._waited())

    def _notify_listener(self) -> None:
        """Call the listener for each category that has ended."""
        ended, device = self._ended, self._device_times
        while ended and (device is None or ended[0][2].query()):
            name, begin, end, waited = ended.popleft()
            if self.listener is not None:
                if device is not None:
                    begin, end = device.host_time(begin), device.host_time(end)
                self.listener.add_category(name, begin, end, waited)


class _DeviceTimes:
    """Boundaries of categories recorded as events in the main stream of a device."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        from mpitrain.comm.memory import device as devices

        self._devices, self._device = devices, device
        self._origin = devices.record_event(device, timed=True)
        self._origin.synchronize()
        self._origin_time = now()  # host time at which the first event completed

    def stamp(self) -> torch.Event:
        """Return an event recorded after all work launched on the device so far."""
        return self._devices.record_event(self._device, timed=True)

    def seconds(self, first: torch.Event, last: torch.Event) -> float:
        """Return the seconds between two completed events.

        Args:
            first, last: Earlier and later event.
        """
        return first.elapsed_time(last) / 1e3

    def host_time(self, event: torch.Event) -> float:
        """Return the time on the host's clock at which the device reached an event."""
        return self._origin_time + self.seconds(self._origin, event)

    def synchronize(self) -> None:
        """Wait until the device has finished all launched work."""
        self._devices.synchronize(self._device)
