"""Plain text as documents: each file is one, or one ends wherever lines are blank. See `documents` for what follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mpitrain.data.sources.documents import TextFields, documents_source
from mpitrain.data.sources.streams import LONGEST
from mpitrain.data.sources.text import encoding_of, text_pieces
from mpitrain.data.writer import Source
from mpitrain.errors import InputError


def text_documents_source(
    files: Sequence[Path],
    tokenizer: Path | None,
    *,
    pack: int | None = None,
    blank_lines: bool = False,
    encoding: str | None = None,
    end_token: str | None = None,
) -> Source:
    """Describe text files as documents, in a stream of tokens or packed into samples.

    Args:
        files: The text files, in order.
        tokenizer: The file of a Hugging Face tokenizer; None for bytes.
        pack: Tokens of a sample that whole documents are packed into; None for a stream.
        blank_lines: Whether a document ends at a blank line; else with its file.
        encoding: What the text is in; None for UTF-8.
        end_token: What ends a document, see `make_encoder`.
    """
    encoding = encoding_of(files, encoding)

    def read(path: Path, fields: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
        pieces = text_pieces(path, encoding)
        return ((text,) for text in (between_blank_lines(pieces, path) if blank_lines else [joined(pieces, path)]))

    return documents_source(
        files, TextFields(), tokenizer, pack=pack, encoding=encoding, end_token=end_token, read=read
    )


def joined(pieces: Iterable[str], path: Path) -> str:
    """The text of one document. Raises InputError where it is longer than `LONGEST`."""
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise _too_long(path)
    return "".join(found)


def between_blank_lines(pieces: Iterable[str], path: Path) -> Iterator[str]:
    """The texts between blank lines, which have white space alone. pieces: of one text, cut anywhere."""
    lines: list[str] = []
    length = 0
    for line in _lines(pieces, path):
        if line.strip():
            lines.append(line)
            length += len(line)
            if length > LONGEST:
                raise _too_long(path)
        elif lines:
            yield "\n".join(lines).rstrip("\r")
            lines, length = [], 0
    if lines:
        yield "\n".join(lines).rstrip("\r")


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
