"""Writer of a data set: fills shards from a source of blocks, counts classes and vocabulary, writes the manifest last.

    source.blocks(held_out) -> (split, columns), (split, columns), ...
          collected to about 4 MiB per split -> ShardWriter -> next shard when full

Memory use: a few blocks of the source and of 4 MiB, for any size of the input.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import (
    EXTENT_BYTES,
    HELD_OUT,
    TOKENIZER,
    TRAIN,
    DatasetManifest,
    FieldSpec,
    Origin,
    ShardSpec,
    SplitSpec,
    write_manifest,
)
from mpitrain.data.shards import ShardWriter
from mpitrain.data.sources import GATHER_BYTES, MOST_CLASSES, Columns, Source
from mpitrain.errors import InputError
from mpitrain.storage.disk import write_durably

Progress = Callable[[str, int, int], None]  # split, rows and bytes written so far


def write_dataset(
    folder: Path,
    source: Source,
    *,
    names: Sequence[str],
    held_out: float,
    shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write every file of a data set, the manifest last, and flush them to the disk.

    Args:
        folder: Empty folder.
        source: Source of the rows.
        names: Names of the sources, for the manifest.
        held_out: Fraction of rows to hold out.
        shard_bytes: Bytes of data per shard.
        progress: Function called with a split and the rows and bytes of it that are written so far.

    Raises:
        InputError: The source cannot be read, has no rows, or too few of them for the fraction to hold out.
        OSError: The disk is full.
    """
    writers = {split: _SplitWriter(folder, split, source.fields, shard_bytes) for split in (TRAIN, HELD_OUT)}
    tally = Tally(source)
    try:
        for split, columns in source.blocks(held_out):
            if split not in writers:
                raise InputError(f"the source yields rows of a split {split!r}; name it {TRAIN!r} or {HELD_OUT!r}")
            tally.add(split, columns)
            writers[split].append(columns)
            if progress:
                progress(split, writers[split].rows, writers[split].rows * writers[split].row_bytes)
        splits = {split: writer.finish() for split, writer in writers.items() if writer.rows}
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    check_splits(splits, held_out, source.kind, names)
    finish_manifest(folder, source, splits, tally, names)


def finish_manifest(
    folder: Path, source: Source, splits: dict[str, SplitSpec], tally: Tally, names: Sequence[str], **more: Any
) -> None:
    """Write the tokenizer, if there is one, and the manifest.

    Args:
        folder: Folder of the data set.
        source: Source of the rows.
        splits: Splits without their class counts.
        tally: Counts of all rows.
        names: Names of the sources.
        **more: Further entries of the manifest.
    """
    if source.tokenizer is not None:
        tokenizer = source.tokenizer.read_bytes()
        write_durably(folder / TOKENIZER, tokenizer)
    now, notes = datetime.now(timezone.utc).isoformat(timespec="seconds"), (*source.notes, *source.found())
    write_manifest(
        folder,
        DatasetManifest(
            kind=source.kind,
            fields=source.fields,
            extent_bytes=EXTENT_BYTES,
            vocabulary=tally.vocabulary(),
            tokenizer_crc32=None if source.tokenizer is None else zlib.crc32(tokenizer),
            document_end=source.document_end,
            pack=source.pack,
            classes=tally.classes(),
            splits={name: split.model_copy(update=tally.counts(name)) for name, split in splits.items()},
            columns=source.columns() if source.columns else None,
            images=source.images,
            origin=Origin(sources=tuple(names), files=source.files, prepared=now, notes=notes),
            **more,
        ),
    )


def check_splits(splits: dict[str, SplitSpec], held_out: float, kind: str, names: Sequence[str]) -> None:
    """Raise InputError if there are no training rows, or none that are held out although some should be.

    Args:
        splits: Splits that have rows.
        held_out: Fraction of rows to hold out.
        kind: "tokens" or "arrays".
        names: Names of the sources.
    """
    label = " ".join(names)
    rows = sum(split.rows for split in splits.values())
    if not rows:
        raise InputError(f"source {label} contains no data; use another source")
    if TRAIN not in splits:
        raise InputError(f"source {label} is too small: all of it is held out; use more data")
    if held_out and HELD_OUT not in splits:
        raise InputError(
            f"source {label} has too few {'tokens' if kind == 'tokens' else 'rows'} ({rows}) to hold out {held_out:g} "
            "of them; use more data, a larger --held-out, or --held-out 0"
        )


