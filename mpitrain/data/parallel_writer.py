"""Data sets of HDF5, NetCDF and Zarr files, prepared by several ranks: as shards, or as an index of the files in place.

    units of work   shard 0 | shard 1 | shard 2 | shard 3 | ...      or ranges of chunks to hash, of samples to survey
    rank            0       | 1       | 0       | 1       | ...      in rounds; after each, all ranks agree on errors

A unit depends only on the input, and results are combined in the order of the units: the files are the same for any
number of ranks. Without ranks, `world` is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.data.conversion import in_units, parts_of
from mpitrain.data.folders import agree_on_errors, make_dataset, os_errors
from mpitrain.data.format import (
    INDEX,
    LARGEST_CHUNK,
    TRAIN,
    InPlaceSpec,
    PlacedArray,
    PlacedFile,
    ShardSpec,
    SplitSpec,
)
from mpitrain.data.in_place import ENTRY, Index, PlacedArrays
from mpitrain.data.shards import ShardWriter
from mpitrain.data.sources import Columns, finite
from mpitrain.data.sources.grids import Grid, GridSource, with_statistics
from mpitrain.data.sources.table import Moments, combine_moments, moments_of
from mpitrain.data.sources.variables import COPY
from mpitrain.data.split_rows import count
from mpitrain.data.writer import Tally, check_splits, finish_manifest
from mpitrain.errors import InputError, MpitrainError
from mpitrain.storage import hdf5
from mpitrain.storage.disk import write_durably

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_UNIT_BYTES = 64 << 20  # of an array to hash, or of samples to survey
_SMALL_CHUNK, _FEW_ROWS = 256 << 10, 16  # bytes or rows up to which a chunk may be read for one sample
_DTYPES = re.compile(r"[<>][iuf][248]|\|[iub]1")


def make_grid_dataset(
    out: Path,
    source: GridSource,
    *,
    names: Sequence[str],
    held_out: float,
    shard_bytes: int,
    world: Communicator | None = None,
) -> None:
    """Make the data set folder `out` from variables of files. Collective if there are ranks.

    Args:
        out: Folder to make.
        source: Variables of the files.
        names: Names of the sources, for the manifest.
        held_out: Fraction of the samples to hold out.
        shard_bytes: Bytes of data per shard.
        world: Ranks that share the work; None for this process alone.

    Raises:
        InputError: On all ranks, if any rank cannot read or write a file, or numbers are missing or not finite.
    """
    write = _write_index if source.grid.options.in_place else partial(_write_shards, shard_bytes=shard_bytes)

    def fill(folder: Path) -> None:
        write(folder, source, names, held_out, world)

    if world is None:
        make_dataset(out, fill, once=False)
        return
    begun = False

    def begin(folder: Path) -> None:
        nonlocal begun
        begun = True
        world.broadcast_object(str(folder))
        fill(folder)

    try:
        if world.rank == 0:
            make_dataset(out, begin, once=False)
        elif folder := world.broadcast_object(None):
            fill(Path(folder))
    except MpitrainError as error:
        if world.rank == 0 and not begun:
            world.broadcast_object("")
        world.agree(error)
        raise
    world.agree(None)


def _share(world: Communicator | None, units: Sequence[Any], act: Callable[[Any], Any]) -> list[Any]:
    """Return `act` of each unit, in order; each rank computes some of them. Collective."""
    ranks, rank = (1, 0) if world is None else (world.size, world.rank)
    results: list[Any] = []
    for begin in range(0, len(units), ranks):
        here = units[begin : begin + ranks]

        def compute(here: Sequence[Any] = here) -> Any:
            with os_errors("the data set cannot be written"):
                return act(here[rank]) if rank < len(here) else None

        value = agree_on_errors(world, compute)
        results += [value] if world is None else world.all_gather_object(value)[: len(here)]
    return results


# -- shards


def _write_shards(
    folder: Path,
    source: GridSource,
    names: Sequence[str],
    held_out: float,
    world: Communicator | None,
    *,
    shard_bytes: int,
) -> None:
    grid = source.grid
    rows = grid.splits(held_out)
    capacity = max(1, shard_bytes // max(1, sum(each.row_bytes for each in source.fields)))
    units = [
        (split, number, first, min(first + capacity, count(rows[split])))
        for split in rows
        for number, first in enumerate(range(0, count(rows[split]), capacity))
    ]

    def write(unit: tuple[str, int, int, int]) -> dict[str, Any]:
        split, number, first, stop = unit
        writer = ShardWriter(folder / f"{split}-{number:05d}.h5", source.fields, stop - first)
        survey = _Survey(source, split)
        try:
            for row, columns in grid.blocks(rows[split], first, stop):
                survey.add(row, columns)
                writer.append([np.ascontiguousarray(column) for column in columns])
            return {"shard": writer.finish().model_dump(mode="json"), "survey": survey.state()}
        except BaseException:
            writer.abandon()
            raise

    results = _share(world, units, write)
    shards: dict[str, list[ShardSpec]] = {}
    for unit, result in zip(units, results, strict=True):
        shards.setdefault(unit[0], []).append(ShardSpec(**result["shard"]))
    splits = {s: SplitSpec(rows=sum(each.rows for each in of), shards=tuple(of)) for s, of in shards.items()}
    _finish(folder, source, names, held_out, world, splits, [result["survey"] for result in results])


def _finish(
    folder: Path,
    source: GridSource,
    names: Sequence[str],
    held_out: float,
    world: Communicator | None,
    splits: dict[str, SplitSpec],
    surveys: Sequence[dict[str, Any]],
    **more: Any,
) -> None:
    """Combine the surveys of all units, and write the manifest on one rank."""
    check_splits(splits, held_out, "arrays", names)
    tally, moments, nonfinite = Tally(source), dict[str, Moments](), dict[str, int]()
    for survey in surveys:
        tally.merge(survey["tally"])
        for name, of in survey["moments"].items():
            moments[name] = combine_moments(moments.get(name), (np.array(of[0]), np.array(of[1]), np.array(of[2])))
        for name, number in survey["nonfinite"].items():
            nonfinite[name] = nonfinite.get(name, 0) + number
    notes = tuple(f"variable {name} has {n} numbers that are missing or not finite" for name, n in nonfinite.items())
    source = replace(source, notes=(*source.notes, *notes))
    variables = with_statistics(source.grid, moments)
    if world is None or world.rank == 0:
        finish_manifest(folder, source, splits, tally, names, variables=variables, **more)


class _Survey:
    """Counts of the samples of a unit, and checks of their numbers.

    Args:
        source: Variables of the files.
        split: Split of the samples.
    """

    def __init__(self, source: GridSource, split: str) -> None:
        self._grid, self._split, self._tally = source.grid, split, Tally(source)
        self._moments: dict[str, Moments] = {}
        self._nonfinite: dict[str, int] = {}

    def add(self, row: int, columns: Columns) -> None:
        """Check and count a block of samples.

        Args:
            row: First row of the block, for messages.
            columns: Rows of x and y, as stored.

        Raises:
            InputError: A number is missing or not finite, and no option accepts it.
        """
        self._tally.add(self._split, columns)
        options, counted = self._grid.options, set[str]()
        for spec, column in zip(self._grid.fields, columns, strict=True):
            if spec.given != "float":
                continue
            for variable, part in parts_of(self._grid.variables, spec, column):
                values = in_units(variable, part)
                bad = ~finite(values)
                if (number := int(np.count_nonzero(bad))) and variable.fill is None and options.missing is None:
                    if not options.allow_nonfinite:
                        first = row + int(bad.reshape(len(bad), -1).any(1).argmax())
                        raise InputError(
                            f"{self._grid.label(variable.name, first + self._grid.ahead * (spec.name == 'y'))} or a "
                            f"later one: {number} numbers are missing, not finite or too large for float32; replace "
                            "them with --missing mean or zero, or accept them with --allow-nonfinite"
                        )
                    self._nonfinite[variable.name] = self._nonfinite.get(variable.name, 0) + number
                if (options.scale or options.missing) and self._split == TRAIN and variable.name not in counted:
                    counted.add(variable.name)  # only in x, if it is in x and y
                    before = self._moments.get(variable.name)
                    self._moments[variable.name] = combine_moments(before, moments_of(values[~bad][:, None]))

    def state(self) -> dict[str, Any]:
        """Return the counts as a value that JSON can represent."""
        moments = {name: [part.tolist() for part in of] for name, of in self._moments.items()}
        return {"tally": self._tally.state(), "moments": moments, "nonfinite": self._nonfinite}


# -- an index of files in place


def _write_index(
    folder: Path, source: GridSource, names: Sequence[str], held_out: float, world: Communicator | None
) -> None:
    grid = source.grid
    places = _share(world, range(len(grid.files)), lambda file: _describe_file(file, grid))
    files = tuple(PlacedFile(**place["file"], rows=n) for place, n in zip(places, grid.rows, strict=True))
    arrays = tuple(PlacedArray(**array) for place in places for array in place["arrays"])
    chunks = [entry for place in places for entry in place["chunks"]]
    index: Index = np.zeros(len(chunks), ENTRY)
    index["offset"], index["bytes"] = np.array(chunks, np.int64).reshape(-1, 2).T
    samples = grid.splits(held_out)
    spec = InPlaceSpec(files=files, arrays=arrays, ahead=grid.ahead, samples=samples, index_crc32=0)
    unchecked = PlacedArrays(f"data set {folder}", spec, index, check=False)
    _compare(unchecked, source, world)
    units = [
        (number, first, min(first + step, array.grid[0]))
        for number, array in enumerate(arrays)
        for step in [max(1, _UNIT_BYTES // max(1, math.prod((array.chunk[0], *array.shape[1:]))))]
        for first in range(0, array.grid[0], step)
    ]
    hashed = _share(world, units, lambda u: [h for block in range(*u[1:]) for h in unchecked.hashes(u[0], block)])
    index["crc32"] = np.array([crc for crcs in hashed for crc in crcs], np.uint32)
    step = max(1, _UNIT_BYTES // max(1, sum(each.row_bytes for each in source.fields)))
    ranges = [
        (split, first, min(first + step, count(samples[split])))
        for split in samples
        for first in range(0, count(samples[split]), step)
    ]

    def survey(unit: tuple[str, int, int]) -> dict[str, Any]:
        of = _Survey(source, unit[0])
        for row, columns in grid.blocks(samples[unit[0]], *unit[1:]):
            of.add(row, columns)
        return of.state()

    surveys = _share(world, ranges, survey)
    splits = {split: SplitSpec(rows=count(of), shards=()) for split, of in samples.items() if count(of)}
    data = index.tobytes()
    if world is None or world.rank == 0:
        write_durably(folder / INDEX, data)
    spec = spec.model_copy(update={"index_crc32": hdf5.crc32(data)})
    _finish(folder, source, names, held_out, world, splits, surveys, in_place=spec)


def _compare(placed: PlacedArrays, source: GridSource, world: Communicator | None) -> None:
    """Check that the first and the last row of each array are the same through the index and through the library."""

    def compare(file: int) -> None:
        for name, variable in source.grid.files[file].items():
            for row in {0, variable.shape[0] - 1}:
                expected = source.grid.reader.rows(variable, 0, row, row + 1)
                if not np.array_equal(expected, placed.read(file, name, row, row + 1), equal_nan=True):
                    raise InputError(f"{variable.label} is stored in an unusual way; {COPY}")

    _share(world, range(len(source.grid.files)), compare)


def _describe_file(number: int, grid: Grid) -> dict[str, Any]:
    """Return the entries of a file and of its arrays, and (offset, bytes) of all their chunks."""
    arrays, places = [], list[list[int]]()
    path = next(iter(grid.files[number].values())).path
    for name, variable in grid.files[number].items():
        if grid.axis[name]:
            raise InputError(f"{variable.label} does not have the axis of samples first; {COPY}")
        if not _DTYPES.fullmatch(variable.dtype.str):
            raise InputError(f"{variable.label} has the dtype {variable.dtype}; {COPY}")
        row_bytes = variable.dtype.itemsize * math.prod(variable.shape[1:])
        step = variable.chunk[0] if variable.chunk else 1
        if step > _FEW_ROWS and step * row_bytes > _SMALL_CHUNK:
            raise InputError(
                f"{variable.label} has chunks of {step} samples, all of which must be decoded to read one; {COPY}"
            )
        table = grid.reader.chunk_table(variable)
        if math.prod(table.chunk) * variable.dtype.itemsize > LARGEST_CHUNK:
            raise InputError(f"{variable.label} has chunks or shards larger than 1 GiB; {COPY}")
        places += table.places.tolist()
        entry = {"file": number, "name": name, "dtype": variable.dtype.str, "shape": variable.shape}
        arrays.append(entry | {"chunk": table.chunk, "filters": table.filters, "chunks": len(table.places)})
    store, size = ("zarr", 0) if path.is_dir() else ("hdf5", path.stat().st_size)
    file = {"path": str(path.resolve()), "store": store, "bytes": size}
    return {"file": file, "arrays": arrays, "chunks": places}
