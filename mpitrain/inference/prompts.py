"""Prompts and what comes out: text to tokens and back, as the data of the training were made.

Bytes where a run has no tokenizer.json, else what the tokenizer makes of the text, without special tokens.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpitrain.data.sources.documents import LINES, TextFields, documents_of
from mpitrain.data.sources.encoder import load_tokenizer, without_surrogates
from mpitrain.data.sources.streams import lines_of, opened, plain_suffix
from mpitrain.errors import InputError

BYTES = 256


def utf8(text: str) -> bytes:
    """The bytes of a text: those that the command line had, and "?" for half a surrogate pair of a JSON file."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


class TextDecoder(ABC):
    """Makes text of tokens that come one after the other."""

    @abstractmethod
    def add(self, token: int) -> str:
        """The text that is whole with this token, if any."""

    @abstractmethod
    def finish(self) -> str:
        """What is left of a character that was never completed."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens of a text."""
        return "".join([self.add(token) for token in tokens]) + self.finish()


class BytesCodec:
    """Tokens are the bytes of the text in UTF-8. Tokens beyond those are no text."""

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def decoder(self) -> TextDecoder:
        return _BytesDecoder()


class _BytesDecoder(TextDecoder):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < BYTES else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerCodec:
    """Tokens of a Hugging Face tokenizer. path: its file. Raises InputError where it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids)

    def decoder(self) -> TextDecoder:
        return _TokensDecoder(self._tokenizer)


class _TokensDecoder(TextDecoder):
    """Some tokens give a character together, and some are written differently at the beginning of a text.

    So each is decoded with those before it, and what is new in that text is given, once it is whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._told: list[int] = []  # the last tokens whose text was given
        self._new: list[int] = []

    def add(self, token: int) -> str:
        self._new.append(token)
        text = self._text(self._told + self._new)
        return "" if text.endswith("\ufffd") else self._give(text)  # which stands for a character of which bytes lack

    def finish(self) -> str:
        return self._give(self._text(self._told + self._new)) if self._new else ""

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _give(self, text: str) -> str:
        before = self._text(self._told) if self._told else ""
        self._told, self._new = (self._told + self._new)[-16:], []  # as many as may change how the next is written
        return text[len(before) :]


TextCodec = BytesCodec | TokenizerCodec  # encode(text): its tokens. decoder(): makes text of tokens


def codec_of(tokenizer: Path | None, vocabulary: int, run: Path) -> TextCodec:
    """What makes tokens of text for a model.

    Args:
        tokenizer: The file of the tokenizer that made its data, if there is one.
        vocabulary: Tokens that the model knows.
        run: The run's folder, for messages.
    """
    if tokenizer is not None:
        return TokenizerCodec(tokenizer)
    if vocabulary in (BYTES, BYTES + 1):  # one more where documents have an end
        return BytesCodec()
    raise InputError(
        f"{run} has no tokenizer.json, and its {vocabulary} tokens are no bytes; copy the file from the data set there"
    )


_DOCUMENTS = LINES | {".json", ".parquet"}


def is_texts(path: Path) -> bool:
    """Return whether the name of a file says that it holds texts."""
    return path.is_file() and plain_suffix(path) in (".txt", *_DOCUMENTS)


def texts_of(path: Path, fields: TextFields) -> Iterator[Sequence[str]]:
    """The text of each sample of a file, or its prompt and its completion. Raises InputError."""
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


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: its lines but empty ones, or, of JSON lines, what each has under "prompt".

    Raises:
        InputError: The file cannot be read, or has a line without a prompt, or none at all.
    """
    found = [text for (text,) in texts_of(path, TextFields("prompt", hint="give each object a prompt"))]
    if not found:
        raise InputError(f"--prompts {path} holds no prompt; write one a line")
    return found
