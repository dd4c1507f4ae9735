"""Kinds of input. Each file here has a source of rows for one kind, and a function that recognises its files.

Which rows and files are held out depends only on their order, so it is the same on every machine. One row is held out
of each interval of about 1/fraction rows, at a place that is drawn with the interval's number as seed. So the held-out
rows are spread evenly: input sorted by class keeps its mix of classes. They do not follow any period of the input
either: if classes alternate, rows of every class are held out.

    rows       0 ....... 19 | 20 ....... 39 | 40 ...      fraction 0.05: intervals of 20 rows
    held out   *            |      *        |

The first interval holds out its first row (mix64(0) is 0), so even an input of a few rows has one held out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import (
    HELD_OUT,
    MASK,
    TOKENS,
    TRAIN,
    Categories,
    ColumnSpec,
    FieldSpec,
    ImagesSpec,
    Missing,
    Scale,
)
from mpitrain.data.order import mix64

Columns = tuple[npt.NDArray[Any], ...]
Block = tuple[str, Columns]
GATHER_BYTES = 4 << 20
MOST_CLASSES = 65536
MOST_DIMENSIONS = 32  # HDF5's limit, for a field with its axis of rows
T = TypeVar("T")
TEST_NAMES = ("val", "valid", "validation", "test", "held_out")  # of an input's own test set
_OF_TEST = re.compile(rf"({'|'.join(TEST_NAMES)})([-_.\d]|$)", re.IGNORECASE)
FINEST = 10**6  # largest denominator of a fraction, so that row numbers times it fit into 64 bits


@dataclass(frozen=True)
class Source:
    """An input that is described but not yet read.

    Attributes:
        kind: "tokens" or "arrays".
        fields: Fields of a row.
        blocks: Function of the fraction of rows to hold out. It yields (split, one array `[k, *shape]` per field) with
            k at least 1, in the same order each time it is called.
        files: Number of files of the input.
        classes: Names of the classes 0, 1, ...; None if the numbers in y are to be counted.
        vocabulary: Size of the vocabulary; None if the integers of x or tokens are to be counted.
        tokenizer: Tokenizer file, which is copied into the data set.
        notes: Sentences about the input, for people.
        document_end: Token that ends each document, if documents have one.
        pack: Tokens per sample, if documents are packed into samples.
        columns: Function that returns the columns of the table that x is made of; call it after the blocks were read.
        found: Function that returns further notes; call it after the blocks were read.
        images: Form of the images, if the rows of x are places of encoded images.
    """

    kind: Literal["tokens", "arrays"]
    fields: tuple[FieldSpec, ...]
    blocks: Callable[[float], Iterator[Block]]
    files: int
    classes: tuple[str, ...] | None = None
    vocabulary: int | None = None
    tokenizer: Path | None = None
    notes: tuple[str, ...] = ()
    document_end: int | None = None
    pack: int | None = None
    columns: Callable[[], tuple[ColumnSpec, ...]] | None = None
    found: Callable[[], tuple[str, ...]] = tuple
    images: ImagesSpec | None = None


@dataclass(frozen=True)
class TextFields:
    """Fields of a line or row that contain the text.

    Attributes:
        text: Field of the whole text, if there is no prompt.
        prompt: Field of the prompt given to the model.
        completion: Field of the answer that the model learns.
        hint: Advice on how to name the fields, for the message about a missing one.
    """

    text: str = "text"
    prompt: str | None = None
    completion: str | None = None
    hint: str = "name the field with --text, or --prompt and --completion"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that are read."""
        if self.prompt is None:
            return (self.text,)
        return self.prompt, self.completion or "completion"


