"""A timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

A process is a rank; its threads are main (steps, parts, modules), communication (one more where operations overlap),
pipeline and, on an accelerator, host (when the host asked for what a module computes). All events with a duration are
complete ones ("X"); times are microseconds from the first event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.monitor.timeline.merging import RankTimeline, TimedOperation

Event = dict[str, Any]
_MAIN, _PIPELINE, _HOST, _COMMUNICATION = 0, 1, 2, 10  # numbers of threads; more of communication follow


def trace_of(ranks: Iterable[RankTimeline]) -> dict[str, Any]:
    """The trace of all ranks, as JSON holds it."""
    ranks = list(ranks)
    begins = [s.begin for r in ranks for s in r.spans] + [o.begin for r in ranks for o in r.operations]
    begins += [step[1] for r in ranks for step in r.steps] + [at for r in ranks for at, _ in r.memory]
    origin = min(begins, default=0.0)
    events: list[Event] = []
    for rank in ranks:
        events += _RankEvents(rank, origin).events()
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made_by": "mpitrain monitor.timeline"}}


class _RankEvents:
    """The events of one rank."""

    def __init__(self, timeline: RankTimeline, origin: float) -> None:
        self._timeline, self._origin = timeline, origin
        self._events: list[Event] = []

    def events(self) -> list[Event]:
        """All of them, the names of process and threads first."""
        recorded = self._timeline.recorded
        self._named("process_name", _MAIN, name=f"{self._timeline.name} ({recorded['host']})")
        self._named("process_sort_index", _MAIN, sort_index=self._timeline.rank)
        self._named(
            "thread_name", _MAIN, name="main" if recorded["device"] == "cpu" else f"main ({recorded['device']})"
        )
        for number, begin, end, parts in self._timeline.steps:
            told = {f"{part}_ms": round(seconds * 1e3, 4) for part, seconds in parts.items()}
            self._complete(f"step {number}", "step", _MAIN, begin, end, told)
        self._add_spans()
        self._add_operations()
        for at, figures in self._timeline.memory:
            told = {name: value for name, value in figures.items() if name not in ("host", "device")}
            self._events.append(self._event("memory", "C", _MAIN, self._nanoseconds(at), cat="memory", args=told))
        return self._events

    def _add_spans(self) -> None:
        on_host = self._timeline.recorded["device"] == "cpu"
        threads = set()
        for span in self._timeline.spans:
            thread, arguments = _MAIN, span.arguments
            if span.kind == "part":
                arguments = {"waited_ms": round(span.arguments["waited"] * 1e3, 4)}
            elif span.kind == "action":
                thread = _PIPELINE
            elif not on_host:
                thread = _HOST
            threads.add(thread)
            direction = f" ({span.kind})" if span.kind in ("forward", "backward") else ""
            self._complete(span.name + direction, span.kind, thread, span.begin, span.end, arguments)
        for thread, name in ((_PIPELINE, "pipeline"), (_HOST, "host")):
            if thread in threads:
                self._named("thread_name", thread, name=name)

    def _add_operations(self) -> None:
        free: list[float] = []  # until when each of the threads is taken
        for one in sorted(self._timeline.operations, key=lambda one: (one.begin, -one.end)):
            lane = next((number for number, until in enumerate(free) if until <= one.begin), len(free))
            if lane == len(free):
                free.append(0.0)
                name = "communication" if lane == 0 else f"communication {lane + 1}"
                self._named("thread_name", _COMMUNICATION + lane, name=name)
            free[lane] = one.end
            self._operation(one, _COMMUNICATION + lane)

    def _operation(self, one: TimedOperation, thread: int) -> None:
        told = {
            "operation": one.operation,
            "axis": one.axis,
            "algorithm": one.algorithm,
            "bytes_inside_node": one.inside,
            "bytes_between_nodes": one.between,
            "background": one.background,
            "wait_ms": round(one.wait * 1e3, 4),
            "last_rank": one.last,
        }
        self._complete(f"{one.operation} ({one.axis})", "communication", thread, one.begin, one.end, told)
        if one.wait > 0.0:
            name = f"wait for rank {one.last}"
            self._complete(name, "wait", thread, one.begin, one.begin + one.wait, {"last_rank": one.last})

    def _complete(self, name: str, kind: str, thread: int, begin: float, end: float, told: dict[str, Any]) -> None:
        first, last = self._nanoseconds(begin), self._nanoseconds(end)  # rounded alike, what nests still does
        event = self._event(name, "X", thread, first, cat=kind, dur=max(0, last - first) / 1e3)
        self._events.append(event | ({"args": told} if told else {}))

    def _named(self, what: str, thread: int, **told: object) -> None:
        self._events.append(self._event(what, "M", thread, 0, args=told))

    def _event(self, name: str, phase: str, thread: int, nanoseconds: int, **more: Any) -> Event:
        return {"name": name, "ph": phase, "ts": nanoseconds / 1e3, "pid": self._timeline.rank, "tid": thread} | more

    def _nanoseconds(self, at: float) -> int:
        return round((at - self._origin) * 1e9)
