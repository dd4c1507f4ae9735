"""Plain text as documents: each file is one, or one ends wherever lines are blank. See `documents` for what follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mpitrain.data.sources.documents import TextFields, documents_source
from mpitrain.data.sources.text import encoding_of, text_pieces
from mpitrain.data.writer import Source


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
        return ((text,) for text in (between_blank_lines(pieces) if blank_lines else ["".join(pieces)]))

    return documents_source(
        files, TextFields(), tokenizer, pack=pack, encoding=encoding, end_token=end_token, read=read
    )


def between_blank_lines(pieces: Iterable[str]) -> Iterator[str]:
    """The texts between blank lines, which have white space alone. pieces: of one text, cut anywhere."""
    lines: list[str] = []
    for line in _lines(pieces):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines).rstrip("\r")
            lines = []
    if lines:
        yield "\n".join(lines).rstrip("\r")


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        yield from whole
    yield rest
