"""Charts of ranks: where their time goes, what they hold in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from mpitrain.monitor.report import style
from mpitrain.monitor.report.charts_training import positions
from mpitrain.monitor.report.compare import Named
from mpitrain.monitor.report.findings import STATES, MemoryUse, memory_use, own_seconds, parts_a_step
from mpitrain.monitor.report.records import CATEGORIES, PARTS, Column, MeasuredRank, RunRecord
from mpitrain.monitor.report.series import chosen, held_at, means_between, thinned
from mpitrain.monitor.report.style import Drawing, data, records

NO_RANKS = "Ranks wrote no measurements (RUN/ranks): jobs killed in their first step, or of older versions, have none."
POINTS = 120  # of each rank over time
MOST_FACETS = 8


def part_bars(runs: Sequence[Named]) -> Drawing:
    """Seconds a step by part: a bar for each rank of one run, or for the median rank of each of several."""
    title = "Time of a step by part"
    title += ", by rank" if len(runs) == 1 else ", median rank of each run"
    measured = [named for named in runs if named.run.ranks]
    if not measured:
        return Drawing("parts", title, NO_RANKS)
    bars: list[tuple[str, MeasuredRank]] = []
    note = "Means over the steps of the last start. Communication is what a rank waited for; the part that lies under "
    note += "backward is not in it."
    if len(runs) == 1:
        ranks = measured[0].run.ranks
        shown = chosen([own_seconds(rank) for rank in ranks])
        bars = [(ranks[i].name, ranks[i]) for i in shown]
        if len(shown) < len(ranks):
            note += (
                f" Of {len(ranks):,} ranks: the one that computes least, the median one, and the one that does most."
            )
    else:
        bars = [(named.name, median_rank(named.run)) for named in measured]
    most = max(sum(parts_a_step(rank).values()) for _, rank in bars)
    size, unit = style.time_unit(most)
    rows = [
        {"bar": name, "host": rank.header.host, "part": part, "order": PARTS.index(part), "value": seconds / size}
        for name, rank in bars
        for part, seconds in parts_a_step(rank).items()
        if seconds > 0
    ]
    if not rows:
        return Drawing("parts", title, "Ranks measured no time of any part.")
    tooltip = ["bar:N", "host:N", "part:N", alt.Tooltip("sum(value):Q", title=unit, format=",.2f")]
    colour = style.palette("part", "part of a step", style.PART_COLOURS, rows)
    x = f"time of a step ({unit})"
    chart = style.bars(rows, title, x, 26, colour, order=alt.Order("order:Q"), tooltip=tooltip)
    return Drawing("parts", title, note, chart)


def median_rank(run: RunRecord) -> MeasuredRank:
    """The rank that computes as long as half of them do."""
    ranks = sorted(run.workers or run.ranks, key=own_seconds)
    return ranks[(len(ranks) - 1) // 2]


def parts_over_time(named: Named) -> Drawing:
    """Seconds a step by part over the steps, of the median rank and of the slowest."""
    title = "Time of a step by part, over the steps"
    run = named.run
    if not run.ranks:
        return Drawing("parts_over_time", title, NO_RANKS)
    slowest, usual = max(run.workers or run.ranks, key=own_seconds), median_rank(run)
    shown = {f"slowest: rank {slowest.rank}": slowest}
    if slowest is not usual:
        shown = {f"median: rank {usual.rank}": usual} | shown
    most = max(sum(parts_a_step(rank).values()) for rank in shown.values())
    size, unit = style.time_unit(most)
    rows: list[dict[str, Any]] = []
    ends = thinned(usual.step, POINTS)
    if len(ends) < 2:
        return Drawing("parts_over_time", title, "Ranks measured once; the bars above have it.")
    for name, rank in shown.items():
        for part in PARTS:
            values = means_between(rank, part, ends) / size
            if values.any():
                where = positions(run.columns, ends)
                rows += records(**where, value=values, part=part, order=PARTS.index(part), rank=name)
    if not rows:
        return Drawing("parts_over_time", title, "Ranks measured no time of any part.")
    chart = alt.Chart(data(rows)).mark_area(interpolate="step")
    chart = chart.encode(
        style.steps_axis(),
        y=alt.Y("value:Q", title=f"time ({unit})", stack=True),
        color=style.palette("part", "part of a step", style.PART_COLOURS, rows),
        order=alt.Order("order:Q"),
        tooltip=["part:N", style.STEP, alt.Tooltip("value:Q", title=unit, format=",.2f")],
    ).properties(width=style.WIDTH, height=150)
    chart = chart.facet(row=alt.Row("rank:N", title=None, sort=list(shown), header=_above()), spacing=12)
    note = "The rank that computes longest beside the median one: what it does more of, the others wait for."
    return Drawing("parts_over_time", title, note, chart.properties(title=title, usermeta={"axes": True, "columns": 1}))


def _above() -> alt.Header:
    return alt.Header(labelOrient="top", labelAnchor="start", labelPadding=4)


def memory_bars(runs: Sequence[Named]) -> Drawing:
    """Parameters, gradients and states by rank (of several runs: of the largest rank of each) beside the formula."""
    title = "Parameters, gradients and optimizer states beside the formula"
    uses = [(named.name, memory_use(named.run)) for named in runs]
    if not any(use for _, use in uses):
        return Drawing("memory_formula", title, _no_memory(runs))
    if len(runs) == 1:
        shown = chosen([use.total for use in uses[0][1]])
        bars = [(uses[0][1][i].rank.name, uses[0][1][i]) for i in shown]
        few = len(shown) < len(uses[0][1])
        note = " The ranks that hold least, the median and most." if few else ""
    else:
        bars = [(name, max(of, key=lambda u: u.total)) for name, of in uses if of]
        note = " Of each run the rank that holds most."
    most = max(max(use.total, _known(use)) for _, use in bars)
    size, unit = style.byte_unit(most)
    rows = [
        {"bar": name, "what": what, "category": category, "order": i, "value": value / size}
        for name, use in bars
        for what, values in (("held", use.held), ("formula", use.expected))
        for i, category in enumerate(STATES)
        if np.isfinite(value := values.get(category, np.nan))
    ]
    what = ["held", "formula"]
    pale, legend = alt.Scale(domain=what, range=[1, 0.45]), alt.Legend(symbolFillColor="@grey")
    chart = style.bars(
        rows, title, f"memory ({unit})", 36, _by_category(rows), order=alt.Order("order:Q"),
        yOffset=alt.YOffset("what:N", sort=what, scale=alt.Scale(paddingInner=0.1)),
        opacity=alt.Opacity("what:N", title="bar", sort=what, scale=pale, legend=legend),
        tooltip=["bar:N", "what:N", "category:N", alt.Tooltip("sum(value):Q", title=unit, format=",.3f")],
    )  # fmt: skip
    note = "The strong bar is what a rank held at its peak, the pale one below it what the formula says." + note
    if any(use.held["parameters"] < 0.99 * use.expected.get("parameters", 0.0) for _, use in bars):
        note += " Of parameters that the ranks of a node share (parallel.share_node), each counts its part."
    return Drawing("memory_formula", title, note, chart)


def _no_memory(runs: Sequence[Named]) -> str:
    return "Ranks measured no memory." if any(named.run.ranks for named in runs) else NO_RANKS


def _known(use: MemoryUse) -> float:
    return sum(v for v in use.expected.values() if np.isfinite(v))


def memory_categories(runs: Sequence[Named]) -> Drawing:
    """All categories of the largest rank of each of several runs."""
    title = "Memory by category, the largest rank" + (" of each run" if len(runs) > 1 else "")
    uses = [(n.name, max(of, key=lambda u: u.total)) for n in runs if (of := memory_use(n.run))]
    if not uses:
        return Drawing("memory", title, _no_memory(runs))
    shown, left_out = _categories([use for _, use in uses])
    size, unit = style.byte_unit(max(sum(use.held[c] for c in shown) for _, use in uses))
    rows: list[dict[str, Any]] = [
        {"bar": f"{name}: {use.rank.name}", "category": c, "order": i, "value": use.held[c] / size}
        for name, use in uses
        for i, c in enumerate(shown)
    ]
    tooltip = ["bar:N", "category:N", alt.Tooltip("sum(value):Q", title=unit, format=",.2f")]
    x, order = f"memory ({unit})", alt.Order("order:Q")
    chart = style.bars(rows, title, x, 34, _by_category(rows), order=order, tooltip=tooltip)
    note = "At the moment when the sum of all categories was the largest." + left_out
    return Drawing("memory", title, note, chart)


def _by_category(rows: Sequence[Mapping[str, Any]]) -> alt.Color:
    return style.palette("category", "category", style.MEMORY_COLOURS, rows)


def _categories(uses: Sequence[MemoryUse]) -> tuple[tuple[str, ...], str]:
    """The categories to show. What is other is left out, and told of, where all else would be thin beside it."""
    other = max(use.held["other"] for use in uses)
    held = tuple(category for category in CATEGORIES if any(use.held[category] for use in uses))
    if all(use.held["other"] <= 0.5 * use.total for use in uses):
        return held, ""
    told = (
        " Not in the picture, where it would hide all else: other memory, such as the interpreter and libraries, up to"
    )
    whole = max(use.total for use in uses)
    return held[:-1], f"{told} {style.bytes_text(other)} of a rank's {style.bytes_text(whole)}."


def memory_over_time(named: Named) -> Drawing:
    """Bytes by category over the steps, a panel for each rank."""
    title, run = "Memory by category, over the steps", named.run
    uses = memory_use(run)
    if not uses:
        return Drawing("memory", title, _no_memory([named]))
    shown = [uses[i].rank for i in chosen([use.total for use in uses], MOST_FACETS)]
    categories, left_out = _categories(uses)
    whole = max(max(u.total, u.resident, u.device) for u in uses)
    size, unit = style.byte_unit(max(sum(u.held[c] for c in categories) for u in uses) if left_out else whole)
    areas: list[dict[str, Any]] = []
    # all panels have the same steps: where one lacks a step that another has, Vega-Lite would draw 0
    steps = thinned(np.unique(np.concatenate([_taken(rank) for rank in shown])), POINTS)
    if len(steps) < 2:
        return memory_categories([named])  # there is no area over one step
    where = positions(run.columns, steps)
    for rank in shown:
        panel = _panel(rank)
        for i, category in enumerate(categories):
            values = np.nan_to_num(held_at(rank, category, steps)) / size
            areas += records(**where, value=values, category=category, order=i, rank=panel, line=None)
        for line, name in (("resident in host memory", "host"), ("taken on the device", "device")):
            values = held_at(rank, name, steps) / size
            if np.nansum(values) > 0 and not left_out:
                areas += records(**where, value=values, category=None, order=0, rank=panel, line=line)
    columns = {1: 1, 3: 3}.get(len(shown), 2)
    width = (style.WIDTH - 50 * (columns - 1)) // columns
    chart = _memory_panels(areas, unit).properties(width=width, height=130)
    chart = chart.facet(
        facet=alt.Facet("rank:N", title=None, sort=[_panel(r) for r in shown], header=_above()),
        columns=columns, spacing=14,
    )  # fmt: skip
    note = "What the run knows to be its own, by category" + (
        "." + left_out if left_out else "; dashed lines are the whole process and what is taken on its device."
    )
    if len(shown) < len(uses):
        note += f" Of {len(uses):,} ranks: those that hold least, the median and most."
    return Drawing("memory", title, note, chart.properties(title=title, usermeta={"axes": True, "columns": columns}))


def _taken(rank: MeasuredRank) -> Column:
    """The steps with which a rank told of its memory, and its last one."""
    (at,) = np.nonzero(np.isfinite(np.array([rank.memory[c] for c in CATEGORIES])).any(axis=0))
    return rank.step[np.append(at, len(rank.step) - 1)]


def _panel(rank: MeasuredRank) -> str:
    return rank.name + (f" ({rank.header.host})" if rank.header.host else "")


def _memory_panels(rows: list[dict[str, Any]], unit: str) -> Any:
    """Areas by category under lines of the process and the device."""
    tooltip = [style.STEP, alt.Tooltip("value:Q", title=unit, format=",.2f")]
    base = alt.Chart(data(rows))
    x, y = style.steps_axis(), f"memory ({unit})"
    layers = [
        base.transform_filter("datum.category !== null").mark_area(interpolate="step-after").encode(
            x, y=alt.Y("value:Q", title=y, stack=True), order=alt.Order("order:Q"),
            color=_by_category(rows), tooltip=["category:N", *tooltip],
        )
    ]  # fmt: skip
    names = list(dict.fromkeys(row["line"] for row in rows if row["line"]))
    if names:
        dash = style.dashes("line", "in all", dict(zip(names, ([6, 3], [2, 2]), strict=False)), "@ink")
        lines = base.transform_filter("datum.line !== null").mark_line(color="@ink", strokeWidth=1.3)
        layers.append(lines.encode(x, alt.Y("value:Q", title=y, stack=None), dash, tooltip=["line:N", *tooltip]))
    return alt.layer(*layers)
