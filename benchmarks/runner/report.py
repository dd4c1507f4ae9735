"""The report of a benchmark: tables, targets and a plot, written as Markdown, JSON and PNG."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.job.topology import processor_name
from mpitrain.storage.disk import replacing, write_whole

MIB = 1 << 20
CODE = ("mpitrain", "benchmarks", ":!benchmarks/results")  # paths of git that a measurement depends on
ROOT = Path(__file__).resolve().parents[2]  # folder of the sources
RESULTS = ROOT / "benchmarks/results"  # result files, from which docs/figures.py writes the figures of the pages
Values = dict[str, Any]  # a report with its header, as JSON values; see `values_of`
Cell = str | float | int | None  # None: not measured


@dataclass(frozen=True)
class ReportTable:
    """A table of a report.

    Attributes:
        title: Heading above the table.
        columns: Heading of each column.
        rows: Cells by row, one per column.
        note: Paragraph under the title; empty, the default: none.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class ReportTarget:
    """A target: a required figure, the measured one, and whether the target was met.

    Attributes:
        what: Name of the figure.
        wanted: Required value, as text.
        measured: Measured value, as text.
        met: True if the target was met; None if this run cannot decide.
    """

    what: str
    wanted: str
    measured: str
    met: bool | None


def target_of(
    what: str,
    value: float | None,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    text: str | None = None,
    absent: str = "not measured",
    where: str = "",
    percent: bool = False,
) -> ReportTarget:
    """Return the target for a figure that has a lower or an upper bound.

    Args:
        what: Name of the figure.
        value: Measured value; None if it was not measured, nan if it is undefined.
        least: Lower bound.
        most: Upper bound; the report shows it only if there is no lower one.
        text: Text shown for the measured value; None: the value itself.
        absent: Text shown if there is no value.
        where: Text after the bound, such as a unit.
        percent: If true, bound and value are shown as percentages.
    """
    sign, bound = ("≤", most) if least == -math.inf else ("≥", least)
    target = f"{sign} {bound:.0%}{where}" if percent else f"{sign} {bound:g}{where}"
    if value is None or math.isnan(value):
        return ReportTarget(what, target, absent, None)
    return ReportTarget(what, target, text or (f"{value:.2%}" if percent else f"{value:.2f}"), least <= value <= most)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences of equal length; nan if one of them is constant.

    Equal values have the mean of their ranks.

    Args:
        a: Values of the first variable.
        b: Values of the second variable.
    """
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    below, above = ((one < other).sum(1) for one, other in ((array, array[:, None]), (array[:, None], array)))
    return (below - above) / 2


def ratio(times: Mapping[str, Mapping[str, float]], slower: str, faster: str) -> float:
    """Return the ratio of two contenders' median times.

    Args:
        times: Times by contender, from `summaries`.
        slower: Contender in the numerator.
        faster: Contender in the denominator.
    """
    return times[slower]["median"] / times[faster]["median"]


def milliseconds(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the median time of each contender in milliseconds."""
    return {name: of["median"] * 1e3 for name, of in times.items()}


