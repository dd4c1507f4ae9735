"""Files of tables, read as blocks of columns: CSV and TSV, also compressed, and Parquet.

A CSV file is separated by commas, semicolons or tabs, whichever the first line has most of. A header is optional: the
first line is one where none of its cells is a number, or where it has text in a column of which the second line has a
number. Cells of CSV are texts; those of Parquet are texts, numbers or None.

Columns become numbers as they are or standardised, texts become classes, and gaps are filled. The manifest keeps how
(`ColumnSpec`), so that other tables with the same columns give the same x:

    column       age      colour                     x, float32 of 4
    a row        31.5     green                      31.5  0 1 0      --categories onehot: blue, green, red
    a row        (none)   red         fill 30.2      30.2  0 0 1
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.folders import needing, os_errors
from mpitrain.data.format import ColumnSpec
from mpitrain.data.sources import finite
from mpitrain.data.sources.streams import opened, plain_suffix
from mpitrain.errors import InputError

Cell = str | float | None
Ragged = Callable[[str], object]
Blocks = Iterator[tuple[Sequence[int], list[Sequence[Cell]]]]  # the lines that rows stand in, cells of each column
Unfit = Callable[[int, str], object]  # number of a row, and what is wrong with it
CSV, PARQUET = (".csv", ".tsv"), (".parquet",)
LARGEST = float(np.finfo(np.float32).max)
_MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "<na>"))
_CELLS = 1 << 17  # of a block: as Python numbers they take 32 bytes each
_LONGEST_LINE = 16 << 20
_TEXT_COLUMN = "text"
_ARROW_TYPES = ("integer", "floating", "boolean", "null", "string", "large_string")  # of cells


@dataclass(frozen=True)
class TableFile:
    """A file, learnt from its beginning.

    Attributes:
        path: The file.
        header: The names of its columns, where it has them.
        columns: How many columns it has.
        delimiter: What separates them in a line; nothing in Parquet.
    """

    path: Path
    header: tuple[str, ...] | None
    columns: int
    delimiter: str

    def name(self, column: int) -> str:
        """What a column is called: its name, or its number from 1."""
        return self.header[column] if self.header else str(column + 1)

    def place(self, number: int) -> str:
        """What messages call a row."""
        return f"{self.path}, {'line' if self.delimiter else 'row'} {number}"

    def blocks(self, chosen: Sequence[int], ragged: Ragged | None = None) -> Blocks:
        """(the lines that rows stand in, the cells of each chosen column), again and again.

        Args:
            chosen: Numbers of the columns.
            ragged: Called for each row with another number of columns, between the blocks before and after it, with
                what is wrong and where; the row is left out. None: such a row is refused.
        """
        if not self.delimiter:
            yield from _groups(self.path, chosen)
            return
        rows = _lines(self.path, self.delimiter, skip=self.header is not None)
        while block := _block(rows, max(1, _CELLS // self.columns)):
            start = 0
            for number, (line, cells) in enumerate(block):
                if len(cells) == self.columns:
                    continue
                told = f"{self.path}, line {line}: {len(cells)} columns where the first line has {self.columns}"
                if ragged is None:
                    raise InputError(f"{told}; mend it, or leave such rows out with --skip-bad")
                if number > start:
                    yield _part(block[start:number], chosen)
                ragged(told)
                start = number + 1
            if start < len(block):
                yield _part(block[start:], chosen)


def _part(rows: Sequence[tuple[int, list[str]]], chosen: Sequence[int]) -> tuple[list[int], list[Sequence[Cell]]]:
    columns = list(zip(*(cells for _, cells in rows), strict=True))
    return [line for line, _ in rows], [columns[i] for i in chosen]


def _block(rows: Iterator[tuple[int, list[str]]], most: int) -> list[tuple[int, list[str]]]:
    """The next rows: `most`, or fewer where their cells are long."""
    block, letters = [], 0
    for row in islice(rows, most):
        block.append(row)
        letters += sum(map(len, row[1]))
        if letters > _LONGEST_LINE:
            break
    return block


def is_table(path: Path) -> bool:
    """Whether a file is a table: by its name, and one of Parquet that has a column of texts called text is not."""
    if plain_suffix(path) in CSV:
        return True
    if path.suffix.lower() not in PARQUET:
        return False
    schema = parquet_schema(path)
    return _TEXT_COLUMN not in schema.names or str(schema.field(_TEXT_COLUMN).type) not in ("string", "large_string")


def look(path: Path, *, least: int = 2) -> TableFile:
    """Learn what columns a file has. least: how many there must be."""
    if path.suffix.lower() in PARQUET:
        schema = parquet_schema(path)
        if len(schema.names) < least:
            raise InputError(f"table {path} has one column; it needs inputs and a label")
        return TableFile(path, tuple(schema.names), len(schema.names), "")
    with opened(path) as file:
        top = io.TextIOWrapper(file, "utf-8-sig", "replace").readline(_LONGEST_LINE)
    if len(top) == _LONGEST_LINE:
        raise InputError(f"table {path}: its first line has over {_LONGEST_LINE >> 20} Mi characters; is it a table?")
    delimiter = max(",;\t", key=top.count)
    lines = [cells for _, cells in islice(_lines(path, delimiter, skip=False), 2)]
    if not lines:
        raise InputError(f"table {path} is empty; give a file with data")
    head = [is_number(cell) for cell in lines[0]]
    below = [is_number(cell) for cell in lines[1]] if len(lines) > 1 else []
    has_header = not any(head) or any(
        now and not above and not is_missing(text) for text, above, now in zip(lines[0], head, below, strict=False)
    )
    if len(lines[0]) < least:
        raise InputError(f"table {path} has one column; it needs numbers and a label, separated by , ; or tab")
    if has_header and len(lines) < 2:
        raise InputError(f"table {path} has a header and no rows; give a file with data")
    header = tuple(cell.strip() for cell in lines[0]) if has_header else None
    return TableFile(path, header, len(lines[0]), delimiter)


def is_missing(cell: Cell) -> bool:
    """Whether a cell has no value: empty, null, or one of the words that stand for that, as NA and NaN."""
    if isinstance(cell, str):
        return cell.strip().lower() in _MISSING
    return cell is None or math.isnan(cell)


def value_of(cell: Cell) -> float | None:
    """Return the number that a cell is; None where it is none."""
    try:
        return None if cell is None else float(cell)
    except ValueError:
        return None


def is_number(cell: Cell) -> bool:
    """Whether a cell is a number that float32 can hold (nan and inf are not either)."""
    return (value := value_of(cell)) is not None and abs(value) <= LARGEST


def _lines(path: Path, delimiter: str, *, skip: bool) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every line that is not blank; skip: but the first."""
    row = 0  # characters of the lines of a row, which has several where a cell in quotes does

    def bounded(text: io.TextIOWrapper) -> Iterator[str]:
        nonlocal row
        while line := text.readline(_LONGEST_LINE + 1):
            row += len(line)
            if row > _LONGEST_LINE:
                raise csv.Error(f"a row of more than {_LONGEST_LINE >> 20} Mi characters")
            yield line

    with opened(path) as file:
        reader = csv.reader(bounded(io.TextIOWrapper(file, "utf-8-sig", newline="")), delimiter=delimiter)
        try:
            for cells in reader:
                row = 0
                if cells and not skip:
                    yield reader.line_num, cells
                skip = skip and not cells
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: not CSV ({error}); mend it") from None
        except UnicodeDecodeError:
            raise InputError(f"table {path} is not UTF-8 after line {reader.line_num}; convert it") from None


