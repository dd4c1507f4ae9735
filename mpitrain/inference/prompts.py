"""Prompts and what comes out: text to tokens and back, as the data of the training were made.

Bytes where a run has no tokenizer.json, else what the tokenizer makes of the text, without special tokens.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpitrain.data.sources.encoder import without_surrogates
from mpitrain.errors import InputError
from mpitrain.storage.disk import read_plain, reason

BYTES = 256
_HALF = "\ufffd"  # what a tokenizer gives for a character of which bytes lack
_WINDOW = 16  # tokens before the next one that it is decoded together with


def utf8(text: str) -> bytes:
    """The bytes of a text: those that the command line had, and "?" for half a surrogate pair of a JSON file."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


class TextCodec(ABC):
    """Makes tokens of text, and text of tokens."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    @abstractmethod
    def decoder(self) -> TextDecoder:
        """Makes text of tokens that come one after the other."""


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


class BytesCodec(TextCodec):
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


class TokenizerCodec(TextCodec):
    """Tokens of a Hugging Face tokenizer. path: its file. Raises InputError where it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError(f'{path} needs the package tokenizers; pip install "mpitrain[data]"') from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            why = str(error).splitlines()[0]
            raise InputError(f"tokenizer file {path} is not one of Hugging Face tokenizers ({why})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

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
        return "" if text.endswith(_HALF) else self._give(text)

    def finish(self) -> str:
        return self._give(self._text(self._told + self._new)) if self._new else ""

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _give(self, text: str) -> str:
        before = self._text(self._told) if self._told else ""
        self._told, self._new = (self._told + self._new)[-_WINDOW:], []
        return text[len(before) :]


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


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: its lines but empty ones, or, of a .jsonl file, what each has under "prompt".

    Raises:
        InputError: The file cannot be read, or has a line without a prompt, or none at all.
    """
    try:
        text = read_plain(path).decode("utf-8")
    except OSError as error:
        raise InputError(f"--prompts {path} cannot be read: {reason(error)}; give a file of prompts") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts {path} is not UTF-8 at byte {error.start}; convert it") from None
    lines = text.split("\n")
    found = list(_of_json(path, lines)) if path.suffix == ".jsonl" else [line.rstrip("\r") for line in lines if line]
    if not found:
        raise InputError(f"--prompts {path} holds no prompt; write one a line")
    return found


def _of_json(path: Path, lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            value = None
        if not isinstance(value, str):
            raise InputError(f'--prompts {path}, line {number} is no JSON object with a text "prompt"; mend it')
        yield value
