"""Samples to predict: a prepared data set, or files in the formats that `prepare` takes, with or without targets.

data set folder           its samples, those of train first
.npy, .npz                an array of x, or the array called x; uint8 is read as value / 255, as in training
tables                    .csv, .tsv, .parquet: columns converted to x as in training; other columns are ignored
images                    a file, or a folder in the order of its paths; scaled and cropped to the training size
.txt                      one text a line
.jsonl, .json, .parquet   texts: one field of each record; or a prompt field and a completion field, of which only the
                          completion counts

A text is scored by the log-probability of its tokens, each given the tokens before it. A text starts after the token
that ends a document, if the data have one. Otherwise its first token is only given, not scored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.data import Dataset, Description, open_dataset, read_manifest
from mpitrain.data.decoding import BadImage, load_decoders, read_image
from mpitrain.data.format import HELD_OUT, TRAIN, ColumnSpec, is_dataset
from mpitrain.data.prepare import files_below
from mpitrain.data.sources.documents import TextFields
from mpitrain.data.sources.images import is_image
from mpitrain.data.sources.table_files import cells_of_table, is_table, open_table, rows_of_table, width
from mpitrain.errors import InputError
from mpitrain.inference.prompts import TextCodec, texts_of
from mpitrain.models.losses import UNCOUNTED

Array = npt.NDArray[Any]


class Samples(ABC):
    """Ordered samples to predict.

    Attributes:
        shape: Shape of one sample's x.
        dtype: Data type of x.
        names: Names of the samples in the output; None to use their numbers.
        left_out_kind: Description of samples that may be left out, for messages.
        extra_columns: Columns of a table that are copied to the output, by name, with a value for each sample.
        left_out: Samples that this rank has left out so far: number and description of each.
    """

    names: Sequence[Any] | None = None
    left_out_kind = "samples"
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _items: Any  # one item for each sample

    def __init__(self) -> None:
        self.left_out: list[tuple[int, str]] = []
        self.extra_columns: dict[str, Sequence[Any]] = {}

    def __len__(self) -> int:
        return len(self._items)

    @abstractmethod
    def read(self, lo: int, hi: int) -> tuple[Array, Array, Array | None]:
        """Read samples lo to hi - 1, without those left out.

        Args:
            lo: First sample.
            hi: Sample after the last one.

        Returns:
            The numbers of the samples, their x, and for tokens the targets (the token after each one), else None.
        """


def open_samples(path: Path, description: Description, *, skip_bad: bool = False, keep: Sequence[str] = ()) -> Samples:
    """Open the samples in a data set, a file or a folder.

    Args:
        path: Data set, file or folder.
        description: Description of the data that the model was trained on.
        skip_bad: If true, leave out unreadable images, and table rows that do not fit.
        keep: Columns of a table to copy to the output.

    Raises:
        InputError: The samples cannot be read, or their shape or type differs from the training data.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; use a data set's folder, or a file or folder of samples")
    if keep and not (path.is_file() and is_table(path)):
        raise InputError(f"--keep {','.join(keep)} is for columns of a table, but {path} is not a table; remove it")
    if path.is_dir() and is_dataset(path):
        samples: Samples = _Prepared(path, description)
    elif description.kind == "tokens":
        raise InputError(
            f"{path} is neither a data set of tokens nor a file of texts, but the model takes text; use .txt or "
            ".jsonl, or make a data set with mpitrain.data prepare"
        )
    elif path.suffix.lower() in (".npy", ".npz"):
        samples = _Array(path)
    elif path.is_file() and is_table(path):
        samples = _Rows(path, description, skip_bad=skip_bad, keep=keep)
    elif images := [file for file in (files_below(path) if path.is_dir() else [path]) if is_image(file)]:
        samples = _Images(path, images, description.x_shape, skip_bad=skip_bad)
    else:
        raise InputError(f"{path} has no samples that predict can read; use a data set, .npy, .npz, table or images")
    if samples.shape != description.x_shape or samples.dtype != description.x_dtype:
        raise InputError(
            f"{path} has samples of {samples.dtype} {list(samples.shape)}, but the model was trained on "
            f"{description.x_dtype} {list(description.x_shape)}; use samples of that dtype and shape"
        )
    return samples


