"""Kinds of input: each file has a source of rows for one of them, and knows which files are of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpitrain.data.format import Categories, Missing, Scale


@dataclass(frozen=True)
class TextFields:
    """Fields of a line or row that hold the text.

    Attributes:
        text: The field of the whole text; used where there is no prompt.
        prompt: The field of what is given to the model.
        completion: The field of what the model learns to answer.
    """

    text: str = "text"
    prompt: str | None = None
    completion: str | None = None

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
