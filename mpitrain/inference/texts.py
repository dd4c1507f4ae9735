"""Texts whose probability is asked for, one a sample: what each token of a text costs after those before it.

.txt                      a text a line
.jsonl, .json, .parquet   what each has in a field; or in one of a prompt and one of its completion, which counts alone

A text begins after the token that ends a document, where the data have one; else its first token is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mpitrain.data import Description
from mpitrain.data.sources.documents import LINES, TextFields, documents_of
from mpitrain.data.sources.streams import lines_of, opened, plain_suffix
from mpitrain.errors import InputError
from mpitrain.inference.inputs import Array, Samples
from mpitrain.inference.prompts import TextCodec
from mpitrain.models.losses import UNCOUNTED

_DOCUMENTS = LINES | {".json", ".parquet"}


def is_texts(path: Path) -> bool:
    """Whether a file is one of texts, by its name."""
    return path.is_file() and plain_suffix(path) in (".txt", *_DOCUMENTS)


class Texts(Samples):
    """The texts of a file.

    Args:
        path: The file.
        description: The data that the model was trained on.
        codec: Gives what makes tokens of text.
        fields: In which JSON lines and parquet have the texts.

    Raises:
        InputError: The file cannot be read, or a text is too short or too long to be a sample.
    """

    def __init__(
        self, path: Path, description: Description, codec: Callable[[], TextCodec], fields: TextFields
    ) -> None:
        super().__init__()
        self.shape, self.dtype = description.x_shape, description.x_dtype
        begin = [] if description.document_end is None else [description.document_end]
        made, longest = codec(), self.shape[0] + 1
        self._texts: list[tuple[list[int], int]] = []
        for number, parts in enumerate(_texts_of(path, fields), 1):
            tokens = [made.encode(part) for part in parts]
            given = len(begin) + (len(tokens[0]) if len(tokens) > 1 else 0)
            whole = [*begin, *(token for some in tokens for token in some)]
            if len(whole) < 2 or len(whole) == given:
                raise InputError(f"{path}, text {number} has no token to foretell; leave it out")
            if len(whole) > longest:
                raise InputError(
                    f"{path}, text {number} has {len(whole)} tokens, and a sample of this model {longest}; cut it, or "
                    "make a data set with mpitrain.data prepare"
                )
            if description.vocabulary is not None and max(whole) >= description.vocabulary:
                raise InputError(
                    f"{path}, text {number} has the token {max(whole)}, and the model knows {description.vocabulary}; "
                    "give the run the tokenizer.json of its data"
                )
            self._texts.append((whole, max(1, given)))
        if not self._texts:
            raise InputError(f"{path} holds no text; write one a line")

    def __len__(self) -> int:
        return len(self._texts)

    def read(self, lo: int, hi: int) -> tuple[Array, Array | None]:
        x = np.zeros((hi - lo, *self.shape), self.dtype)
        y = np.full_like(x, UNCOUNTED)
        for row, (tokens, given) in enumerate(self._texts[lo:hi]):
            x[row, : len(tokens) - 1] = tokens[:-1]
            y[row, given - 1 : len(tokens) - 1] = tokens[given:]
        return x, y


def _texts_of(path: Path, fields: TextFields) -> Iterator[Sequence[str]]:
    """The text of each sample, or its prompt and its completion."""
    if plain_suffix(path) in _DOCUMENTS:
        yield from documents_of(path, fields)
        return
    with opened(path) as file:
        for number, line in lines_of(file, path):
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise InputError(f"{path}, line {number} is not UTF-8; convert it") from None
            if text:
                yield (text,)