class _Prepared(Samples):
    """Samples of a prepared data set, those of train first."""

    def __init__(self, path: Path, description: Description) -> None:
        super().__init__()
        manifest = read_manifest(path)
        if manifest.kind != description.kind:
            raise InputError(f"{path} has {manifest.kind}, but the model was trained on {description.kind}; use those")
        sequence = description.x_shape[0] if description.kind == "tokens" else None
        splits = [split for split in (TRAIN, HELD_OUT) if split in manifest.splits]
        self._parts: list[Dataset] = [open_dataset(path, split, sequence=sequence) for split in splits]
        first = self._parts[0].description
        self.shape, self.dtype, self._tokens = first.x_shape, first.x_dtype, description.kind == "tokens"
        known, vocabulary = description.vocabulary, first.vocabulary
        if known is not None and vocabulary is not None and vocabulary > known:
            raise InputError(
                f"{path} has a vocabulary of {vocabulary}, but the model was trained on {known}; use the same "
                "tokenizer to prepare it"
            )
        self._bounds = [0, *accumulate(map(len, self._parts))]

    def __len__(self) -> int:
        return self._bounds[-1]

    def read(self, lo: int, hi: int) -> tuple[Array, Array, Array | None]:
        pairs = []
        for begin, part in zip(self._bounds, self._parts, strict=False):
            first, last = max(lo - begin, 0), min(hi - begin, len(part))
            if first < last:
                pairs.append(part.read(np.arange(first, last)))
        x, y = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        return np.arange(lo, hi), x, y if self._tokens else None


