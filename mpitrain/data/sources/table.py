"""Tables, CSV or Parquet: columns as x (float32), one column as the label y; read in blocks, several times.

    1  the label's kind      integers or texts: classes, numbered in order (by number, or by name)
                             numbers, some with a decimal point: float32 to predict
    2  survey of columns     with --missing or --categories: which have missing values, which have texts
    3  missing values        with --missing mean or median: computed from the rows that are not held out
    4  mean and deviation    with --scale standard: of the columns of numbers, computed from those rows too
    5  writing the rows

Without these options, a cell that is not a number is an error; the survey then counts such cells and reports the first.
Several files form one table; all must have the same columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import ColumnSpec, DatasetManifest, FieldSpec, read_manifest
from mpitrain.data.sources import MOST_CLASSES, Columns, PrepareOptions, Source, held_out_mask, partition, table_files
from mpitrain.data.sources.table_files import Cell, Floats, TableFile, UnfitCell, are_numbers, is_missing, is_number
from mpitrain.errors import InputError

MOST_CATEGORIES = 1024  # in a column; more of them are probably names or numbers of things
_LARGE = 10  # a model with small initial weights learns badly from larger numbers
_UNSCALED = {"shift": 0.0, "scale": 1.0}
_EMPTY = {"fill": None, "nonfinite": True, **_UNSCALED}  # a missing value becomes nan
_MOST_TEXTS = 0.1  # largest fraction of texts in a column that still counts as one of numbers

Labels = tuple[dict[str, int], tuple[str, ...] | None]  # number of each label and class names, or ({}, None)
TableBlock = tuple[
    TableFile, Sequence[int], list[Sequence[Cell]], Sequence[Cell]
]  # table, lines, cells of columns, labels


def table_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe tables whose rows are the samples.

    Args:
        files: Tables, in order; all have the same columns.
        options: Label, columns and their conversion.

    Raises:
        InputError: The tables do not fit the options.
    """
    table = _TableReader(files, options)
    classes = table.classes
    x = FieldSpec(name="x", dtype="float32", shape=(table_files.width(table.specs),), given="float")
    y_dtype, value_kind = ("int32", "integer") if classes else ("float32", "float")
    y = FieldSpec(name="y", dtype=y_dtype, shape=(), given=value_kind)
    columns, notes = (lambda: tuple(table.specs)), table.notes()
    return Source(
        "arrays", (x, y), table.blocks, len(files), classes, notes=notes, columns=columns, found=table.row_notes
    )


