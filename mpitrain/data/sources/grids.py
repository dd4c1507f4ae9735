"""Samples of HDF5, NetCDF and Zarr files: variables of one or several files, joined along the axis of the samples.

    file a.nc   rows 0 ... 364     t2m [time, lat, lon], u10 [time, lat, lon], geopotential [time, level, lat, lon]
    file b.nc   rows 365 ... 729   the same variables
    x           [2 + levels, lat, lon]: the variables one after the other along the first axis of a sample
    y           other variables of the same row, or (`ahead`) the same variables some rows later

The stored numbers are kept. `VariableSpec` says how a reader converts them: unpacking (CF), missing values, and the
normalisation by --scale. Any range of samples can be read on its own, so ranks prepare a data set together.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.conversion import parts_of
from mpitrain.data.format import FieldSpec, SplitRows, VariableSpec, read_manifest
from mpitrain.data.sources import GATHER_BYTES, Columns, PrepareOptions, Source, split_own_test
from mpitrain.data.sources.arrays import Array, make_field
from mpitrain.data.sources.coordinates import direction_notes, time_notes
from mpitrain.data.sources.file_reader import FileReader
from mpitrain.data.sources.table import Moments
from mpitrain.data.sources.variables import Variable
from mpitrain.data.split_rows import divide_rows, rows_of, sample_mask
from mpitrain.errors import InputError, printable

_RANGE = re.compile(r"(.+)=(\d{0,18}):(\d{0,18})")
_SHOWN = 12  # variables in a message
_MISSING = ("mean", "zero")


@dataclass(frozen=True)
class Grid:
    """Variables of several files, and the samples made of them.

    Attributes:
        fields: Fields x and y, as stored in shards.
        variables: Variables of x, then those of y.
        files: Variables of each file, by name; the files of the input's own test set are last.
        rows: Rows of each file.
        test_rows: Rows of the own test set.
        ahead: Rows by which y lies after x.
        axis: Axis of the rows of each variable, by name.
        options: Options of the input.
        reader: Reader of the files.
    """

    fields: tuple[FieldSpec, FieldSpec]
    variables: tuple[VariableSpec, ...]
    files: tuple[dict[str, Variable], ...]
    rows: tuple[int, ...]
    test_rows: int
    ahead: int
    axis: dict[str, int]
    options: PrepareOptions
    reader: FileReader

    def splits(self, held_out: float) -> dict[str, SplitRows]:
        """Return the rows of each split.

        Args:
            held_out: Fraction of the samples to hold out, if there is no own test set.
        """
        return divide_rows(sum(self.rows) - self.test_rows, self.test_rows, held_out, self.ahead)

    def blocks(self, split: SplitRows, first: int, stop: int) -> Iterator[tuple[int, Columns]]:
        """Yield (first row, one array [k, *shape] per field) for samples `first` to `stop` - 1 of a split, in order."""
        low, high = (int(rows_of(split, np.array([i], np.int64))[0]) for i in (first, stop - 1))
        step = max(1, GATHER_BYTES // max(1, sum(each.row_bytes for each in self.fields)))
        chunk = max((v.chunk[self.axis[name]] for name, v in self.files[0].items() if v.chunk), default=1)
        step = -(-step // chunk) * chunk if chunk < 8 * step else step
        begin = low
        while begin <= high:
            end = min(high + 1, begin - begin % step + step)
            mask = sample_mask(split, begin, end)
            if mask.any():
                x = self.read(0, begin, end)[mask]
                yield begin, (x, self.read(1, begin + self.ahead, end + self.ahead)[mask])
            begin = end

    def read(self, number: int, first: int, stop: int) -> npt.NDArray[Any]:
        """Return rows of a field, [stop - first, *shape] of its stored dtype.

        Args:
            number: Number of the field.
            first: First row.
            stop: Row after the last one.
        """
        spec = self.fields[number]
        out = np.empty((stop - first, *spec.shape), spec.stored)
        for variable, part in parts_of(self.variables, spec, out):
            for file, low, high in pieces(self.rows, first, stop):
                base = self._bases[file]
                values = self.reader.rows(self.files[file][variable.name], self.axis[variable.name], low, high)
                into = part[low + base - first : high + base - first]
                into[...] = values.reshape(into.shape)
        return out

    @property
    def _bases(self) -> list[int]:
        return list(accumulate(self.rows, initial=0))

    def label(self, name: str, row: int) -> str:
        """Return the name of a variable and row in messages.

        Args:
            name: Name of the variable.
            row: Row, counted over all files.
        """
        file = bisect_right(self._bases, row) - 1
        return f"{self.files[file][name].label}, row {row - self._bases[file]}"


def pieces(rows: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (file, first row in it, row after the last one) for the rows `first` to `stop` - 1 of several files.

    Args:
        rows: Rows of each file.
        first: First row.
        stop: Row after the last one.
    """
    bases = list(accumulate(rows, initial=0))
    while first < stop:
        file = bisect_right(bases, first) - 1
        end = min(stop, bases[file + 1])
        yield file, first - bases[file], end - bases[file]
        first = end


