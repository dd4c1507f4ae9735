"""Kinds of input: each file has a source of rows for one of them, and knows which files are of it. What all share:

Which rows and files are held out is a function of their order alone, the same on every machine. Rows are taken one from
each stretch of about 1/fraction rows, at a place inside the stretch that is drawn from the stretch's number. So the
held-out rows are spread evenly (input sorted by class keeps its mix of classes) and yet in step with no period of the
input (classes that come in turn are not held out one-sidedly):

    rows       0 ....... 19 | 20 ....... 39 | 40 ...      fraction 0.05: stretches of 20 rows
    held out   *            |      *        |

The first stretch gives its first row (mix64(0) is 0), so that even a few rows have one held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from mpitrain.data.format import HELD_OUT, MASK, TOKENS, TRAIN, Categories, ColumnSpec, FieldSpec, Missing, Scale
from mpitrain.data.order import mix64

Columns = tuple[npt.NDArray[Any], ...]
Block = tuple[str, Columns]
GATHER_BYTES = 4 << 20
MOST_CLASSES = 65536
MOST_DIMENSIONS = 32  # of a field with all its rows, as HDF5 has them
T = TypeVar("T")
_FINEST = 10**6  # fractions are rounded to this denominator at most, so that row numbers times it fit 64 bits


@dataclass(frozen=True)
class Source:
    """An input that is described but not yet read.

    Attributes:
        kind: "tokens" or "arrays".
        fields: The fields of a row.
        blocks: Gives (split, one array `[k, *shape]` for each field) again and again, k at least 1, in an order that is
            always the same; it is called with the fraction of rows to hold out.
        files: How many files the input has.
        classes: The names of the classes 0, 1, ...; None where y's own numbers are to be counted.
        vocabulary: The size of the vocabulary; None where the integers of x or tokens are to be counted.
        tokenizer: A tokenizer's file, which is kept with the data.
        notes: Sentences about the input, for people.
        document_end: The token after each document.
        pack: The tokens of a sample that documents were packed into.
        columns: Gives the columns of the table that x is made of, when the blocks have been read.
        found: Gives further sentences, when the blocks have been read.
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


@dataclass(frozen=True)
class TextFields:
    """Fields of a line or row that hold the text.

    Attributes:
        text: The field of the whole text; used where there is no prompt.
        prompt: The field of what is given to the model.
        completion: The field of what the model learns to answer.
        hint: How people name the fields, for the message where one is missing.
    """

    text: str = "text"
    prompt: str | None = None
    completion: str | None = None
    hint: str = "name the field with --text, or --prompt and --completion"

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are read."""
        if self.prompt is None:
            return (self.text,)
        return self.prompt, self.completion or "completion"


@dataclass(frozen=True)
class PrepareOptions:
    """What a person may say about the input, each for one kind of it.

    Attributes:
        tokenizer: The file of a Hugging Face tokenizer, for text.
        size: The height and the width of images, in pixels.
        label: The name or the number of a table's column.
        text: The field of JSON lines or parquet that holds the text.
        prompt: The field of what is given to a model, whose tokens are not trained on.
        completion: The field of what it learns to answer.
        pack: The tokens of a sample that whole documents are packed into.
        blank_lines: Whether documents of plain text end at blank lines, and not with their files.
        encoding: What text is in.
        end_token: What ends a document: a token's name or number, or "none".
        dtype: Of the numbers in files of tokens.
        vocabulary: How many tokens there are in files of tokens.
        columns: Names or numbers of the columns of a table that are used; None for all.
        drop: Those that are not used.
        missing: What missing values of a table become: "mean", "median", "zero", or "drop" for their rows.
        categories: What the texts of a table become: "onehot" or "codes".
        scale: What the numbers of a table become: "standard" for mean 0 and deviation 1.
        like: A data set of another table: what became of its columns is done here too.
        allow_nonfinite: Whether nan and infinite numbers are taken as they are.
        skip_bad: Whether images that cannot be read, and rows of tables with other columns, are left out and counted.
        classes: A file with the names of the classes, one a line, for archives of images.
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
    found: Callable[[], tuple[str, ...]] = tuple,
) -> Source:
    """Describe tokens of this dtype, a stream of them or samples that documents were packed into; see `Source`."""
    tokens = FieldSpec(name=TOKENS, dtype=dtype, shape=(), given="integer")
    mask = FieldSpec(name=MASK, dtype="uint8", shape=(), given="integer")
    fields, kept = (tokens, mask) if pack else (tokens,), options.tokenizer
    return Source("tokens", fields, blocks, files, None, vocabulary, kept, document_end=end, pack=pack, found=found)


def finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say of each number whether float32 holds it, which nan and infinite ones are not."""
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32, copy=False))


def held_out_mask(start: int, count: int, fraction: float) -> npt.NDArray[np.bool_]:
    """True for the held-out ones of the rows start ... start+count-1; bool [count]. fraction: 0 to 0.5."""
    exact = Fraction(fraction).limit_denominator(_FINEST)
    if not exact:
        return np.zeros(count, np.bool_)
    p, q = exact.numerator, exact.denominator
    rows = np.arange(start, start + count, dtype=np.int64)
    stretch = rows * p // q
    first = -(-stretch * q // p)
    length = -(-(stretch + 1) * q // p) - first
    place = mix64(stretch.astype(np.uint64)) % length.astype(np.uint64)
    held: npt.NDArray[np.bool_] = rows - first == place.astype(np.int64)
    return held


def partition(
    rows: Callable[[T], Iterator[Columns]], train: T, test: T | None = None
) -> Callable[[float], Iterator[Block]]:
    """How a source's rows come to the splits.

    Args:
        rows: Reads rows, in blocks.
        train: What it reads them from.
        test: The same of the input's own test set; without one, some rows of `train` are held out.

    Returns:
        The `blocks` of a `Source`.
    """

    def blocks(held_out: float) -> Iterator[Block]:
        start = 0
        for columns in rows(train):
            held = held_out_mask(start, len(columns[0]), 0.0 if test else held_out)
            start += len(held)
            if held.any():
                yield HELD_OUT, tuple(column[held] for column in columns)
                columns = tuple(column[~held] for column in columns)
            if len(columns[0]):
                yield TRAIN, columns
        yield from ((HELD_OUT, columns) for columns in (rows(test) if test else ()))

    return blocks