class _TableReader:
    """Reader of the chosen columns of tables, which also decides how each column is converted."""

    def __init__(self, files: Sequence[Path], options: PrepareOptions) -> None:
        self._tables, self._options = [table_files.open_table(path) for path in files], options
        first = self._tables[0]
        for table in self._tables[1:]:
            if (table.header, table.columns) != (first.header, first.columns):
                raise InputError(f"{table.path} has other columns than {first.path}; prepare each separately")
        self._at = _find_column(first, options.label)
        self._like = None if options.like is None else manifest_of_table(options.like, options)
        self._dropped, self._largest = 0, 0.0  # dropped rows, and the largest absolute value
        self._ragged: list[str] = []  # the problem of each row skipped in this pass
        if self._like is not None:
            self.specs = list(self._like.columns or ())
            self._chosen = table_files.column_numbers(first, self.specs, "the data set of --like has")
        else:
            fill = 0.0 if options.missing == "zero" else None
            self._chosen = _choose_columns(first, self._at, options)
            names = [first.name(column) for column in self._chosen]
            self.specs = [ColumnSpec(name=name, fill=fill, nonfinite=options.allow_nonfinite) for name in names]
        (self._numbers, self.classes), self._is_missing_label = self._survey_labels()
        self._with_gaps: list[int] = []
        if options.missing or options.categories:
            self._choose_conversions()

    def blocks(self, held_out: float) -> Iterator[tuple[str, Columns]]:
        """Yield (split, columns of the rows), as the `blocks` of a `Source`."""
        if self._options.missing in ("mean", "median"):
            self._choose_fills(held_out)
        if self._options.scale:
            numbers = [number for number, spec in enumerate(self.specs) if spec.categories is None]
            _, mean, deviation = moments(self._training_blocks(numbers, _UNSCALED, held_out), len(numbers))
            for number, shift, scale in zip(numbers, mean.tolist(), deviation.tolist(), strict=True):
                self._update(number, {"shift": shift, "scale": scale or 1.0})  # a column of one value becomes 0
        self._dropped = 0
        self._ragged.clear()
        yield from partition(lambda _: self._rows(), None)(held_out)

    def notes(self) -> tuple[str, ...]:
        """Return sentences about the label, and about columns of texts."""
        texts = [spec for spec in self.specs if spec.categories is not None]
        encodings = {True: "one number each (one-hot)", False: "numbers from 0"}
        conversions = (f"column {s.name}: {len(s.categories or ())} texts as {encodings[s.onehot]}" for s in texts)
        return (f"label: column {self._tables[0].name(self._at)}", *conversions)

    def row_notes(self) -> tuple[str, ...]:
        """Return sentences about the rows that were read."""
        filled = [self.specs[number] for number in self._with_gaps if self.specs[number].fill is not None]
        replacement = {"mean": "the mean", "median": "the median"}.get(self._options.missing or "", "zero")
        sentences = [f"column {s.name}: missing values were replaced by {replacement}, {s.fill:g}" for s in filled]
        if self._options.missing == "drop":
            sentences.append(f"left out {self._dropped} rows with missing values")
        if self._ragged:
            sentences.append(
                f"left out {len(self._ragged)} rows with another number of columns, such as {self._ragged[0]}"
            )
        if self._options.scale:
            sentences.append(
                "columns of numbers were scaled to mean 0 and deviation 1, computed from the training rows"
            )
        elif self._largest > _LARGE and self._like is None:
            sentences.append(f"numbers reach up to {self._largest:g}; most models learn better with --scale standard")
        return tuple(sentences)

    def _rows(self) -> Iterator[Columns]:
        classes, to_number = self.classes, (self._numbers.__getitem__ if self.classes else float)
        for table, lines, columns, labels in self._usable_blocks():
            x = self._encode(self.specs, table, lines, columns)
            self._largest = max(self._largest, float(np.abs(x).max(initial=0, where=np.isfinite(x))))
            yield x, np.array([to_number(_label_text(cell)) for cell in labels], np.int32 if classes else np.float32)

    def _encode(
        self, specs: Sequence[ColumnSpec], table: TableFile, lines: Sequence[int], columns: Sequence[Sequence[Cell]]
    ) -> Floats:
        try:
            return table_files.encode_columns(specs, columns)
        except UnfitCell as error:
            input_error = error.to_error(table, lines, specs)
            if self._like is None:
                self._choose_conversions()  # counts such cells, and raises the error
            raise input_error from None

    def _usable_blocks(self) -> Iterator[TableBlock]:
        """Yield the rows of all tables, without those that --missing drop removes."""
        for table, lines, (labels, *columns) in self._blocks([self._at, *self._chosen]):
            mask = np.ones(len(lines), np.bool_)
            if self._options.missing == "drop":
                mask = ~np.array([self._is_missing_label(cell) for cell in labels], np.bool_)
                for cells in columns:
                    if not are_numbers(cells):
                        mask &= ~np.array([is_missing(cell) for cell in cells], np.bool_)
            self._dropped += int((~mask).sum())
            if mask.all():
                yield table, lines, columns, labels
            elif mask.any():
                at = np.flatnonzero(mask).tolist()
                yield table, [lines[i] for i in at], [[c[i] for i in at] for c in columns], [labels[i] for i in at]

    def _blocks(self, chosen: Sequence[int]) -> Iterator[tuple[TableFile, Sequence[int], list[Sequence[Cell]]]]:
        for table in self._tables:
            for lines, columns in table.blocks(chosen, self._ragged.append if self._options.skip_bad else None):
                yield table, lines, columns

    # -- the label

    def _survey_labels(self) -> tuple[Labels, Any]:
        """Read all labels; return their numbers and class names, and a function that recognises a missing label.

        If labels are numbers, words such as NA stand for a missing one; if they are texts, only an empty cell does.
        """
        class_names: dict[str, None] = {}
        words: dict[str, tuple[TableFile, int]] = {}  # stand for missing values; first place of each
        empty, dropping = [], self._options.missing == "drop"
        for table, lines, (labels,) in self._blocks([self._at]):
            for line, value in zip(lines, labels, strict=True):
                cell = _label_text(value)
                if is_missing(value):
                    words.setdefault(cell, (table, line))
                if not cell:
                    empty.append(table.place(line))
                elif cell not in class_names and len(class_names) <= MOST_CLASSES:  # one above the limit suffices
                    class_names[cell] = None
        numbers = all(is_number(cell) for cell in class_names if not is_missing(cell))
        if numbers:
            class_names = {cell: None for cell in class_names if not is_missing(cell)}
            empty += [table.place(line) for cell, (table, line) in words.items() if cell]
        if empty and not dropping:
            raise InputError(f"{empty[0]}: the label is empty; fill it in, or skip such rows with --missing drop")
        gap = is_missing if numbers else (lambda cell: not _label_text(cell))
        return self._number_labels(list(class_names), numbers), gap

    def _number_labels(self, distinct: list[str], numbers: bool) -> Labels:
        path, like = self._tables[0].path, self._like
        if not distinct:
            raise InputError(f"{path}: the label column is empty; choose another --label")
        if like is not None:
            classes = like.classes
            codes = {name: code for code, name in enumerate(classes or ())}
            odd = next((cell for cell in distinct if (cell not in codes if codes else not is_number(cell))), None)
            if odd is not None:
                known = ", ".join(map(repr, list(codes)[:8]))
                others = (
                    f"not among the classes of --like ({known})" if codes else "not a number, unlike those of --like"
                )
                raise InputError(f"{path}: label {odd!r:.100} is {others}; fix it")
            return codes, classes
        if numbers and not all(cell.lstrip("+-").isdecimal() for cell in distinct):
            return {}, None
        if len(distinct) > MOST_CLASSES:
            raise InputError(
                f"{path}: the label column has more than {MOST_CLASSES} different values, too many for classes; "
                "choose another --label; to predict numbers, write them with a decimal point"
            )
        names = sorted(distinct, key=int) if numbers else sorted(distinct)
        return {name: i for i, name in enumerate(names)}, tuple(names)

    # -- the columns

    def _choose_conversions(self) -> None:
        """Decide how each column is converted, from a survey of all rows."""
        seen = [_ColumnSurvey() for _ in self._chosen]
        for table, lines, columns, _ in self._usable_blocks():
            for column, cells in zip(seen, columns, strict=True):
                column.add(table, lines, cells, self._options)
        for number, (spec, column) in enumerate(zip(self.specs, seen, strict=True)):
            texts = column.odd > (_MOST_TEXTS * column.cells if self._options.categories else column.cells)
            if column.odd and not texts:
                raise self._not_a_number(spec, column)
            if texts:
                if len(column.names) > MOST_CATEGORIES:
                    raise InputError(
                        f"{self._tables[0].path}, column {spec.name}: more than {MOST_CATEGORIES} different texts; "
                        f"leave the column out with --drop {spec.name}"
                    )
                onehot = self._options.categories == "onehot"
                self._update(number, {"categories": tuple(sorted(column.names)), "onehot": onehot, "fill": None})
            elif column.gaps:
                self._with_gaps.append(number)
        with_gaps = [(self.specs[number], seen[number]) for number in self._with_gaps]
        if with_gaps and not (self._options.missing or self._options.allow_nonfinite):
            raise _missing_values(with_gaps)

    def _not_a_number(self, spec: ColumnSpec, column: _ColumnSurvey) -> InputError:
        place, cell = column.first_odd
        drop, kind = f"leave the column out (--drop {spec.name})", "a number"
        others = f" ({column.odd} such cells)" if column.odd > 1 else ""
        if table_files.value_of(cell) is not None:
            kind, fix = "a finite float32 number", f"{drop}, or accept such numbers with --allow-nonfinite"
        elif self._options.categories:
            fix = f"or {drop}"
        else:
            fix = f"{drop}, or encode texts with --categories onehot or codes"
        return InputError(f"{place}, column {spec.name}: {cell!r:.100} is not {kind}{others}; fix it, {fix}")

    def _choose_fills(self, held_out: float) -> None:
        """Set the mean or median of each column with missing values as their replacement."""
        numbers = self._with_gaps
        compute = moments if self._options.missing == "mean" else medians
        counts, values, *_ = compute(self._training_blocks(numbers, _EMPTY, held_out), len(numbers))
        for number, count, value in zip(numbers, counts, values.tolist(), strict=True):
            if not count:
                name = self.specs[number].name
                raise InputError(f"{self._tables[0].path}, column {name} is empty; leave it out (--drop {name})")
            self._update(number, {"fill": value})

    def _update(self, number: int, values: dict[str, Any]) -> None:
        self.specs[number] = self.specs[number].model_copy(update=values)

    def _training_blocks(self, numbers: Sequence[int], changed: dict[str, Any], held_out: float) -> Iterator[Floats]:
        """Yield some columns of the rows that are not held out, in blocks.

        Args:
            numbers: Numbers of the columns.
            changed: Values that replace those of the columns' `ColumnSpec`.
            held_out: Fraction of rows to hold out.
        """
        specs, start = [self.specs[number].model_copy(update=changed) for number in numbers], 0
        for table, lines, columns, _ in self._usable_blocks() if numbers else ():
            x = self._encode(specs, table, lines, [columns[number] for number in numbers])
            yield x[~held_out_mask(start, len(x), held_out)]
            start += len(x)


