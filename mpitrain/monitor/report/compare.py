"""Several runs side by side: short names, what their configurations differ in, key figures with ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.config.settings import Config
from mpitrain.errors import printable
from mpitrain.monitor.report.findings import last_finite, memory_use, metric_columns, traffic
from mpitrain.monitor.report.reading import CATEGORIES, RunRecord
from mpitrain.storage.text import short, spoken

LONGEST_NAME = 28  # characters
_MISSING, _NONE = "-", np.empty(0)


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
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


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


def differing_settings(runs: Sequence[Named]) -> list[list[str]]:
    """Return the settings that are not the same in all runs, but for run.dir: section.key, then a text for each run."""
    tables = [flat(named.run.config) for named in runs]
    names = [n for n in dict.fromkeys(name for table in tables for name in table) if n != "run.dir"]
    rows = [[name, *(spelled(table.get(name, _MISSING)) for table in tables)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def spelled(value: Any) -> str:
    """A setting as TOML writes it, nearly."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(spelled(v) for v in value) + "]"
    return '""' if value == "" else str(value)


def key_figures(runs: Sequence[Named]) -> list[list[str]]:
    """Return a table of what runs are compared by: losses, metrics, speed, memory of the fullest rank, bytes sent.

    Returns:
        Rows of a name, then each run's figure with its ratio to the first one's; none of what no run tells.
    """
    columns = [named.run.columns for named in runs]
    measured = [metric_columns(named.run) for named in runs]
    uses = [max(memory_use(named.run), key=lambda use: use.total, default=None) for named in runs]
    sent = [sum(t.inside + t.between for t in traffic(n.run)) / 1e6 if n.run.ranks else math.nan for n in runs]
    figures: list[tuple[str, list[float], Callable[[float], str]]] = [
        ("steps", [float(c.step[-1]) for c in columns], "{:,.0f}".format),
        (f"final {loss_label(runs)}", [last_finite(c.loss) for c in columns], "{:.4f}".format),
        (f"held-out {loss_label(runs)}", [last_finite(c.held_out_loss) for c in columns], "{:.4f}".format),
        *(
            (f"held-out {spoken(name)}", [last_finite(m.get(name, _NONE)) for m in measured], "{:.4g}".format)
            for name in dict.fromkeys(name for metrics in measured for name in metrics)
        ),
        ("median step (ms)", [float(np.median(c.seconds)) * 1e3 for c in columns], "{:,.1f}".format),
        ("samples/s in steps", [c.rate(c.samples) for c in columns], short),
        ("tokens/s in steps", [c.rate(c.tokens) or math.nan for c in columns], short),
        ("ranks", [float(c.world_size[-1]) for c in columns], "{:,.0f}".format),
        *(
            (f"{name} (MB)", [use.held[name] / 1e6 if use else math.nan for use in uses], "{:,.2f}".format)
            for name in CATEGORIES
        ),
        ("bytes sent a step and rank (MB)", sent, "{:,.3f}".format),
    ]
    return [
        [name, *(_beside(value, values[0] if number else math.nan, text) for number, value in enumerate(values))]
        for name, values, text in figures
        if any(map(math.isfinite, values))
    ]


def _beside(value: float, first: float, text: Callable[[float], str]) -> str:
    """Return a figure as text, with its ratio to another one."""
    if not math.isfinite(value):
        return _MISSING
    return text(value) + (f" ({value / first:.2f}x)" if math.isfinite(first) and first else "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, one under the other."""
    header, *rows = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    padded = ([f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in (header, *rows))
    return "\n".join("  " + "   ".join(row).rstrip() for row in padded)


def comparison(runs: Sequence[Named]) -> str:
    """The text of several runs: what their configurations differ in, then their key figures, a column a run."""
    names = [named.name for named in runs]
    different = differing_settings(runs)
    settings = table(["settings", *names], different) if different else "  their configurations are the same"
    return "\n\n".join([f"{len(runs)} runs", settings, table(["figures", *names], key_figures(runs))])
