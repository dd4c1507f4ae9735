"""Text files as a stream of tokens: their bytes, or what a Hugging Face `tokenizers` file makes of them.

Files follow each other in the order given. A file is a document: where documents have an end (see `make_encoder`), it
comes after each, else there is nothing between them. Held out are whole files where there are several and they come
near the fraction, else the end of the stream, cut after a line.

With a tokenizer, text is encoded in pieces of about 256 KiB that end after a line, without special tokens.

Where documents are packed or end at blank lines, `documents` goes on with their texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.sources import Block, PrepareOptions, Source, TextFields, held_out_files, token_source
from mpitrain.data.sources.documents import documents_source
from mpitrain.data.sources.encoder import Encoder, make_encoder
from mpitrain.data.sources.streams import LONGEST, head, opened, plain_suffix, size_of, skip, wide_encoding
from mpitrain.errors import InputError

_CHUNK = 1 << 20
_PIECE = 256 << 10
_PIECES_AT_ONCE = 16  # encoded together: the tokenizer library spreads them over the cores
_LINE_SEARCH = 64 << 10
_SNIFF_BYTES = 64 << 10
_ARCHIVES = (".zip", ".tar", ".7z", ".h5", ".hdf5", ".parquet", ".arrow", ".safetensors", ".pdf", ".pyc")
NEVER_TEXT = frozenset((*_ARCHIVES, ".pt", ".pth", ".pkl", ".pickle"))
_NEAR_ENOUGH = 0.5  # whole files held out must come within this part of the fraction asked for


@dataclass(frozen=True)
class _Range:
    """Bytes start ... stop-1 of a file, the split they go to, and what the file's text is in (None: UTF-8)."""

    path: Path
    start: int
    stop: int
    split: str
    encoding: str | None
    ends: bool  # whether the file ends with it


def is_text(path: Path) -> bool:
    """Whether a file, or what is compressed in it, is text by its first bytes."""
    if plain_suffix(path) in NEVER_TEXT:
        return False
    start = head(path, _SNIFF_BYTES)
    return b"\0" not in start or wide_encoding(start) is not None


