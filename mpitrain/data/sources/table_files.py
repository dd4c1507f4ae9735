"""Table files, read as blocks of columns: CSV and TSV, also compressed, and Parquet.

The delimiter of a CSV file is the comma, semicolon or tab, whichever is most frequent in the first line. The first line
is a header if none of its cells is a number, or if it has text in a column in which the second line has a number. Cells
of CSV are texts; cells of Parquet are texts, numbers or None.

Columns of numbers are kept or standardised, texts become classes, and missing values are replaced. The manifest stores
the conversion (`ColumnSpec`), so that other tables with the same columns give the same x:

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

from mpitrain.data.folders import os_errors, require_package
from mpitrain.data.format import ColumnSpec
from mpitrain.data.sources import finite
from mpitrain.data.sources.streams import open_stream, plain_suffix
from mpitrain.errors import InputError
from mpitrain.storage.disk import open_plain

Cell = str | float | None
Ragged = Callable[[str], object]
Blocks = Iterator[tuple[Sequence[int], list[Sequence[Cell]]]]  # line numbers of rows, cells of each column
Unfit = Callable[[int, str], object]  # number of a row, and its problem
CSV, ARROW = (".csv", ".tsv"), (".parquet", ".arrow")  # the latter are read by Arrow
LARGEST = float(np.finfo(np.float32).max)
_MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "<na>"))
_CELLS = 1 << 17  # cells of a block; as Python numbers they take 32 bytes each
_LONGEST_LINE = 16 << 20
_TEXT_COLUMN = "text"
_ARROW_FILE = b"ARROW1"  # first bytes of the file form; the stream form has none
_ARROW_TYPES = ("integer", "floating", "boolean", "null", "string", "large_string")  # allowed for cells


@dataclass(frozen=True)
class TableFile:
    """A table file, with properties found at its beginning.

    Attributes:
        path: The file.
        header: Names of the columns, if it has a header.
        columns: Number of columns.
        delimiter: Delimiter of cells in a line; empty for Parquet.
    """

    path: Path
    header: tuple[str, ...] | None
    columns: int
    delimiter: str

    def name(self, column: int) -> str:
        """Return the name of a column, or its number from 1 if it has none."""
        return self.header[column] if self.header else str(column + 1)

    def place(self, number: int) -> str:
        """Return the name of a row in messages."""
        return f"{self.path}, {'line' if self.delimiter else 'row'} {number}"

    def blocks(self, chosen: Sequence[int], ragged: Ragged | None = None) -> Blocks:
        """Yield (line numbers of the rows, cells of each chosen column) of block after block.

        Args:
            chosen: Numbers of the columns.
            ragged: Function called with the place and problem of each row with another number of columns, between the
                blocks before and after it; the row is skipped. None: such a row raises InputError.
        """
        if not self.delimiter:
            yield from _arrow_blocks(self.path, chosen)
            return
        rows = _lines(self.path, self.delimiter, skip=self.header is not None)
        while block := _block(rows, max(1, _CELLS // self.columns)):
            start = 0
            for number, (line, cells) in enumerate(block):
                if len(cells) == self.columns:
                    continue
                problem = f"{self.path}, line {line}: {len(cells)} columns where the first line has {self.columns}"
                if ragged is None:
                    raise InputError(f"{problem}; fix it, or skip such rows with --skip-bad")
                if number > start:
                    yield _columns_of(block[start:number], chosen)
                ragged(problem)
                start = number + 1
            if start < len(block):
                yield _columns_of(block[start:], chosen)


def _columns_of(rows: Sequence[tuple[int, list[str]]], chosen: Sequence[int]) -> tuple[list[int], list[Sequence[Cell]]]:
    columns = list(zip(*(cells for _, cells in rows), strict=True))
    return [line for line, _ in rows], [columns[i] for i in chosen]


def _block(rows: Iterator[tuple[int, list[str]]], most: int) -> list[tuple[int, list[str]]]:
    """Return the next `most` rows, or fewer if their cells are long."""
    block, letters = [], 0
    for row in islice(rows, most):
        block.append(row)
        letters += sum(map(len, row[1]))
        if letters > _LONGEST_LINE:
            break
    return block


def is_table(path: Path) -> bool:
    """Return True if a file is a table, judged by its name.

    A Parquet or Arrow file with a column of texts called text is not a table.
    """
    if plain_suffix(path) in CSV:
        return True
    if path.suffix.lower() not in ARROW:
        return False
    schema = arrow_schema(path)
    return _TEXT_COLUMN not in schema.names or str(schema.field(_TEXT_COLUMN).type) not in ("string", "large_string")


def open_table(path: Path, *, least: int = 2) -> TableFile:
    """Find the columns of a file from its beginning.

    Args:
        path: Table file.
        least: Smallest number of columns it must have.

    Raises:
        InputError: The file is empty, not readable, or has too few columns.
    """
    if path.suffix.lower() in ARROW:
        schema = arrow_schema(path)
        if len(schema.names) < least:
            raise InputError(f"table {path} has one column; it needs inputs and a label")
        return TableFile(path, tuple(schema.names), len(schema.names), "")
    with open_stream(path) as file:
        top = io.TextIOWrapper(file, "utf-8-sig", "replace").readline(_LONGEST_LINE)
    if len(top) == _LONGEST_LINE:
        raise InputError(f"{path}: its first line has over {_LONGEST_LINE >> 20} Mi characters; check if it is a table")
    delimiter = max(",;\t", key=top.count)
    lines = [cells for _, cells in islice(_lines(path, delimiter, skip=False), 2)]
    if not lines:
        raise InputError(f"table {path} is empty; use a file with data")
    head = [is_number(cell) for cell in lines[0]]
    below = [is_number(cell) for cell in lines[1]] if len(lines) > 1 else []
    has_header = not any(head) or any(
        now and not above and not is_missing(text) for text, above, now in zip(lines[0], head, below, strict=False)
    )
    if len(lines[0]) < least:
        raise InputError(f"table {path} has one column; it needs numbers and a label, separated by , ; or tab")
    if has_header and len(lines) < 2:
        raise InputError(f"table {path} has a header but no rows; use a file with data")
    header = tuple(cell.strip() for cell in lines[0]) if has_header else None
    return TableFile(path, header, len(lines[0]), delimiter)


def is_missing(cell: Cell) -> bool:
    """Return True if a cell has no value: it is empty, null, or a word for a missing value, such as NA or NaN."""
    if isinstance(cell, str):
        return cell.strip().lower() in _MISSING
    return cell is None or math.isnan(cell)


def value_of(cell: Cell) -> float | None:
    """Return the number in a cell; None if it contains none."""
    try:
        return None if cell is None else float(cell)
    except ValueError:
        return None


def is_number(cell: Cell) -> bool:
    """Return True if a cell is a finite number within the range of float32."""
    return (value := value_of(cell)) is not None and abs(value) <= LARGEST


def _lines(path: Path, delimiter: str, *, skip: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of every line that is not blank; with `skip`, without the first."""
    row = 0  # characters of a row, which has several lines if a quoted cell does

    def bounded(text: io.TextIOWrapper) -> Iterator[str]:
        nonlocal row
        while line := text.readline(_LONGEST_LINE + 1):
            row += len(line)
            if row > _LONGEST_LINE:
                raise csv.Error(f"a row of more than {_LONGEST_LINE >> 20} Mi characters")
            yield line

    with open_stream(path) as file:
        reader = csv.reader(bounded(io.TextIOWrapper(file, "utf-8-sig", newline="")), delimiter=delimiter)
        try:
            for cells in reader:
                row = 0
                if cells and not skip:
                    yield reader.line_num, cells
                skip = skip and not cells
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num} is not valid CSV ({error}); fix it") from None
        except UnicodeDecodeError:
            raise InputError(f"table {path} is not UTF-8 after line {reader.line_num}; convert it to UTF-8") from None


