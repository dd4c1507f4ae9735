"""What a benchmark has found: a header, tables, targets and a plot, as files for people and for programs."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.storage.disk import replacing, write_whole

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

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


@dataclass(frozen=True)
class Report:
    """What a benchmark has found.

    Attributes:
        title: What stands above all of it.
        tables: The figures.
        targets: What was wanted of them.
        draw: Draws on a matplotlib figure; it is not called where matplotlib is missing.
    """

    title: str
    tables: Sequence[ReportTable]
    targets: Sequence[ReportTarget] = ()
    draw: Callable[[Any], None] | None = None


def facts(world: Communicator) -> dict[str, Any]:
    """The machine and the software of this run, for the header. Collective."""
    from mpitrain.comm.job.topology import processor_name

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
        quick: Whether it was a quick run.

    Returns:
        The files that were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
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
    if report.draw is not None:
        picture = folder / f"BENCH-{name}.png"
        if _plot(report.draw, picture):
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


def _plot(draw: Callable[[Any], None], path: Path) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(layout="constrained")
    draw(figure)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120)
    return True