@dataclass
class _ColumnSurvey:
    """Counts of cells in one column, made by a survey."""

    cells: int = 0
    gaps: int = 0
    odd: int = 0  # cells that are neither empty nor numbers
    first_gap: str = ""
    first_odd: tuple[str, Cell] = ("", None)
    names: set[str] = field(default_factory=set)

    def add(self, table: TableFile, lines: Sequence[int], cells: Sequence[Cell], options: PrepareOptions) -> None:
        self.cells += len(cells)
        if options.categories and len(self.names) <= MOST_CATEGORIES:
            self.names.update(map(table_files.category, cells))
        if are_numbers(cells):
            return
        for line, cell in zip(lines, cells, strict=True):
            if is_missing(cell):
                self.gaps += 1
                self.first_gap = self.first_gap or table.place(line)
            elif not is_number(cell) and (table_files.value_of(cell) is None or not options.allow_nonfinite):
                self.odd += 1
                self.first_odd = self.first_odd if self.first_odd[0] else (table.place(line), cell)


def _missing_values(with_gaps: Sequence[tuple[ColumnSpec, _ColumnSurvey]]) -> InputError:
    (spec, column), others = with_gaps[0], len(with_gaps) - 1
    values = "a missing value" if column.gaps == 1 else f"{column.gaps} missing values, the first one here"
    also = f" ({others} more columns have some too)" if others else ""
    return InputError(
        f"{column.first_gap}, column {spec.name}: {values}{also}; fill them in, choose --missing mean, median, "
        f"zero or drop, or leave the column out with --drop {spec.name}"
    )


