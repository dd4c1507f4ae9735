"""Merging of the ranks' recordings to one timeline: corrects clocks, finds waits and computes totals.

    merge(RUN/timeline/steps-A-B)  ->  trace.json (Chrome's trace event format), summary.json, timeline.png

This module needs neither MPI nor torch.

The trace uses the Trace Event Format, which ui.perfetto.dev and chrome://tracing open. A process of the trace is a
rank. Its threads are main (steps, time categories, modules), communication (more than one if operations overlap),
pipeline and, on an accelerator, host (the time at which the host launched a module's work). All events with a duration
are complete events ("X"); times are microseconds since the first event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import refusing
from mpitrain.monitor.timeline.curves import StepCurve, highest_curves
from mpitrain.monitor.timeline.spans import RankTimeline, TimedOperation, TimedSpan, read_ranks
from mpitrain.storage.disk import reason, replacing, reporting, write_whole
from mpitrain.storage.run_folder import TIMELINE, rank_paths


@dataclass(frozen=True)
class MergedTimeline:
    """Result of `merge`."""

    trace: Path
    summary: dict[str, Any]
    picture: Path | None  # None if it could not be drawn
    note: str  # reason why there is no picture, or ""


def merge(folder: Path) -> MergedTimeline:
    """Merge the files of all ranks in RUN/timeline/steps-A-B into one timeline.

    Raises InputError if the folder has no such files, or the results cannot be written.
    """
    with refusing(f"{folder} contains a damaged recording", "record the steps again"):
        ranks = timelines(read_ranks(folder))
        summary = summarize(ranks)
        texts = json.dumps(trace_of(ranks), separators=(",", ":")), json.dumps(summary, indent=1) + "\n"
    trace, path = folder / "trace.json", folder / "summary.json"
    with reporting(f"{folder} cannot be written", "free some space"):
        write_whole(trace, texts[0])
        write_whole(path, texts[1])
    picture, note = folder / "timeline.png", ""
    try:
        with replacing(picture) as aside:
            _draw(ranks, summary, aside)
    except ImportError as error:
        note = f'no picture was drawn ({error}); pip install "mpitrain[monitor]"'
    except OSError as error:
        note = f"no picture was drawn ({reason(error)})"
    return MergedTimeline(trace, summary, None if note else picture, note)


def recordings(run: Path) -> list[Path]:
    """Return the folders with recorded steps of a run, or `run` itself if it is such a folder."""
    if rank_paths(run, "json"):
        return [run]
    return sorted(path for path in (run / TIMELINE).glob("steps-*-*") if path.is_dir())


def timelines(recorded: Sequence[dict[str, Any]]) -> list[RankTimeline]:
    """Return the recordings of all ranks, converted to seconds of rank 0's clock."""
    clocks = [clock_correction(each["offsets"]) for each in recorded]
    # begin of the last rank's operation, and that rank, by key and sequence
    arrivals: dict[tuple[str, int], tuple[float, int]] = {}
    for each, clock in zip(recorded, clocks, strict=True):
        for row in each["communication"]:
            key, begin = (row[8], row[9]), clock(row[5])
            if row[8] and begin > arrivals.get(key, (float("-inf"), -1))[0]:
                arrivals[key] = begin, each["rank"]
    return [_timeline(each, clock, arrivals) for each, clock in zip(recorded, clocks, strict=True)]


def step_curves(run: Path) -> list[StepCurve]:
    """Return the memory of each rank within a step of a run folder's last recording; see `highest_curves`.

    Raises InputError if the recording is damaged.
    """
    folders = [folder for folder in recordings(run) if any(folder.glob("rank-*.json"))]
    if not folders:
        return []
    folder = max(folders, key=lambda each: max(file.stat().st_mtime for file in each.glob("rank-*.json")))
    with refusing(f"{folder} contains a damaged recording", "record the steps again"):
        return highest_curves(timelines(read_ranks(folder)))


