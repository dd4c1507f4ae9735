"""Charts of a run: training and speed, time and memory of ranks, bytes sent, and the course of the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import altair as alt
import numpy as np

from mpitrain.monitor.parts import TIME_CATEGORIES
from mpitrain.monitor.report import findings, style
from mpitrain.monitor.report.findings import NamedRun, histogram, loss_label, metric_columns, percentiles, trend
from mpitrain.monitor.report.reading import CATEGORIES, Column, MeasuredRank, RunEvent, RunRecord, StepColumns
from mpitrain.monitor.report.style import Drawing, data, records
from mpitrain.storage.text import counted, number_text, with_spaces

NOISY = 300  # number of points above which a line of medians is drawn over the series
SAVES = 30  # largest number of checkpoints that the loss chart marks
HOVER = 300  # points of a series that have a tooltip
METRICS = 12  # largest number of metric charts
MARKS = {"start": "restart", "save": "checkpoint", "lost": "ranks lost", "stop": "stop", "end": "failure"}
MARK_DASHES = {"restart": [1, 0], "checkpoint": [2, 4], "ranks lost": [7, 3], "stop": [4, 4], "failure": [9, 3, 2, 3]}


@dataclass(frozen=True)
class _Curve:
    """Series over the steps. marked: show each of its few points. exact: the series is not noisy."""

    name: str
    columns: StepColumns
    values: Column
    marked: bool = False
    exact: bool = False

    def rows(self, at: Any) -> list[dict[str, Any]]:
        """Return the points as rows of a chart."""
        return records(**positions(self.columns, self.columns.step[at]), value=self.values[at], run=self.name)

    def medians(self) -> list[dict[str, Any]]:
        """Return the rows of a line of medians through a noisy series."""
        step, value = trend(self.columns.step, self.values)
        return records(**positions(self.columns, step), value=value, run=self.name)


def positions(columns: StepColumns, steps: Column) -> dict[str, Column]:
    """Return the positions of steps on each x axis: step number, seconds of training, samples seen."""
    return {
        "step": steps,
        "seconds": np.interp(steps, columns.step, np.cumsum(columns.seconds)),
        "samples": np.interp(steps, columns.step, np.cumsum(columns.samples)),
    }


def _lines(
    name: str, title: str, note: str, curves: Sequence[_Curve], y: alt.Y, number: str, unit: str,
    *, extra: Sequence[alt.Chart] = (), wide: bool = False, missing: str = "",
) -> Drawing:  # fmt: skip
    """Draw curves over each other.

    Args:
        name, title, note, wide: Attributes of the `Drawing`.
        curves, y: Curves to draw, and the y axis.
        number, unit: Format for d3 and label of a value in the tooltip.
        extra: Charts to draw below the curves.
        missing: Note of the drawing if there are no curves.
    """
    if not curves:
        return Drawing(name, title, missing)
    names = [curve.name for curve in curves]
    several = len({id(curve.columns) for curve in curves}) > 1  # for a single run, dashes mark events
    colour, dash = style.run_colour(names, "run" if several else "series"), style.run_dash(names)
    x = style.steps_axis()
    tooltip = [alt.Tooltip("run:N", title="series"), style.STEP, alt.Tooltip("value:Q", title=unit, format=number)]
    whole, points, marks = (list[dict[str, Any]]() for _ in range(3))
    layers: list[alt.Chart] = list(extra)
    for place, curve in enumerate(curves):
        at = findings.points_to_draw(curve.values)
        if len(at) > NOISY and not curve.exact:  # faint, with a fixed colour, so that the legend is not faint
            faint = alt.Chart(data(curve.rows(at)))
            colours = style.RUN_COLOURS
            layers.append(faint.mark_line(style="faint", color=colours[place % len(colours)]).encode(x, y))
            whole.extend(curve.medians())
        else:
            whole.extend(curve.rows(at))
        rows = marks if len(at) == 1 or (curve.marked and len(at) <= 60) else points  # one point makes no line
        rows.extend(curve.rows(findings.points_to_draw(curve.values, HOVER)))
    layers.append(alt.Chart(data(whole)).mark_line(clip=True).encode(x, y, colour, *([dash] if several else [])))
    if marks:
        layers.append(alt.Chart(data(marks)).mark_point(filled=True, size=36).encode(x, y, colour, tooltip=tooltip))
    if points:
        layers.append(alt.Chart(data(points)).mark_point(size=90, opacity=0).encode(x, y, colour, tooltip=tooltip))
    layers[-1] = layers[-1].add_params(style.zoom())
    chart = style.frame(alt.layer(*layers), title).properties(usermeta={"axes": True})
    return Drawing(name, title, note, chart, wide)


def _y(title: str, values: Sequence[Column], *, zero: bool = False, log_from: float = np.inf) -> alt.Y:
    """Return a y axis for series, logarithmic if largest / median exceeds `log_from`."""
    everything = np.concatenate([np.empty(0), *(v[np.isfinite(v)] for v in values)])
    if len(everything) and float(np.ptp(everything)) == 0.0 and not zero:  # an axis without extent has no labels
        middle = float(everything[0])
        around = [middle - 0.1 * abs(middle), middle + 0.1 * abs(middle)] if middle else [-1.0, 1.0]
        return alt.Y("value:Q", title=title, scale=alt.Scale(domain=around), stack=None)
    positive = len(everything) > 0 and float(everything.min()) > 0
    if positive and float(everything.max()) > log_from * float(np.median(everything)):
        return alt.Y("value:Q", title=f"{title}, log scale", scale=alt.Scale(type="log", nice=True), stack=None)
    return alt.Y("value:Q", title=title, scale=alt.Scale(zero=zero), stack=None)


def _curves(runs: Sequence[NamedRun], column: Callable[[StepColumns], Column], name: str, **kind: bool) -> list[_Curve]:
    """Return a curve for each run that has values in a column; `name` is its name if there is one run."""
    return [
        _Curve(named.name if len(runs) > 1 else name, named.run.columns, values, **kind)
        for named in runs
        if np.isfinite(values := column(named.run.columns)).any()
    ]


def losses(runs: Sequence[NamedRun]) -> list[Drawing]:
    """Return charts of the loss and the held-out loss: one chart for one run, two for several."""
    trained = _curves(runs, lambda columns: columns.loss, "training")
    held_out = _curves(runs, lambda columns: columns.held_out_loss, "held out", marked=True)
    why = "No step has a finite loss." if not trained else "No held-out loss was measured (see data.held_out)."
    label, single = loss_label(runs), len(runs) == 1
    charts = [("loss", "Loss", trained + held_out)]
    if not single:
        charts = [("loss", "Training loss", trained), ("held_out_loss", "Held-out loss", held_out)]
    marks = event_rules(runs[0].run) if single else []
    drawings = []
    for name, title, curves in charts:
        note = f"{title} of each run."
        if single:
            note = "Training loss of each step. If it is noisy, the thick line is the median over a range of steps."
            note += " Vertical lines are events of the run." if marks else ""
            note += "" if held_out else " " + why
        y = _y(label, [curve.values for curve in curves])
        drawings.append(_lines(name, title, note, curves, y, ".4f", label, extra=marks, wide=True, missing=why))
    return drawings


def metrics(runs: Sequence[NamedRun]) -> list[Drawing]:
    """Return a chart for each held-out metric, in the order in which the runs name them."""
    measured = [(named, metric_columns(named.run)) for named in runs]
    drawings = []
    for name in list(dict.fromkeys(name for _, columns in measured for name in columns))[:METRICS]:
        text = with_spaces(name)
        curves = [
            _Curve(named.name if len(runs) > 1 else text, named.run.columns, columns[name], marked=True, exact=True)
            for named, columns in measured
            if name in columns
        ]
        label = text.replace("loss", loss_label(runs), 1) if text.startswith("loss of ") else f"{text} (no unit)"
        y, title = _y(label, [curve.values for curve in curves]), f"Held-out {text}"
        place = re.sub(r"\W", "_", f"held_out_{name}")  # valid file name, because users choose the names of metrics
        note = f"Held-out {text} at each evaluation."
        drawings.append(_lines(place, title, note, curves, y, ".4g", text))
    return drawings


def event_rules(run: RunRecord) -> list[alt.Chart]:
    """Return a list with a layer of vertical lines at the events of a run; empty if there are no events."""
    events = []
    for moment in run.events:
        kind = MARKS.get(moment.kind)
        resumed = moment.kind == "start" and moment is not next(m for m in run.events if m.kind == "start")
        failed = moment.kind == "end" and moment.details.get("outcome") == "failed"
        if kind and (moment.kind not in ("start", "end") or resumed or failed):
            events.append((kind, float(moment.step)))
    events = list(dict.fromkeys(events))
    if sum(kind == "checkpoint" for kind, _ in events) > SAVES:
        events = [(kind, step) for kind, step in events if kind != "checkpoint"]
    if not events:
        return []
    steps = np.clip(np.array([step for _, step in events]), run.columns.step[0], run.columns.step[-1])
    rows = records(**positions(run.columns, steps), event=[kind for kind, _ in events])
    kinds = {kind for kind, _ in events}
    dashes = style.dashes("event", "event", {k: dash for k, dash in MARK_DASHES.items() if k in kinds}, "@muted")
    chart = alt.Chart(data(rows)).mark_rule(color="@muted", clip=True)
    return [chart.encode(style.steps_axis(), dashes, tooltip=["event:N", style.STEP])]


def learning_rate(runs: Sequence[NamedRun]) -> Drawing:
    """Return a chart of the learning rate."""
    curves = _curves(runs, lambda columns: columns.lr, "learning rate", exact=True)
    y = alt.Y("value:Q", title="learning rate (per step)", scale=alt.Scale(zero=True), axis=alt.Axis(format="~g"))
    note, missing = "Learning rate of each step.", "The metrics have no learning rate."
    return _lines("learning_rate", "Learning rate", note, curves, y, ".3e", "learning rate", missing=missing)


def gradient_norm(runs: Sequence[NamedRun]) -> Drawing:
    """Return a chart of the gradient norm."""
    curves = _curves(runs, lambda columns: columns.grad_norm, "gradient norm")
    y = _y("L2 norm before clipping (no unit)", [c.values for c in curves], log_from=20)
    note = "L2 norm of all gradients before clipping."
    why = "The gradient norm was not measured because train.clip was 0."
    return _lines("gradient_norm", "Gradient norm", note, curves, y, ".3f", "L2 norm", missing=why)


def throughput(runs: Sequence[NamedRun]) -> Drawing:
    """Return a chart of tokens per second, or of samples per second if samples are not tokens."""
    unit = "tokens" if any(named.run.columns.tokens.any() for named in runs) else "samples"
    curves = _curves(runs, lambda columns: getattr(columns, unit) / columns.seconds, f"{unit}/s")
    y = alt.Y("value:Q", title=f"throughput ({unit}/s)", scale=alt.Scale(zero=True), axis=alt.Axis(format="~s"))
    rates = [f"{n.run.columns.rate(n.run.columns.samples):,.1f}" for n in runs]
    order = " (in the order of the runs)" if len(runs) > 1 else ""
    note = f"All ranks together, for each step. Mean over the run: {', '.join(rates)} samples/s{order}."
    return _lines("throughput", "Throughput", note, curves, y, ",.0f", f"{unit}/s", wide=True)


def step_time(runs: Sequence[NamedRun]) -> Drawing:
    """Return a chart of the seconds of each step."""
    size, unit = _unit(runs)
    curves = _curves(runs, lambda columns: columns.seconds / size, "step time")
    y = _y(f"step time ({unit})", [c.values for c in curves], zero=True, log_from=8)
    note = "Time of each step, without evaluation and saving."
    return _lines("step_time", "Step time", note, curves, y, ",.2f", unit)


def _unit(runs: Sequence[NamedRun]) -> tuple[float, str]:
    """Return the size in seconds and the name of a suitable unit for the runs' step times."""
    return style.time_unit(max(float(np.median(named.run.columns.seconds)) for named in runs))


