"""Text files as one stream of tokens: their bytes, or what a Hugging Face `tokenizers` file makes of them.

Files follow each other in the order given, with nothing between them. Held out are whole files where there are
several and they come near the fraction, else the end of the stream, cut after a line.

With a tokenizer, text is encoded in pieces of about 256 KiB that end after a line, without special tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.commit import os_errors
from mpitrain.data.format import HELD_OUT, TRAIN, FieldSpec
from mpitrain.data.sources.split import held_out_files
from mpitrain.data.writer import Block, Source
from mpitrain.errors import InputError

_CHUNK = 1 << 20
_PIECE = 256 << 10
_PIECES_AT_ONCE = 16  # encoded together: the tokenizer library spreads them over the cores
_LINE_SEARCH = 64 << 10
_NEAR_ENOUGH = 0.5  # whole files held out must come within this part of the fraction asked for


@dataclass(frozen=True)
class _Range:
    """Bytes start ... stop-1 of a file, and the split they go to."""

    path: Path
    start: int
    stop: int
    split: str


def text_source(files: Sequence[Path], tokenizer: Path | None) -> Source:
    """Describe text as a stream of bytes (uint8, a vocabulary of 256), or of token numbers (uint16 or uint32).

    Args:
        files: The text files, in order.
        tokenizer: The file of a Hugging Face tokenizer; None for bytes.
    """
    encoder = _load(tokenizer) if tokenizer else None
    vocabulary = max(encoder.get_vocab().values()) + 1 if encoder else 256
    dtype = "uint8" if not encoder else "uint16" if vocabulary <= 1 << 16 else "uint32"

    def blocks(held_out: float) -> Iterator[Block]:
        for part in _ranges(files, held_out):
            for tokens in _encoded(part, encoder) if encoder else _bytes(part):
                yield part.split, (np.asarray(tokens, dtype),)

    field = FieldSpec(name="tokens", dtype=dtype, shape=(), given="integer")
    return Source("tokens", (field,), blocks, files=len(files), vocabulary=vocabulary, tokenizer=tokenizer)


def _ranges(files: Sequence[Path], fraction: float) -> list[_Range]:
    with os_errors("a text file cannot be read"):
        sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    held = held_out_files(sizes, fraction)
    held_bytes = sum(size for size, out in zip(sizes, held, strict=True) if out)
    if abs(held_bytes - total * fraction) <= _NEAR_ENOUGH * total * fraction:
        return [
            _Range(path, 0, size, HELD_OUT if out else TRAIN)
            for path, size, out in zip(files, sizes, held, strict=True)
            if size
        ]
    return list(_tail_ranges(files, sizes, round(total * (1 - fraction))))


def _tail_ranges(files: Sequence[Path], sizes: Sequence[int], cut: int) -> Iterator[_Range]:
    """Everything from byte `cut` of the stream on is held out."""
    for path, size in zip(files, sizes, strict=True):
        inside = size if cut >= size else _after_line(path, cut, size) if cut > 0 else 0
        if inside:
            yield _Range(path, 0, inside, TRAIN)
        if inside < size:
            yield _Range(path, inside, size, HELD_OUT)
        cut -= size


def _after_line(path: Path, offset: int, size: int) -> int:
    """The next place after `offset` where a line, or else a character, begins."""
    with os_errors(f"text file {path} cannot be read"), open(path, "rb") as file:
        file.seek(offset)
        near = file.read(_LINE_SEARCH)
    line = near.find(b"\n") + 1
    if line and offset + line < size:
        return offset + line
    return offset + next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)


def _bytes(part: _Range) -> Iterator[np.ndarray[Any, Any]]:
    return (np.frombuffer(chunk, np.uint8) for chunk in _read(part, _CHUNK))


def _read(part: _Range, size: int) -> Iterator[bytes]:
    with os_errors(f"text file {part.path} cannot be read"), open(part.path, "rb") as file:
        file.seek(part.start)
        left = part.stop - part.start
        while left and (chunk := file.read(min(size, left))):
            left -= len(chunk)
            yield chunk


def _encoded(part: _Range, encoder: Any) -> Iterator[np.ndarray[Any, Any]]:
    pieces = _pieces(part)
    while together := list(islice(pieces, _PIECES_AT_ONCE)):
        for encoding in encoder.encode_batch(together, add_special_tokens=False):
            if encoding.ids:
                yield np.array(encoding.ids, np.uint32)


def _pieces(part: _Range) -> Iterator[str]:
    """The text in pieces that end after a line, else after a space, else between two characters."""
    rest, offset = b"", part.start
    for chunk in _read(part, _PIECE):
        rest += chunk
        end = rest.rfind(b"\n") + 1 or rest.rfind(b" ") + 1 or _whole_characters(rest)
        yield _decoded(rest[:end], part.path, offset)
        rest, offset = rest[end:], offset + end
    if rest:
        yield _decoded(rest, part.path, offset)


def _whole_characters(text: bytes) -> int:
    """The length without a UTF-8 character that is cut at the end."""
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 == 0xC0:
            return len(text) - back
    return len(text)


def _decoded(text: bytes, path: Path, offset: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text file {path} is not UTF-8 at byte {offset + error.start}; "
            "convert it, or leave --tokenizer out to train on bytes"
        ) from None


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError('--tokenizer needs the package tokenizers; pip install "mpitrain[data]"') from None
    if not path.is_file():
        raise InputError(f"tokenizer file {path} does not exist; give a tokenizer.json")
    try:
        encoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise InputError(f"tokenizer file {path} is not one of Hugging Face tokenizers ({reason})") from None
    encoder.no_truncation()  # a file may ask for both, and would silently cut our pieces
    encoder.no_padding()
    return encoder
