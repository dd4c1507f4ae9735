"""Report as one HTML file that opens without a network, with charts, tables and sentences; its charts as PNG files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import vl_convert

from mpitrain.errors import InputError
from mpitrain.monitor.report import charts, findings, style
from mpitrain.monitor.report.findings import (
    NamedRun,
    changed_settings,
    differing_settings,
    flatten,
    key_figures,
    toml_text,
)
from mpitrain.monitor.report.goodput import PARTS
from mpitrain.monitor.report.reading import RunRecord
from mpitrain.monitor.report.style import Drawing
from mpitrain.monitor.report.within_step import memory_in_step
from mpitrain.monitor.run_files import axis_of
from mpitrain.storage.disk import reporting, write_whole
from mpitrain.storage.text import counted, duration, seconds_text, short, with_spaces

SCALE = 1.5  # pixels of a PNG file per pixel of a chart
MARK = b'content="mpitrain.report"'  # text that identifies an HTML file as a report


class PageSection(NamedTuple):
    """Section of the page: a title, its charts, and HTML that follows the charts (`after`)."""

    title: str
    drawings: tuple[Drawing, ...]
    after: str = ""


def sections(runs: Sequence[NamedRun]) -> list[PageSection]:
    """Return the sections of the page in order."""
    single = len(runs) == 1
    memory = charts.memory_over_time(runs[0]) if single else charts.memory_categories(runs)
    header = ["step time", *(f"p{p}" if p < 100 else "largest" for p in findings.PERCENTILES), "mean"]
    spent = []
    for named in runs:
        seconds = named.run.columns.seconds
        spent.append([named.name, *map(seconds_text, [*findings.percentiles(seconds).values(), float(seconds.mean())])])
    times = [charts.time_bars(runs)] + ([charts.time_over_steps(runs[0])] if single else [])
    return [
        PageSection("Course", (charts.course(runs),)),
        PageSection(
            "Training",
            (*charts.losses(runs), *charts.metrics(runs), charts.learning_rate(runs), charts.gradient_norm(runs)),
        ),
        PageSection(
            "Speed",
            (charts.throughput(runs), charts.step_time(runs), charts.step_histogram(runs)),
            after=_table(header, spent),
        ),
        PageSection("Where the time goes", tuple(times), after=_goodput_table(runs)),
        PageSection("Memory", (memory, memory_in_step(runs), charts.memory_bars(runs))),
        PageSection(
            "Communication",
            (charts.bytes_by_operation(runs), charts.bytes_beside_formula(runs)),
            after="".join(_traffic_table(named, single) for named in runs),
        ),
    ]  # fmt: skip


def page(runs: Sequence[NamedRun]) -> str:
    """Return the text of the whole HTML file, which loads nothing from other files or the network."""
    parts = sections(runs)
    specs = {d.name: style.spec_of(d.chart) for part in parts for d in part.drawings if d.chart is not None}
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [_header(runs)]
    for part in parts:
        figures = "".join(map(_figure, part.drawings))
        body.append(f'<section><h2>{escape(part.title)}</h2><div class="charts">{figures}</div>{part.after}</section>')
    body.append(_facts(runs))
    size, unit = style.time_unit(max([float(named.run.columns.seconds.sum()) for named in runs]))
    settings = {
        "themes": {"light": style.theme(style.LIGHT), "dark": style.theme(style.DARK)},
        "colours": {"light": style.LIGHT, "dark": style.DARK},
        "time": {"size": size, "unit": unit},
        "foreign": style.FOREIGN,
    }
    here = files("mpitrain.monitor.report")
    template = (here / "page.html").read_text(encoding="utf-8")
    filled = {
        "TITLE": escape(title),
        "STYLE": (here / "page.css").read_text(encoding="utf-8"),
        "BODY": "\n".join(body),
        "MADE": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "SPECS": _script_json(specs),
        "SETTINGS": _script_json(settings),
        "SCRIPT": (here / "page.js").read_text(encoding="utf-8"),
        "VEGA": vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script"),
    }
    return re.sub("@@([A-Z]+)@@", lambda place: filled[place[1]], template)


def write_page(runs: Sequence[NamedRun], path: Path) -> int:
    """Write the page, replacing an earlier report but no other file.

    Args:
        runs: One run, or several to show in the same charts.
        path: Path of the HTML file.

    Returns:
        Size of the file in bytes.

    Raises:
        InputError: The file cannot be written, or exists and is not a report.
    """
    text = page(runs).encode()
    with reporting(f"page {path} cannot be written", "use another --out"):
        if path.exists() and MARK not in path.read_bytes()[:2000]:
            raise InputError(f"page {path} already exists and is not a report; use another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return len(text)


def write_pictures(runs: Sequence[NamedRun], folder: Path) -> list[Path]:
    """Write every chart of a report as a PNG file.

    Args:
        runs: One run, or several to show in the same charts.
        folder: Folder of the files, which is created if necessary. Files of the same names are replaced.

    Returns:
        Paths of the files.

    Raises:
        InputError: A file cannot be written.
    """
    paths = []
    for section in sections(runs):
        for drawing in section.drawings:
            if drawing.chart is None:
                continue
            spec: dict[str, Any] = style.paint(style.spec_of(drawing.chart), style.LIGHT)
            if spec.get("width") == "container":
                spec["width"] = style.WIDTH
            config = style.paint(style.theme(style.LIGHT), style.LIGHT)
            data = vl_convert.vegalite_to_png(spec, config=config, scale=SCALE)
            path = folder / f"{drawing.name}.png"
            with reporting(f"picture {path} cannot be written", "use another --png"):
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(path, data)
            paths.append(path)
    return paths


def _script_json(value: Any) -> str:
    """Return JSON that can be embedded in a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _figure(drawing: Drawing) -> str:
    note = escape(drawing.note)
    wide = " wide" if drawing.wide else ""
    if drawing.chart is None:
        return f'<p class="missing{wide}"><b>{escape(drawing.title)}:</b> {note}</p>'
    return (
        f'<figure class="card{wide}"><div class="chart" id="{escape(drawing.name)}" role="img" '
        f'aria-label="{escape(drawing.title)}"></div><figcaption>{note}</figcaption></figure>'
    )


