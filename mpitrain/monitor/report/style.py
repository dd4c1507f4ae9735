"""Appearance of charts: the colours of Okabe and Ito for light and dark pages, and elements shared by all charts.

A chart refers to colours by name ("@blue"). The page and the PNG files insert a theme's colours, so one chart serves
both themes.

Reference:
    Okabe and Ito (2002), Color Universal Design: https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
LIGHT = {
    "blue": "#0072B2", "red": "#D55E00", "green": "#009E73", "purple": "#CC79A7", "orange": "#E69F00", "sky": "#56B4E9",
    "yellow": "#DBCB1E", "grey": "#8B9098", "ink": "#1c2128", "muted": "#57606a", "grid": "#e4e7eb", "paper": "#ffffff",
}  # fmt: skip
DARK = {
    "blue": "#3E9BE0", "red": "#F0804A", "green": "#2DC598", "purple": "#E29CC4", "orange": "#F2B544", "sky": "#9AD5F7",
    "yellow": "#F0E442", "grey": "#8D96A0", "ink": "#e6edf3", "muted": "#9aa4af", "grid": "#2d333b", "paper": "#161b22",
}  # fmt: skip
RUN_COLOURS = ("@blue", "@red", "@green", "@purple", "@orange", "@sky", "@grey")
RUN_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 4], [12, 4], [1, 3])
TIME_COLOURS = {
    "data": "@orange", "forward": "@sky", "backward": "@blue", "communication": "@red", "optimizer": "@green",
    "evaluation": "@yellow", "checkpoint": "@purple", "other": "@grey",
}  # fmt: skip
MEMORY_COLOURS = {
    "parameters": "@blue", "gradients": "@orange", "states": "@green", "activations": "@purple", "buffers": "@sky",
    "shared": "@yellow", "other": "@grey",
}  # fmt: skip
FOREIGN = ("datasets", "domain", "title")  # keys of a chart with names of runs and metrics, which are never colours
OUTCOME_COLOURS = {"done": "@green", "stopped": "@sky", "running": "@blue", "failed": "@red", "killed": "@purple"}
STEP = alt.Tooltip("step:Q", format=",.0f")
FIT = alt.AutoSizeParams(type="fit-x", contains="padding")  # width of the page, height of the chart
WIDTH, HEIGHT = 760, 240  # pixels of a chart in a PNG file, without its axes


@dataclass(frozen=True)
class Drawing:
    """Chart with its title and note."""

    name: str  # name of its file and of its element in the page
    title: str
    note: str  # explanation of the chart, or the reason why there is no chart
    chart: alt.TopLevelMixin | None = None  # chart, or None if the run has no data for it
    wide: bool = True  # if true, the chart takes the whole width of the page


def theme(colours: Mapping[str, str]) -> dict[str, Any]:
    """Return the Vega-Lite configuration for a set of colours."""
    ink, muted, grid = colours["ink"], colours["muted"], colours["grid"]
    return {
        "background": colours["paper"],
        "font": FONT,
        "view": {"stroke": None},
        "title": {"color": ink, "fontSize": 14, "fontWeight": 600, "anchor": "start", "frame": "group", "offset": 12},
        "axis": {
            "labelColor": muted, "titleColor": muted, "gridColor": grid, "domainColor": grid, "tickColor": grid,
            "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "titlePadding": 8,
            "labelOverlap": "greedy",
        },
        "axisX": {"grid": False, "tickCount": 8},
        "axisY": {"tickCount": 5},
        "legend": {
            "labelColor": ink, "titleColor": muted, "labelFontSize": 11, "titleFontSize": 11, "symbolType": "square",
            "titleFontWeight": "normal", "orient": "bottom", "labelLimit": 240, "columns": 4, "offset": 10,
        },
        "header": {"labelColor": ink, "titleColor": muted, "labelFontSize": 11, "labelFontWeight": 600},
        "line": {"strokeWidth": 1.8, "strokeJoin": "round"},
        "area": {"line": False},
        "style": {"faint": {"opacity": 0.3, "strokeWidth": 1}},
    }  # fmt: skip


def paint(node: Any, colours: Mapping[str, str]) -> Any:
    """Return a chart, or a part of it, with names of colours replaced by the colours of a theme.

    Args:
        node: Chart as JSON, or a part of it.
        colours: Hexadecimal colours by name.
    """
    if isinstance(node, Mapping):
        return {key: paint(value, colours) if key not in FOREIGN else value for key, value in node.items()}
    if isinstance(node, str):
        return colours.get(node[1:], node) if node.startswith("@") else node
    return [paint(part, colours) for part in node] if isinstance(node, (list, tuple)) else node


def records(**columns: Any) -> list[dict[str, Any]]:
    """Return rows for a chart from columns of equal length; a scalar is repeated in each row. NaN becomes null."""
    length = max(len(c) for c in columns.values() if isinstance(c, (np.ndarray, list)))
    whole = {n: c if isinstance(c, (np.ndarray, list)) else [c] * length for n, c in columns.items()}
    return [{n: _plain(c[i]) for n, c in whole.items()} for i in range(length)]


def _plain(value: Any) -> Any:
    """Return a value for JSON, with floats rounded to six digits, which suffice to draw and take half the space."""
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
    return int(value) if isinstance(value, np.integer) else value


def data(rows: Sequence[Mapping[str, Any]]) -> alt.InlineData:
    """Return the rows of a chart as a JSON string, which altair does not inspect; `spec_of` converts it back."""
    return alt.InlineData(values=json.dumps(list(rows), allow_nan=False), format=alt.JsonDataFormat(type="json"))


def spec_of(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """Return a chart as Vega-Lite JSON, with each data set once, without colours and without a schema address."""
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("config", None)
    spec.pop("$schema", None)
    spec["datasets"] = {name: json.loads(text) for name, text in spec["datasets"].items()}
    for part in _objects(spec):
        if "name" in part.get("data", {}):
            del part["data"]["format"]  # the format of the JSON string
    return spec


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a chart, except in its data sets."""
    if isinstance(node, list):
        for part in node:
            yield from _objects(part)
    elif isinstance(node, dict):
        yield node
        for name, part in node.items():
            if name != "datasets":
                yield from _objects(part)