def _arrow_blocks(path: Path, chosen: Sequence[int]) -> Blocks:
    from pyarrow import types

    schema, start = arrow_schema(path), 1
    names = [schema.names[i] for i in chosen]
    for name, kind in ((name, schema.field(name).type) for name in names):
        element_type = kind.value_type if types.is_dictionary(kind) else kind
        if not any(getattr(types, f"is_{each}")(element_type) for each in _ARROW_TYPES):
            raise InputError(
                f"table {path}, column {name}: {element_type} is neither a number nor text; convert it, or leave the "
                f"column out with --drop {name}"
            )
    for columns in arrow_columns(path, names, max(1, _CELLS // max(1, len(names)))):
        yield range(start, start + len(columns[0])), columns
        start += len(columns[0])


# -- Parquet and Arrow


def arrow_schema(path: Path) -> Any:
    """Return the Arrow schema of a Parquet or Arrow file."""
    if path.suffix.lower() != ".arrow":
        return _parquet(path).schema_arrow
    with _arrow_errors(path, "not a complete Arrow file"), _open_arrow(path) as (schema, _):
        return schema


def arrow_columns(path: Path, names: Sequence[str], rows: int) -> Iterator[list[Any]]:
    """Yield some columns of a Parquet or Arrow file in blocks; each column is a list of Python values.

    Args:
        path: Parquet or Arrow file.
        names: Names of the columns.
        rows: Largest number of rows in a block.
    """
    if path.suffix.lower() != ".arrow":
        with _arrow_errors(path, "damaged"):
            for batch in _parquet(path).iter_batches(rows, columns=list(names)):
                yield [batch.column(name).to_pylist() for name in names]
        return
    with _arrow_errors(path, "damaged"), _open_arrow(path) as (_, batches):
        for whole in batches:
            whole.validate(full=True)  # Arrow would follow any offsets in the file
            for first in range(0, whole.num_rows, rows):
                batch = whole.slice(first, rows)
                yield [batch.column(name).to_pylist() for name in names]


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Yield the schema and the record batches of an Arrow file: a stream, as Hugging Face writes it, or a file."""
    with require_package(f"{path} needs", "pyarrow"):
        import pyarrow
        from pyarrow import ipc
    with open_plain(path) as plain, pyarrow.PythonFile(plain, "r") as file:  # a memory map ends the process on errors
        if plain.read(len(_ARROW_FILE)) == _ARROW_FILE:
            reader = ipc.open_file(file)
            yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        else:
            plain.seek(0)
            stream = ipc.open_stream(file)
            yield stream.schema, iter(stream)


def _parquet(path: Path) -> Any:
    with require_package(f"{path} needs", "pyarrow"):
        from pyarrow import parquet
    with _arrow_errors(path, "not a complete Parquet file"):
        return parquet.ParquetFile(path)


@contextmanager
def _arrow_errors(path: Path, what: str) -> Iterator[None]:
    """Turn Arrow's errors about the content of a file into an InputError of one line."""
    with os_errors(f"{path} cannot be read"):
        try:
            yield
        except Exception as error:
            if type(error).__module__.startswith("pyarrow") or (isinstance(error, OSError) and error.errno is None):
                raise InputError(f"{path} is {what} ({str(error).splitlines()[0]:.120}); restore that file") from None
            if isinstance(error, (MemoryError, UnicodeDecodeError)):
                raise InputError(f"{path} is {what} ({type(error).__name__}); restore that file") from None
            raise


# -- columns


Floats = npt.NDArray[np.float32]


def width(specs: Sequence[ColumnSpec]) -> int:
    """Return the count of numbers in a row of x."""
    return sum(spec.width for spec in specs)


def encode_columns(specs: Sequence[ColumnSpec], columns: Sequence[Sequence[Cell]]) -> Floats:
    """Convert cells to rows of x.

    Args:
        specs: Conversion of each column.
        columns: Cells of each column, one for each of the n rows.

    Returns:
        float32 [n, width].

    Raises:
        UnfitCell: A cell is not a number, is missing without a replacement, or is a text that is not among the column's
            categories.
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
                what = f"{category(cells[row])!r:.100} is not among the values of this column ({known})"
                raise UnfitCell(number, row, what)
            if spec.onehot:
                x[np.arange(len(cells)), at + codes] = 1
            else:
                x[:, at] = codes
        at += spec.width
    return x


def rows_of_table(path: Path, specs: Sequence[ColumnSpec], unfit: Unfit | None = None) -> Iterator[Floats]:
    """Yield rows of x of a table, in blocks, converted as in a data set; columns that the data set lacks are ignored.

    Args:
        path: Table file, as for `prepare`.
        specs: `columns` of the data set's manifest.
        unfit: Function called for each row with an unfit cell or another number of columns, in order, with the number
            of the row from 0 and the problem; the row is skipped.

    Raises:
        InputError: A column is missing; or a row does not fit, and `unfit` is None.
    """
    table = open_table(path, least=1)
    for first, lines, columns in _numbered_blocks(
        table, column_numbers(table, specs, "the model was trained with"), unfit
    ):
        for result in _encode_fitting_rows(specs, columns, range(len(lines))):
            if not isinstance(result, UnfitCell):
                yield result
            elif unfit is None:
                raise result.to_error(table, lines, specs)
            else:
                unfit(first + result.row, result.describe(table, lines, specs))


def _numbered_blocks(
    table: TableFile, chosen: Sequence[int], unfit: Unfit | None
) -> Iterator[tuple[int, Sequence[int], list[Sequence[Cell]]]]:
    """Yield blocks of a table with the number of their first row, from 0; rows with other columns go to `unfit`."""
    first = 0

    def ragged(problem: str) -> None:
        nonlocal first
        assert unfit is not None
        unfit(first, problem)
        first += 1

    for lines, columns in table.blocks(chosen, ragged if unfit is not None else None):
        yield first, lines, columns
        first += len(lines)


def cells_of_table(path: Path, names: Sequence[str], without: Container[int]) -> dict[str, list[Cell]]:
    """Return the unconverted cells of some columns of a table, by the name of the column.

    Args:
        path: Table file.
        names: Names or numbers of the columns.
        without: Numbers of the rows to skip, from 0.

    Raises:
        InputError: There is no such column.
    """
    table = open_table(path, least=1)
    results: list[list[Cell]] = [[] for _ in names]
    chosen = column_numbers(table, [ColumnSpec(name=name) for name in names], "--keep names")
    for first, _, columns in _numbered_blocks(table, chosen, lambda row, problem: None):
        for target, cells in zip(results, columns, strict=True):
            target += [cell for number, cell in enumerate(cells, first) if number not in without]
    return dict(zip(names, results, strict=True))


def _encode_fitting_rows(
    specs: Sequence[ColumnSpec], columns: Sequence[Sequence[Cell]], rows: range
) -> Iterator[Floats | UnfitCell]:
    """Yield x of the rows that fit, in pieces, and the error of each row that does not, in order."""
    try:
        yield encode_columns(specs, [cells[rows.start : rows.stop] for cells in columns])
    except UnfitCell as error:
        middle = (rows.start + rows.stop) // 2
        if middle == rows.start:
            yield UnfitCell(error.column, rows.start, error.what)
            return
        yield from _encode_fitting_rows(specs, columns, range(rows.start, middle))
        yield from _encode_fitting_rows(specs, columns, range(middle, rows.stop))


def column_numbers(table: TableFile, specs: Sequence[ColumnSpec], why: str) -> list[int]:
    """Return the numbers of a table's columns that have the names of `specs`, in their order.

    Args:
        table: Table to search.
        specs: Columns to find.
        why: Origin of these columns, for the message.

    Raises:
        InputError: A column is missing.
    """
    names = [table.name(i) for i in range(table.columns)]
    lacking = [spec.name for spec in specs if spec.name not in names]
    if lacking:
        raise InputError(f"table {table.path} has no column {lacking[0]}, which {why}; add it")
    return [names.index(spec.name) for spec in specs]


class UnfitCell(ValueError):
    """A cell that cannot be converted to a number of x.

    Attributes:
        column: Number of its column.
        row: Number of its row in the block.
        what: The problem.
    """

    def __init__(self, column: int, row: int, what: str) -> None:
        super().__init__(what)
        self.column, self.row, self.what = column, row, what

    def describe(self, table: TableFile, lines: Sequence[int], specs: Sequence[ColumnSpec]) -> str:
        """Return the problem and its place.

        Args:
            table: Table of the cell.
            lines: Line numbers of the rows of the block.
            specs: Conversion of the columns, with their names.
        """
        return f"{table.place(lines[self.row])}, column {specs[self.column].name}: {self.what}"

    def to_error(self, table: TableFile, lines: Sequence[int], specs: Sequence[ColumnSpec]) -> InputError:
        """Return an InputError that names the place.

        Args:
            table: Table of the cell.
            lines: Line numbers of the rows of the block.
            specs: Conversion of the columns, with their names.
        """
        return InputError(f"{self.describe(table, lines, specs)}; fix it")


def _numbers(spec: ColumnSpec, cells: Sequence[Cell], column: int) -> npt.NDArray[np.float64]:
    try:
        values = np.array(list(map(float, cells)), np.float64)  # type: ignore[arg-type]  # None is a TypeError
    except (TypeError, ValueError):
        numbers = [math.nan if is_missing(cell) else value_of(cell) for cell in cells]
        if None in numbers:
            row = numbers.index(None)
            raise UnfitCell(column, row, f"{cells[row]!r} is not a number") from None
        values = np.array(numbers, np.float64)
    gaps = np.isnan(values)
    if gaps.any() and spec.fill is not None:
        values[gaps] = spec.fill
    wrong = ~finite(values)
    if wrong.any() and not spec.nonfinite:
        row = int(wrong.argmax())
        raise UnfitCell(
            column, row, "the cell is empty" if is_missing(cells[row]) else f"{cells[row]!r} is not a number"
        )
    return values


def category(cell: Cell) -> str:
    """Return the category of a cell; a missing cell has the category ""."""
    if is_missing(cell):
        return ""
    return cell.strip() if isinstance(cell, str) else str(cell)


def are_numbers(cells: Sequence[Cell]) -> bool:
    """Return True if all cells are numbers within the range of float32, which is the usual case and tested fast."""
    try:
        values = np.array(list(map(float, cells)), np.float64)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return bool(finite(values).all())
