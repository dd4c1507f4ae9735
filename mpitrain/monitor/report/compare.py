"""Several runs side by side: short names, what their configurations differ in, key figures with ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.config.settings import Config
from mpitrain.errors import printable
from mpitrain.monitor.report.findings import STATES, MemoryUse, memory_use, traffic
from mpitrain.monitor.report.records import Column, RunRecord
from mpitrain.monitor.report.series import metric_columns
from mpitrain.storage.text import short, spoken

LONGEST_NAME = 28  # characters
_MISSING = "-"


@dataclass(frozen=True)
class Named:
    """A run and its name in charts and tables."""

    name: str
    run: RunRecord


def short_names(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder, no two the same.

    Args:
        folders: Folders of runs.

    Returns:
        The last part of each path; more of it where that does not tell them apart, and a number where nothing does.
    """
    paths = [folder.resolve().parts for folder in folders]
    names: list[str] = []
    for mine in paths:
        length = 1
        while length < len(mine) and sum(other[-length:] == mine[-length:] for other in paths) > 1:
            length += 1
            if all(other == mine for other in paths):
                break
        name = "/".join(mine[-length:]) if len(set(paths)) == len(paths) else mine[-1]
        names.append(name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :])
    return [
        name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)
    ]  # fmt: skip


def loss_label(runs: Sequence[Named]) -> str:
    """Return "loss" with its unit, where all runs recorded the same one."""
    units = {str(named.run.facts.get("loss_unit") or "") for named in runs}
    return f"loss ({units.pop() if len(units) == 1 and units != {''} else 'unit of the model'})"


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings as one table: {"train": {"steps": 10}} becomes {"train.steps": 10}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{above}{name}."))
        else:
            found[f"{above}{name}"] = value
    return found


def changed_settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings of a run that are not at their defaults.

    Returns:
        The run's value and the default by section.key; of a setting that is known no more the default is None.
    """
    defaults = flat(Config().model_dump(mode="json"))
    return {
        name: (value, defaults.get(name))
        for name, value in flat(config).items()
        if name not in defaults or defaults[name] != value
    }


def differing_settings(runs: Sequence[Named]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, but for run.dir: a text for each run, by section.key."""
    tables = [flat(named.run.config) for named in runs]
    names = [n for n in dict.fromkeys(name for table in tables for name in table) if n != "run.dir"]
    rows = {name: [spelled(table.get(name, _MISSING)) for table in tables] for name in names}
    return {name: texts for name, texts in rows.items() if len(set(texts)) > 1}


def spelled(value: Any) -> str:
    """A setting as TOML writes it, nearly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(spelled(v) for v in value) + "]"
    return '""' if value == "" else str(value)


@dataclass(frozen=True)
class KeyFigure:
    """A figure of several runs.

    Attributes:
        name: With its unit.
        values: Of each run; NaN where a run does not tell.
        text: Writes one of them.
    """

    name: str
    values: tuple[float, ...]
    text: Callable[[float], str]

    def told(self, position: int) -> str:
        """The value of one run, with the ratio to the first one's."""
        value, first = self.values[position], self.values[0]
        if not math.isfinite(value):
            return _MISSING
        if position == 0 or not math.isfinite(first) or first == 0:
            return self.text(value)
        return f"{self.text(value)} ({value / first:.2f}x)"


def key_figures(runs: Sequence[Named]) -> list[KeyFigure]:
    """Return what runs are compared by: losses, metrics, speed, memory of the fullest rank, bytes sent, where known."""
    uses = [_largest(named.run) for named in runs]
    measured = [metric_columns(named.run) for named in runs]
    figures: list[tuple[str, Callable[[int], float], Callable[[float], str]]] = [
        ("steps", lambda i: float(runs[i].run.columns.step[-1]), "{:,.0f}".format),
        (f"final {loss_label(runs)}", lambda i: _last(runs[i].run.columns.loss), "{:.4f}".format),
        (f"held-out {loss_label(runs)}", lambda i: _last(runs[i].run.columns.held_out_loss), "{:.4f}".format),
        *(
            (f"held-out {spoken(name)}", partial(_measured, measured, name), "{:.4g}".format)
            for name in dict.fromkeys(name for columns in measured for name in columns)
        ),
        ("median step (ms)", lambda i: float(np.median(runs[i].run.columns.seconds)) * 1e3, "{:,.1f}".format),
        ("samples/s in steps", lambda i: _rate(runs[i].run, runs[i].run.columns.samples), short),
        ("tokens/s in steps", lambda i: _rate(runs[i].run, runs[i].run.columns.tokens) or math.nan, short),
        ("ranks", lambda i: float(runs[i].run.columns.world_size[-1]), "{:,.0f}".format),
    ]
    for name in (*STATES, "activations", "buffers", "other"):
        figures.append((f"{name} (MB)", partial(_held, uses, name), "{:,.2f}".format))
    figures.append(("bytes sent a step and rank (MB)", lambda i: _sent(runs[i].run), "{:,.3f}".format))
    found = [KeyFigure(name, tuple(value(i) for i in range(len(runs))), text) for name, value, text in figures]
    return [figure for figure in found if any(math.isfinite(v) for v in figure.values)]


def _largest(run: RunRecord) -> MemoryUse | None:
    return max(memory_use(run), key=lambda use: use.total, default=None)


def _held(uses: Sequence[MemoryUse | None], name: str, position: int) -> float:
    use = uses[position]
    return math.nan if use is None else use.held[name] / 1e6


def _sent(run: RunRecord) -> float:
    return sum(t.inside + t.between for t in traffic(run)) / 1e6 if run.ranks else math.nan


def _measured(measured: Sequence[Mapping[str, Column]], name: str, position: int) -> float:
    return _last(measured[position][name]) if name in measured[position] else math.nan


def _last(column: Column) -> float:
    finite = column[np.isfinite(column)]
    return float(finite[-1]) if len(finite) else math.nan


def _rate(run: RunRecord, column: Column) -> float:
    return float(column.sum() / run.columns.seconds.sum())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, one under the other."""
    header, *rows = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  " + "   ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in (header, *rows)]  # fmt: skip
    return "\n".join(lines)


def comparison(runs: Sequence[Named]) -> str:
    """The text of several runs: what their configurations differ in, then their key figures, a column a run."""
    names = [named.name for named in runs]
    different = differing_settings(runs)
    parts = [f"{len(runs)} runs"]
    if different:
        parts.append(table(["settings", *names], [[name, *texts] for name, texts in different.items()]))
    else:
        parts.append("  their configurations are the same")
    figures = key_figures(runs)
    parts.append(table(["figures", *names], [[f.name, *(f.told(i) for i in range(len(runs)))] for f in figures]))
    return "\n\n".join(parts)