def _label_text(cell: Cell) -> str:
    return "" if cell is None else str(cell).strip()


def _find_column(table: TableFile, name: str | None) -> int:
    """Return the column of a name or number; for None, the one called label, or else the last."""
    names = table.header or ()
    if name is None:
        return names.index("label") if "label" in names else table.columns - 1
    if name in names:
        return names.index(name)
    if name.isdecimal() and 1 <= int(name) <= table.columns:
        return int(name) - 1
    known = ", ".join(names[:20]) if names else f"1 to {table.columns}"
    raise InputError(f"{table.path} has no column {name}; its columns are {known}")


def _choose_columns(table: TableFile, at: int, options: PrepareOptions) -> list[int]:
    """Return the columns of x, in the order of the table."""
    if options.columns is not None and options.drop is not None:
        raise InputError("--columns and --drop both choose columns; use only one of them")
    named = {_find_column(table, name) for name in options.columns or options.drop or ()}
    chosen = [i for i in range(table.columns) if i != at and (i in named) == bool(options.columns)]
    if not chosen:
        raise InputError(f"{table.path}: no column is left to learn from; choose others with --columns or --drop")
    return chosen


# -- Means, deviations and medians of columns, from blocks of rows in which some numbers are missing (nan)


Doubles = npt.NDArray[np.float64]