@dataclass(frozen=True)
class Panel:
    """A plot of lines, points, areas or bars.

    Attributes:
        label: Label of the y axis.
        across: Label of the x axis.
        lines: (x values, y values) of each line, by label; of bars, (names, lengths).
        styles: Keyword arguments of matplotlib's `plot`, by label of the line.
        title: Heading above the plot; empty: none.
        log: If true, both axes are logarithmic.
        doubling: If true, the x axis is logarithmic, in powers of two.
        band: Half width of a band around y = x, relative to x, in a plot of points instead of lines; None: no band.
        kind: "lines"; "areas": the areas under the lines, on top of each other; "bars": bars to the right, one for each
            name, end to end.
        top: Upper end of the y axis; None: that of the values.
    """

    label: str
    across: str
    lines: Mapping[str, tuple[Sequence[Any], Sequence[float]]]
    styles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    title: str = ""
    log: bool = False
    doubling: bool = False
    band: float | None = None
    kind: str = "lines"
    top: float | None = None

    @property
    def wide(self) -> bool:
        """True if the names of the lines stand beside the plot: there are more than eight, or bars at every place."""
        return len(self.lines) > 8 or self.kind == "bars"

    def draw(self, axes: Any) -> None:
        """Draw the plot on `axes` of matplotlib."""
        ends: Any = 0.0
        for label, (x, y) in self.lines.items():
            begins, ends = ends, np.add(ends, y) if self.kind != "lines" else 0.0
            if self.kind == "areas":
                axes.fill_between(x, begins, ends, label=label, linewidth=0)
                continue
            if self.kind == "bars":
                axes.barh(x, y, left=begins, label=label)
                continue
            style = {"marker": "."} if self.band is None else {"marker": "o", "linestyle": "none"}
            axes.plot(x, y, **{"label": label, "alpha": 0.7, **style, **self.styles.get(label, {})})
        axes.set(title=self.title, xlabel=self.across, ylabel=self.label)
        if self.kind == "bars":
            axes.invert_yaxis()  # the first name at the top
        if self.top is not None:
            axes.set_ylim(0, self.top)
        if self.log:
            axes.set(xscale="log", yscale="log")
        if self.doubling:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.grid(alpha=0.3)
        if self.band is not None:
            corners = sorted((*axes.get_xlim(), *axes.get_ylim()))[::3]
            axes.plot(corners, corners, color="black", linewidth=0.8)
            low, high = ([corner * (1 + sign * self.band) for corner in corners] for sign in (-1, 1))
            axes.fill_between(corners, low, high, color="grey", alpha=0.2)
        if len(self.lines) > 1 or self.kind == "lines":
            axes.legend(fontsize="small", **({"loc": "upper left", "bbox_to_anchor": (1, 1)} if self.wide else {}))


@dataclass(frozen=True)
class Report:
    """The report of a benchmark.

    Attributes:
        title: Heading of the report.
        tables: Tables of the measured figures.
        targets: Targets, default none.
        panels: Plots, three in a row; ignored if matplotlib is not installed.
    """

    title: str
    tables: Sequence[ReportTable]
    targets: Sequence[ReportTarget] = ()
    panels: Sequence[Panel] = ()


def facts(world: Communicator) -> dict[str, Any]:
    """Return facts about the machine and the software of this run, for the header of the report. Collective."""
    return {
        "machine": processor_name() or platform.machine(),
        "cores": os.cpu_count(),
        "nodes": world.num_nodes,
        "ranks": world.size,
        "MPI": world.library,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "tuning": world.process.tuning.origin,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "load": round(os.getloadavg()[0], 1),
        **(sources() if world.rank == 0 else {}),
    }


def sources() -> dict[str, Any]:
    """Return the commit of the sources, "" if unknown, and if the code is "clean", that is, as in this commit."""
    return {"commit": git("rev-parse", "--short=10", "HEAD"), "clean": not git("status", "--porcelain", "--", *CODE)}


def git(*arguments: str) -> str:
    """Return what git prints about the sources; "" if they are in no repository."""
    with suppress(OSError):
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""


def values_of(name: str, report: Report, header: Mapping[int, Mapping[str, Any]], quick: bool) -> Values:
    """Return a report as JSON values, which `markdown` and `plot` read.

    Args:
        name: Name of the benchmark.
        report: Report of the benchmark.
        header: Result of `facts` for each number of ranks.
        quick: True for a quick run, which judges no target.
    """
    if quick:
        report = replace(report, targets=[replace(target, met=None) for target in report.targets])
    return {"name": name, "quick": quick, "header": {str(ranks): of for ranks, of in header.items()}, **asdict(report)}