@dataclass(frozen=True)
class GridSource(Source):
    """A source whose samples can be read in any order, so that ranks prepare it together; it has no `blocks`.

    Attributes:
        grid: Variables and samples.
    """

    grid: Grid = field(kw_only=True)


def grid_source(files: Sequence[Path], options: PrepareOptions) -> GridSource:
    """Describe variables of HDF5, NetCDF or Zarr files.

    Args:
        files: Files and Zarr stores, joined in this order.
        options: Variables of x and y, the axis of the samples, and their conversion.

    Raises:
        InputError: Variables are missing, or do not fit each other or the options.
    """
    if options.missing not in (None, *_MISSING):
        raise InputError(f"--missing {options.missing} is for tables; use --missing mean or zero for these sources")
    train, test = split_own_test(files)
    ordered, training = [*train, *test], len(train)
    reader = FileReader()
    listed = [reader.variables(path) for path in ordered]
    x, y = _choose(listed[0], ordered[0], options)
    names = list(dict.fromkeys((*x, *y)))
    axis = {name: _axis(listed[0][name], options.samples) for name in names}
    if options.select:
        joined = listed[0][x[0]].dimensions[axis[x[0]]]
        selected = _select(listed, options, joined, training)
        training = sum(map(bool, selected[:training]))
        ordered, listed = list(compress(ordered, selected)), list(filter(None, selected))
    for path, variables in zip(ordered[1:], listed[1:], strict=True):
        _require_equal(listed[0], variables, names, axis, path)
    chosen = tuple({name: variables[name] for name in names} for variables in listed)
    rows = tuple(_rows(variables, axis) for variables in chosen)
    like = read_manifest(options.like).variables if options.like else None
    fields, specs = zip(
        *(_field(each, of, chosen[0], axis, options, like) for each, of in (("x", x), ("y", y))), strict=True
    )
    test_rows = sum(rows[training:])
    ahead = options.ahead or 0
    if ahead >= (states := sum(rows[:training])):
        raise InputError(f"--ahead {ahead} is too far for {states} states in {ordered[0].parent}; use a smaller number")
    grid = Grid(fields, (*specs[0], *specs[1]), chosen, rows, test_rows, ahead, axis, options, reader)
    along = listed[0][names[0]].dimensions[axis[names[0]]]
    others = dict.fromkeys(name for spec in grid.variables for name in spec.dimensions)
    notes = [*direction_notes(reader, listed, others)]
    for part in (slice(training), slice(training, None)) if ahead else ():  # no pair has a state in both
        notes += time_notes(reader, listed[part], along, rows[part]) if listed[part] else ()
    return GridSource("arrays", fields, lambda held_out: iter(()), len(files), notes=tuple(notes), grid=grid)


def _select(
    listed: Sequence[dict[str, Variable]], options: PrepareOptions, joined: str, training: int
) -> list[dict[str, Variable]]:
    """Return the parts of the variables of each file that --select chooses; nothing of a file without any rows.

    Args:
        listed: Variables of each file.
        options: Options with the ranges.
        joined: Name of the axis along which files are joined; its range counts the rows of all training files.
        training: Number of training files, which come first.
    """
    if options.in_place:
        raise InputError("--select makes a copy of the part that it selects; leave out --in-place")
    result = [dict(variables) for variables in listed]
    for text in options.select or ():
        match = _RANGE.fullmatch(text)
        name, first, stop = match.groups() if match else ("", "", "")
        lengths = [
            next((v.shape[v.dimensions.index(name)] for v in each.values() if name in v.dimensions), 0)
            for each in listed
        ]
        if not match or not all(lengths):
            known = ", ".join(dict.fromkeys(axis for v in listed[0].values() for axis in v.dimensions))
            raise InputError(f"--select {text}: use AXIS=FIRST:STOP with an axis of all files, such as {known:.300}")
        low, high, base = int(first or 0), int(stop or 1 << 62), 0
        for number, length in enumerate(lengths):
            if name == joined and number >= training:
                continue  # the input's own test set
            begin, end = max(0, low - base), min(length, high - base)
            base += length if name == joined else 0
            part = {key: v.select(name, begin, end) for key, v in result[number].items()}
            result[number] = part if begin < end else {}
        if not any(result[:training]):
            raise InputError(f"--select {text} selects nothing of the axis, whose length is {base or lengths[0]}")
    return result