@dataclass(frozen=True)
class PrepareOptions:
    """Options for the input, each for some kinds of it.

    Attributes:
        tokenizer: Hugging Face tokenizer file, for text.
        size: Height and width of images, in pixels.
        label: Name or number of a table's label column.
        text: Field of JSON lines or parquet that contains the text.
        prompt: Field of the prompt given to a model, whose tokens are not trained on.
        completion: Field of the answer that the model learns.
        pack: Tokens per sample into which whole documents are packed.
        blank_lines: If true, documents of plain text end at blank lines, instead of at the end of their files.
        encoding: Encoding of text; default UTF-8.
        end_token: Token that ends a document: its name or number, or "none".
        dtype: Dtype of the numbers in files of tokens.
        vocabulary: Size of the vocabulary of files of tokens.
        columns: Names or numbers of the columns of a table to use; None for all.
        drop: Names or numbers of the columns not to use.
        missing: Replacement of missing values in a table: "mean", "median" or "zero"; "drop" removes their rows.
        categories: Encoding of texts in a table: "onehot" or "codes".
        scale: Scaling of numbers in a table: "standard" for mean 0 and deviation 1.
        like: Data set of another table, whose conversion of the columns is used.
        allow_nonfinite: If true, accept nan and infinite numbers.
        skip_bad: If true, skip and count unreadable images, and table rows with another number of columns.
        classes: File with the names of the classes, one per line, for archives of images.
        x: Variables of HDF5, NetCDF or Zarr files that become x.
        y: Variables that become y.
        samples: Axis of a variable along which the samples lie; default its first axis.
        select: Ranges of axes as AXIS=FIRST:STOP, to which the variables are cut.
        ahead: Number of rows by which y lies after x, for pairs of states on an axis of time.
        in_place: If true, make an index of the files and read them where they lie, instead of a copy.
    """

    tokenizer: Path | None = None
    size: tuple[int, int] | None = None
    label: str | None = None
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    pack: int | None = None
    blank_lines: bool = False
    encoding: str | None = None
    end_token: str | None = None
    dtype: str | None = None
    vocabulary: int | None = None
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] | None = None
    missing: Missing | None = None
    categories: Categories | None = None
    scale: Scale | None = None
    like: Path | None = None
    allow_nonfinite: bool = False
    skip_bad: bool = False
    classes: Path | None = None
    x: tuple[str, ...] | None = None
    y: tuple[str, ...] | None = None
    samples: str | None = None
    select: tuple[str, ...] | None = None
    ahead: int | None = None
    in_place: bool = False

    @property
    def text_fields(self) -> TextFields:
        """Fields of JSON lines or parquet that are read."""
        return TextFields(self.text or "text", self.prompt, self.completion)


def token_source(
    files: int,
    blocks: Callable[[float], Iterator[Block]],
    options: PrepareOptions,
    dtype: str,
    vocabulary: int | None,
    end: int | None,
    *,
    pack: int | None = None,
    late_notes: Callable[[], tuple[str, ...]] = tuple,
) -> Source:
    """Describe tokens: a stream, or samples that documents were packed into. See `Source`.

    Args:
        files: Number of files of the input.
        blocks: Function that yields the blocks.
        options: Options of the input; their tokenizer is kept.
        dtype: Stored dtype of a token.
        vocabulary: Size of the vocabulary; None if it is to be counted.
        end: Token that ends each document, if documents have one.
        pack: Tokens per sample, if documents are packed into samples.
        late_notes: Function that returns further notes after the blocks were read.
    """
    tokens = FieldSpec(name=TOKENS, dtype=dtype, shape=(), given="integer")
    mask = FieldSpec(name=MASK, dtype="uint8", shape=(), given="integer")
    fields, tokenizer = (tokens, mask) if pack else (tokens,), options.tokenizer
    return Source(
        "tokens", fields, blocks, files, None, vocabulary, tokenizer, document_end=end, pack=pack, found=late_notes
    )


def split_own_test(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files to train on and those of the input's own test set, which are named val, test, ....

    If all files have such names, there is no own test set.
    """
    test = [path for path in files if _OF_TEST.match(path.name)]
    test = test if len(test) < len(files) else []
    return [path for path in files if path not in test], test


def finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return, for each number, True if it is finite as float32."""
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32, copy=False))


def held_out_mask(start: int, count: int, fraction: float | Fraction) -> npt.NDArray[np.bool_]:
    """Return True for each held-out row among `count` rows, bool [count].

    Args:
        start: Number of the first row.
        count: Number of rows.
        fraction: Fraction of rows to hold out, 0 to 0.5.
    """
    exact = Fraction(fraction).limit_denominator(FINEST)
    if not exact:
        return np.zeros(count, np.bool_)
    p, q = exact.numerator, exact.denominator
    rows = np.arange(start, start + count, dtype=np.int64)
    interval = rows * p // q
    first = -(-interval * q // p)
    length = -(-(interval + 1) * q // p) - first
    place = mix64(interval.astype(np.uint64)) % length.astype(np.uint64)
    mask: npt.NDArray[np.bool_] = rows - first == place.astype(np.int64)
    return mask


def partition(
    rows: Callable[[T], Iterator[Columns]], train: T, test: T | None = None
) -> Callable[[float], Iterator[Block]]:
    """Return a `blocks` function of a `Source` that assigns rows to the splits.

    Args:
        rows: Function that reads rows of an input, in blocks.
        train: Input of training rows.
        test: Input of the source's own test set; if None, some rows of `train` are held out.
    """

    def blocks(held_out: float) -> Iterator[Block]:
        start = 0
        for columns in rows(train):
            mask = held_out_mask(start, len(columns[0]), 0.0 if test else held_out)
            start += len(mask)
            if mask.any():
                yield HELD_OUT, tuple(column[mask] for column in columns)
                columns = tuple(column[~mask] for column in columns)
            if len(columns[0]):
                yield TRAIN, columns
        yield from ((HELD_OUT, columns) for columns in (rows(test) if test else ()))

    return blocks
