"""What becomes of the columns of a table: numbers as they are or standardised, texts as classes, gaps filled.

The manifest keeps it (`ColumnSpec`), so that other tables with the same columns give the same x:

    column       age      colour                     x, float32 of 4
    a row        31.5     green                      31.5  0 1 0      --categories onehot: blue, green, red
    a row        (none)   red         fill 30.2      30.2  0 0 1
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import ColumnSpec
from mpitrain.data.sources.table_files import LARGEST, Cell, TableFile, is_missing, is_number, look
from mpitrain.errors import InputError

Floats = npt.NDArray[np.float32]


def width(specs: Sequence[ColumnSpec]) -> int:
    """How many numbers a row of x has."""
    return sum(spec.width for spec in specs)


def encoded(specs: Sequence[ColumnSpec], columns: Sequence[Sequence[Cell]]) -> Floats:
    """The rows of x.

    Args:
        specs: What becomes of each column.
        columns: The cells of each column, n of them.

    Returns:
        float32 [n, width].

    Raises:
        UnfitCell: A cell is no number where one is wanted, is missing with nothing to fill it with, or is a text that
            the column has not had.
    """
    x = np.zeros((len(columns[0]), width(specs)), np.float32)
    at = 0
    for number, (spec, cells) in enumerate(zip(specs, columns, strict=True)):
        if spec.categories is None:
            x[:, at] = (_numbers(spec, cells, number) - spec.shift) / spec.scale
        else:
            codes = _codes(spec, cells, number)
            if spec.onehot:
                x[np.arange(len(cells)), at + codes] = 1
            else:
                x[:, at] = codes
        at += spec.width
    return x


def rows_of_table(
    path: Path, specs: Sequence[ColumnSpec], unfit: Callable[[int, str], object] | None = None
) -> Iterator[Floats]:
    """x of a table's rows, in blocks, by what a data set keeps of its columns; other columns are passed over.

    Args:
        path: A file such as `prepare` takes.
        specs: `columns` of a data set's manifest.
        unfit: Told of each row with a cell that does not fit, or with another number of columns, in order: its number
            from 0, and what is wrong where; it is then left out.

    Raises:
        InputError: A column is missing, or, without `unfit`, a row does not fit.
    """
    table, first = look(path, least=1), 0

    def ragged(told: str) -> None:
        nonlocal first
        assert unfit is not None
        unfit(first, told)
        first += 1

    chosen = places(table, specs, "the model was trained with")
    for lines, columns in table.blocks(chosen, ragged if unfit is not None else None):
        for found in _fitting(specs, columns, range(len(lines))):
            if not isinstance(found, UnfitCell):
                yield found
            elif unfit is None:
                raise found.of(table, lines, specs)
            else:
                unfit(first + found.row, found.told(table, lines, specs))
        first += len(lines)


def cells_of_table(path: Path, names: Sequence[str], without: Container[int]) -> dict[str, list[Cell]]:
    """Return columns of a table as they are, by name.

    Args:
        path: The table.
        names: Names or numbers of the columns.
        without: Numbers, from 0, of the rows that are left out.

    Raises:
        InputError: There is no such column.
    """
    table, first = look(path, least=1), 0
    found: list[list[Cell]] = [[] for _ in names]

    def ragged(told: str) -> None:
        nonlocal first
        first += 1

    chosen = places(table, [ColumnSpec(name=name) for name in names], "--keep names")
    for lines, columns in table.blocks(chosen, ragged):
        for kept, cells in zip(found, columns, strict=True):
            kept += [cell for number, cell in enumerate(cells, first) if number not in without]
        first += len(lines)
    return dict(zip(names, found, strict=True))


def _fitting(
    specs: Sequence[ColumnSpec], columns: Sequence[Sequence[Cell]], rows: range
) -> Iterator[Floats | UnfitCell]:
    """x of some rows, in pieces around those that do not fit, of which there is what is wrong."""
    try:
        yield encoded(specs, [cells[rows.start : rows.stop] for cells in columns])
    except UnfitCell as error:
        middle = (rows.start + rows.stop) // 2
        if middle == rows.start:
            yield UnfitCell(error.column, rows.start, error.what)
            return
        yield from _fitting(specs, columns, range(rows.start, middle))
        yield from _fitting(specs, columns, range(middle, rows.stop))


def places(table: TableFile, specs: Sequence[ColumnSpec], why: str) -> list[int]:
    """The numbers of a table's columns that have the names of others, in their order.

    Args:
        table: The table.
        specs: The other columns.
        why: What has to do with them, for the message.

    Raises:
        InputError: A column is missing.
    """
    names = [table.name(i) for i in range(table.columns)]
    lacking = [spec.name for spec in specs if spec.name not in names]
    if lacking:
        raise InputError(f"table {table.path} has no column {lacking[0]}, which {why}; add it")
    return [names.index(spec.name) for spec in specs]


class UnfitCell(ValueError):
    """A cell that cannot become a number of x.

    Attributes:
        column: The number of its column.
        row: The number of its row in the block.
        what: What is wrong with it.
    """

    def __init__(self, column: int, row: int, what: str) -> None:
        super().__init__(what)
        self.column, self.row, self.what = column, row, what

    def told(self, table: TableFile, lines: Sequence[int], specs: Sequence[ColumnSpec]) -> str:
        """What is wrong, and where. lines: those of the block's rows."""
        return f"{table.place(lines[self.row])}, column {specs[self.column].name}: {self.what}"

    def of(self, table: TableFile, lines: Sequence[int], specs: Sequence[ColumnSpec]) -> InputError:
        """The error that names the place."""
        return InputError(f"{self.told(table, lines, specs)}; mend it")


