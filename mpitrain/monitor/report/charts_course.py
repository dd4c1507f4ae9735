"""Charts of a run's course on the clock, and of the bytes that its ranks send."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import altair as alt
import numpy as np

from mpitrain.monitor.report import style
from mpitrain.monitor.report.compare import Named
from mpitrain.monitor.report.findings import expected_traffic, sent_along, traffic
from mpitrain.monitor.report.records import Moment, RunRecord
from mpitrain.monitor.report.series import kept
from mpitrain.monitor.report.style import Drawing, data
from mpitrain.storage.text import counted, number_text

MOST_MARKS = 200  # of a kind
MOST_STARTS = 40
# of each event its shape, and how many pixels below the middle of the bar it is
MARK_SHAPES = {
    "checkpoint": ("triangle-up", -5), "evaluation": ("circle", 6), "ranks lost": ("cross", 0), "stop": ("square", 0),
}  # fmt: skip
_KINDS = {"save": "checkpoint", "evaluate": "evaluation", "lost": "ranks lost", "stop": "stop"}
TIER_COLOURS = {"inside a node": "@sky", "between nodes": "@red", "by formula": "@grey"}


def course(runs: Sequence[Named]) -> Drawing:
    """Starts of a run as bars on the clock, with what happened in them; of several, each from its first start on."""
    title = "Course of the run" if len(runs) == 1 else "Course of the runs"
    spans = [named.run.starts[-1].end - named.run.starts[0].begin for named in runs if named.run.starts]
    if not spans:
        return Drawing("course", title, "The run wrote no events (events.jsonl); runs of older versions have none.")
    size, unit = (1e-3, "") if len(runs) == 1 else style.time_unit(max(spans))
    bars: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    for named in runs:
        starts = named.run.starts[-MOST_STARTS:]
        since = starts[0].begin if starts and len(runs) > 1 else 0.0
        for start in starts:
            row = f"start {start.number}, {counted(start.ranks, 'rank')}"
            row = f"{named.name}: start {start.number}" if len(runs) > 1 else row
            last = max(start.end, start.begin + 0.005 * max(spans))
            bars.append({
                "row": row, "begin": _at(start.begin - since, size), "end": _at(last - since, size),
                "ranks": start.ranks, "outcome": start.outcome, "steps": f"{start.first_step:,} to {start.last_step:,}",
                "message": start.message or start.outcome, "took": f"{start.end - start.begin:,.1f} s",
            })  # fmt: skip
            for mark in _marks(named.run, start.begin, start.end):
                marks.append(mark | {"row": row, "begin": _at(mark["begin"] - since, size)})
    x = alt.X("begin:Q", title=f"time since the first start ({unit})")
    if len(runs) == 1:
        day = datetime.fromtimestamp(runs[0].run.starts[0].begin, timezone.utc).strftime("%Y-%m-%d")
        form = "%H:%M:%S" if max(spans) < 3600 else "%d %b %H:%M"
        scale, axis = alt.Scale(type="utc", nice=False, padding=8), alt.Axis(format=form, labelFlush=True)
        x = alt.X("begin:T", title=f"time of day (UTC), from {day}", scale=scale, axis=axis)
    chart = style.framed(_course_layers(bars, marks, x), title, 36 * len({bar["row"] for bar in bars}) + 8)
    note = "A bar is a job that worked in the run folder; its colour says how it ended. A job that was killed ends "
    note += "where it last gave a sign."
    if any(len(named.run.starts) > MOST_STARTS for named in runs):
        note += f" Only the last {MOST_STARTS} starts are shown."
    return Drawing("course", title, note, chart)


def _course_layers(bars: list[dict[str, Any]], marks: list[dict[str, Any]], x: alt.X) -> Any:
    """Bars of starts under marks of events, each kind at its height."""
    rows = list(dict.fromkeys(bar["row"] for bar in bars))
    y = alt.Y("row:N", title=None, sort=rows, axis=alt.Axis(labelLimit=260))
    tooltip = ["row:N", "outcome:N", "message:N", "ranks:Q", "steps:N", "took:N"]
    colour = style.palette("outcome", "a start's end", style.OUTCOME_COLOURS, bars)
    layer = alt.Chart(data(bars)).mark_bar(height={"band": 0.62}, cornerRadius=3, opacity=0.85)
    layers = [layer.encode(x, y, alt.X2("end"), color=colour, tooltip=tooltip).add_params(style.zoom())]
    names = [name for name in MARK_SHAPES if any(mark["event"] == name for mark in marks)]
    shapes = alt.Scale(domain=names, range=[MARK_SHAPES[name][0] for name in names])
    legend = alt.Legend(symbolFillColor="@ink", symbolStrokeColor="@ink", symbolType=alt.Undefined)
    for name in names:
        of = data([mark for mark in marks if mark["event"] == name])
        points = alt.Chart(of).mark_point(
            filled=True,
            color="@ink",
            size=50,
            opacity=1,
            stroke="@paper",
            strokeWidth=0.7,
            yOffset=MARK_SHAPES[name][1],
        )
        told = ["event:N", style.STEP, "told:N"]
        layers.append(
            points.encode(x, y, alt.Shape("event:N", title="event", scale=shapes, legend=legend), tooltip=told)
        )
    return alt.layer(*layers)


def _at(seconds: float, size: float) -> float:
    """Seconds in a unit; milliseconds, as the clock has them, are whole."""
    return round(seconds / size) if size < 1 else seconds / size


def _marks(run: RunRecord, begin: float, end: float) -> list[dict[str, Any]]:
    """What happened in a start, with its time in unix seconds."""
    found: list[dict[str, Any]] = []
    for kind, event in _KINDS.items():
        of = [m for m in run.moments if m.kind == kind and begin <= m.time <= end]
        at = kept(np.arange(len(of), dtype=np.float64), MOST_MARKS)
        found += [{"begin": of[i].time, "event": event, "step": of[i].step, "told": _told(of[i])} for i in at]
    return found


def _told(moment: Moment) -> str:
    """What an event says, in a few words."""
    told = moment.told
    number = {n: number_text(told.get(n), ",.3g", "unknown") for n in ("seconds", "loss", "recovered_s")}
    texts = {
        "save": f"{told.get('folder', '')} in {number['seconds']} s",
        "evaluate": f"held-out loss {number['loss']}",
        "lost": f"ranks {told.get('ranks', 'unknown')}, went on after {number['recovered_s']} s",
        "stop": str(told.get("reason", "")),
    }
    return texts[moment.kind]


LITTLE = 0.01  # of the most, below which an operation has no bar
NO_ACCOUNT = "Ranks wrote no account of what they sent (RUN/ranks)."
NOTHING = "No rank has sent anything to another."
NO_FORMULA = "There is no formula for a single rank, nor for parallel.mode server and local."


def bytes_by_operation(runs: Sequence[Named]) -> Drawing:
    """Bytes a rank sends a step: by operation of one run, by run and axis of several."""
    title = "Bytes sent a step and rank, by operation"
    rows: list[dict[str, Any]] = [
        {"bar": (f"{n.name}: " if len(runs) > 1 else "") + f"{t.operation} along {t.axis}", "tier": tier,
         "value": value, "calls": round(t.calls, 2), "algorithm": t.algorithm}
        for n in runs
        for t in traffic(n.run)
        for tier, value in (("inside a node", t.inside), ("between nodes", t.between))
        if value > 0
    ]  # fmt: skip
    if not rows:
        return Drawing("bytes", title, NOTHING if any(traffic(n.run) for n in runs) else NO_ACCOUNT)
    most = max(row["value"] for row in rows)
    size, unit = style.byte_unit(most)
    rows = [row for row in rows if row["value"] > LITTLE * most]
    for row in rows:
        row["value"] = round(row["value"] / size, 6)
    tooltip = ["bar:N", "tier:N", "algorithm:N", alt.Tooltip("value:Q", title=unit, format=",.4f"), "calls:Q"]
    chart = _sent_bars(rows, title, unit, 26, tooltip=tooltip)
    note = "Means over the ranks of the last start. What a rank reads in its neighbours' memory counts as sent, too. "
    note += "What is less than a hundredth of the largest is in the table alone."
    return Drawing("bytes", title, note, chart)


def bytes_beside_formula(runs: Sequence[Named]) -> Drawing:
    """Bytes a rank sends a step along each axis, beside those by formula."""
    title = "Bytes sent a step and rank, beside the formula"
    rows: list[dict[str, Any]] = []
    for named in runs:
        before = f"{named.name}: " if len(runs) > 1 else ""
        for axis, formula in sorted(expected_traffic(named.run).items()):
            tiers = dict(zip(("inside a node", "between nodes"), sent_along(named.run, axis), strict=True))
            rows += [{"bar": f"{before}{axis}", "what": "sent", "tier": t, "value": v} for t, v in tiers.items() if v]
            rows.append({"bar": f"{before}{axis}", "what": "formula", "tier": "by formula", "value": formula})
    if not rows:
        return Drawing("bytes_formula", title, NO_FORMULA if any(n.run.ranks for n in runs) else NO_ACCOUNT)
    size, unit = style.byte_unit(max(float(row["value"]) for row in rows))
    for row in rows:
        row["value"] = round(float(row["value"]) / size, 6)
    tooltip = ["bar:N", "what:N", "tier:N", alt.Tooltip("value:Q", title=unit, format=",.4f")]
    offset = alt.YOffset("what:N", sort=["sent", "formula"])
    chart = _sent_bars(rows, title, unit, 36, yOffset=offset, tooltip=tooltip)
    note = "What the textbook formula says that a rank must send, beside what it sent, by axis of the mesh."
    return Drawing("bytes_formula", title, note, chart)


def _sent_bars(rows: list[dict[str, Any]], title: str, unit: str, each: int, **channels: Any) -> Any:
    colour = style.palette("tier", "to ranks", TIER_COLOURS, rows)
    return style.bars(rows, title, f"sent ({unit} a step)", each, colour, **channels)