def step_histogram(runs: Sequence[NamedRun]) -> Drawing:
    """Return a histogram of step times."""
    size, unit = _unit(runs)
    title, above, names = "Distribution of step times", 0, [named.name for named in runs]
    rows: list[dict[str, Any]] = []
    everything = [named.run.columns.seconds / size for named in runs]
    for named, seconds in zip(runs, everything, strict=True):
        shares, edges, more = histogram(seconds, among=everything)
        above += more
        rows += records(low=edges[:-1], high=edges[1:], share=shares, run=named.name)
    tooltip = [
        alt.Tooltip("low:Q", title=f"from ({unit})", format=",.2f"),
        alt.Tooltip("high:Q", title=f"to ({unit})", format=",.2f"),
        alt.Tooltip("share:Q", title="share of steps", format=".1%"),
    ]
    x = alt.X("low:Q", title=f"step time ({unit})", scale=alt.Scale(zero=False), bin="binned")
    y = alt.Y("share:Q", title="share of steps (%)", axis=alt.Axis(format=".2~%"), stack=None)
    colour = style.run_colour(names)
    bars = alt.Chart(data(rows)).mark_bar(opacity=0.8 if len(runs) == 1 else 0.45)
    layers = [bars.encode(x, y, colour, x2="high:Q", tooltip=tooltip)]
    if len(runs) > 1:
        outline = alt.Chart(data(rows)).mark_line(interpolate="step-after")
        layers.append(outline.encode(alt.X("low:Q"), y, colour, style.run_dash(names)))
    else:
        # vertical lines at the median, the 90th and the 99th percentile
        quantiles = percentiles(everything[0])
        rules = [{"low": quantiles[p], "percentile": f"p{p}"} for p in (50, 90, 99)]
        dashes = style.dashes("percentile", "percentile", {"p50": [1, 0], "p90": [6, 3], "p99": [2, 3]}, "@muted")
        rule = alt.Chart(data(rules)).mark_rule(color="@ink", strokeWidth=1.4)
        rule_tooltip = ["percentile:N", alt.Tooltip("low:Q", title=unit)]
        layers.append(rule.encode(x="low:Q", strokeDash=dashes, tooltip=rule_tooltip))
    note = "Share of steps by their time. A second peak is a second kind of step, such as those after a save."
    note += f" Not shown: the slowest {counted(above, 'step')}." if above else ""
    return Drawing("step_histogram", title, note, style.frame(alt.layer(*layers), title), wide=False)


