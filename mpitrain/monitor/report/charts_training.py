"""Charts of what was learned and how fast: loss, metrics, learning rate, gradient norm, throughput, step time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from mpitrain.monitor.report import style
from mpitrain.monitor.report.findings import Named, histogram, kept, loss_label, metric_columns, percentiles, trend
from mpitrain.monitor.report.reading import Column, RunRecord, StepColumns
from mpitrain.monitor.report.style import Drawing, data, records
from mpitrain.storage.text import counted, spoken

NOISY = 300  # points, from where on a line of medians is drawn over the series itself
SAVES = 30  # up to so many saves are marked in the chart of the loss
HOVER = 300  # points of a series that answer to the pointer
METRICS = 12  # charts of metrics at most
MARKS = {"start": "restart", "save": "checkpoint", "lost": "ranks lost", "stop": "stop", "end": "failure"}
MARK_DASHES = {"restart": [1, 0], "checkpoint": [2, 4], "ranks lost": [7, 3], "stop": [4, 4], "failure": [9, 3, 2, 3]}


@dataclass(frozen=True)
class _Curve:
    """A series over the steps. marked: its points are few, and each is shown. exact: it is not noisy."""

    name: str
    columns: StepColumns
    values: Column
    marked: bool = False
    exact: bool = False

    def rows(self, at: Any) -> list[dict[str, Any]]:
        """Those points as rows of a chart."""
        return records(**positions(self.columns, self.columns.step[at]), value=self.values[at], run=self.name)

    def medians(self) -> list[dict[str, Any]]:
        """A line through a noisy series."""
        step, value = trend(self.columns.step, self.values)
        return records(**positions(self.columns, step), value=value, run=self.name)


def positions(columns: StepColumns, steps: Column) -> dict[str, Column]:
    """Where steps lie on each x axis: their numbers, seconds of training, samples seen."""
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
        name, title, note, wide: As of `Drawing`.
        curves: They.
        y: The axis.
        number: How d3 writes a value.
        unit: What follows it where the pointer is.
        extra: Charts under the curves.
        missing: Why there are no curves, where that can be.
    """
    if not curves:
        return Drawing(name, title, missing)
    names = [curve.name for curve in curves]
    several = len({id(curve.columns) for curve in curves}) > 1  # of one run, dashes are for events
    colour, dash = style.run_colour(names, "run" if several else "series"), style.run_dash(names)
    x = style.steps_axis()
    tooltip = [alt.Tooltip("run:N", title="series"), style.STEP, alt.Tooltip("value:Q", title=unit, format=number)]
    whole, points, marks = (list[dict[str, Any]]() for _ in range(3))
    layers: list[alt.Chart] = list(extra)
    for place, curve in enumerate(curves):
        at = kept(curve.values)
        if len(at) > NOISY and not curve.exact:  # pale, and with a colour of its own, so that the legend is not pale
            faint = alt.Chart(data(curve.rows(at)))
            colours = style.RUN_COLOURS
            layers.append(faint.mark_line(style="faint", color=colours[place % len(colours)]).encode(x, y))
            whole.extend(curve.medians())
        else:
            whole.extend(curve.rows(at))
        alone = len(at) == 1  # no line goes through one point
        (marks if alone or (curve.marked and len(at) <= 60) else points).extend(curve.rows(kept(curve.values, HOVER)))
    layers.append(alt.Chart(data(whole)).mark_line(clip=True).encode(x, y, colour, *([dash] if several else [])))
    if marks:
        layers.append(alt.Chart(data(marks)).mark_point(filled=True, size=36).encode(x, y, colour, tooltip=tooltip))
    if points:
        layers.append(alt.Chart(data(points)).mark_point(size=90, opacity=0).encode(x, y, colour, tooltip=tooltip))
    layers[-1] = layers[-1].add_params(style.zoom())
    chart = style.framed(alt.layer(*layers), title).properties(usermeta={"axes": True})
    return Drawing(name, title, note, chart, wide)