class _Array(Samples):
    """Rows of an array in a .npy or .npz file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            loaded = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                names = loaded.files
                name = "x" if "x" in names else names[0] if len(names) == 1 else ""
                if not name:
                    raise InputError(f"{path} contains {', '.join(names)}; name the array of samples x")
                loaded = loaded[name]
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"{path} is not a plain array ({str(error).splitlines()[0]:.200}); save it again"
            ) from None
        if loaded.ndim == 0 or loaded.dtype.kind not in "biuf":
            raise InputError(f"{path} is {loaded.dtype} {list(loaded.shape)}; use numbers, one row per sample")
        self._items, self.shape = loaded, loaded.shape[1:]
        self.dtype = np.dtype(np.int64 if loaded.dtype.kind in "iu" and loaded.dtype != np.uint8 else np.float32)

    def read(self, lo: int, hi: int) -> tuple[Array, Array, Array | None]:
        x = self._items[lo:hi].astype(self.dtype)
        return np.arange(lo, hi), x * np.float32(1 / 255) if self._items.dtype == np.uint8 else x, None


class _Rows(Samples):
    """Rows of a table, converted to x as in training.

    Args:
        path: File of the table.
        description: Description of the data that the model was trained on. If it lists no columns, all columns are x.
            If there is one column too many, it is the label: the column of that name, or else the last one.
        skip_bad: If true, leave out rows with a cell that does not fit.
        keep: Columns to copy to the output.
    """

    left_out_kind = "rows that do not fit"

    def __init__(self, path: Path, description: Description, *, skip_bad: bool, keep: Sequence[str]) -> None:
        super().__init__()
        specs = description.columns
        if specs is None:
            table = open_table(path, least=1)
            names = [table.name(i) for i in range(table.columns)]
            if table.columns == math.prod(description.x_shape) + 1:
                names.pop(next((i for i, name in enumerate(names) if name.lower() == "label"), -1))
            specs = tuple(ColumnSpec(name=name) for name in names)
        unfit = (lambda row, problem: self.left_out.append((row, problem))) if skip_bad else None
        self._items = np.concatenate([np.empty((0, width(specs)), np.float32), *rows_of_table(path, specs, unfit)])
        if skip_bad:
            without = {row for row, _ in self.left_out}
            self.names = [row for row in range(len(self._items) + len(without)) if row not in without]
        self.extra_columns.update(cells_of_table(path, keep, {row for row, _ in self.left_out}) if keep else {})
        self.shape, self.dtype = self._items.shape[1:], self._items.dtype

    def read(self, lo: int, hi: int) -> tuple[Array, Array, Array | None]:
        return np.arange(lo, hi), self._items[lo:hi], None


class _Images(Samples):
    """Images, scaled and cropped as by `prepare --size`. skip_bad: if true, leave out unreadable images."""

    left_out_kind = "images that cannot be read"

    def __init__(self, path: Path, images: Sequence[Path], shape: tuple[int, ...], *, skip_bad: bool) -> None:
        super().__init__()
        load_decoders()
        if len(shape) != 3 or shape[0] != 3:
            raise InputError(f"{path} has images, but the model was trained on samples of {list(shape)}; use those")
        self.shape, self.dtype = shape, np.dtype(np.float32)
        self._items, self._skip_bad = images, skip_bad
        self.names = [str(image.relative_to(path)) if path.is_dir() else image.name for image in images]

    def read(self, lo: int, hi: int) -> tuple[Array, Array, Array | None]:
        numbers, pixels = [], []
        for number, path in enumerate(self._items[lo:hi], lo):
            try:
                image = read_image(path, f"image {path}", (self.shape[1], self.shape[2]), crop=True)
            except BadImage:
                if not self._skip_bad:
                    raise
                self.left_out.append((number, str(path)))
                continue
            numbers.append(number)
            pixels.append(image * np.float32(1 / 255))
        x = np.stack(pixels) if pixels else np.empty((0, *self.shape), self.dtype)
        return np.array(numbers, np.int64), x, None


class Texts(Samples):
    """Texts of a file, as tokens.

    Args:
        path: File with the texts.
        description: Description of the data that the model was trained on.
        codec: Codec from text to tokens.
        fields: Names of the fields with the texts in JSON lines, JSON and parquet.

    Raises:
        InputError: The file cannot be read, a text is too short or too long for a sample, or it has a token that the
            model does not know.
    """

    def __init__(self, path: Path, description: Description, codec: TextCodec, fields: TextFields) -> None:
        super().__init__()
        self.shape, self.dtype = description.x_shape, description.x_dtype
        begin = [] if description.document_end is None else [description.document_end]
        longest = self.shape[0] + 1
        self._items = []
        for number, parts in enumerate(texts_of(path, fields), 1):
            tokens = [codec.encode(part) for part in parts]
            prompt_length = len(begin) + (len(tokens[0]) if len(tokens) > 1 else 0)
            whole = [*begin, *(token for some in tokens for token in some)]
            if len(whole) < 2 or len(whole) == prompt_length:
                raise InputError(f"{path}, text {number} has no token to predict; remove it")
            if len(whole) > longest:
                raise InputError(
                    f"{path}, text {number} has {len(whole)} tokens, but a sample of this model has {longest}; cut it, "
                    "or make a data set with mpitrain.data prepare"
                )
            if description.vocabulary is not None and max(whole) >= description.vocabulary:
                raise InputError(
                    f"{path}, text {number} has the token {max(whole)}, but the model knows {description.vocabulary}; "
                    "put the tokenizer.json of its data into the run folder"
                )
            self._items.append((whole, max(1, prompt_length)))
        if not self._items:
            raise InputError(f"{path} contains no text; write one per line")

    def read(self, lo: int, hi: int) -> tuple[Array, Array, Array | None]:
        x = np.zeros((hi - lo, *self.shape), self.dtype)
        y = np.full_like(x, UNCOUNTED)
        for row, (tokens, prompt_length) in enumerate(self._items[lo:hi]):
            x[row, : len(tokens) - 1] = tokens[:-1]
            y[row, prompt_length - 1 : len(tokens) - 1] = tokens[prompt_length:]
        return np.arange(lo, hi), x, y
