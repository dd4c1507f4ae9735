"""The figures of a timeline: parts of each step, what lay under backward, bytes and waits by operation, stragglers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.monitor.timeline.merging import RankTimeline

Interval = tuple[float, float]
_LATE = 0.05  # of the mean time of a step: who holds the others up for longer is a straggler


def summarize(ranks: Sequence[RankTimeline]) -> dict[str, Any]:
    """The figures, as JSON can hold them. Times are in seconds, sizes in bytes.

    Args:
        ranks: In seconds of one clock.
    """
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
                    {"step": number, "seconds": end - begin, "parts": parts}
                    for number, begin, end, parts in timeline.steps
                ],
            }
            for timeline, under, time in zip(ranks, hidden, total, strict=True)
        ],
    }


def hidden_under_backward(timeline: RankTimeline) -> float:
    """Seconds of communication in the background that lay in backward and for which the main thread did not wait.

    The main thread's waits in backward are known as a sum: what it did not spend in operations of its own there, it
    spent waiting for those in the background.
    """
    backward = joined((s.begin, s.end) for s in timeline.spans if s.kind == "part" and s.name == "backward")
    aside = [(one.begin, one.end) for one in timeline.operations if one.background]
    own = common(backward, joined((one.begin, one.end) for one in timeline.operations if not one.background))
    waited = timeline.recorded["waited"].get("backward", 0.0) - sum(end - begin for begin, end in own)
    under = sum(overlap(backward, [one]) - overlap(own, [one]) for one in aside)
    return max(0.0, under - max(0.0, waited))


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """What some intervals cover together, in order and without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both are; each is in order and without overlaps."""
    return sum(end - begin for begin, end in common(first, second))


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """When both are; each is in order and without overlaps."""
    found, a, b = [], 0, 0
    while a < len(first) and b < len(second):
        begin, end = max(first[a][0], second[b][0]), min(first[a][1], second[b][1])
        if begin < end:
            found.append((begin, end))
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
    return found


def _operations(ranks: Sequence[RankTimeline]) -> list[dict[str, Any]]:
    """Sums over all ranks, by operation, axis and algorithm, the longest first."""
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
    """Ranks for which others waited, and for how long: that which the longest wait for one of its operations was.

    Of ranks that only serve neither counts: they wait for whoever asks, and who has asked waits for them.
    """
    ranks = [timeline for timeline in ranks if not timeline.serves]
    workers = {timeline.rank for timeline in ranks}
    steps = [end - begin for timeline in ranks for _, begin, end, _ in timeline.steps]
    caused: dict[int, float] = {}
    for timeline in ranks:
        for one in timeline.operations:
            if one.last != timeline.rank and one.last in workers:
                caused[one.last] = caused.get(one.last, 0.0) + one.wait
    others, most = (
        max(1, len(ranks) - 1),
        _LATE * sum(steps) / max(1, len(ranks)),
    )  # of the time that is recorded of a rank
    late = [(seconds / others, rank) for rank, seconds in caused.items() if steps and seconds / others > most]
    return [{"rank": rank, "others_waited_s": seconds} for seconds, rank in sorted(late, reverse=True)]