def clock_correction(offsets: Sequence[Sequence[float]]) -> Callable[[float], float]:
    """Return a function that converts a rank's time to rank 0's, by linear interpolation between its clock offsets.

    The line passes through the first and the last offset; a single offset is constant.
    """
    first, last = offsets[0], offsets[-1]
    elapsed = last[0] - first[0]
    slope = (last[1] - first[1]) / elapsed if elapsed > 0.0 else 0.0
    return lambda at: at + first[1] + slope * (at - first[0])


def _timeline(
    recorded: dict[str, Any], clock: Callable[[float], float], arrivals: dict[tuple[str, int], tuple[float, int]]
) -> RankTimeline:
    operations = []
    for operation, axis, algorithm, inside, between, begin, end, background, key, sequence in recorded["communication"]:
        begin, end = clock(begin), clock(end)
        arrived, last = arrivals.get((key, sequence), (begin, recorded["rank"]))
        wait = min(max(0.0, arrived - begin), end - begin)
        figures = (inside, between, begin, end, bool(background), wait, last)
        operations.append(TimedOperation(operation, axis, algorithm, *figures))
    return RankTimeline(
        recorded,
        [(number, clock(begin), clock(end), times) for number, begin, end, times in recorded["steps"]],
        [TimedSpan(kind, name, clock(b), clock(e), more) for kind, name, b, e, more in recorded["spans"]],
        operations,
        [(clock(at), figures) for at, figures in recorded["memory"]],
    )


def describe(merged: MergedTimeline) -> list[str]:
    """Return lines of text about a merged timeline."""
    share = merged.summary["communication_under_backward_share"]
    seconds, servers = merged.summary["communication_s"], merged.summary["servers"]
    who = "all workers" if servers else "all ranks"
    under = f"{share:.1%} of {seconds:.3g} s of communication ({who})" if share is not None else "no communication"
    lines = [f"timeline: {merged.trace} (open it at https://ui.perfetto.dev)"]
    lines.append(f"timeline: {merged.picture}" if merged.picture else f"timeline: {merged.note}")
    lines.append(f"timeline: {under} hidden behind backward")
    for peak in sorted(merged.summary["memory_peaks"], key=lambda peak: -int(peak["bytes"]))[:1]:
        largest = f"{peak['bytes'] / 1e6:,.1f} MB of {peak['rank']} in step {peak['step']}"
        lines.append(f"timeline: the highest peak of memory is {largest}, {peak['where'] or 'outside of modules'}")
    for late in merged.summary["stragglers"][:3]:
        lines.append(f"timeline: each other rank waited {late['others_waited_s']:.3g} s for rank {late['rank']}")
    if servers:
        which = ", ".join(map(str, servers))
        lines.append(f"timeline: servers, which are not compared with other ranks: ranks {which}")
    if missing := merged.summary["missing_ranks"]:
        lines.append(f"timeline: no recording of ranks {', '.join(map(str, missing))}")
    return lines


Interval = tuple[float, float]
_STRAGGLER_SHARE = 0.05  # of the recorded time; a rank for which the others wait longer is a straggler


def summarize(ranks: Sequence[RankTimeline]) -> dict[str, Any]:
    """Return the totals of a timeline as a JSON object. Times are in seconds, sizes in bytes."""
    world_size = ranks[0].recorded["world_size"]
    there = {timeline.rank for timeline in ranks}
    hidden = [hidden_under_backward(timeline) for timeline in ranks]
    total = [sum(one.end - one.begin for one in timeline.operations) for timeline in ranks]
    trained = [(under, time) for r, under, time in zip(ranks, hidden, total, strict=True) if not r.serves]
    covered, communicated = (sum(column) for column in zip(*trained, strict=True)) if trained else (0.0, 0.0)
    return {
        "world_size": world_size,
        "missing_ranks": [rank for rank in range(world_size) if rank not in there],
        "clock_correction_within_s": max(offset[2] for timeline in ranks for offset in timeline.recorded["offsets"]),
        "servers": [timeline.rank for timeline in ranks if timeline.serves],
        "communication_s": communicated,
        "communication_under_backward_s": covered,
        "communication_under_backward_share": covered / communicated if communicated else None,
        "stragglers": _stragglers(ranks),
        "operations": _operations(ranks),
        "memory_peaks": [
            {"rank": c.rank, "step": c.step, "bytes": c.peak_bytes, "where": c.where, "categories": c.nbytes[c.peak]}
            for c in highest_curves(ranks)
        ],
        "ranks": [
            {
                "rank": timeline.rank,
                "role": timeline.recorded.get("role", "worker"),
                "communication_s": time,
                "communication_under_backward_s": under,
                "communication_under_backward_share": under / time if time else None,
                "spans_left_out": timeline.recorded.get("left_out", 0),
                "modules_to_depth": timeline.recorded.get("depth"),
                "steps": [
                    {"step": number, "seconds": end - begin, "parts": times}
                    for number, begin, end, times in timeline.steps
                ],
            }
            for timeline, under, time in zip(ranks, hidden, total, strict=True)
        ],
    }