class _SplitWriter:
    """Writer of the shards of one split, one after the other."""

    def __init__(self, folder: Path, split: str, fields: Sequence[FieldSpec], shard_bytes: int) -> None:
        self._folder, self._split, self._fields = folder, split, fields
        self.row_bytes = sum(field.row_bytes for field in fields)
        self._capacity = max(1, shard_bytes // max(1, self.row_bytes))
        self._waiting: list[Columns] = []
        self._waiting_rows = 0
        self._shard: ShardWriter | None = None
        self._done: list[ShardSpec] = []
        self.rows = 0

    def append(self, columns: Columns) -> None:
        self._waiting.append(columns)
        self._waiting_rows += len(columns[0])
        self.rows += len(columns[0])
        if self._waiting_rows * self.row_bytes >= GATHER_BYTES:
            self._flush()

    def finish(self) -> SplitSpec:
        self._flush()
        self._close_shard()
        return SplitSpec(rows=self.rows, shards=tuple(self._done))

    def abandon(self) -> None:
        if self._shard:
            self._shard.abandon()

    def _flush(self) -> None:
        if not self._waiting:
            return
        columns = tuple(
            np.concatenate([block[i] for block in self._waiting]).astype(field.stored, copy=False)
            for i, field in enumerate(self._fields)
        )
        self._waiting, self._waiting_rows = [], 0
        taken, rows = 0, len(columns[0])
        while taken < rows:
            if self._shard is None:
                path = self._folder / f"{self._split}-{len(self._done):05d}.h5"
                self._shard = ShardWriter(path, self._fields, self._capacity)
            shard = self._shard
            stop = min(rows, taken + shard.room)
            shard.append([column[taken:stop] for column in columns])
            taken = stop
            if not shard.room:
                self._close_shard()

    def _close_shard(self) -> None:
        if self._shard:
            self._done.append(self._shard.finish())
            self._shard = None


class Tally:
    """Classes and size of the vocabulary, counted while the data is written.

    If y is one integer per row, its values are classes counted from 0. Tokens, and an x of integers, are codes of a
    vocabulary.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        first, last = source.fields[0], source.fields[-1]
        self._has_classes = last.name == "y" and last.given == "integer" and not last.shape
        self._has_codes = first.given == "integer" and (first.name == "x" or source.vocabulary is None)
        self._counts: dict[str, npt.NDArray[np.int64]] = {}
        self._largest_code = -1

    def add(self, split: str, columns: Columns) -> None:
        """Count the rows of a block. Raises InputError for a class or code out of range."""
        if self._has_classes:
            classes = columns[-1].astype(np.int64)
            low, high = int(classes.min()), int(classes.max())
            if low < 0 or high >= MOST_CLASSES:
                raise InputError(
                    f"source: y contains the class {low if low < 0 else high}, but classes are numbered from 0 to at "
                    f"most {MOST_CLASSES - 1}; renumber them, or save y as floating point to predict numbers"
                )
            before = self._counts.get(split, np.zeros(0, np.int64))
            now = np.bincount(classes, minlength=len(before))
            now[: len(before)] += before
            self._counts[split] = now
        if self._has_codes:
            if int(columns[0].min()) < 0:
                raise InputError("source: x has negative integers, which cannot be codes; save x as floating point")
            self._largest_code = max(self._largest_code, int(columns[0].max()))

    def state(self) -> dict[str, Any]:
        """Return the counts as a value that JSON can represent, for `merge` on another rank."""
        return {"counts": {split: c.tolist() for split, c in self._counts.items()}, "largest": self._largest_code}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of a `state`."""
        for split, counts in state["counts"].items():
            both = self._counts.get(split, np.zeros(0, np.int64)), np.array(counts, np.int64)
            length = max(map(len, both))
            one, other = (np.pad(each, (0, length - len(each))) for each in both)
            self._counts[split] = one + other
        self._largest_code = max(self._largest_code, state["largest"])

    def vocabulary(self) -> int | None:
        """Return the size of the vocabulary, if there is one."""
        if not self._has_codes:
            return self._source.vocabulary
        return max(self._largest_code, -1 if self._source.document_end is None else self._source.document_end) + 1

    def classes(self) -> tuple[str, ...] | None:
        """Return the names of the classes, if there are any."""
        if self._source.classes is not None or not self._has_classes:
            return self._source.classes
        return tuple(str(i) for i in range(max(len(counts) for counts in self._counts.values())))

    def counts(self, split: str) -> dict[str, tuple[int, ...]]:
        """Return the manifest's entry for the class counts of a split; empty if there are no classes."""
        classes = self.classes()
        if classes is None:
            return {}
        counts = self._counts[split].tolist()
        return {"class_counts": (*counts, *[0] * (len(classes) - len(counts)))}