def _groups(path: Path, chosen: Sequence[int]) -> Blocks:
    from pyarrow import types

    schema, start = parquet_schema(path), 1
    names = [schema.names[i] for i in chosen]
    for name, kind in ((name, schema.field(name).type) for name in names):
        held = kind.value_type if types.is_dictionary(kind) else kind
        if not any(getattr(types, f"is_{each}")(held) for each in _ARROW_TYPES):
            raise InputError(
                f"table {path}, column {name}: {held} is neither a number nor text; convert it, or leave the column "
                f"out with --drop {name}"
            )
    for columns in parquet_columns(path, names, max(1, _CELLS // max(1, len(names)))):
        yield range(start, start + len(columns[0])), columns
        start += len(columns[0])


# -- Parquet


def parquet_schema(path: Path) -> Any:
    """Return the schema of a file of Parquet, as Arrow's."""
    return _parquet(path).schema_arrow


def parquet_columns(path: Path, names: Sequence[str], rows: int) -> Iterator[list[Any]]:
    """Yield some columns of a file of Parquet, each a list of Python values, in blocks of at most so many rows."""
    with _arrow_errors(path, "damaged"):
        for batch in _parquet(path).iter_batches(rows, columns=list(names)):
            yield [batch.column(name).to_pylist() for name in names]


def _parquet(path: Path) -> Any:
    with needing(f"{path} needs", "pyarrow"):
        from pyarrow import parquet
    with _arrow_errors(path, "not a whole Parquet file"):
        return parquet.ParquetFile(path)


@contextmanager
def _arrow_errors(path: Path, what: str) -> Iterator[None]:
    """Turn what Arrow raises about the content of a file into an InputError of one line."""
    with os_errors(f"{path} cannot be read"):
        try:
            yield
        except Exception as error:
            if type(error).__module__.startswith("pyarrow") or (isinstance(error, OSError) and error.errno is None):
                raise InputError(f"{path} is {what} ({str(error).splitlines()[0]:.120}); restore that file") from None
            raise


# -- columns


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
            code_of = {name: code for code, name in enumerate(spec.categories)}
            codes = np.array([code_of.get(category(cell), -1) for cell in cells], np.int64)
            if (codes < 0).any():
                row, known = int((codes < 0).argmax()), ", ".join(map(repr, spec.categories[:8]))
                what = f"{category(cells[row])!r:.100} is none of the column's values ({known})"
                raise UnfitCell(number, row, what)
            if spec.onehot:
                x[np.arange(len(cells)), at + codes] = 1
            else:
                x[:, at] = codes
        at += spec.width
    return x


def rows_of_table(path: Path, specs: Sequence[ColumnSpec], unfit: Unfit | None = None) -> Iterator[Floats]:
    """x of a table's rows, in blocks, by what a data set keeps of its columns; other columns are passed over.

    Args:
        path: A file such as `prepare` takes.
        specs: `columns` of a data set's manifest.
        unfit: Told of each row with a cell that does not fit, or with another number of columns, in order: its number
            from 0, and what is wrong where; it is then left out.

    Raises:
        InputError: A column is missing, or, without `unfit`, a row does not fit.
    """
    table = look(path, least=1)
    for first, lines, columns in _numbered(table, places(table, specs, "the model was trained with"), unfit):
        for found in _fitting(specs, columns, range(len(lines))):
            if not isinstance(found, UnfitCell):
                yield found
            elif unfit is None:
                raise found.of(table, lines, specs)
            else:
                unfit(first + found.row, found.told(table, lines, specs))


def _numbered(
    table: TableFile, chosen: Sequence[int], unfit: Unfit | None
) -> Iterator[tuple[int, Sequence[int], list[Sequence[Cell]]]]:
    """Yield blocks of a table, each with the number of its first row, from 0; those of other columns go to `unfit`."""
    first = 0

    def ragged(told: str) -> None:
        nonlocal first
        assert unfit is not None
        unfit(first, told)
        first += 1

    for lines, columns in table.blocks(chosen, ragged if unfit is not None else None):
        yield first, lines, columns
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
    table = look(path, least=1)
    found: list[list[Cell]] = [[] for _ in names]
    chosen = places(table, [ColumnSpec(name=name) for name in names], "--keep names")
    for first, _, columns in _numbered(table, chosen, lambda row, told: None):
        for kept, cells in zip(found, columns, strict=True):
            kept += [cell for number, cell in enumerate(cells, first) if number not in without]
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
        found = [math.nan if is_missing(cell) else value_of(cell) for cell in cells]
        if None in found:
            row = found.index(None)
            raise UnfitCell(column, row, f"{cells[row]!r} is not a number") from None
        values = np.array(found, np.float64)
    gaps = np.isnan(values)
    if gaps.any() and spec.fill is not None:
        values[gaps] = spec.fill
    wrong = ~finite(values)
    if wrong.any() and not spec.nonfinite:
        row = int(wrong.argmax())
        raise UnfitCell(column, row, "empty" if is_missing(cells[row]) else f"{cells[row]!r} is not a number")
    return values


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
    return bool(finite(values).all())