def write(values: Values, results: Any, folder: Path) -> list[Path]:
    """Write BENCH-<name>.json (values, results), .md and .png, and print the targets.

    Args:
        values: Values of the report, from `values_of`.
        results: Measured values for the JSON file.
        folder: Folder for the files; created if it does not exist.

    Returns:
        Paths of the written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, text, picture = (folder / f"BENCH-{values['name']}.{kind}" for kind in ("json", "md", "png"))
    write_whole(data, json.dumps(values | {"results": results}, indent=1, default=float) + "\n")
    write_whole(text, markdown(values))
    written = [data, text, *([picture] if plot(values, picture) else [])]
    for target in values["targets"]:
        if target["met"] is not None:
            print(target_line(target))
    return written


def keep(values: Values, options: Sequence[str]) -> None:
    """Write the result file of a benchmark into `RESULTS`, without raw values, and with one line for each entry.

    Args:
        values: Content of the file BENCH-<name>.json.
        options: Options of the benchmark that are not its defaults.
    """
    entries = {name: _shorter(value) for name, value in values.items() if name != "results"} | {"options": [*options]}
    lines = ",\n".join(f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in entries.items())
    RESULTS.mkdir(exist_ok=True)
    write_whole(RESULTS / f"{values['name']}.json", "{\n" + lines + "\n}\n")


def read_results() -> dict[str, Values]:
    """Return the result files in `RESULTS`, by name of the benchmark."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def _shorter(value: Any) -> Any:
    """Return a JSON value whose numbers have at most five digits."""
    if isinstance(value, dict):
        return {name: _shorter(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shorter(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def target_line(target: Mapping[str, Any]) -> str:
    """Return one line about a target: verdict, name, measured and required value."""
    return f"{verdict(target['met']):12}  {target['what']}: {target['measured']} (target {target['wanted']})"


def markdown(values: Values) -> str:
    """Return the report as Markdown, from the result of `values_of`."""
    lines = [f"# {values['title']}", "", caption(values)]
    if values["quick"]:
        lines += ["", "**Quick run: it only shows that the benchmark works; the figures are not meaningful.**"]
    if values["targets"]:
        lines += ["", "## Targets", "", *targets_table(values)]
    for table in values["tables"]:
        lines += ["", f"## {table['title']}", "", *([table["note"], ""] if table["note"] else [])]
        lines += table_lines(table["columns"], table["rows"])
    return "\n".join(lines) + "\n"


def caption(values: Values) -> str:
    """Return one paragraph about the machine, the software, the options and the commit of a report."""
    first, options = next(iter(values["header"].values())), " ".join(values.get("options", ()))
    return (
        f"{first['machine']}, {first['cores']} cores, {first['nodes']} node(s); {first['MPI']}; "
        f"torch {first['torch']}; {first['threads']} thread(s) per rank; "
        f"Python {first['python']}; ranks {', '.join(values['header'])}; "
        f"algorithms from the {first['tuning']} table; {first['date']}, load {first['load']} at the start; "
        f"{measured_at(values)}" + (f"; options `{options}`" if options else "")
    )


def measured_at(values: Values) -> str:
    """Return the commit at which a report was measured, as text."""
    first = next(iter(values["header"].values()))
    changed = "" if first["clean"] else " with changes that are not committed"
    return f"measured at commit {first['commit'] or 'unknown'}{changed}"


def targets_table(values: Values) -> list[str]:
    """Return the lines of a table of all targets of a report."""
    rows = [(t["what"], t["wanted"], t["measured"], verdict(t["met"])) for t in values["targets"]]
    return table_lines(("figure", "target", "measured", "verdict"), rows)


def verdict(met: bool | None) -> str:
    """Return "met", "MISSED" or "not measured" for a target."""
    return "not measured" if met is None else "met" if met else "MISSED"


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Return the lines of a table in Markdown; columns of numbers are aligned to the right."""
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    rule = ["---:" if right else "---" for right in numeric]
    return [f"| {' | '.join(cells)} |" for cells in (columns, rule, *([_cell(c) for c in row] for row in rows))]


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def plot(values: Values, path: Path) -> bool:
    """Draw the plots of a report into a PNG file that names the commit.

    Args:
        values: Values of the report, from `values_of`.
        path: File to write.

    Returns:
        True if the file was written; false if there are no plots, or matplotlib is not installed.
    """
    panels = [Panel(**panel) for panel in values["panels"]]
    if not panels:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot, because matplotlib is not installed; run pip install matplotlib")
        return False
    rows, width = -(-len(panels) // 3), sum(9 if panel.wide else 6 for panel in panels[:3])
    figure = Figure(figsize=(width, 4 * rows), layout="constrained")
    for number, panel in enumerate(panels, 1):
        panel.draw(figure.add_subplot(rows, min(3, len(panels)), number))
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120, metadata={"Source": measured_at(values)})
    return True