def _header(runs: Sequence[NamedRun]) -> str:
    """Return the HTML above the charts: key figures and findings, and for several runs their differences first."""
    if len(runs) == 1:
        run = runs[0].run
        tiles = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _tiles(run))
        return f'<p class="sub">{escape(str(run.folder))}</p><dl class="tiles">{tiles}</dl>' + _findings_list(run)
    names = [named.name for named in runs]
    different = differing_settings(runs)
    text = _table(["setting", *names], different) if different else "<p>The configurations are the same.</p>"
    keys = _table(["", *names], key_figures(runs))
    folders = "".join(f"<li><b>{escape(n.name)}</b> {escape(str(n.run.folder))}</li>" for n in runs)
    findings_html = "".join(f"<h3>{escape(n.name)}</h3>{_findings_list(n.run)}" for n in runs)
    return (
        f'<ul class="folders">{folders}</ul><section><h2>Differences between the configurations</h2>{text}</section>'
        f"<section><h2>Key figures</h2><p>In brackets: the ratio to the first run. Memory is that of the rank "
        f"with the most memory.</p>{keys}</section><section><h2>Findings</h2>{findings_html}</section>"
    )


def _findings_list(run: RunRecord) -> str:
    sentences = findings.findings(run)
    return "<ul class=findings>" + "".join(f"<li>{escape(t)}</li>" for t in sentences) + "</ul>" if sentences else ""


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    columns = run.columns
    loss, held_out = (findings.last_finite(each) for each in (columns.loss, columns.held_out_loss))
    tokens, joules = columns.rate(columns.tokens), findings.median_finite(columns.j_per_sample)
    tflops, share = columns.mean(columns.tflops_per_rank), columns.mean(columns.mfu)
    tiles = [
        ("steps", f"{int(columns.step[-1]):,}"),
        ("loss", f"{loss:.4f}" if math.isfinite(loss) else "not finite"),
        ("held-out loss", f"{held_out:.4f}" if math.isfinite(held_out) else ""),
        ("median step", seconds_text(float(np.median(columns.seconds)))),
        ("tokens/s in steps" if tokens else "samples/s in steps", short(tokens or columns.rate(columns.samples))),
        ("median J per sample", short(joules) if math.isfinite(joules) else ""),
        ("useful TFLOP/s per rank", f"{tflops:.3g}" if math.isfinite(tflops) else ""),
        ("share of the peak (MFU)", f"{share:.1%}" if math.isfinite(share) else ""),
        ("ranks", f"{int(columns.world_size[-1]):,}"),
        ("goodput", f"{run.goodput.ratio:.1%}" if run.goodput.wall else ""),
        ("time in steps", duration(float(columns.seconds.sum()))),
        (f"outcome ({counted(len(run.starts), 'start')})", run.starts[-1].outcome if run.starts else ""),
    ]
    return [(name, value) for name, value in tiles if value]