def _y(title: str, values: Sequence[Column], *, zero: bool = False, log_from: float = np.inf) -> alt.Y:
    """The y axis of some series. log_from: the ratio of the largest to the median from which it is logarithmic."""
    everything = np.concatenate([np.empty(0), *(v[np.isfinite(v)] for v in values)])
    if len(everything) and float(np.ptp(everything)) == 0.0 and not zero:  # an axis without extent has no numbers
        middle = float(everything[0])
        around = [middle - 0.1 * abs(middle), middle + 0.1 * abs(middle)] if middle else [-1.0, 1.0]
        return alt.Y("value:Q", title=title, scale=alt.Scale(domain=around), stack=None)
    positive = len(everything) > 0 and float(everything.min()) > 0
    if positive and float(everything.max()) > log_from * float(np.median(everything)):
        return alt.Y("value:Q", title=f"{title}, log scale", scale=alt.Scale(type="log", nice=True), stack=None)
    return alt.Y("value:Q", title=title, scale=alt.Scale(zero=zero), stack=None)


def _of(runs: Sequence[Named], column: Callable[[StepColumns], Column], single: str, **kind: bool) -> list[_Curve]:
    """Return a column of each run, where it has values. single: its name where there is one run."""
    return [
        _Curve(named.name if len(runs) > 1 else single, named.run.columns, values, **kind)
        for named in runs
        if np.isfinite(values := column(named.run.columns)).any()
    ]


def losses(runs: Sequence[Named]) -> list[Drawing]:
    """The loss and the held-out loss: one chart for one run, two for several."""
    trained = _of(runs, lambda columns: columns.loss, "training")
    held_out = _of(runs, lambda columns: columns.held_out_loss, "held out", marked=True)
    why = "No step has a finite loss." if not trained else "Nothing was held out (data.held_out), or not evaluated yet."
    label, single = loss_label(runs), len(runs) == 1
    charts = [("loss", "Loss", trained + held_out)]
    if not single:
        charts = [("loss", "Training loss", trained), ("held_out_loss", "Held-out loss", held_out)]
    marks = event_rules(runs[0].run) if single else []
    drawings = []
    for name, title, curves in charts:
        note = f"The {title.lower()} of each run."
        if single:
            note = "The training loss of each step; where it is noisy, the strong line is the median of a stretch of "
            note += "steps."
            note += " Thin upright lines are events of the run." if marks else ""
            note += "" if held_out else " " + why
        y = _y(label, [curve.values for curve in curves])
        drawings.append(_lines(name, title, note, curves, y, ".4f", label, extra=marks, wide=True, missing=why))
    return drawings


def metrics(runs: Sequence[Named]) -> list[Drawing]:
    """A chart of each metric of held-out samples, in the order in which the runs name them; none where none has any."""
    measured = [(named, metric_columns(named.run)) for named in runs]
    drawings = []
    for name in list(dict.fromkeys(name for _, columns in measured for name in columns))[:METRICS]:
        told = spoken(name)
        curves = [
            _Curve(named.name if len(runs) > 1 else told, named.run.columns, columns[name], marked=True, exact=True)
            for named, columns in measured
            if name in columns
        ]
        label = told.replace("loss", loss_label(runs), 1) if told.startswith("loss of ") else f"{told} (no unit)"
        y, title = _y(label, [curve.values for curve in curves]), f"Held-out {told}"
        place = re.sub(r"\W", "_", f"held_out_{name}")  # the name of its file: metrics are called as users like
        note = f"The {told} of held-out samples at each evaluation."
        drawings.append(_lines(place, title, note, curves, y, ".4g", told))
    return drawings


def event_rules(run: RunRecord) -> list[alt.Chart]:
    """Thin upright lines where something happened to a run; none where nothing did."""
    found = []
    for moment in run.moments:
        kind = MARKS.get(moment.kind)
        resumed = moment.kind == "start" and moment is not next(m for m in run.moments if m.kind == "start")
        failed = moment.kind == "end" and moment.told.get("outcome") == "failed"
        if kind and (moment.kind not in ("start", "end") or resumed or failed):
            found.append((kind, float(moment.step)))
    found = list(dict.fromkeys(found))
    if sum(kind == "checkpoint" for kind, _ in found) > SAVES:
        found = [(kind, step) for kind, step in found if kind != "checkpoint"]
    if not found:
        return []
    steps = np.clip(np.array([step for _, step in found]), run.columns.step[0], run.columns.step[-1])
    rows = records(**positions(run.columns, steps), event=[kind for kind, _ in found])
    kinds = {kind for kind, _ in found}
    dashes = style.dashes("event", "event", {k: dash for k, dash in MARK_DASHES.items() if k in kinds}, "@muted")
    chart = alt.Chart(data(rows)).mark_rule(color="@muted", clip=True)
    return [chart.encode(style.steps_axis(), dashes, tooltip=["event:N", style.STEP])]