def hidden_under_backward(timeline: RankTimeline) -> float:
    """Return the seconds of background communication during backward for which the main thread did not wait.

    The main thread's waits in backward are known only as a sum. The part of the sum that it did not spend in its own
    operations was spent waiting for background operations.
    """
    backward = merge_intervals((s.begin, s.end) for s in timeline.spans if s.kind == "part" and s.name == "backward")
    aside = [(one.begin, one.end) for one in timeline.operations if one.background]
    main = merge_intervals((one.begin, one.end) for one in timeline.operations if not one.background)
    foreground = intersect(backward, main)
    waited = timeline.recorded["waited"].get("backward", 0.0) - sum(end - begin for begin, end in foreground)
    under = sum(overlap(backward, [one]) - overlap(foreground, [one]) for one in aside)
    return max(0.0, under - max(0.0, waited))


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order and without overlaps."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the total length of the intersection of two lists of intervals.

    Args:
        first, second: Intervals in order and without overlaps.
    """
    return sum(end - begin for begin, end in intersect(first, second))


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals.

    Args:
        first, second: Intervals in order and without overlaps.
    """
    intersection, a, b = [], 0, 0
    while a < len(first) and b < len(second):
        begin, end = max(first[a][0], second[b][0]), min(first[a][1], second[b][1])
        if begin < end:
            intersection.append((begin, end))
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
    return intersection