def _goodput_table(runs: Sequence[NamedRun]) -> str:
    """Return a table of the parts of the wall clock, with a column for each run that recorded its starts."""
    runs = [named for named in runs if named.run.goodput.wall]
    if not runs:
        return ""
    accounts = [named.run.goodput for named in runs]
    parts = [account.parts() for account in accounts]
    both = list(zip(parts, accounts, strict=True))
    rows = [
        [with_spaces(name), *(f"{each[name]:,.1f} s ({each[name] / a.wall:.1%})" for each, a in both)]
        for name in PARTS
        if any(each[name] for each in parts)
    ]
    rows.append(["wall clock", *(f"{account.wall:,.1f} s" for account in accounts)])
    rows.append(["steps recomputed", *(f"{account.recomputed_steps:,}" for account in accounts)])
    names = [""] if len(runs) == 1 else [named.name for named in runs]
    return "<p>Wall clock of rank 0 over all starts, by part; goodput is the share of compute:</p>" + _table(
        ["part", *names], rows
    )


def _traffic_table(named: NamedRun, single: bool) -> str:
    rows, expected = findings.traffic(named.run), findings.expected_traffic(named.run)
    if not rows:
        return ""
    header = ["operation", "axis", "algorithm", "calls", "inside a node", "between nodes", "largest rank"]
    cells = [
        [row.operation, row.axis, row.algorithm, f"{row.calls:,.3g}",
         *map(style.bytes_text, (row.inside, row.between, row.most))]
        for row in rows
    ]  # fmt: skip
    for axis in sorted({axis_of(row.axis) for row in rows} | set(expected)):
        of = [row for row in rows if axis_of(row.axis) == axis]
        formula = f"{style.bytes_text(expected[axis])} by formula" if axis in expected else ""
        sums = map(style.bytes_text, findings.sent_along(named.run, axis))
        cells.append([f"total along {axis}", axis, "", f"{sum(row.calls for row in of):,.3g}", *sums, formula])
    title = "" if single else f"<h3>{escape(named.name)}</h3>"
    return f"{title}<p>Calls and bytes sent per step, as means over the ranks:</p>" + _table(header, cells)


def _facts(runs: Sequence[NamedRun]) -> str:
    """Return the HTML with machine, versions and configuration of each run."""
    parts = []
    for named in runs:
        if len(runs) > 1:
            parts.append(f"<h3>{escape(named.name)}</h3>")
        parts.append(_machine(named.run.facts) + _configuration(named.run.config))
    return "<section><h2>Machine, versions, configuration</h2>" + "".join(parts) + "</section>"


_FACTS = {
    "version": "mpitrain", "torch": "torch", "mpi": "MPI", "python": "Python", "model": "model",
    "parameters": "parameters", "precision": "precision", "parallel": "parallel", "ranks": "ranks", "nodes": "nodes",
    "hosts": "hosts", "threads": "threads per rank", "device": "device", "cpu": "processor", "cores": "cores",
}  # fmt: skip


def _machine(facts: Mapping[str, Any]) -> str:
    if not facts:
        return '<p class="missing">The machine and the versions are unknown, because the run has no events.jsonl.</p>'
    rows = []
    for key, name in _FACTS.items():
        value = facts.get(key)
        if isinstance(value, list):
            value = ", ".join(map(str, value[:16])) + (f" and {len(value) - 16:,} more" if len(value) > 16 else "")
        if value not in (None, ""):
            rows.append([name, f"{value:,}" if isinstance(value, int) else str(value)])
    return _table(["", "last start"], rows)


def _configuration(config: Mapping[str, Any]) -> str:
    if not config:
        return '<p class="missing">The configuration of the run (config.toml) is missing or cannot be read.</p>'
    rows = [[name, toml_text(value), toml_text(default)] for name, (value, default) in changed_settings(config).items()]
    everything = [[name, toml_text(value)] for name, value in flatten(config).items()]
    return (
        f"<details><summary>Configuration: {len(rows)} settings that differ from their defaults</summary>"
        + _table(["setting", "value", "default"], rows)
        + f"<details><summary>All {len(everything)} settings</summary>"
        + _table(["setting", "value"], everything)
        + "</details></details>"
    )


_BEGINS_NUMBERS = {"", *"+-0123456789"}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table, with columns of numbers aligned to the right."""
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    numbers = [any(column) and all(text[:1] in _BEGINS_NUMBERS for text in column) for column in columns]
    kinds = [' class="number"' if each else "" for each in numbers]
    head = "".join(f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, header, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
