"""Memory of a rank within one recorded step, and the module at its peak. This module needs neither MPI nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.monitor.timeline.spans import RankTimeline

_WHOLE = ("host", "device")  # sums in the recordings of older versions


@dataclass(frozen=True)
class StepCurve:
    """Memory of a rank within one step.

    On an accelerator the peak is the largest sum of all categories. On the CPU the category `other` does not count for
    it, because the C library does not return all freed memory to the system.
    """

    rank: str  # name of the rank in charts
    step: int
    seconds: list[float]  # time since the beginning of the step of each sample
    nbytes: list[dict[str, int]]  # bytes by category of each sample
    peak: int  # index of the sample at the peak
    peak_bytes: int  # bytes of the categories that count, at the peak
    where: str  # last module that began or ended before the peak, for example "in backward of blocks.3"


def highest_curves(ranks: Sequence[RankTimeline]) -> list[StepCurve]:
    """Return the memory of the ranks that recorded it, in the step with the highest peak of any rank."""
    steps = [(step[0], timeline, step[1], step[2]) for timeline in ranks for step in timeline.steps]
    curves = [curve for step in steps if (curve := _curve(*step)) is not None]
    if not curves:
        return []
    highest = max(curves, key=lambda curve: curve.peak_bytes)
    return [curve for curve in curves if curve.step == highest.step]


def _curve(step: int, timeline: RankTimeline, begin: float, end: float) -> StepCurve | None:
    """Return a rank's memory between the begin and the end of a step; None if it was not recorded there."""
    samples = [(at, nbytes) for at, nbytes in timeline.memory if begin <= at <= end]
    if len(samples) < 2:
        return None
    rows = [{name: count for name, count in nbytes.items() if name not in _WHOLE} for _, nbytes in samples]
    on_host = timeline.recorded["device"] == "cpu"
    totals = [sum(row.values()) - (row.get("other", 0) if on_host else 0) for row in rows]
    peak = max(range(len(rows)), key=totals.__getitem__)
    where = _module_at(timeline, samples[peak][0], begin)
    return StepCurve(timeline.name, step, [at - begin for at, _ in samples], rows, peak, totals[peak], where)


def _module_at(timeline: RankTimeline, at: float, since: float) -> str:
    """Return the last begin or end of a recorded module up to a time, as text; "" if there is none after `since`."""
    edges = [
        (time, entered, span.begin - span.end, f"{'in' if entered else 'after'} {span.kind} of {span.name}")
        for span in timeline.spans
        if span.kind in ("forward", "backward")
        for time, entered in ((span.begin, True), (span.end, False))
        if since <= time <= at
    ]
    return max(edges, default=(0.0, False, 0.0, ""))[-1]