def palette(field: str, title: str, colours: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> alt.Color:
    """Return a colour for each value of a field that occurs in the rows, in the order of `colours`.

    Args:
        field, title: Name of the field, and title of the legend.
        colours: Colours by value of the field.
        rows: Rows of the chart.
    """
    present = {row[field] for row in rows}
    names = [name for name in colours if name in present]
    return alt.Color(f"{field}:N", title=title, scale=alt.Scale(domain=names, range=[colours[name] for name in names]))


def frame(chart: alt.Chart | alt.LayerChart, title: str, height: int = HEIGHT) -> Any:
    """Return a chart with a title that is as wide as the page.

    Args:
        chart, title: Chart to frame, and its headline.
        height: Height in pixels.
    """
    return chart.properties(title=title, width="container", autosize=FIT, height=height)


def bars(
    rows: Sequence[Mapping[str, Any]], title: str, what: str, unit: Callable[[float], tuple[float, str]], each: int,
    field: str, legend: str, colours: Mapping[str, str], tooltip: Sequence[str] = (), **channels: Any,
) -> alt.Chart:  # fmt: skip
    """Return stacked bars: the sum of the rows' `value` by `bar` (and `what`), in the order of the rows.

    Args:
        rows: Rows of the chart.
        title: Headline of the chart.
        what: Title of the axis along the bars, with {} for the unit.
        unit: Function that returns size and name of a suitable unit for the longest bar.
        each: Height of a bar with the space around it, in pixels.
        field, legend, colours: Field, title of the legend and colours of the parts of a bar; see `palette`.
        tooltip: Further fields that the tooltip shows.
        channels: Further encoding channels.
    """
    sums = Counter[Any]()
    for row in rows:
        sums[row["bar"], row.get("what")] += row["value"]
    size, name = unit(max(sums.values(), default=0.0))
    order = list(colours)
    rows = [{**row, "value": round(row["value"] / size, 6), "order": order.index(row[field])} for row in rows]
    names = list(dict.fromkeys(row["bar"] for row in rows))
    y = alt.Y("bar:N", title=None, sort=names, axis=alt.Axis(labelLimit=280))
    x, colour = alt.X("sum(value):Q", title=what.format(name)), palette(field, legend, colours, rows)
    tooltips = ["bar:N", *tooltip, f"{field}:N", alt.Tooltip("sum(value):Q", title=name, format=",.3f")]
    chart = alt.Chart(data(rows)).mark_bar(stroke="@paper", strokeWidth=0.5)
    chart = chart.encode(x=x, y=y, color=colour, order=alt.Order("order:Q"), tooltip=tooltips, **channels)
    return frame(chart, title, each * len(names) + 8)


def run_colour(names: Sequence[str], title: str = "run") -> alt.Color:
    """Return a colour for each run, with a legend if there are several.

    Args:
        names, title: Names of the runs, and title of the legend.
    """
    return alt.Color("run:N", **_by_run(names, title, RUN_COLOURS))


def run_dash(names: Sequence[str]) -> alt.StrokeDash:
    """Return a dash pattern for each run, in addition to its colour."""
    return alt.StrokeDash("run:N", **_by_run(names, "run", RUN_DASHES))


def _by_run(names: Sequence[str], title: str, values: Sequence[Any]) -> dict[str, Any]:
    scale = alt.Scale(domain=list(names), range=[values[i % len(values)] for i in range(len(names))])
    # long enough to show dashes, and opaque even if the line itself is faint
    legend = alt.Legend(symbolType="stroke", symbolStrokeWidth=2.5, symbolSize=400, symbolOpacity=1)
    return {"scale": scale, "title": title, "legend": legend if len(names) > 1 else None}


def dashes(field: str, title: str, patterns: Mapping[str, Sequence[int]], ink: str) -> alt.StrokeDash:
    """Return a dash pattern for each value of a field, with a legend.

    Args:
        field, title: Name of the field, and title of the legend.
        patterns: Dash patterns by value of the field.
        ink: Colour of the legend's symbols.
    """
    legend = alt.Legend(symbolType="stroke", symbolSize=400, symbolStrokeColor=ink)
    scale = alt.Scale(domain=list(patterns), range=list(patterns.values()))
    return alt.StrokeDash(f"{field}:N", title=title, scale=scale, legend=legend)


def zoom() -> alt.Parameter:
    """Return a selection that pans along x by dragging, zooms with Ctrl and the wheel, and resets by a double click."""
    return alt.selection_interval(bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey || event.metaKey]")


def steps_axis() -> alt.X:
    """Return an x axis of steps, which the page can change to time or samples."""
    return alt.X("step:Q", title="step", scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(format=",.0f"))


def byte_unit(most: float) -> tuple[float, str]:
    """Return the size in bytes and the name of a suitable unit."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if most >= unit[0]), (1.0, "B"))


def bytes_text(count: float) -> str:
    """Return a number of bytes as readable text: 2.577 MB."""
    size, name = byte_unit(count)
    return f"{count / size:,.4g} {name}"


def time_unit(most: float) -> tuple[float, str]:
    """Return the size in seconds and the name of a suitable unit of time."""
    units = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (1.0, 1.0, "s"))
    return next(((size, name) for least, size, name in units if most >= least), (1e-3, "ms"))