# -- time, memory and bytes sent of ranks, and the course of the run


NO_RANKS = "No measurements of ranks (RUN/ranks): the job was killed in its first step, or is of an older version."
POINTS = 120  # points of each rank over time
MOST_FACETS = 8
_ABOVE = alt.Header(labelOrient="top", labelAnchor="start", labelPadding=4)
_BY_TIME = "category", "time category", style.TIME_COLOURS
_BY_CATEGORY = "category", "category", style.MEMORY_COLOURS
_BY_TIER = "tier", "bytes", {"inside a node": "@sky", "between nodes": "@red", "by formula": "@grey"}


def time_bars(runs: Sequence[NamedRun]) -> Drawing:
    """Return bars of seconds per step by category, for each rank of one run or the median rank of each of several."""
    title = f"Time of a step by category, {'by rank' if len(runs) == 1 else 'median rank of each run'}"
    measured = [named for named in runs if named.run.ranks]
    if not measured:
        return Drawing("parts", title, NO_RANKS)
    note = "Means over the steps of the last start. Communication is the time that a rank waited for other ranks; "
    note += "communication hidden behind backward is not included."
    if len(runs) == 1:
        ranks = measured[0].run.ranks
        shown = findings.ranks_to_show([findings.busy_seconds(rank) for rank in ranks])
        bars = [(ranks[i].name, ranks[i]) for i in shown]
        if len(shown) < len(ranks):
            note += f" Of {len(ranks):,} ranks: those with the least, the median and the most compute time."
    else:
        bars = [(named.name, median_rank(named.run)) for named in measured]
    rows = [
        {"bar": name, "host": rank.header.host, "category": category, "value": seconds}
        for name, rank in bars
        for category, seconds in findings.seconds_per_step(rank).items()
        if seconds > 0
    ]
    chart = style.bars(rows, title, "time of a step ({})", style.time_unit, 26, *_BY_TIME, ["host:N"])
    return Drawing("parts", title, note, chart)


