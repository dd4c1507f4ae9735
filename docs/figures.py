"""Writer of the figures in README.md and docs/*.md: the tables and plots that come from results of benchmarks.

`python docs/figures.py` writes them; `python -m benchmarks all` calls it. A block of a page is everything between these
two comments:

    <!-- begin: step, "Step time, 2 ranks" -->      the tables of benchmark `step` whose titles begin with this text
    <!-- end -->

In place of a title, `targets` stands for all targets of the benchmark, and `plot` for its plots. `all, targets` counts
the targets of every benchmark. The result file of a benchmark, benchmarks/results/NAME.json, has its tables, targets
and plots, and the machine, software, date and commit of the measurement. A block without a result says how to get one.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.runner.report import (  # noqa: E402
    Values,
    caption,
    measured_at,
    plot,
    read_results,
    table_lines,
    targets_table,
    verdict,
)

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r'(?<=<!-- begin: )([\w-]+), (targets|plot|"[^"\n]*")( -->\n).*?(?=<!-- end -->)', re.DOTALL)
_VERDICTS = (True, False, None)


def main() -> None:
    """Write the blocks of all pages and the plots that they show, and print the pages that have changed."""
    results = read_results()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        for name in {match[1] for match in BLOCK.finditer(before) if match[2] == "plot"} & results.keys():
            plot(results[name], picture_of(name))
        after = with_blocks(before, page.parent, results)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


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
    return BLOCK.sub(partial(_written, folder, results), text)


def _written(folder: Path, results: Mapping[str, Values], match: re.Match[str]) -> str:
    name, part, values = match[1], match[2], results.get(match[1])
    if name == "all":
        lines = _overview(results)
    elif values is None:
        lines = [] if part == "plot" else [f"Not measured yet: `python -m benchmarks all --only {name}`."]
    else:
        lines = [*_part(values, part, folder), "", f"*{measured_at(values) if part == 'plot' else caption(values)}.*"]
    return f"{name}, {part}{match[3]}\n" + "\n".join(lines) + "\n\n"


def _part(values: Values, part: str, folder: Path) -> list[str]:
    if part == "targets":
        return targets_table(values)
    if part == "plot":
        return [f"![{values['title']}]({os.path.relpath(picture_of(values['name']), folder)})"]
    lines: list[str] = []
    for table in values["tables"]:
        if table["title"].startswith(part.strip('"')):
            title = f"**{table['title']}.** {table['note']}".rstrip()
            lines += ["", title, "", *table_lines(table["columns"], table["rows"])]
    return lines[1:] or [f"The result has no table {part}."]


def _overview(results: Mapping[str, Values]) -> list[str]:
    """Return the lines of a table with the number of targets of each benchmark by verdict, and its commit."""
    rows = []
    for name, values in results.items():
        counts = Counter(target["met"] for target in values["targets"])
        rows.append(
            [f"`{name}`", *(counts[met] for met in _VERDICTS), measured_at(values).removeprefix("measured at ")]
        )
    return table_lines(("benchmark", *map(verdict, _VERDICTS), "measured at"), rows)


if __name__ == "__main__":
    main()