def _choose(there: dict[str, Variable], path: Path, options: PrepareOptions) -> tuple[list[str], list[str]]:
    """Return the names of the variables of x and of y."""
    shown = [f"{v.name} {list(v.shape)}" for v in there.values() if not v.is_coordinate and v.shape]
    listed = printable(", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else ""), 600) or "none"

    def find(flag: str, names: Sequence[str] | None) -> list[str]:
        if names is None and (flag not in there or there[flag].is_coordinate):
            pairs = ", or pairs of states with --ahead N" if flag == "y" else ""
            raise InputError(f"source {path}: choose {flag} with --{flag} NAME{pairs}; its variables are {listed}")
        chosen = []
        for name in (each.strip("/") for each in names or (flag,)):
            matches = [name] if name in there else [each for each in there if each.rpartition("/")[2] == name]
            if len(matches) != 1:
                problem = "is ambiguous" if matches else "does not exist"
                raise InputError(f"source {path}: --{flag} {name} {problem}; its variables are {listed}")
            unsigned = str(there[matches[0]].attributes.get("_Unsigned", "")).lower() == "true"
            if problem := there[matches[0]].problem or "its numbers have the attribute _Unsigned" * unsigned:
                raise InputError(
                    f"{there[matches[0]].label} cannot be read: {problem}; write it anew, or choose others"
                )
            if matches[0] in chosen:
                raise InputError(f"--{flag} names variable {matches[0]} twice; name each variable once")
            chosen += matches
        return chosen

    x = find("x", options.x)
    return x, x if options.ahead and options.y is None else find("y", options.y)


def _axis(variable: Variable, name: str | None) -> int:
    """Return the axis of the samples of a variable."""
    if not variable.shape:
        raise InputError(f"{variable.label} is a single number; use variables with an axis of samples")
    if name is None:
        return 0
    if name not in variable.dimensions:
        known = ", ".join(variable.dimensions)
        raise InputError(f"{variable.label} has no axis {name!a:.100}; set --samples to one of its axes: {known:.300}")
    return variable.dimensions.index(name)


def _require_equal(
    first: dict[str, Variable], others: dict[str, Variable], names: list[str], axis: dict[str, int], path: Path
) -> None:
    """Raise InputError unless a file has the same variables as the first one, except for the number of rows."""
    for name in names:
        one, other = first[name], others.get(name)
        if other is None:
            raise InputError(f"source {path} has no variable {name}, but {one.path} does; remove one of them")
        forms = [
            (
                *(_without(v.shape, axis[name]) if v.shape else None, v.dtype, v.missing),
                *(v.number("scale_factor", 1.0), v.number("add_offset", 0.0), str(v.attributes.get("units", ""))),
            )
            for v in (one, other)
        ]
        _require_one_order(one, one.dimensions, other, other.dimensions)
        if len(one.shape) != len(other.shape) or forms[0] != forms[1]:
            raise InputError(
                f"{other.label} differs from that of {one.path} in shape, dtype, units or packing ({forms[1]!s:.300}; "
                f"{forms[0]!s:.300}); prepare such files apart, and mix them with data.mix"
            )


def _require_one_order(one: Variable, axes: Sequence[str], other: Variable, others: Sequence[str]) -> None:
    """Raise InputError if two variables have the same axes in different orders, which equal lengths would hide."""
    if tuple(axes) != tuple(others) and sorted(axes) == sorted(others):
        raise InputError(
            f"{other.label} has the axes {', '.join(others):.200}, but {one.label} {', '.join(axes):.200}; store both "
            "in one order"
        )


def _without(shape: Sequence[Any], axis: int) -> tuple[Any, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _rows(variables: dict[str, Variable], axis: dict[str, int]) -> int:
    counts = {variable.shape[axis[name]] for name, variable in variables.items()}
    first = next(iter(variables.values()))
    if len(counts) > 1:
        listed = ", ".join(f"{name} {variable.shape[axis[name]]}" for name, variable in variables.items())
        raise InputError(
            f"source {first.path}: its variables have different numbers of samples ({listed:.300}); set --samples to "
            "the name of the axis along which the samples lie"
        )
    if 0 in (*counts, *first.shape):
        raise InputError(f"{first.label} is empty (shape {list(first.shape)}); use files with data")
    return counts.pop()


def _field(
    field_name: str,
    names: Sequence[str],
    variables: dict[str, Variable],
    axis: dict[str, int],
    options: PrepareOptions,
    like: tuple[VariableSpec, ...] | None,
) -> tuple[FieldSpec, tuple[VariableSpec, ...]]:
    """Return a field and the variables that it is made of."""
    shapes = {name: _without(variables[name].shape, axis[name]) for name in names}
    for name in names[1:]:
        first = variables[names[0]]
        axes, others = (_without(v.dimensions, axis[v.name]) for v in (first, variables[name]))
        _require_one_order(first, axes, variables[name], others)
    channels = _channels(shapes, variables) if len(names) > 1 else {names[0]: 0}
    common = min(shapes.values(), key=len)
    shape = (sum(channels.values()), *common) if len(names) > 1 else common
    whole = [
        make_field(field_name, Array(variables[n].label, variables[n].dtype, (1, *shapes[n]), lambda step: iter(())))
        for n in names
    ]
    specs = []
    for name in names:
        variable = variables[name]
        units = printable(str(variable.attributes.get("units", "")))
        spec = VariableSpec(
            field="x" if field_name == "x" else "y",
            name=name,
            units=units,
            dimensions=_without(variable.dimensions, axis[name]),
            channels=channels[name],
            factor=variable.number("scale_factor", 1.0),
            offset=variable.number("add_offset", 0.0),
            missing=variable.missing,
        )
        for other in like or ():
            if (other.field, other.name) == (spec.field, name):
                spec = spec.model_copy(update={key: getattr(other, key) for key in ("fill", "shift", "scale")})
        specs.append(spec)
    dtype = np.result_type(*(np.dtype(each.dtype) for each in whole))
    packed = any(spec.converts for spec in specs)
    # classes and codes stay integers; all other numbers may be scaled, or have replacements of missing ones
    is_class = field_name == "y" and dtype.kind in "iub"
    changes = packed or ((options.scale is not None or options.missing is not None) and not is_class)
    kinds = {each.given for each in whole}
    form = kinds.pop() if len(kinds) == 1 and not changes else "float"
    return FieldSpec(name=field_name, dtype=dtype.name, shape=shape, given=form), tuple(specs)


def _channels(shapes: dict[str, tuple[int, ...]], variables: dict[str, Variable]) -> dict[str, int]:
    """Return how much of the first axis of a sample each of several variables takes."""
    common = min(shapes.values(), key=len)
    channels = {}
    for name, shape in shapes.items():
        if shape != common and shape[1:] != common:
            raise InputError(
                f"{variables[name].label} has samples of {list(shape)}, which do not fit those of {list(common)}; use "
                "variables whose samples are equal, except for a first axis such as levels"
            )
        channels[name] = 1 if shape == common else shape[0]
    return channels


def with_statistics(grid: Grid, numbers: dict[str, Moments]) -> tuple[VariableSpec, ...]:
    """Return the variables with the normalisation of --scale, and the replacements of --missing.

    Args:
        grid: Variables and options.
        numbers: Moments of each variable's training numbers, in its units, [1] each.
    """
    options, result = grid.options, []
    for spec in grid.variables:
        form = next(each.given for each in grid.fields if each.name == spec.field)
        count, mean, squares = (part.item() for part in numbers.get(spec.name, (np.zeros(1),) * 3))
        changes: dict[str, float] = {}
        if options.like is None and form == "float":
            if options.scale and count:
                changes = {"shift": mean, "scale": math.sqrt(squares / count) or 1.0}
            if options.missing:
                changes["fill"] = mean if options.missing == "mean" else 0.0
        result.append(spec.model_copy(update=changes))
    return tuple(result)