def _areas(
    chart: alt.Chart, rows: list[dict[str, Any]], by: tuple[str, str, dict[str, str]], title: str, unit: str
) -> alt.Chart:
    """Return areas of the rows' values over the steps, stacked by a field with its legend and colours."""
    y, colour = alt.Y("value:Q", title=title, stack=True), style.palette(*by, rows)
    tooltip = ["category:N", style.STEP, alt.Tooltip("value:Q", title=unit, format=",.2f")]
    return chart.encode(style.steps_axis(), y=y, color=colour, order=alt.Order("order:Q"), tooltip=tooltip)


def median_rank(run: RunRecord) -> MeasuredRank:
    """Return the rank with the median compute time."""
    ranks = sorted(run.workers or run.ranks, key=findings.busy_seconds)
    return ranks[(len(ranks) - 1) // 2]


def time_over_steps(named: NamedRun) -> Drawing:
    """Return areas of seconds per step by category over the steps, for the median rank and the slowest."""
    title = "Time of a step by category, over the steps"
    run = named.run
    if not run.ranks:
        return Drawing("parts_over_time", title, NO_RANKS)
    slowest, usual = max(run.workers or run.ranks, key=findings.busy_seconds), median_rank(run)
    shown = {f"slowest: rank {slowest.rank}": slowest}
    if slowest is not usual:
        shown = {f"median: rank {usual.rank}": usual} | shown
    size, unit = style.time_unit(max(sum(findings.seconds_per_step(rank).values()) for rank in shown.values()))
    rows: list[dict[str, Any]] = []
    ends = findings.thin_out(usual.step, POINTS)
    if len(ends) < 2:
        return Drawing("parts_over_time", title, "Ranks measured only once; see the bars above.")
    where = positions(run.columns, ends)
    for name, rank in shown.items():
        for order, category in enumerate(TIME_CATEGORIES):
            values = findings.means_between(rank, category, ends) / size
            if values.any():
                rows += records(**where, value=values, category=category, order=order, rank=name)
    chart = _areas(alt.Chart(data(rows)).mark_area(interpolate="step"), rows, _BY_TIME, f"time ({unit})", unit)
    chart = chart.properties(width=style.WIDTH, height=150).facet(
        row=alt.Row("rank:N", title=None, sort=list(shown), header=_ABOVE), spacing=12
    )
    note = "The rank that computes longest, next to the median rank. The others wait for the extra time of that rank."
    return Drawing("parts_over_time", title, note, chart.properties(title=title, usermeta={"axes": True, "columns": 1}))


def memory_bars(runs: Sequence[NamedRun]) -> Drawing:
    """Return bars of parameters, gradients and states beside the formula, by rank, or for each run's largest rank."""
    title = "Parameters, gradients and optimizer states compared with the formula"
    uses = [(named.name, findings.memory_use(named.run)) for named in runs]
    if not any(use for _, use in uses):
        return Drawing("memory_formula", title, _no_memory(runs))
    if len(runs) == 1:
        shown = findings.ranks_to_show([use.total for use in uses[0][1]])
        bars = [(uses[0][1][i].rank.name, uses[0][1][i]) for i in shown]
        note = " Ranks with the least, the median and the most memory." if (len(shown) < len(uses[0][1])) else ""
    else:
        bars = [(name, max(of, key=lambda u: u.total)) for name, of in uses if of]
        note = " Each run is shown by its rank with the most memory."
    rows = [
        {"bar": name, "what": what, "category": category, "value": value}
        for name, use in bars
        for what, values in (("measured", use.peak), ("formula", use.expected))
        for category in findings.STATES
        if np.isfinite(value := values.get(category, np.nan))
    ]
    what = ["measured", "formula"]
    pale, legend = alt.Scale(domain=what, range=[1, 0.45]), alt.Legend(symbolFillColor="@grey")
    chart = style.bars(
        rows, title, "memory ({})", style.byte_unit, 36, *_BY_CATEGORY, ["what:N"],
        yOffset=alt.YOffset("what:N", sort=what, scale=alt.Scale(paddingInner=0.1)),
        opacity=alt.Opacity("what:N", title="bar", sort=what, scale=pale, legend=legend),
    )  # fmt: skip
    note = "Strong bars: bytes measured at the rank's peak. Pale bars: bytes predicted by the formula." + note
    if any(use.peak["parameters"] < 0.99 * use.expected.get("parameters", 0.0) for _, use in bars):
        note += " If ranks of a node share the parameters (parallel.share_node), each rank counts its share of them."
    return Drawing("memory_formula", title, note, chart)


def _no_memory(runs: Sequence[NamedRun]) -> str:
    return "The ranks did not measure their memory." if any(named.run.ranks for named in runs) else NO_RANKS


def memory_categories(runs: Sequence[NamedRun]) -> Drawing:
    """Return bars of all memory categories for the largest rank of each run."""
    title = "Memory by category, rank with the most memory" + (" of each run" if len(runs) > 1 else "")
    uses = [(n.name, max(of, key=lambda u: u.total)) for n in runs if (of := findings.memory_use(n.run))]
    if not uses:
        return Drawing("memory", title, _no_memory(runs))
    shown, left_out = _categories([use for _, use in uses])
    rows: list[dict[str, Any]] = [
        {"bar": f"{name}: {use.rank.name}", "category": c, "value": use.peak[c]} for name, use in uses for c in shown
    ]
    chart = style.bars(rows, title, "memory ({})", style.byte_unit, 34, *_BY_CATEGORY)
    return Drawing("memory", title, f"Measured when the sum of all categories was largest.{left_out}", chart)


def _categories(uses: Sequence[findings.MemoryUse]) -> tuple[tuple[str, ...], str]:
    """Return the categories to show, and a note if `other` is left out because it would dwarf all else."""
    categories = tuple(category for category in CATEGORIES if any(use.peak[category] for use in uses))
    if all(use.peak["other"] <= 0.5 * use.total for use in uses):
        return categories, ""
    other, total = max(use.peak["other"] for use in uses), max(use.total for use in uses)
    return categories[:-1], (
        " Other memory, such as the interpreter and libraries, is not shown because it would dwarf the rest: up to "
        f"{style.bytes_text(other)} of a rank's {style.bytes_text(total)}."
    )


def memory_over_time(named: NamedRun) -> Drawing:
    """Return areas of bytes by category over the steps, in one panel per rank."""
    title, run = "Memory by category, over the steps", named.run
    uses = findings.memory_use(run)
    if not uses:
        return Drawing("memory", title, _no_memory([named]))
    shown = [uses[i].rank for i in findings.ranks_to_show([use.total for use in uses], MOST_FACETS)]
    categories, left_out = _categories(uses)
    whole = max(max(u.total, u.resident, u.device) for u in uses)
    size, unit = style.byte_unit(max(sum(u.peak[c] for c in categories) for u in uses) if left_out else whole)
    areas: list[dict[str, Any]] = []
    # all panels need the same steps, because Vega-Lite draws 0 at a step that a panel lacks
    taken = [rank.step[-1:] for rank in shown]
    taken += [rank.step[np.isfinite([rank.memory[c] for c in CATEGORIES]).any(axis=0)] for rank in shown]
    steps = findings.thin_out(np.unique(np.concatenate(taken)), POINTS)
    if len(steps) < 2:
        return memory_categories([named])  # one step makes no area
    where = positions(run.columns, steps)
    for rank in shown:
        panel = _panel(rank)
        for i, category in enumerate(categories):
            values = np.nan_to_num(findings.bytes_at(rank, category, steps)) / size
            areas += records(**where, value=values, category=category, order=i, rank=panel, line=None)
        for line, name in (("resident in host memory", "host"), ("in use on the device", "device")):
            values = findings.bytes_at(rank, name, steps) / size
            if np.nansum(values) > 0 and not left_out:
                areas += records(**where, value=values, category=None, order=0, rank=panel, line=line)
    columns = {1: 1, 3: 3}.get(len(shown), 2)
    chart = _memory_panels(areas, unit).properties(width=(style.WIDTH - 50 * (columns - 1)) // columns, height=130)
    chart = chart.facet(
        facet=alt.Facet("rank:N", title=None, sort=[_panel(r) for r in shown], header=_ABOVE),
        columns=columns, spacing=14,
    )  # fmt: skip
    note = "Bytes of each category." + (
        left_out or " Dashed lines: all memory of the process, and all memory in use on its device."
    )
    if len(shown) < len(uses):
        note += f" Of {len(uses):,} ranks: those with the least, the median and the most memory."
    return Drawing("memory", title, note, chart.properties(title=title, usermeta={"axes": True, "columns": columns}))


def _panel(rank: MeasuredRank) -> str:
    return rank.name + (f" ({rank.header.host})" if rank.header.host else "")


def _memory_panels(rows: list[dict[str, Any]], unit: str) -> Any:
    """Return areas by category below lines of the whole process and the device."""
    tooltip = [style.STEP, alt.Tooltip("value:Q", title=unit, format=",.2f")]
    base = alt.Chart(data(rows))
    x, y = style.steps_axis(), f"memory ({unit})"
    areas = base.transform_filter("datum.category !== null").mark_area(interpolate="step-after")
    layers = [_areas(areas, rows, _BY_CATEGORY, y, unit)]
    names = list(dict.fromkeys(row["line"] for row in rows if row["line"]))
    if names:
        dash = style.dashes("line", "total", dict(zip(names, ([6, 3], [2, 2]), strict=False)), "@ink")
        lines = base.transform_filter("datum.line !== null").mark_line(color="@ink", strokeWidth=1.3)
        layers.append(lines.encode(x, alt.Y("value:Q", title=y, stack=None), dash, tooltip=["line:N", *tooltip]))
    return alt.layer(*layers)


MOST_MARKS = 200  # of each kind of event
MOST_STARTS = 40
# shape of each event, and its distance in pixels below the middle of the bar
MARK_SHAPES = {
    "checkpoint": ("triangle-up", -5), "evaluation": ("circle", 6), "ranks lost": ("cross", 0), "stop": ("square", 0),
}  # fmt: skip
_KINDS = {"save": "checkpoint", "evaluate": "evaluation", "lost": "ranks lost", "stop": "stop"}


def course(runs: Sequence[NamedRun]) -> Drawing:
    """Return the starts of a run as bars over time, with events; several runs are aligned at their first starts."""
    title = "Course of the run" if len(runs) == 1 else "Course of the runs"
    spans = [named.run.starts[-1].end - named.run.starts[0].begin for named in runs if named.run.starts]
    if not spans:
        return Drawing("course", title, "There are no events of the run (events.jsonl); older versions wrote none.")
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
            for kind, event in _KINDS.items():
                events = [m for m in named.run.events if m.kind == kind and start.begin <= m.time <= start.end]
                for i in findings.points_to_draw(np.arange(len(events), dtype=np.float64), MOST_MARKS):
                    mark = {"event": event, "step": events[i].step, "details": _event_details(events[i])}
                    marks.append(mark | {"row": row, "begin": _at(events[i].time - since, size)})
    x = alt.X("begin:Q", title=f"time since the first start ({unit})")
    if len(runs) == 1:
        day = datetime.fromtimestamp(runs[0].run.starts[0].begin, timezone.utc).strftime("%Y-%m-%d")
        form = "%H:%M:%S" if max(spans) < 3600 else "%d %b %H:%M"
        scale, axis = alt.Scale(type="utc", nice=False, padding=8), alt.Axis(format=form, labelFlush=True)
        x = alt.X("begin:T", title=f"time of day (UTC), from {day}", scale=scale, axis=axis)
    chart = style.frame(_course_layers(bars, marks, x), title, 36 * len({bar["row"] for bar in bars}) + 8)
    note = "Each bar is a job that worked in the run folder; its colour shows how it ended. The bar of a killed job "
    note += "ends at its last line in any file."
    if any(len(named.run.starts) > MOST_STARTS for named in runs):
        note += f" Only the last {MOST_STARTS} starts are shown."
    return Drawing("course", title, note, chart)


def _course_layers(bars: list[dict[str, Any]], marks: list[dict[str, Any]], x: alt.X) -> Any:
    """Return bars of starts below marks of events, with each kind of event at its own height."""
    rows = list(dict.fromkeys(bar["row"] for bar in bars))
    y = alt.Y("row:N", title=None, sort=rows, axis=alt.Axis(labelLimit=260))
    tooltip = ["row:N", "outcome:N", "message:N", "ranks:Q", "steps:N", "took:N"]
    colour = style.palette("outcome", "outcome", style.OUTCOME_COLOURS, bars)
    layer = alt.Chart(data(bars)).mark_bar(height={"band": 0.62}, cornerRadius=3, opacity=0.85)
    layers = [layer.encode(x, y, alt.X2("end"), color=colour, tooltip=tooltip).add_params(style.zoom())]
    names = [name for name in MARK_SHAPES if any(mark["event"] == name for mark in marks)]
    shapes = alt.Scale(domain=names, range=[MARK_SHAPES[name][0] for name in names])
    legend = alt.Legend(symbolFillColor="@ink", symbolStrokeColor="@ink", symbolType=alt.Undefined)
    for name in names:
        of = data([mark for mark in marks if mark["event"] == name])
        look = {"filled": True, "color": "@ink", "size": 50, "opacity": 1, "stroke": "@paper", "strokeWidth": 0.7}
        points = alt.Chart(of).mark_point(**look, yOffset=MARK_SHAPES[name][1])
        shape = alt.Shape("event:N", title="event", scale=shapes, legend=legend)
        layers.append(points.encode(x, y, shape, tooltip=["event:N", style.STEP, "details:N"]))
    return alt.layer(*layers)


def _at(seconds: float, size: float) -> float:
    """Return seconds in another unit, rounded for units below a second."""
    return round(seconds / size) if size < 1 else seconds / size


def _event_details(moment: RunEvent) -> str:
    """Return a short text about an event."""
    facts = moment.details
    number = {n: number_text(facts.get(n), ",.3g", "unknown") for n in ("seconds", "loss", "recovered_s")}
    texts = {
        "save": f"{facts.get('folder', '')} in {number['seconds']} s",
        "evaluate": f"held-out loss {number['loss']}",
        "lost": f"ranks {facts.get('ranks', 'unknown')}; continued after {number['recovered_s']} s",
        "stop": str(facts.get("reason", "")),
    }
    return texts[moment.kind]


LEAST_SHARE = 0.01  # share of the largest value below which an operation has no bar
NO_TRAFFIC_FILE = "There is no record of the bytes that ranks sent (RUN/ranks)."
NOTHING = "No rank sent anything to another rank."
NO_FORMULA = "There is no formula for a single rank, or for parallel.mode server or local."


def bytes_by_operation(runs: Sequence[NamedRun]) -> Drawing:
    """Return bars of the bytes a rank sends per step, by operation and axis; several runs are shown separately."""
    title = "Bytes sent per step and rank, by operation"
    rows: list[dict[str, Any]] = [
        {"bar": (f"{n.name}: " if len(runs) > 1 else "") + f"{t.operation} along {t.axis}", "tier": tier,
         "value": value, "calls": round(t.calls, 2), "algorithm": t.algorithm}
        for n in runs
        for t in findings.traffic(n.run)
        for tier, value in (("inside a node", t.inside), ("between nodes", t.between))
        if value > 0
    ]  # fmt: skip
    if not rows:
        return Drawing("bytes", title, NOTHING if any(findings.traffic(n.run) for n in runs) else NO_TRAFFIC_FILE)
    most = max(row["value"] for row in rows)
    rows = [row for row in rows if row["value"] > LEAST_SHARE * most]
    chart = style.bars(rows, title, "sent ({} per step)", style.byte_unit, 26, *_BY_TIER, ["algorithm:N", "calls:Q"])
    note = "Means over the ranks of the last start. Bytes that a rank reads from shared memory also count as sent. "
    note += "Operations below 1 % of the largest one are only in the table."
    return Drawing("bytes", title, note, chart)


def bytes_beside_formula(runs: Sequence[NamedRun]) -> Drawing:
    """Return bars of the bytes a rank sends per step along each axis, beside the bytes predicted by formula."""
    title = "Bytes sent per step and rank, compared with the formula"
    rows: list[dict[str, Any]] = []
    for named in runs:
        before = f"{named.name}: " if len(runs) > 1 else ""
        for axis, formula in sorted(findings.expected_traffic(named.run).items()):
            tiers = dict(zip(("inside a node", "between nodes"), findings.sent_along(named.run, axis), strict=True))
            rows += [{"bar": f"{before}{axis}", "what": "sent", "tier": t, "value": v} for t, v in tiers.items() if v]
            rows.append({"bar": f"{before}{axis}", "what": "formula", "tier": "by formula", "value": formula})
    if not rows:
        return Drawing("bytes_formula", title, NO_FORMULA if any(n.run.ranks for n in runs) else NO_TRAFFIC_FILE)
    offset, tooltip = alt.YOffset("what:N", sort=["sent", "formula"]), ["what:N"]
    chart = style.bars(rows, title, "sent ({} per step)", style.byte_unit, 36, *_BY_TIER, tooltip, yOffset=offset)
    note = "Bytes that a rank sent along each axis of the mesh, compared with the textbook formula."
    return Drawing("bytes_formula", title, note, chart)