def _numbers(spec: ColumnSpec, cells: Sequence[Cell], column: int) -> npt.NDArray[np.float64]:
    try:
        values = np.array(list(map(float, cells)), np.float64)  # type: ignore[arg-type]  # None is a TypeError
    except (TypeError, ValueError):
        values = np.array([_number(cell, row, column) for row, cell in enumerate(cells)], np.float64)
    gaps = np.isnan(values)
    if gaps.any() and spec.fill is not None:
        values[gaps] = spec.fill
    with np.errstate(over="ignore"):
        wrong = ~np.isfinite(values.astype(np.float32))
    if wrong.any() and not spec.nonfinite:
        row = int(wrong.argmax())
        raise UnfitCell(column, row, "empty" if is_missing(cells[row]) else f"{cells[row]!r} is not a number")
    return values


def _number(cell: Cell, row: int, column: int) -> float:
    if is_missing(cell):
        return float("nan")
    try:
        return float(cell)  # type: ignore[arg-type]
    except ValueError:
        raise UnfitCell(column, row, f"{cell!r} is not a number") from None


def _codes(spec: ColumnSpec, cells: Sequence[Cell], column: int) -> npt.NDArray[np.int64]:
    assert spec.categories is not None
    number = {name: code for code, name in enumerate(spec.categories)}
    codes = np.array([number.get(category(cell), -1) for cell in cells], np.int64)
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        known = ", ".join(map(repr, spec.categories[:8]))
        raise UnfitCell(column, row, f"{category(cells[row])!r:.100} is none of the column's values ({known})")
    return codes


def category(cell: Cell) -> str:
    """What a cell is called as a class; a missing one is "", a class of its own."""
    if is_missing(cell):
        return ""
    return cell.strip() if isinstance(cell, str) else str(cell)


def is_plain(cells: Sequence[Cell]) -> bool:
    """Whether all cells are numbers that float32 can hold: told fast, for they mostly are."""
    try:
        values = np.array(list(map(float, cells)), np.float64)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values.astype(np.float32)).all())


def is_odd(cell: Cell, *, nonfinite: bool) -> bool:
    """Whether a cell has a value that is no number. nonfinite: infinite ones are numbers too."""
    return not (is_missing(cell) or is_number(cell) or (nonfinite and is_nonfinite(cell)))


def is_nonfinite(cell: Cell) -> bool:
    """Whether a cell is a number that is infinite, or as good as that for float32."""
    try:
        return cell is not None and not -LARGEST <= float(cell) <= LARGEST
    except ValueError:
        return False