def learning_rate(runs: Sequence[Named]) -> Drawing:
    """The learning rate."""
    curves = _of(runs, lambda columns: columns.lr, "learning rate", exact=True)
    y = alt.Y("value:Q", title="learning rate (per step)", scale=alt.Scale(zero=True), axis=alt.Axis(format="~g"))
    note, missing = "What the optimizer multiplied its steps with.", "The metrics say no learning rate."
    return _lines("learning_rate", "Learning rate", note, curves, y, ".3e", "learning rate", missing=missing)


def gradient_norm(runs: Sequence[Named]) -> Drawing:
    """The norm of the gradients."""
    curves = _of(runs, lambda columns: columns.grad_norm, "gradient norm")
    y = _y("L2 norm before clipping (no unit)", [c.values for c in curves], log_from=20)
    note = "The L2 norm of all gradients, before they were clipped."
    why = "No norm was taken: train.clip was 0."
    return _lines("gradient_norm", "Gradient norm", note, curves, y, ".3f", "L2 norm", missing=why)


def throughput(runs: Sequence[Named]) -> Drawing:
    """Tokens a second, or samples where they are not tokens."""
    unit = "tokens" if any(named.run.columns.tokens.any() for named in runs) else "samples"
    curves = _of(runs, lambda columns: getattr(columns, unit) / columns.seconds, f"{unit}/s")
    y = alt.Y("value:Q", title=f"throughput ({unit}/s)", scale=alt.Scale(zero=True), axis=alt.Axis(format="~s"))
    rates = [f"{n.run.columns.rate(n.run.columns.samples):,.1f}" for n in runs]
    note = f"All ranks together, step by step. On the whole {', '.join(rates)} samples/s" + (
        " (in the order of the runs)." if len(runs) > 1 else "."
    )
    return _lines("throughput", "Throughput", note, curves, y, ",.0f", f"{unit}/s", wide=True)


def step_time(runs: Sequence[Named]) -> Drawing:
    """Seconds of each step."""
    size, unit = _unit(runs)
    curves = _of(runs, lambda columns: columns.seconds / size, "step time")
    y = _y(f"step time ({unit})", [c.values for c in curves], zero=True, log_from=8)
    note = "How long each step took, without evaluation and saving."
    return _lines("step_time", "Step time", note, curves, y, ",.2f", unit)


def _unit(runs: Sequence[Named]) -> tuple[float, str]:
    """Return the seconds of a unit that suits the runs' steps, and its name."""
    return style.time_unit(max(float(np.median(named.run.columns.seconds)) for named in runs))


def step_histogram(runs: Sequence[Named]) -> Drawing:
    """How often steps took how long."""
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
        # the median, and what one step of ten and one of a hundred exceed, as upright lines
        found = percentiles(everything[0])
        rules = [{"low": found[p], "percentile": f"p{p}"} for p in (50, 90, 99)]
        dashes = style.dashes("percentile", "percentile", {"p50": [1, 0], "p90": [6, 3], "p99": [2, 3]}, "@muted")
        rule = alt.Chart(data(rules)).mark_rule(color="@ink", strokeWidth=1.4)
        told = ["percentile:N", alt.Tooltip("low:Q", title=unit)]
        layers.append(rule.encode(x="low:Q", strokeDash=dashes, tooltip=told))
    note = "Where most steps lie. A second hill is a second kind of step, such as those after a save."
    note += f" Further to the right: {counted(above, 'step')}, the slowest." if above else ""
    return Drawing("step_histogram", title, note, style.framed(alt.layer(*layers), title), wide=False)
