"""The report of a benchmark: tables, targets and a plot, written as Markdown, JSON and PNG."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.job.topology import processor_name
from mpitrain.storage.disk import replacing, write_whole

MIB = 1 << 20
Cell = str | float | int | None  # None: not measured


@dataclass(frozen=True)
class ReportTable:
    """Rows of cells under columns.

    Attributes:
        title: What stands above it.
        columns: The heading of each column.
        rows: The cells.
        note: One paragraph under the title.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class ReportTarget:
    """What was wanted of a figure, and what was measured.

    Attributes:
        what: The figure.
        wanted: What it should be.
        measured: What it is.
        met: Whether that will do; None where this run could not tell.
    """

    what: str
    wanted: str
    measured: str
    met: bool | None


def judged(
    what: str,
    found: float | None,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    text: str | None = None,
    absent: str = "not measured",
    where: str = "",
    percent: bool = False,
) -> ReportTarget:
    """Return a target of a figure that must be at least, or at most, so much.

    Args:
        what: The figure.
        found: What it is; None where it was not measured, nan where there is nothing to tell.
        least: What it must reach.
        most: What it must not exceed.
        text: How it is shown, instead of the number alone.
        absent: Why there is none.
        where: What follows the wanted figure.
        percent: Whether it is shown as a percentage.
    """
    sign, bound = ("≤", most) if least == -math.inf else ("≥", least)
    wanted = f"{sign} {bound:.0%}{where}" if percent else f"{sign} {bound:g}{where}"
    if found is None or math.isnan(found):
        return ReportTarget(what, wanted, absent, None)
    return ReportTarget(what, wanted, text or (f"{found:.2%}" if percent else f"{found:.2f}"), least <= found <= most)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing the mean of theirs. nan where one is constant."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    below, above = ((one < other).sum(1) for one, other in ((array, array[:, None]), (array[:, None], array)))
    return (below - above) / 2


def ratio(times: Mapping[str, Mapping[str, float]], slower: str, faster: str) -> float:
    """Return how many times as long as `faster` a contender takes, by the medians."""
    return times[slower]["median"] / times[faster]["median"]