def _operations(ranks: Sequence[RankTimeline]) -> list[dict[str, Any]]:
    """Return sums over all ranks by operation, axis and algorithm, in order of falling time."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for timeline in ranks:
        for one in timeline.operations:
            row = sums.setdefault((one.operation, one.axis, one.algorithm), [0, 0, 0, 0.0, 0.0])
            figures = (1, one.inside, one.between, one.end - one.begin, one.wait)
            row[:] = [a + b for a, b in zip(row, figures, strict=True)]
    names = ("calls", "bytes_inside_nodes", "bytes_between_nodes", "seconds", "wait_s")
    rows = [
        {"operation": key[0], "axis": key[1], "algorithm": key[2]} | dict(zip(names, row, strict=True))
        for key, row in sums.items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))


def _stragglers(ranks: Sequence[RankTimeline]) -> list[dict[str, Any]]:
    """Return the ranks for which others waited, and the mean seconds that the others waited for each.

    A wait is attributed to the rank that began the operation last. Servers are left out on both sides, because they
    wait for requests, and workers wait for their answers.
    """
    ranks = [timeline for timeline in ranks if not timeline.serves]
    workers = {timeline.rank for timeline in ranks}
    steps = [end - begin for timeline in ranks for _, begin, end, _ in timeline.steps]
    caused: dict[int, float] = {}
    for timeline in ranks:
        for one in timeline.operations:
            if one.last != timeline.rank and one.last in workers:
                caused[one.last] = caused.get(one.last, 0.0) + one.wait
    others = max(1, len(ranks) - 1)
    most = _STRAGGLER_SHARE * sum(steps) / max(1, len(ranks))  # share of the recorded time of a rank
    late = [(seconds / others, rank) for rank, seconds in caused.items() if steps and seconds / others > most]
    return [{"rank": rank, "others_waited_s": seconds} for seconds, rank in sorted(late, reverse=True)]


Event = dict[str, Any]
_MAIN, _PIPELINE, _HOST, _COMMUNICATION = 0, 1, 2, 10  # numbers of threads; those of overlapping communication follow


def trace_of(ranks: Iterable[RankTimeline]) -> dict[str, Any]:
    """Return the trace of all ranks as a JSON object."""
    ranks = list(ranks)
    begins = [s.begin for r in ranks for s in r.spans] + [o.begin for r in ranks for o in r.operations]
    begins += [step[1] for r in ranks for step in r.steps] + [at for r in ranks for at, _ in r.memory]
    origin = min(begins, default=0.0)
    events = [event for rank in ranks for event in _RankEvents(rank, origin).events()]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made_by": "mpitrain monitor.timeline"}}


class _RankEvents:
    """Trace events of one rank."""

    def __init__(self, timeline: RankTimeline, origin: float) -> None:
        self._timeline, self._origin = timeline, origin

    def events(self) -> Iterator[Event]:
        """Yield all events, with the names of the process and the main thread first."""
        recorded = self._timeline.recorded
        yield self._thread_name("process_name", _MAIN, name=f"{self._timeline.name} ({recorded['host']})")
        yield self._thread_name("process_sort_index", _MAIN, sort_index=self._timeline.rank)
        main = "main" if recorded["device"] == "cpu" else f"main ({recorded['device']})"
        yield self._thread_name("thread_name", _MAIN, name=main)
        for number, begin, end, times in self._timeline.steps:
            arguments = {f"{name}_ms": round(seconds * 1e3, 4) for name, seconds in times.items()}
            yield self._complete(f"step {number}", "step", _MAIN, begin, end, arguments)
        yield from self._spans()
        yield from self._operations()
        for at, figures in self._timeline.memory:
            arguments = {name: value for name, value in figures.items() if name not in ("host", "device")}
            yield self._event("memory", "C", _MAIN, self._nanoseconds(at), cat="memory", args=arguments)

    def _spans(self) -> Iterator[Event]:
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
            yield self._complete(span.name + direction, span.kind, thread, span.begin, span.end, arguments)
        for thread, name in ((_PIPELINE, "pipeline"), (_HOST, "host")):
            if thread in threads:
                yield self._thread_name("thread_name", thread, name=name)

    def _operations(self) -> Iterator[Event]:
        free: list[float] = []  # time until which each thread is occupied
        for one in sorted(self._timeline.operations, key=lambda one: (one.begin, -one.end)):
            lane = next((number for number, until in enumerate(free) if until <= one.begin), len(free))
            if lane == len(free):
                free.append(0.0)
                name = "communication" if lane == 0 else f"communication {lane + 1}"
                yield self._thread_name("thread_name", _COMMUNICATION + lane, name=name)
            free[lane], thread = one.end, _COMMUNICATION + lane
            arguments = {
                "operation": one.operation, "axis": one.axis, "algorithm": one.algorithm,
                "bytes_inside_node": one.inside, "bytes_between_nodes": one.between, "background": one.background,
                "wait_ms": round(one.wait * 1e3, 4), "last_rank": one.last,
            }  # fmt: skip
            name = f"{one.operation} ({one.axis})"
            yield self._complete(name, "communication", thread, one.begin, one.end, arguments)
            if one.wait > 0.0:
                name = f"wait for rank {one.last}"
                yield self._complete(name, "wait", thread, one.begin, one.begin + one.wait, {"last_rank": one.last})

    def _complete(
        self, name: str, kind: str, thread: int, begin: float, end: float, arguments: dict[str, Any]
    ) -> Event:
        first, last = self._nanoseconds(begin), self._nanoseconds(end)  # rounded, so that nested events stay nested
        event = self._event(name, "X", thread, first, cat=kind, dur=max(0, last - first) / 1e3)
        return event | ({"args": arguments} if arguments else {})

    def _thread_name(self, what: str, thread: int, **arguments: object) -> Event:
        return self._event(what, "M", thread, 0, args=arguments)

    def _event(self, name: str, phase: str, thread: int, nanoseconds: int, **more: Any) -> Event:
        return {"name": name, "ph": phase, "ts": nanoseconds / 1e3, "pid": self._timeline.rank, "tid": thread} | more

    def _nanoseconds(self, at: float) -> int:
        return round((at - self._origin) * 1e9)


# -- the picture: a row for each rank, time from left to right, one of Okabe and Ito's colours for each time category


_COLOURS = {
    "data": "#F0E442", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73", "evaluation": "#CC79A7",
    "checkpoint": "#999999",
}  # fmt: skip
_OPERATION, _WAIT = "#E69F00", "#D55E00"
_MOST_ROWS = 32  # ranks that are drawn
_LONGEST_LABEL = 0.04  # share of the width that the name of a step takes
_MOST_BARS = 20_000  # of each kind and rank


def _draw(ranks: Sequence[RankTimeline], summary: dict[str, Any], path: Path) -> None:
    """Draw a timeline as a PNG file. Raises ImportError without matplotlib, and OSError if it cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = list(ranks[:_MOST_ROWS])
    steps = [step for timeline in shown for step in timeline.steps]
    origin = min((step[1] for step in steps), default=0.0)
    longest = max((step[2] for step in steps), default=origin) - origin
    unit, factor = ("s", 1.0) if longest > 10.0 else ("ms", 1e3)
    figure = Figure(figsize=(13, 1.9 + 0.62 * len(shown)), layout="constrained")
    axes = figure.add_subplot()

    def bars(row: float, height: float, spans: Sequence[tuple[float, float]], colour: str) -> None:
        pairs = [((begin - origin) * factor, (end - begin) * factor) for begin, end in spans[:_MOST_BARS]]
        axes.broken_barh(pairs, (row, height), facecolors=colour, linewidth=0)

    colours: dict[str, str] = {}
    for row, timeline in enumerate(shown):
        for name, colour in _COLOURS.items():
            spans = [(s.begin, s.end) for s in timeline.spans if s.kind == "part" and s.name == name]
            if spans:
                colours[name] = colour
                bars(row - 0.40, 0.44, spans, colour)
        bars(row + 0.07, 0.28, [(one.begin, one.end) for one in timeline.operations], _OPERATION)
        waits = [(one.begin, one.begin + one.wait) for one in timeline.operations if one.wait > 0.0]
        bars(row + 0.07, 0.28, waits, _WAIT)
    free = 0.0  # a line where each step begins, and its name where it does not overlap the previous name
    for number, begin in ((step[0], (step[1] - origin) * factor) for step in shown[0].steps):
        axes.axvline(begin, color="black", linewidth=0.6, alpha=0.5)
        if begin >= free:
            free = begin + _LONGEST_LABEL * longest * factor
            axes.annotate(f" step {number}", (begin, -0.52), fontsize=8, va="bottom", ha="left", annotation_clip=False)
    axes.set_yticks(range(len(shown)), [timeline.name for timeline in shown])
    axes.set_ylim(len(shown) - 0.5, -0.55)
    axes.set_xlim(0.0, longest * factor or 1.0)
    axes.set_xlabel(
        f"time since the beginning of step {shown[0].steps[0][0] if shown[0].steps else 0} on rank 0's clock [{unit}]"
    )
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    patches.append(Patch(color=_OPERATION, label="communication"))
    patches.append(Patch(color=_WAIT, label="of which waiting for the last rank"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    share = summary["communication_under_backward_share"]
    text = "no communication" if share is None else f"{share:.0%} of communication hidden behind backward"
    more = f", the first {_MOST_ROWS} of {len(ranks)} ranks" if len(ranks) > _MOST_ROWS else ""
    axes.set_title(f"above: the main thread; below: communication ({text}{more})", fontsize=10, loc="left", pad=16)
    figure.savefig(path, dpi=120, format="png")
