"""The blocks of README.md and docs/*.md that are written from result files of benchmarks.

A block is everything between these two comments:

    <!-- begin: step, "Step time, 2 ranks" -->      the tables of benchmark `step` whose titles begin with this text
    <!-- end -->

In place of a title, `targets` stands for all targets of the benchmark, and `plot` for its plots. `all, targets` counts
the targets of every benchmark. The result file of a benchmark, NAME.json in `RESULTS`, has tables, targets, plots, and
the machine, software, date and commit of the measurement. A block without a result says how to get one.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.runner.report import ROOT, Values, caption, measured_at, plot, table_lines, targets_table, verdict
from mpitrain.storage.disk import write_whole

RESULTS = ROOT / "benchmarks/results"
_BLOCK = re.compile(r'(?<=<!-- begin: )([\w-]+), (targets|plot|"[^"\n]*")( -->\n).*?(?=<!-- end -->)', re.DOTALL)
_VERDICTS = (True, False, None)


def read_results(folder: Path) -> dict[str, Values]:
    """Return the result files in a folder, by name of the benchmark."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def keep(values: Values, options: Sequence[str], folder: Path) -> None:
    """Write the result file of a benchmark, without the measured values, and with one line for each entry.

    Args:
        values: Content of the file BENCH-<name>.json.
        options: Options of the benchmark that are not its defaults.
        folder: Folder of the result files.
    """
    kept = {name: _shorter(value) for name, value in values.items() if name != "results"} | {"options": [*options]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in kept.items())
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{values['name']}.json", "{\n" + lines + "\n}\n")


def _shorter(value: Any) -> Any:
    """Return a JSON value whose numbers have at most five digits."""
    if isinstance(value, dict):
        return {name: _shorter(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shorter(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_pages(results: Mapping[str, Values]) -> Iterator[Path]:
    """Write the blocks of all pages and the plots that they show, and yield each page that has changed.

    Args:
        results: Results by name of the benchmark, from `read_results`.
    """
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = page.read_text(encoding="utf-8")
        for name in {match[1] for match in _BLOCK.finditer(before) if match[2] == "plot"} & results.keys():
            plot(results[name], picture_of(name))
        after = with_blocks(before, page.parent, results)
        if after != before:
            write_whole(page, after)
            yield page


def picture_of(name: str) -> Path:
    """Return the path of the plots of a benchmark that pages show."""
    return ROOT / "docs" / f"{name}.png"


def with_blocks(text: str, folder: Path, results: Mapping[str, Values]) -> str:
    """Return the text of a page with its blocks as the results give them.

    Args:
        text: Text of the page.
        folder: Folder of the page.
        results: Results by name of the benchmark.
    """
    return _BLOCK.sub(partial(_written, folder, results), text)


def _written(folder: Path, results: Mapping[str, Values], match: re.Match[str]) -> str:
    name, part, values = match[1], match[2], results.get(match[1])
    if name == "all":
        lines = _overview(results)
    elif values is None:
        lines = [f"Not measured since the code has changed: `python -m benchmarks all --only {name}`."]
    else:
        lines = [*_part(values, part, folder), "", f"*{caption(values)}.*"]
    return f"{name}, {part}{match[3]}\n" + "\n".join(lines) + "\n\n"


def _part(values: Values, part: str, folder: Path) -> list[str]:
    if part == "targets":
        return targets_table(values)
    if part == "plot":
        return [f"![{values['title']}]({os.path.relpath(picture_of(values['name']), folder)})"]
    lines: list[str] = []
    for table in values["tables"]:
        if table["title"].startswith(part.strip('"')):
            lines += ["", f"**{table['title']}.** {table['note']}".rstrip(), "", *table_lines(**_cells(table))]
    return lines[1:] or [f"The result has no table {part}."]


def _cells(table: Mapping[str, Any]) -> dict[str, Any]:
    return {"columns": table["columns"], "rows": table["rows"]}


def _overview(results: Mapping[str, Values]) -> list[str]:
    """Return the lines of a table with the number of targets of each benchmark by verdict, and its commit."""
    rows = []
    for name, values in results.items():
        counts = Counter(target["met"] for target in values["targets"])
        rows.append(
            [f"`{name}`", *(counts[met] for met in _VERDICTS), measured_at(values).removeprefix("measured at ")]
        )
    return table_lines(("benchmark", *map(verdict, _VERDICTS), "measured at"), rows)