def milliseconds(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each contender."""
    return {name: of["median"] * 1e3 for name, of in times.items()}


@dataclass(frozen=True)
class Panel:
    """One set of axes with bars or lines.

    Attributes:
        title: What stands above it.
        label: What its values are: of bars to the right, of lines upwards.
        bars: By name the length of a bar, or by series the lengths for each of `names`.
        names: Of the groups of bars, where there are several series.
        stacked: Whether a group's bars continue each other instead of lying side by side.
        colours: Of the bars by themselves, one each.
        lines: By label the x and y values of a line.
        across: What the x values of lines are.
        log: Whether values are drawn by their logarithms; of lines both.
        mark: A value that a thin line marks.
        band: Width of a band around equal x and y, as a share of them; lines are points then.
    """

    title: str
    label: str
    bars: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()
    stacked: bool = False
    colours: Sequence[str] | None = None
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    across: str = ""
    log: bool = False
    mark: float | None = None
    band: float | None = None

    def draw(self, axes: Any) -> None:
        """Draw on matplotlib's axes."""
        axes.set_title(self.title)
        if self.lines:
            for label, (x, y) in self.lines.items():
                axes.plot(x, y, "o" if self.band else ".-", alpha=0.7, label=label)
            axes.set(xlabel=self.across, ylabel=self.label)
        else:
            self._draw_bars(axes)
            axes.set_xlabel(self.label)
        if self.log:
            axes.set(xscale="log", **({"yscale": "log"} if self.lines else {}))
        if self.band is not None:
            ends = sorted((*axes.get_xlim(), *axes.get_ylim()))[::3]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            low, high = ([end * (1 + sign * self.band) for end in ends] for sign in (-1, 1))
            axes.fill_between(ends, low, high, color="grey", alpha=0.2)
        if self.mark is not None:
            (axes.axhline if self.lines else axes.axvline)(self.mark, color="black", linewidth=0.8)
        if self.lines or self.names:
            axes.legend(fontsize="small")

    def _draw_bars(self, axes: Any) -> None:
        names = self.names or list(self.bars)
        series = self.bars if self.names else {"": list(self.bars.values())}
        width, left = 0.8 / (1 if self.stacked else max(1, len(series))), [0.0] * len(names)
        for number, (label, values) in enumerate(series.items()):
            shift = 0.0 if self.stacked else (number - (len(series) - 1) / 2) * width
            axes.barh([i + shift for i in range(len(names))], values, width, left=left, label=label, color=self.colours)
            if self.stacked:
                left = [before + value for before, value in zip(left, values, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()


@dataclass(frozen=True)
class Report:
    """What a benchmark has found.

    Attributes:
        title: What stands above all of it.
        tables: The figures.
        targets: What was wanted of them.
        panels: Rows of what is drawn, each of as many panels; nothing is where matplotlib is missing.
    """

    title: str
    tables: Sequence[ReportTable]
    targets: Sequence[ReportTarget] = ()
    panels: Sequence[Sequence[Panel]] = ()


def facts(world: Communicator) -> dict[str, Any]:
    """The machine and the software of this run, for the header. Collective."""
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
    }


def write(
    name: str, report: Report, header: dict[int, dict[str, Any]], results: Any, folder: Path, quick: bool
) -> list[Path]:
    """Write BENCH-<name>.json (header, targets, results), .md and .png.

    Args:
        name: The benchmark's name.
        report: What it has found.
        header: The facts of each rank count.
        results: What was measured, for the JSON file.
        folder: Where the files go.
        quick: Whether it was a quick run, which judges no target.

    Returns:
        The files that were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if quick:
        report = replace(report, targets=[replace(target, met=None) for target in report.targets])
    values = {
        "name": name,
        "quick": quick,
        "header": header,
        "targets": [asdict(target) for target in report.targets],
        "results": results,
    }
    data, text = folder / f"BENCH-{name}.json", folder / f"BENCH-{name}.md"
    write_whole(data, json.dumps(values, indent=1) + "\n")
    write_whole(text, markdown(report, header, quick))
    written = [data, text]
    if report.panels:
        picture = folder / f"BENCH-{name}.png"
        if _plot(report.panels, picture):
            written.append(picture)
        else:
            print("no plot: matplotlib is not installed (pip install matplotlib)")
    for target in report.targets:
        if target.met is None:
            continue
        print(f"{verdict(target.met):7}  {target.what}: {target.measured} (wanted {target.wanted})")
    return written


def markdown(report: Report, header: dict[int, dict[str, Any]], quick: bool) -> str:
    """The report as the .md file holds it."""
    first = next(iter(header.values()))
    lines = [
        f"# {report.title}",
        "",
        f"{first['machine']}, {first['cores']} cores, {first['nodes']} node(s); {first['MPI']}; torch "
        f"{first['torch']}, {first['threads']} thread(s) a rank; Python {first['python']}; {first['date']}; "
        f"ranks {', '.join(map(str, header))}; algorithms chosen by the {first['tuning']} table; load when started "
        f"{first['load']}",
    ]
    if quick:
        lines += ["", "**A quick run: it shows that the benchmark works; the figures mean little.**"]
    if report.targets:
        rows = [(t.what, t.wanted, t.measured, verdict(t.met)) for t in report.targets]
        lines += ["", "## Targets", "", *_table(("what", "wanted", "measured", "verdict"), rows)]
    for table in report.tables:
        lines += ["", f"## {table.title}", ""]
        lines += [table.note, ""] if table.note else []
        lines += _table(table.columns, table.rows)
    return "\n".join(lines) + "\n"


def verdict(met: bool | None) -> str:
    """Whether a target was met, in a word."""
    return "unknown" if met is None else "met" if met else "MISSED"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    rule = ["---:" if right else "---" for right in numeric]
    return [f"| {' | '.join(cells)} |" for cells in (columns, rule, *([_cell(c) for c in row] for row in rows))]


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _plot(rows: Sequence[Sequence[Panel]], path: Path) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    wide = len(rows[0])
    longest = [max(len(panel.names or panel.bars) for panel in panels) for panels in rows]
    figure = Figure(figsize=(6 * wide, sum(max(4.0, 1.4 + 0.32 * bars) for bars in longest)), layout="constrained")
    for axes, panels in zip(figure.subplots(len(rows), wide, squeeze=False), rows, strict=True):
        for one, panel in zip(axes, panels, strict=True):
            panel.draw(one)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120)
    return True
