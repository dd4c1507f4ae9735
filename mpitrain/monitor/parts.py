"""Where the time of a training step goes: the main thread's time, divided into parts that add up to all of it.

    with clock.forward:        what is done inside counts as forward,
        with clock.data:       but for this, which counts as data,
            ...                and but for what the thread waited for other ranks, which counts as communication

Nothing is estimated: at each beginning and end of a part the time is taken, and what went by since the one before
counts for the part that was the innermost. Outside of all parts it counts as `other`.

An accelerator works off what it is asked later than the host asks. There the times are taken on the device: each
boundary is an event in the main stream, and a part is the time from event to event, whether the device computed or
stood still. The events are read when they are over, mostly after the host has waited for the device anyway, as it does
in each step. What the host waited for other ranks says nothing of the device, so that communication is in the other
parts there.
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
    """One of a clock's parts, for `with`. It may be entered inside of itself and of the others."""

    __slots__ = ("_clock", "name")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self.name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self.name)

    def __exit__(self, *error: object) -> None:
        self._clock.leave()


class StepClock:
    """Seconds of the main thread by part, since the clock was made or last read.

    Args:
        waited: Gives the seconds that the thread has waited for other ranks so far.
        device: What the thread computes on; None for the CPU.
        now: Gives the time, in seconds.

    Attributes:
        data, forward, backward, communication, optimizer, evaluation, checkpoint: The parts, for `with`.
        listener: Is told of each part that is over; None for nobody.
        steps: While a timeline is recorded: (number, its begin, seconds by part until then) of each step; else None.
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
        self._open: list[tuple[str, Any, float]] = []  # part, stamp and waited when it began
        self._pending: deque[tuple[str, Any, float]] = deque()  # part that was the innermost, until when, waited then
        self._told: deque[tuple[str, Any, Any, float]] = deque()  # parts that are over, for the listener
        self._seconds = dict.fromkeys(PARTS, 0.0)  # since the clock was made
        self._before = dict.fromkeys(PARTS, 0.0)  # of them, those that were read
        self._at: tuple[Any, float] = (self._stamp(), waited())
        self.data, self.forward, self.backward = (TimedPart(self, name) for name in PARTS[:3])
        self.communication, self.optimizer, self.evaluation, self.checkpoint = (TimedPart(self, n) for n in PARTS[3:7])

    def enter(self, name: str) -> None:
        """A part begins. See `TimedPart`."""
        stamp, waited = self._stamp(), self._waited()
        self._pending.append((self._open[-1][0] if self._open else "other", stamp, waited))
        self._open.append((name, stamp, waited))

    def leave(self) -> None:
        """The innermost part is over."""
        stamp, waited = self._stamp(), self._waited()
        name, begin, before = self._open.pop()
        self._pending.append((name, stamp, waited))
        if self.listener is not None:
            self._told.append((name, begin, stamp, waited - before))
            if self._device_times is None:
                self._tell()
        if len(self._pending) > _MANY:  # as many as this are under way where nobody reads the clock
            self.settle()

    def step(self, number: int) -> None:
        """A step begins. number: from 1."""
        if self.steps is not None:
            self.settle(wait=True)
            totals = self.totals()
            self.steps.append((number, self._now(), totals))

    def settle(self, *, wait: bool = False) -> None:
        """Count what is over. wait: the device is to be waited for, so that all of it is."""
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
            else:  # what the host waited meanwhile says nothing of the device
                self._seconds[part] += device.seconds(since, stamp)
            self._at = stamp, waited
        self._tell()

    def read(self) -> dict[str, float]:
        """Seconds by part since this was called last, up to now; on a device, up to where it is known to be."""
        before, self._before = self._before, self.totals()
        return {part: seconds - before[part] for part, seconds in self._before.items()}

    def totals(self) -> dict[str, float]:
        """Seconds by part since the clock was made, up to now."""
        part = self._open[-1][0] if self._open else "other"
        self._pending.append((part, self._stamp(), self._waited()))
        self.settle()
        return dict(self._seconds)

    def leave_out(self) -> None:
        """Let what went by since the last boundary count for nothing. Only outside of all parts."""
        self.settle(wait=True)
        self._at = (self._stamp(), self._waited())

    def begin_anew(self) -> None:
        """Forget what was not read yet, and parts that an error has left open."""
        self._open.clear()
        self._pending.clear()
        self._told.clear()
        self._before = dict(self._seconds)
        self._at = (self._stamp(), self._waited())

    def _tell(self) -> None:
        """Tell the listener of the parts that are over."""
        told, device = self._told, self._device_times
        while told and (device is None or told[0][2].query()):
            name, begin, end, waited = told.popleft()
            if self.listener is not None:
                if device is not None:
                    begin, end = device.host_time(begin), device.host_time(end)
                self.listener.part(name, begin, end, waited)


class _DeviceTimes:
    """Boundaries as events in the main stream of a device."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        from mpitrain.comm.memory import device as devices

        self._devices, self._device = devices, device
        self._origin = devices.recorded(device, timed=True)
        self._origin.synchronize()
        self._began = now()  # of the host, when the first event was over

    def stamp(self) -> torch.Event:
        """An event behind what the device was asked so far."""
        return self._devices.recorded(self._device, timed=True)

    def seconds(self, first: torch.Event, last: torch.Event) -> float:
        """From one event to another, both of which are over."""
        return first.elapsed_time(last) / 1e3

    def host_time(self, event: torch.Event) -> float:
        """When the device came to it, on the host's clock."""
        return self._began + self.seconds(self._origin, event)

    def synchronize(self) -> None:
        """Return when the device has done what it was asked."""
        self._devices.synchronize(self._device)
