"""From what each rank has recorded to one timeline of all ranks: clocks corrected, waits found, shares summed up.

    merge(RUN/timeline/steps-A-B)  ->  trace.json (Chrome's trace event format), summary.json, timeline.png

Needs neither MPI nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError, refusing
from mpitrain.monitor.rank_file import SERVER, rank_name
from mpitrain.monitor.timeline.spans import read_ranks
from mpitrain.monitor.timeline.summary import summarize
from mpitrain.monitor.timeline.trace_events import trace_of
from mpitrain.storage.disk import reason, replacing, write_whole
from mpitrain.storage.run_folder import TIMELINE, rank_paths


@dataclass(frozen=True)
class TimedSpan:
    """Something that a rank did. kind: part, forward, backward or action. begin, end: seconds of rank 0's clock."""

    kind: str
    name: str
    begin: float
    end: float
    arguments: dict[str, Any]


@dataclass(frozen=True)
class TimedOperation:
    """A communication of a rank.

    Attributes:
        operation, axis, algorithm: What it was.
        inside, between: Bytes that this rank sent to ranks of its node, and of others.
        begin, end: Seconds of rank 0's clock.
        background: Whether the main thread went on meanwhile.
        wait: Seconds of it until the last rank that took part had begun.
        last: That rank.
    """

    operation: str
    axis: str
    algorithm: str
    inside: int
    between: int
    begin: float
    end: float
    background: bool
    wait: float
    last: int


@dataclass(frozen=True)
class RankTimeline:
    """All that a rank did, in seconds of rank 0's clock.

    Attributes:
        recorded: As in its file.
        steps: Number, begin, end and seconds by part of each step.
        spans: What it computed.
        operations: What it communicated.
        memory: When, and bytes by category.
    """

    recorded: dict[str, Any]
    steps: list[tuple[int, float, float, dict[str, float]]]
    spans: list[TimedSpan]
    operations: list[TimedOperation]
    memory: list[tuple[float, dict[str, int]]]

    @property
    def rank(self) -> int:
        """Its number."""
        return int(self.recorded["rank"])

    @property
    def serves(self) -> bool:
        """Whether it takes no steps itself, so that how long it takes is not to be compared with others."""
        return bool(self.recorded.get("role") == SERVER)

    @property
    def name(self) -> str:
        """What it is called."""
        return rank_name(self.rank, self.recorded.get("role"))


@dataclass(frozen=True)
class Merged:
    """What `merge` has made.

    Attributes:
        trace: Path of the trace.
        summary: The content of summary.json.
        picture: Path of the picture; None where it could not be drawn.
        note: Why not.
    """

    trace: Path
    summary: dict[str, Any]
    picture: Path | None
    note: str


def merge(folder: Path) -> Merged:
    """Make one timeline of the files of all ranks.

    Args:
        folder: RUN/timeline/steps-A-B.

    Raises:
        InputError: The folder has no such files, or the results cannot be written.
    """
    with refusing(f"{folder} has a recording that is damaged", "record the steps again"):
        ranks = timelines(read_ranks(folder))
        summary = summarize(ranks)
        texts = json.dumps(trace_of(ranks), separators=(",", ":")), json.dumps(summary, indent=1) + "\n"
    trace, path = folder / "trace.json", folder / "summary.json"
    try:
        write_whole(trace, texts[0])
        write_whole(path, texts[1])
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({reason(error)}); make room") from None
    picture, note = folder / "timeline.png", ""
    try:
        from mpitrain.monitor.timeline.picture import draw

        with replacing(picture) as aside:
            draw(ranks, summary, aside)
    except ImportError as error:
        note = f'no picture was drawn ({error}); pip install "mpitrain[monitor]"'
    except OSError as error:
        note = f"no picture was drawn ({reason(error)})"
    return Merged(trace, summary, None if note else picture, note)


def recordings(run: Path) -> list[Path]:
    """The folders with recorded steps of a run, or the one that is given itself."""
    if rank_paths(run, "json"):
        return [run]
    return sorted(path for path in (run / TIMELINE).glob("steps-*-*") if path.is_dir())


def timelines(recorded: Sequence[dict[str, Any]]) -> list[RankTimeline]:
    """The recordings of all ranks in seconds of rank 0's clock."""
    clocks = [corrected(each["offsets"]) for each in recorded]
    arrivals: dict[tuple[str, int], tuple[float, int]] = {}  # of the last rank, and which one that is
    for each, clock in zip(recorded, clocks, strict=True):
        for row in each["communication"]:
            key, begin = (row[8], row[9]), clock(row[5])
            if row[8] and begin > arrivals.get(key, (float("-inf"), -1))[0]:
                arrivals[key] = begin, each["rank"]
    return [_timeline(each, clock, arrivals) for each, clock in zip(recorded, clocks, strict=True)]


def corrected(offsets: Sequence[Sequence[float]]) -> Callable[[float], float]:
    """What turns a rank's time into rank 0's: by the two offsets, the line through both; by one, that one."""
    first, last = offsets[0], offsets[-1]
    apart = last[0] - first[0]
    slope = (last[1] - first[1]) / apart if apart > 0.0 else 0.0
    return lambda at: at + first[1] + slope * (at - first[0])


def _timeline(
    recorded: dict[str, Any], clock: Callable[[float], float], arrivals: dict[tuple[str, int], tuple[float, int]]
) -> RankTimeline:
    operations = []
    for operation, axis, algorithm, inside, between, begin, end, background, key, sequence in recorded["communication"]:
        begin, end = clock(begin), clock(end)
        arrived, last = arrivals.get((key, sequence), (begin, recorded["rank"]))
        wait = min(max(0.0, arrived - begin), end - begin)
        operations.append(
            TimedOperation(operation, axis, algorithm, inside, between, begin, end, bool(background), wait, last)
        )
    return RankTimeline(
        recorded,
        [(number, clock(begin), clock(end), parts) for number, begin, end, parts in recorded["steps"]],
        [TimedSpan(kind, name, clock(b), clock(e), more) for kind, name, b, e, more in recorded["spans"]],
        operations,
        [(clock(at), figures) for at, figures in recorded["memory"]],
    )


def told(merged: Merged) -> list[str]:
    """What a person is told of it, in lines."""
    share = merged.summary["communication_under_backward_share"]
    seconds, servers = merged.summary["communication_s"], merged.summary["servers"]
    who = "all workers" if servers else "all ranks"
    under = f"{share:.1%} of {seconds:.3g} s of communication ({who})" if share is not None else "no communication"
    lines = [f"timeline: {merged.trace} (open it at https://ui.perfetto.dev)"]
    lines.append(f"timeline: {merged.picture}" if merged.picture else f"timeline: {merged.note}")
    lines.append(f"timeline: {under} lay under backward")
    for late in merged.summary["stragglers"][:3]:
        lines.append(f"timeline: the others waited {late['others_waited_s']:.3g} s each for rank {late['rank']}")
    if servers:
        lines.append(f"timeline: not compared with others, as they only serve: ranks {', '.join(map(str, servers))}")
    if missing := merged.summary["missing_ranks"]:
        lines.append(f"timeline: nothing is there of ranks {', '.join(map(str, missing))}")
    return lines