def text_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe text as a stream of bytes (uint8, a vocabulary of 256), or of token numbers (uint16 or uint32).

    Args:
        files: The text files, in order.
        options: Tokenizer, encoding and end of documents; whether these are packed or end at blank lines.
    """
    encoding = encoding_of(files, options.encoding)
    if options.pack or options.blank_lines:
        read = _between_blank_lines if options.blank_lines else _whole
        return documents_source(files, replace(options, encoding=encoding), read)
    encoder = make_encoder(options.tokenizer, options.end_token, documents=False)

    def blocks(held_out: float) -> Iterator[Block]:
        for part in _ranges(files, held_out, encoding):
            for tokens in _encoded(part, encoder) if encoder.tokenizer else _bytes(part):
                yield part.split, (np.asarray(tokens, encoder.dtype),)
            if part.ends and encoder.end is not None:
                yield part.split, (np.array([encoder.end], encoder.dtype),)

    return token_source(len(files), blocks, options, encoder.dtype, encoder.vocabulary, encoder.end)


def encoding_of(files: Sequence[Path], encoding: str | None) -> str | None:
    """What the text is to be read as: as given, where it is not UTF-8.

    Raises:
        InputError: Nothing is given, and a file is UTF-16 or UTF-32.
    """
    if encoding is not None:
        try:
            "a".encode(encoding)
        except LookupError:  # Python does not know it, or it is none of text
            known = "utf-8, utf-16, utf-32, latin-1, cp1252 ..."
            raise InputError(f"--encoding {encoding} is unknown; give {known}") from None
        return None if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    for path in files:
        found = wide_encoding(head(path, _SNIFF_BYTES))
        if found is not None:
            raise InputError(f"text file {path} is {found.upper()}; give --encoding {found}, or convert it to UTF-8")
    return None


def text_pieces(path: Path, encoding: str | None) -> Iterator[str]:
    """The text of a file in pieces that end after a line where they can; encoding: None for UTF-8."""
    return _pieces(_Range(path, 0, size_of(path, encoding), TRAIN, encoding, True))


def _ranges(files: Sequence[Path], fraction: float, encoding: str | None) -> list[_Range]:
    sizes = [size_of(path, encoding) for path in files]
    total = sum(sizes)
    held = held_out_files(sizes, fraction)
    held_bytes = sum(size for size, out in zip(sizes, held, strict=True) if out)
    if abs(held_bytes - total * fraction) <= _NEAR_ENOUGH * total * fraction:
        return [
            _Range(path, 0, size, HELD_OUT if out else TRAIN, encoding, True)
            for path, size, out in zip(files, sizes, held, strict=True)
            if size
        ]
    return list(_tail_ranges(files, sizes, round(total * (1 - fraction)), encoding))


def _tail_ranges(files: Sequence[Path], sizes: Sequence[int], cut: int, encoding: str | None) -> Iterator[_Range]:
    """Everything from byte `cut` of the stream on is held out."""
    for path, size in zip(files, sizes, strict=True):
        inside = size if cut >= size else _after_line(path, cut, size, encoding) if cut > 0 else 0
        if inside:
            yield _Range(path, 0, inside, TRAIN, encoding, inside == size)
        if inside < size:
            yield _Range(path, inside, size, HELD_OUT, encoding, True)
        cut -= size


def _after_line(path: Path, offset: int, size: int, encoding: str | None) -> int:
    """The next place after `offset` where a line, or else a character, begins."""
    near = next(_read(_Range(path, offset, size, TRAIN, encoding, False), _LINE_SEARCH))
    line = near.find(b"\n") + 1
    if line and offset + line < size:
        return offset + line
    return offset + next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)


def _bytes(part: _Range) -> Iterator[np.ndarray[Any, Any]]:
    return (np.frombuffer(chunk, np.uint8) for chunk in _read(part, _CHUNK))


def _read(part: _Range, size: int) -> Iterator[bytes]:
    with opened(part.path, part.encoding) as file:
        file.seek(part.start) if file.seekable() else skip(file, part.start)
        left = part.stop - part.start
        while left and (chunk := file.read(min(size, left))):
            left -= len(chunk)
            yield chunk


def _encoded(part: _Range, encoder: Encoder) -> Iterator[np.ndarray[Any, Any]]:
    pieces = _pieces(part)
    while together := list(islice(pieces, _PIECES_AT_ONCE)):
        yield from (tokens for tokens in encoder.encode(together) if len(tokens))


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
            "convert it or give its --encoding, or leave --tokenizer, --pack and --blank-lines out to train on bytes"
        ) from None


# -- documents


def _whole(path: Path, _: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    pieces, length = [], 0
    for piece in text_pieces(path, encoding):
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise _too_long(path)
    yield ("".join(pieces),)


def _between_blank_lines(path: Path, _: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    """The texts between blank lines, which have white space alone."""
    lines: list[str] = []
    length = 0
    for line in chain(_lines(text_pieces(path, encoding), path), [""]):
        if line.strip():
            lines.append(line)
            length += len(line)
            if length > LONGEST:
                raise _too_long(path)
        elif lines:
            yield ("\n".join(lines).rstrip("\r"),)
            lines, length = [], 0


def _lines(pieces: Iterable[str], path: Path) -> Iterator[str]:
    begun: list[str] = []  # of a line, whose pieces are put together once
    for piece in pieces:
        first, *others = piece.split("\n")
        begun.append(first)
        if sum(map(len, begun)) > LONGEST:
            raise _too_long(path)
        if others:
            yield "".join(begun)
            yield from others[:-1]
            begun = others[-1:]
    yield "".join(begun)


def _too_long(path: Path) -> InputError:
    return InputError(
        f"text file {path} has a document of more than {LONGEST >> 20} Mi characters; split it, or leave --pack and "
        "--blank-lines out for a stream of tokens"
    )
