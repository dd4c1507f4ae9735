"""Chart of the memory within one recorded step, of each rank or of several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from mpitrain.monitor.report import findings, style
from mpitrain.monitor.report.findings import NamedRun
from mpitrain.monitor.report.style import Drawing, data
from mpitrain.monitor.timeline.merging import step_curves

MOST_PANELS = 8
POINTS = 400  # approximate number of points of each panel
_NO_STEP = 'No memory was recorded within a step; record some with monitor.timeline = "A:B".'


def memory_in_step(runs: Sequence[NamedRun]) -> Drawing:
    """Return areas of bytes by category within a step: a panel per rank, or one per run for its largest rank."""
    title = "Memory within a step, by category"
    recorded = [(named.name, step_curves(named.run.folder)) for named in runs]
    if len(runs) == 1:
        (_, curves), shown = recorded[0], []
        if curves:
            chosen = findings.ranks_to_show([curve.peak_bytes for curve in curves], MOST_PANELS)
            shown = [(curves[i].rank, curves[i]) for i in chosen]
    else:
        largest = [(n, max(curves, key=lambda curve: curve.peak_bytes)) for n, curves in recorded if curves]
        shown = [(f"{name}: {curve.rank}", curve) for name, curve in largest]
    if not shown:
        return Drawing("memory_step", title, _NO_STEP)
    use = [curve.nbytes[curve.peak] for _, curve in shown]
    # `other` of the CPU is mostly the interpreter and would hide the rest
    without = {"other"} if any(2 * each.get("other", 0) > sum(each.values()) for each in use) else set[str]()
    size, unit = style.byte_unit(max(sum(n for c, n in each.items() if c not in without) for each in use))
    spent, time_name = style.time_unit(max(curve.seconds[-1] for _, curve in shown))
    areas: list[dict[str, Any]] = []
    peaks: list[dict[str, Any]] = []
    for panel, curve in shown:
        sums = np.array([sum(each.values()) for each in curve.nbytes], dtype=np.float64)
        for i in sorted({*findings.points_to_draw(sums, POINTS).tolist(), curve.peak}):
            place = {"panel": panel, "at": curve.seconds[i] / spent}
            areas += [
                place | {"category": name, "value": n / size, "order": order}
                for order, (name, n) in enumerate(curve.nbytes[i].items())
                if name not in without
            ]
        peaks.append({"panel": panel, "at": curve.seconds[curve.peak] / spent, "peak": curve.where})
    columns = min(2, len(shown))
    chart = _panels(areas, peaks, time_name, unit).properties(
        width=(style.WIDTH - 50 * (columns - 1)) // columns, height=170
    )
    above = alt.Header(labelOrient="top", labelAnchor="start", labelPadding=4)
    facet = alt.Facet("panel:N", title=None, sort=[panel for panel, _ in shown], header=above)
    chart = chart.facet(facet=facet, data=data([*areas, *peaks]), columns=columns, spacing=14)
    note = "Step with the highest peak. The line marks the peak: " + "; ".join(
        f"{panel}, step {curve.step}, {style.bytes_text(curve.peak_bytes)} {curve.where or 'outside of modules'}"
        for panel, curve in shown
    )
    note += ". Other memory is not shown and does not count for the peak." if without else "."
    return Drawing("memory_step", title, note, chart.properties(title=title, usermeta={"columns": columns}))


def _panels(areas: Sequence[dict[str, Any]], peaks: Sequence[dict[str, Any]], time: str, unit: str) -> alt.LayerChart:
    """Return areas by category over time, with a line at the peak."""
    x, tooltip = alt.X("at:Q", title=f"time in the step ({time})"), alt.Tooltip("value:Q", title=unit, format=",.2f")
    area = alt.Chart().transform_filter("isValid(datum.category)").mark_area(interpolate="step-after")
    rule = alt.Chart().transform_filter("isValid(datum.peak)").mark_rule(color="@ink", strokeDash=[4, 3])
    return alt.layer(
        area.encode(
            x,
            y=alt.Y("value:Q", title=f"memory ({unit})", stack=True),
            order=alt.Order("order:Q"),
            color=style.palette("category", "category", style.MEMORY_COLOURS, areas),
            tooltip=["category:N", tooltip],
        ),
        rule.encode(x, tooltip=["peak:N"]),
    )
