"""Conversion between text and tokens, the same as for the training data.

A run with a tokenizer.json uses that tokenizer, without special tokens. Otherwise the tokens are bytes.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpitrain.data.sources.documents import LINES, TextFields, documents_of
from mpitrain.data.sources.encoder import load_tokenizer, replace_surrogates
from mpitrain.data.sources.streams import lines_of, open_stream, plain_suffix
from mpitrain.errors import InputError

BYTES = 256


def utf8(text: str) -> bytes:
    """Return the UTF-8 bytes of a text.

    Bytes that the command line could not decode are restored. If that is impossible because the text has an unpaired
    surrogate from a JSON file, the surrogate becomes "?".
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


class TextDecoder(ABC):
    """Incremental decoder from tokens to text."""

    @abstractmethod
    def add(self, token: int) -> str:
        """Return the text that is complete after this token; it may be empty."""

    @abstractmethod
    def finish(self) -> str:
        """Return the rest of the text, with a replacement for an incomplete character."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens."""
        return "".join([self.add(token) for token in tokens]) + self.finish()


class BytesCodec:
    """Codec whose tokens are the UTF-8 bytes of a text. Tokens above 255 are not text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(utf8(text))

    def decoder(self) -> TextDecoder:
        """Return a new decoder, for one text."""
        return _BytesDecoder()


class _BytesDecoder(TextDecoder):
    """Incremental decoder of tokens that are UTF-8 bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < BYTES else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerCodec:
    """Codec of a Hugging Face tokenizer.

    Args:
        path: File of the tokenizer.

    Raises:
        InputError: The tokenizer cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(replace_surrogates(text), add_special_tokens=False).ids)

    def decoder(self) -> TextDecoder:
        """Return a new decoder, for one text."""
        return _TokensDecoder(self._tokenizer)


class _TokensDecoder(TextDecoder):
    """Incremental decoder of a Hugging Face tokenizer.

    Several tokens may form one character, and some tokens are written differently at the beginning of a text. Each
    token is therefore decoded together with those before it, and the new text is returned once its characters are
    complete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last tokens whose text has been returned
        self._new: list[int] = []

    def add(self, token: int) -> str:
        self._new.append(token)
        text = self._text(self._context + self._new)
        return "" if text.endswith("\ufffd") else self._new_text(text)  # U+FFFD stands for an incomplete character

    def finish(self) -> str:
        return self._new_text(self._text(self._context + self._new)) if self._new else ""

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _new_text(self, text: str) -> str:
        before = self._text(self._context) if self._context else ""
        self._context = (self._context + self._new)[-16:]  # enough to determine how the next token is written
        self._new = []
        return text[len(before) :]


TextCodec = BytesCodec | TokenizerCodec


def codec_of(tokenizer: Path | None, vocabulary: int, run: Path) -> TextCodec:
    """Return the codec between text and a model's tokens.

    Args:
        tokenizer: File of the tokenizer that made the model's data; None if there is none.
        vocabulary: Number of tokens that the model knows.
        run: Folder of the run, for messages.

    Raises:
        InputError: There is no tokenizer, and the tokens are not bytes; or the tokenizer cannot be loaded.
    """
    if tokenizer is not None:
        return TokenizerCodec(tokenizer)
    if vocabulary in (BYTES, BYTES + 1):  # one more if documents have an end token
        return BytesCodec()
    raise InputError(
        f"{run} has no tokenizer.json, but its {vocabulary} tokens are not bytes; copy the file of its data set there"
    )


_DOCUMENTS = LINES | {".json", ".parquet"}


def is_texts(path: Path) -> bool:
    """Return whether a path is a file whose suffix is that of a text format."""
    return path.is_file() and plain_suffix(path) in (".txt", *_DOCUMENTS)


def texts_of(path: Path, fields: TextFields) -> Iterator[Sequence[str]]:
    """Yield for each sample of a file its text, or its prompt and its completion.

    Args:
        path: Text file with one text a line, or JSON lines, JSON or parquet.
        fields: Names of the fields with the texts in JSON lines, JSON and parquet.

    Raises:
        InputError: The file cannot be read, is not UTF-8, or has a sample without the field.
    """
    if plain_suffix(path) in _DOCUMENTS:
        yield from documents_of(path, fields)
        return
    with open_stream(path) as file:
        for number, line in lines_of(file, path):
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise InputError(f"{path}, line {number} is not UTF-8; convert it") from None
            if text:
                yield (text,)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file: its non-empty lines, or the field "prompt" of each JSON object.

    Raises:
        InputError: The file cannot be read, a JSON object has no prompt, or there is no prompt at all.
    """
    prompts = [text for (text,) in texts_of(path, TextFields("prompt", hint="add a prompt to each object"))]
    if not prompts:
        raise InputError(f"--prompts {path} contains no prompt; write one per line")
    return prompts