Moments = tuple[Doubles, Doubles, Doubles]  # of each column: count, mean, and sum of squared differences from it


def moments_of(block: Floats) -> Moments:
    """Return the moments of the columns of a block [rows, columns]; nan and infinite numbers are ignored."""
    finite_mask = np.isfinite(block)
    count, x = finite_mask.sum(0).astype(np.float64), block.astype(np.float64)
    mean = np.where(finite_mask, x, 0).sum(0) / np.maximum(count, 1)
    return count, mean, (np.where(finite_mask, x - mean, 0) ** 2).sum(0)


def combine_moments(one: Moments | None, other: Moments) -> Moments:
    """Return the moments of two sets of rows together.

    This is the pairwise algorithm of Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance"; sums
    of squares would lose the deviation of a column with a comparatively large mean.

    Args:
        one: Moments of a set; None if it is empty.
        other: Moments of the other set.
    """
    if one is None:
        return other
    shift, total = other[1] - one[1], np.maximum(one[0] + other[0], 1)
    squares = one[2] + (other[2] + shift**2 * one[0] * other[0] / total)
    return one[0] + other[0], one[1] + shift * other[0] / total, squares


def moments(blocks: Iterable[Floats], columns: int) -> tuple[Doubles, Doubles, Doubles]:
    """Compute the count, mean and deviation of each column over all rows, in float64.

    Args:
        blocks: Blocks of rows, each [rows, columns]; nan and infinite numbers are ignored.
        columns: Number of columns.

    Returns:
        (counts, means, deviations), each float64 [columns].
    """
    sums: Moments = (np.zeros(columns), np.zeros(columns), np.zeros(columns))
    for block in blocks:
        sums = combine_moments(sums, moments_of(block))
    count, mean, squares = sums
    return count, mean, np.sqrt(squares / np.maximum(count, 1))


def medians(blocks: Iterable[Floats], columns: int) -> tuple[Doubles, Doubles]:
    """Compute the count and median of each column over all rows; the median is 0 for a count of 0.

    All rows are in memory at once.

    Args:
        blocks: Blocks of rows, each [rows, columns]; nan and infinite numbers are ignored.
        columns: Number of columns.

    Returns:
        (counts, medians), each float64 [columns].
    """
    x = np.concatenate([np.zeros((0, columns), np.float32), *blocks])
    finite_values = [column[np.isfinite(column)] for column in x.T]
    counts = np.array([len(column) for column in finite_values], np.float64)
    return counts, np.array([np.median(column) if len(column) else 0.0 for column in finite_values], np.float64)


# -- Tables prepared like another one, whose data set defines the conversion of columns and labels


def manifest_of_table(folder: Path, options: PrepareOptions) -> DatasetManifest:
    """Return the manifest of the data set named by --like, whose conversion of columns is used.

    Args:
        folder: Folder of the data set.
        options: Other options, which must not define the conversion of columns.

    Raises:
        InputError: There is no such data set, it was not made of a table, or other options contradict it.
    """
    conflicts = [name for name in ("columns", "drop", "categories", "scale") if getattr(options, name) is not None]
    conflicts += ["missing"] if options.missing not in (None, "drop") else []
    if conflicts:
        raise InputError(f"--like {folder} defines the conversion of columns; remove --{conflicts[0]}")
    manifest = read_manifest(folder)
    if manifest.columns is None:
        raise InputError(f"--like {folder}: that data set was not made from a table; use one that was")
    return manifest
