"""What the benchmark of a machine has found, as tables and as lines for the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.runner.report import Report, ReportTable
from mpitrain.monitor.text import aligned, counted
from mpitrain.planner.machine import Measured
from mpitrain.planner.machine_file import Values
from mpitrain.planner.machine_keys import SECTIONS
from mpitrain.speeds.values import values_from


def shown_values(values: Values) -> str:
    """The figures, a line each, but for those of collectives."""
    lines = [values["name"]]
    for section, keys in SECTIONS.items():
        rows = []
        for key, of in keys.items():
            value = values.get(section, {}).get(key)
            if value is None or of.unit is None:
                continue
            if of.table:
                for precision, table in value.items():
                    told = ", ".join(f"{of.unit.text(rate)} ({n})" for n, rate in sorted(table.items()))
                    rows.append((f"{section} matrix {precision}", told))
            else:
                rows.append((f"{section} {key.replace('_', ' ')}", f"{of.unit.text(value):20} {of.meaning}"))
        lines += [aligned(rows)] if rows else []
    return "\n".join(lines)


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Tables of the results by rank count."""
    values = values_from(results, options.quick)
    rows = []
    for section, keys in SECTIONS.items():
        for key, of in keys.items():
            value = values.get(section, {}).get(key)
            if value is not None and not of.table:
                rows.append([f"{section}.{key}", value if of.unit is None else of.unit.text(value), of.meaning])
    tables = [ReportTable("The machine", ("key", "value", "meaning"), rows)]
    for section in ("core", "device"):
        if matrix := values.get(section, {}).get("matrix"):
            tables.append(_matrices(section, matrix))
    tables += [_collectives(ranks, of["collectives"]) for ranks, of in results.items() if "collectives" in of]
    return Report("The profile of a machine", tables)


def _matrices(section: str, matrix: dict[str, dict[int, float]]) -> ReportTable:
    sizes = sorted({n for table in matrix.values() for n in table})
    rows = [[name, *(table[n] / 1e9 if n in table else None for n in sizes)] for name, table in matrix.items()]
    return ReportTable(f"Matrix products of a {section}, Gflop/s", ("precision", *map(str, sizes)), rows)


def _collectives(ranks: int, found: list[list[Any]]) -> ReportTable:
    measured = [Measured(*row) for row in found]
    sizes = sorted({row.nbytes for row in measured})
    table: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in measured:
        table.setdefault((row.operation, row.algorithm, row.memory), {})[row.nbytes] = row.seconds
    rows = [[*name, *(times[n] * 1e6 if n in times else None for n in sizes)] for name, times in table.items()]
    columns = ("operation", "algorithm", "memory", *(f"{n:,} bytes, us" for n in sizes))
    return ReportTable(f"Collectives of {counted(ranks, 'rank')}", columns, rows)
