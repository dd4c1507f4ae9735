"""CSV files: numeric columns as x (float32), one column as the label y; read row by row, twice.

The first reading finds the label's kind, the second writes rows:

    labels all whole numbers, or any text    classes, numbered in their order (by number, or by name)
    labels numbers, some with a point        float32 to predict

Separated by commas, semicolons or tabs, whichever the first line has most of. A header is optional: the first
line is one where none of its cells is a number, or where it has text in a column of which the second line has a
number. Several files are one table; each has the same columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from mpitrain.data.commit import os_errors
from mpitrain.data.format import FieldSpec
from mpitrain.data.sources.split import partition
from mpitrain.data.writer import MOST_CLASSES, Columns, Source
from mpitrain.errors import InputError

SUFFIXES = frozenset((".csv", ".tsv"))
_CELLS = 1 << 17  # of a block: as Python numbers they take 32 bytes each
_LONGEST_LINE = 16 << 20
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _Table:
    """How a file is to be read, learnt from its first two lines."""

    path: Path
    delimiter: str
    header: tuple[str, ...] | None
    columns: int

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """(line number, cells) of every data row."""
        for line, cells in _lines(self.path, self.delimiter, skip=self.header is not None):
            if len(cells) != self.columns:
                raise InputError(
                    f"{self.path}, line {line}: {len(cells)} columns where the first line has {self.columns}; mend it"
                )
            yield line, cells


def table_source(files: Sequence[Path], label: str | None) -> Source:
    """Describe tables, each of whose rows is a sample.

    Args:
        files: The tables.
        label: The name of the label's column, or its number counted from 1; None for the column called label, or else
            the last one.
    """
    tables = [_look(path) for path in files]
    first = tables[0]
    for table in tables[1:]:
        if (table.header, table.columns) != (first.header, first.columns):
            raise InputError(f"{table.path} has other columns than {first.path}; prepare them apart")
    at = _label_column(first, label)
    number_of, classes = _label_kind(tables, at)
    to_number = number_of.__getitem__ if classes else float

    def rows(tables: Sequence[_Table]) -> Iterator[Columns]:
        x: list[list[float]] = []
        y: list[float] = []
        for table in tables:
            for line, cells in table.rows():
                y.append(to_number(cells.pop(at).strip()))
                numbers = _numbers(cells)
                if numbers is None:
                    raise _not_a_number(table, line, cells, at)
                x.append(numbers)
                if len(x) * len(numbers) >= _CELLS:
                    yield np.array(x, np.float32), np.array(y, y_dtype)
                    x, y = [], []
        if x:
            yield np.array(x, np.float32), np.array(y, y_dtype)

    y_dtype = "int32" if classes else "float32"
    x_field = FieldSpec(name="x", dtype="float32", shape=(first.columns - 1,), given="float")
    y_field = FieldSpec(name="y", dtype=y_dtype, shape=(), given="integer" if classes else "float")
    note = f"label: column {_column_name(first, at)}"
    blocks = partition(rows, tables)
    return Source("arrays", (x_field, y_field), blocks, files=len(files), classes=classes, notes=(note,))


def _look(path: Path) -> _Table:
    with os_errors(f"table {path} cannot be read"), open(path, encoding="utf-8-sig", errors="replace") as file:
        top = file.readline(_LONGEST_LINE)
    if len(top) == _LONGEST_LINE:
        raise InputError(
            f"table {path}: its first line is longer than {_LONGEST_LINE >> 20} Mi characters; is it a table?"
        )
    delimiter = max(",;\t", key=top.count)
    lines = [cells for _, cells in islice(_lines(path, delimiter, skip=False), 2)]
    if not lines:
        raise InputError(f"table {path} is empty; give a file with data")
    head = [_is_number(cell) for cell in lines[0]]
    below = [_is_number(cell) for cell in lines[1]] if len(lines) > 1 else []
    has_header = not any(head) or any(
        now and not above and text.strip() for text, above, now in zip(lines[0], head, below, strict=False)
    )
    if len(lines[0]) < 2:
        raise InputError(f"table {path} has one column; it needs numbers and a label, separated by , ; or tab")
    if has_header and len(lines) < 2:
        raise InputError(f"table {path} has a header and no rows; give a file with data")
    header = tuple(cell.strip() for cell in lines[0]) if has_header else None
    return _Table(path, delimiter, header, len(lines[0]))


def _lines(path: Path, delimiter: str, *, skip: bool) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every line that is not blank; skip: but the first."""
    with os_errors(f"table {path} cannot be read"), open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        try:
            for cells in islice(filter(None, reader), int(skip), None):
                yield reader.line_num, cells
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: not CSV ({error}); mend it") from None
        except UnicodeDecodeError:
            raise InputError(f"table {path} is not UTF-8 after line {reader.line_num}; convert it") from None


def _numbers(cells: list[str]) -> list[float] | None:
    """The cells' values, or None where one is not a number that float32 can hold (nan and inf are not either)."""
    try:
        values = [float(cell) for cell in cells]
    except ValueError:
        return None
    return values if all(-_LARGEST <= value <= _LARGEST for value in values) else None


def _is_number(cell: str) -> bool:
    return _numbers([cell]) is not None


def _label_column(table: _Table, label: str | None) -> int:
    names = table.header or ()
    if label is None:
        return names.index("label") if "label" in names else table.columns - 1
    if label in names:
        return names.index(label)
    if label.isdecimal() and 1 <= int(label) <= table.columns:
        return int(label) - 1
    known = ", ".join(names[:20]) if names else f"1 to {table.columns}"
    raise InputError(f"{table.path} has no column {label}; its columns are {known}")


def _label_kind(tables: Sequence[_Table], at: int) -> tuple[dict[str, int], tuple[str, ...] | None]:
    """Reads the label column: (number of each label, class names), or ({}, None) for numbers to predict."""
    found: dict[str, None] = {}
    all_numbers, any_fraction = True, False
    for table in tables:
        for line, cells in table.rows():
            cell = cells[at].strip()
            if not cell:
                raise InputError(f"{table.path}, line {line}: the label is empty; fill it in")
            if cell in found:
                continue
            all_numbers = all_numbers and _is_number(cell)
            any_fraction = any_fraction or not cell.lstrip("+-").isdecimal()
            if len(found) <= MOST_CLASSES:  # one more than allowed shows that there are too many
                found[cell] = None
    if all_numbers and any_fraction:
        return {}, None
    if len(found) > MOST_CLASSES:
        raise InputError(
            f"{tables[0].path}: the label column has more than {MOST_CLASSES} different values, too many for classes; "
            "choose another --label, or write numbers to predict with a decimal point"
        )
    names = sorted(found, key=int) if all_numbers else sorted(found)
    return {name: i for i, name in enumerate(names)}, tuple(names)


def _not_a_number(table: _Table, line: int, cells: list[str], at: int) -> InputError:
    wrong = next(i for i, cell in enumerate(cells) if not _is_number(cell))
    name = _column_name(table, wrong + (wrong >= at))
    what = f"{cells[wrong]!r} is not a number" if cells[wrong].strip() else "empty"
    return InputError(f"{table.path}, line {line}, column {name}: {what}; mend it, or leave the column out")


def _column_name(table: _Table, at: int) -> str:
    return table.header[at] if table.header else str(at + 1)
