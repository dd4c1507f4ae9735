"""Reads from a data set of any size: rows by number, a bounded number of open files, every extent checked once.

Dataset.read(ids)      samples: shapes, dtypes, neighbours read in one go    (TokenDataset, ArrayDataset)
RowReader.read_into    rows of a split, across the borders of shards
OpenShard.read_into    rows of one file, hashes checked                      (shards.py)

`Loader` makes batches of the samples, in the order of `order.py`.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.conversion import convert
from mpitrain.data.decoding import ImageReader
from mpitrain.data.folders import OpenFiles, resolve
from mpitrain.data.format import (
    TRAIN,
    UNCOUNTED,
    ColumnSpec,
    DatasetManifest,
    FieldSpec,
    SplitSpec,
    VariableSpec,
    read_manifest,
)
from mpitrain.data.in_place import PlacedReader
from mpitrain.data.order import Ordering, SampleOrder
from mpitrain.data.shards import OpenShard
from mpitrain.errors import InputError

if TYPE_CHECKING:
    import torch

Ids = npt.NDArray[np.int64]
_Form = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype of a sample


@dataclass(frozen=True)
class Description:
    """Properties of one split of a data set that a model needs to know.

    Attributes:
        kind: "tokens" or "arrays".
        split: Name of the split.
        samples: Number of samples in the split.
        x_shape: Shape of one sample's x.
        x_dtype: Dtype in which x is returned, int64 or float32.
        y_shape: Shape of one sample's y.
        y_dtype: Dtype in which y is returned, int64 or float32.
        vocabulary: Size of the vocabulary, if x are tokens or codes.
        classes: Names of the classes, if y are class numbers.
        identity: Hexadecimal digits that depend on the content, but not on the place or time of preparation.
        masked: True if some targets are excluded from training; these are -100.
        document_end: Token that ends each document, if documents have one.
        apart: Equal to `document_end` if attention must not cross documents; else None.
        columns: Columns of the table that x was made of, with their conversions, if it was a table.
        variables: Variables of HDF5, NetCDF or Zarr files that x and y were made of, with their conversions.
    """

    kind: str
    split: str
    samples: int
    x_shape: tuple[int, ...]
    x_dtype: np.dtype[Any]
    y_shape: tuple[int, ...]
    y_dtype: np.dtype[Any]
    vocabulary: int | None
    classes: tuple[str, ...] | None
    identity: str
    masked: bool = False
    document_end: int | None = None
    apart: int | None = None
    columns: tuple[ColumnSpec, ...] | None = None
    variables: tuple[VariableSpec, ...] | None = None


def open_dataset(
    path: str | Path,
    split: str = TRAIN,
    *,
    sequence: int | None = None,
    apart: bool = False,
    threads: int | None = None,
) -> Dataset:
    """Open one split of a data set.

    Args:
        path: Folder of the data set, or a name that `resolve` turns into a folder.
        split: "train" or "held_out".
        sequence: Tokens per sample. Required for data of kind "tokens", ignored for "arrays".
        apart: If true, attention must not cross documents; see `Description.apart`.
        threads: Threads that decode images; None for one per core that this process may use.

    Raises:
        InputError: The folder does not exist, is not a data set, is damaged or not readable, has no such split, or has
            too few tokens.
    """
    folder = path if isinstance(path, Path) else resolve(path)
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise InputError(
            f"data set {folder} has no {split} samples (splits: {', '.join(manifest.splits)}); "
            "prepare it again with a larger --held-out"
        )
    if manifest.in_place:
        return ArrayDataset(split, manifest, PlacedReader(folder, split, manifest))
    spec = manifest.splits[split]
    there = set(os.listdir(folder))  # detects missing shards at once; their content is checked when it is read
    for shard in spec.shards:
        if shard.file not in there:
            raise InputError(f"data set {folder}: shard {shard.file} is missing; restore that file, or prepare again")
    reader = RowReader(folder, spec, manifest)
    reader.shard(0)  # reports an unreadable first file at once
    if apart and manifest.document_end is None:
        raise InputError(
            f"data set {folder} does not say which token ends a document, so attention cannot stay within documents; "
            "set data.documents joined, or prepare it again with --end-token"
        )
    if manifest.kind == "tokens":
        return TokenDataset(folder, split, manifest, reader, sequence, apart)
    images = None
    if manifest.images:
        images = ImageReader(f"data set {folder}", manifest.images, manifest.fields[0], threads)
    return ArrayDataset(split, manifest, reader, images)


class Dataset(ABC):
    """Samples 0 to len - 1 of one split. Any number of threads may read them.

    Attributes:
        description: Properties of the split.
    """

    def __init__(self, description: Description, reader: RowReader | PlacedReader) -> None:
        self.description = description
        self._reader = reader

    def __len__(self) -> int:
        return self.description.samples

    def order(self, seed: int) -> Ordering:
        """Return the order of the samples in training: a function of (samples, seed) alone."""
        return SampleOrder(len(self), seed)

    def spread(self, places: Ids, chosen: int) -> Ids:
        """Return some of `chosen` sample ids that are spread evenly over the split.

        Args:
            places: Which of the `chosen` ids to return, 0 to chosen - 1, int64 [n].
            chosen: Total number of ids that are spread over the split.

        Returns:
            Sample ids, int64 [n].
        """
        return places * len(self) // chosen

    def parts(self, chosen: int) -> dict[str, int]:
        """Return how many ids `spread` takes from each data set of a mix, by name and in order; empty without a mix.

        Args:
            chosen: Total number of ids, as for `spread`.
        """
        return {}

    @abstractmethod
    def read(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Read samples.

        Args:
            ids: Sample ids, int64 [n], where n may be 0.

        Returns:
            x `[n, *x_shape]` and y `[n, *y_shape]`, in the order of the ids.

        Raises:
            InputError: Stored bytes are damaged or cannot be read.
            IndexError: An id is out of range.
        """

    def read_at(self, ids: Ids, positions: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Read samples for running positions; see `read`. Only samples with random numbers depend on the positions.

        Args:
            ids: Sample ids, int64 [n].
            positions: Running position of each, int64 [n].
        """
        return self.read(ids)

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._reader.close()

    def _sort(self, ids: Ids) -> tuple[Ids, Ids]:
        """Sort ids in the order of the files; return (their places in `ids`, the sorted ids)."""
        places = np.argsort(ids, kind="stable")
        ordered = ids[places]
        if len(ids) and not 0 <= ordered[0] <= ordered[-1] < len(self):
            raise IndexError(f"sample ids are {ordered[0]} to {ordered[-1]}, but the data set has {len(self)} samples")
        return places, ordered

    def _read_windows(self, number: int, spec: FieldSpec, ids: Ids, step: int, length: int) -> npt.NDArray[Any]:
        """Read `length` rows of a field for each id, from row id * step on.

        Returns:
            Array [n, length, *shape] of the stored dtype.
        """
        places, ordered = self._sort(ids)
        out = np.empty((len(ids), length, *spec.shape), spec.stored)
        if 1 not in (ordered[1:] - ordered[:-1]).tolist():  # no two are neighbours
            self._reader.gather(number, ordered * step, out, places)
            return out
        start = 0  # first of several neighbouring samples, which are read in one go
        for end in [*(np.flatnonzero(np.diff(ordered) != 1) + 1).tolist(), len(ordered)]:
            rows = np.empty(((end - start - 1) * step + length, *spec.shape), spec.stored)
            self._reader.read_into(number, int(ordered[start]) * step, rows)
            windows = np.lib.stride_tricks.sliding_window_view(rows, length, 0)[::step]
            out[places[start:end]] = np.moveaxis(windows, -1, 1)
            start = end
        return out


class TokenDataset(Dataset):
    """A data set of tokens: sample i is tokens[i*S : i*S + S + 1], S inputs and the same shifted by one as targets.

    If documents were packed into samples, sample i is tokens[i*(S+1) : (i+1)*(S+1)]. Targets whose mask is 0 are -100.

    Args:
        folder: Folder of the data set, for messages.
        split: Name of the split.
        manifest: Manifest of the data set.
        reader: Reader of the rows of the split.
        sequence: S, the tokens per sample.
        separate: If true, attention must not cross documents.

    Raises:
        InputError: `sequence` is missing, the split is shorter than one sample, or it was packed for another sequence.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        manifest: DatasetManifest,
        reader: RowReader,
        sequence: int | None,
        separate: bool,
    ) -> None:
        if sequence is None or sequence < 1:
            raise InputError(f"data set {folder} is a stream of tokens; set model.sequence to the tokens per sample")
        if manifest.pack and manifest.pack != sequence:
            raise InputError(
                f"data set {folder} was packed for samples of {manifest.pack} tokens, not {sequence}; set "
                f"model.sequence {manifest.pack}, or prepare it again with --pack {sequence}"
            )
        tokens = manifest.splits[split].rows
        samples = tokens // (sequence + 1) if manifest.pack else (tokens - 1) // sequence
        if samples < 1:
            raise InputError(
                f"data set {folder} has {tokens} {split} tokens, but one sample of model.sequence {sequence} needs "
                f"{sequence + 1}; use more data or a smaller model.sequence"
            )
        form, end = ((sequence,), np.dtype(np.int64)), manifest.document_end
        details = {"masked": len(manifest.fields) > 1, "document_end": end, "apart": end if separate else None}
        super().__init__(_describe(manifest, split, samples, form, form, **details), reader)
        self._length, self._fields = sequence + 1, manifest.fields
        self._step = sequence + bool(manifest.pack)

    def read(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        tokens = self._read_windows(0, self._fields[0], ids, self._step, self._length)
        x, y = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        if self.description.masked:
            y[self._read_windows(1, self._fields[1], ids, self._step, self._length)[:, 1:] == 0] = UNCOUNTED
        return x, y


class ArrayDataset(Dataset):
    """A data set of arrays: sample i is row i of the fields x and y, or the image whose place is that row of x.

    Args:
        split: Name of the split.
        manifest: Manifest of the data set.
        reader: Reader of the rows of the split.
        images: Reader of the images, if they stay encoded in the user's files.
    """

    def __init__(
        self,
        split: str,
        manifest: DatasetManifest,
        reader: RowReader | PlacedReader,
        images: ImageReader | None = None,
    ) -> None:
        x, y = manifest.fields
        forms, samples = ((manifest.sample_shape, x.handed), (y.shape, y.handed)), manifest.splits[split].rows
        more: dict[str, Any] = {"columns": manifest.columns, "variables": manifest.variables}
        super().__init__(_describe(manifest, split, samples, *forms, **more), reader)
        self._fields, self._variables, self._images = (x, y), manifest.variables or (), images

    def read(self, ids: Ids) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        of_x, of_y = (self._read_windows(i, field, ids, 1, 1)[:, 0] for i, field in enumerate(self._fields))
        x = self._images.read(of_x) if self._images else convert(self._fields[0], self._variables, of_x)
        return x, convert(self._fields[1], self._variables, of_y)

    def damaged_images(self) -> Iterator[str]:
        """Read every encoded image; yield one line for each that is damaged. Raises InputError as `read`."""
        for first in range(0, len(self) if self._images else 0, _AHEAD):
            ids = np.arange(first, min(first + _AHEAD, len(self)))
            assert self._images is not None
            yield from self._images.damages(self._read_windows(0, self._fields[0], ids, 1, 1)[:, 0])

    def close(self) -> None:
        super().close()
        if self._images:
            self._images.close()


def _describe(manifest: DatasetManifest, split: str, samples: int, x: _Form, y: _Form, **more: Any) -> Description:
    """Return the description of a split whose samples have these shapes and dtypes."""
    vocabulary, classes = manifest.vocabulary, manifest.classes
    return Description(manifest.kind, split, samples, *x, *y, vocabulary, classes, manifest.identity, **more)


class RowReader:
    """Rows of one split, across all of its shards, a bounded number of which are open.

    Args:
        folder: Folder of the data set.
        spec: The split's entry in the manifest.
        manifest: Manifest of the data set.
    """

    def __init__(self, folder: Path, spec: SplitSpec, manifest: DatasetManifest) -> None:
        self._folder, self._spec, self._manifest = folder, spec, manifest
        self._starts = list(accumulate((shard.rows for shard in spec.shards), initial=0))
        self._bounds = np.array(self._starts, np.int64)
        self._open_shards: OpenFiles[int, OpenShard] = OpenFiles()
        self._trusted: dict[int, list[bytearray]] = {}

    def read_into(self, field: int, start: int, out: npt.NDArray[Any]) -> None:
        """Read consecutive rows of a field.

        Args:
            field: Index of the field.
            start: First row.
            out: Memory [k, *shape] of the stored dtype, which is filled with rows start to start + k - 1.
        """
        done = 0
        while done < len(out):
            row = start + done
            number = bisect_right(self._starts, row) - 1
            here = min(len(out) - done, self._starts[number + 1] - row)
            shard, trusted = self.shard(number)
            shard.read_into(field, row - self._starts[number], out[done : done + here], trusted[field])
            done += here

    def gather(self, field: int, starts: Ids, out: npt.NDArray[Any], places: Ids) -> None:
        """Read ranges of k rows of a field, which may start anywhere.

        Args:
            field: Index of the field.
            starts: First row of each range, in ascending order, int64 [n].
            out: Contiguous memory [n, k, *shape] of the stored dtype.
            places: Index in `out` of each range, int64 [n].
        """
        number = bisect_right(self._starts, starts[0]) - 1 if len(starts) else 0
        if len(starts) and starts[-1] + out.shape[1] <= self._starts[number + 1]:  # all in one shard
            shard, trusted = self.shard(number)
            shard.gather(field, (starts - self._starts[number]).tolist(), out, places.tolist(), trusted[field])
            return
        first = np.searchsorted(self._bounds, starts, side="right") - 1
        whole = starts + out.shape[1] <= self._bounds[first + 1]
        for number in dict.fromkeys(first.tolist()):
            here = whole & (first == number)
            shard, trusted = self.shard(number)
            within = (starts[here] - self._starts[number]).tolist()
            shard.gather(field, within, out, places[here].tolist(), trusted[field])
        for i in np.flatnonzero(~whole).tolist():
            self.read_into(field, int(starts[i]), out[places[i]])

    def shard(self, number: int) -> tuple[OpenShard, list[bytearray]]:
        """Return a shard, which is opened if needed.

        Returns:
            The shard and, for each field, one byte per extent: 1 if its hash was checked and is right.
        """

        def open_shard() -> OpenShard:
            shard = OpenShard(self._folder, self._spec.shards[number], self._manifest)
            fields = range(len(self._manifest.fields))
            self._trusted.setdefault(number, [bytearray(shard.extents(field)) for field in fields])
            return shard

        return self._open_shards.get(number, open_shard), self._trusted[number]

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._open_shards.close()


# -- Batches of one rank, from a data set and an order, read ahead by threads
#
#   running position   p          p+B          p+2B                B: the global batch
#   this rank's share  [start, stop) of each, decided by `share`
#   reader threads     batch 1    batch 2  ... at most max(prefetch, workers) ahead, yielded in order
#
# Threads, never processes: a fork after MPI has started corrupts it. The state of the stream is the position of
# the next batch; nothing else must be saved to continue on any number of ranks.


Share = Callable[[int], tuple[int, int]]

_AHEAD = 2048  # ids computed in one call of the order


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch, in host memory.

    Attributes:
        ids: Sample ids, int64 [n].
        x: Inputs, `[n, *x_shape]`.
        y: Targets, `[n, *y_shape]`.
        position: Running position of the global batch's first sample. The next batch begins at this position plus the
            size of the global batch.
        first: Index of the share's first sample in the global batch.
    """

    ids: Ids
    x: torch.Tensor
    y: torch.Tensor
    position: int
    first: int = 0


class Loader:
    """An endless iterator over consecutive global batches that yields this rank's share of each.

    An error in a reader thread is raised by the `next` that requests its batch. Call `close` at the end, or use `with`.

    Args:
        dataset: Data set to read.
        order: Order of its samples.
        batch: Number of samples in a global batch.
        share: Function that returns (start, stop) of this rank's samples within a global batch of the given size. If
            both are equal, the tensors are empty.
        position: Running position of the first sample.
        warmup: (batches, samples of each) that precede those of `batch` samples.
        workers: Number of reader threads; with 0, the caller reads.
        prefetch: Number of batches that are read ahead of the caller.
        finish: Function that a reader applies to each batch, such as `pin` for `on_device`.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Ordering,
        *,
        batch: int,
        share: Share,
        position: int = 0,
        warmup: Sequence[tuple[int, int]] = (),
        workers: int = 1,
        prefetch: int = 2,
        finish: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._dataset, self._order, self._share, self._finish = dataset, order, share, finish
        self._sizes = deque([*warmup, (sys.maxsize, batch)])  # (batches, samples of each) to come
        self._position = position
        self._ahead: deque[tuple[int, int, Ids]] = deque()
        self._depth = max(prefetch, workers)
        self._pending: deque[Future[Batch]] = deque()
        self._threads = ThreadPoolExecutor(workers, "data-reader") if workers else None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._threads is None:
            return self._read(*self._advance())
        while len(self._pending) <= self._depth:
            self._pending.append(self._threads.submit(self._read, *self._advance()))
        return self._pending.popleft().result()

    def close(self) -> None:
        """Stop the reader threads, after the reads that they have begun; reads that have not begun are cancelled.

        The files of the data set are closed. A later read opens them again.
        """
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._dataset.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, position: int, first: int, ids: Ids) -> Batch:
        return self._finish(_batch(self._dataset, position, first, ids))

    def _advance(self) -> tuple[int, int, Ids]:
        """Return the next batch's position, the index of this rank's share in it, and the sample ids of the share."""
        if not self._ahead:
            batches, size = self._sizes.popleft()
            start, stop = self._share(size)
            share = stop - start
            count = min(batches, max(1, _AHEAD // max(1, share)))
            if batches > count:
                self._sizes.appendleft((batches - count, size))
            firsts = self._position + size * np.arange(count, dtype=np.int64)
            places = firsts[:, None] + np.arange(start, stop, dtype=np.int64)
            ids = self._order.at(places.reshape(-1)).reshape(-1, share) if share else places
            self._ahead.extend((first, start, share_ids) for first, share_ids in zip(firsts.tolist(), ids, strict=True))
            self._position += size * count
        return self._ahead.popleft()


def evaluation_batches(dataset: Dataset, *, samples: int, batch: int, share: Share) -> Iterator[Batch]:
    """Yield batches of samples that are spread evenly over a split, or of all samples if there are not more.

    Args:
        dataset: Split to read.
        samples: Largest number of samples to choose.
        batch: Number of samples in a global batch; the last one may have fewer.
        share: Function that returns (start, stop) of this rank's samples in a global batch of the given size.

    Yields:
        This rank's share of each batch, in order, with positions that count the chosen samples from 0. Every rank gets
        the same number of batches, and a share may be empty.
    """
    chosen = min(samples, len(dataset))
    for position in range(0, chosen, batch):
        start, stop = share(min(batch, chosen - position))
        places = np.arange(position + start, position + stop, dtype=np.int64)
        yield _batch(dataset, position, start, dataset.spread(places, chosen))


def _batch(dataset: Dataset, position: int, first: int, ids: Ids) -> Batch:
    import torch

    x, y = dataset.read_at(ids, position + first + np.arange(len(ids), dtype=np.int64))
    return Batch(ids, torch.from_numpy(x), torch.from_numpy(y), position, first)
