"""Text input: separate documents in JSON lines, JSON arrays, parquet and Arrow, or plain text files.

    {"text": "..."}                          a stream of tokens, an end-of-document token after each document
    {"prompt": "...", "completion": "..."}   whole pairs packed into samples; tokens of prompts are not trained on
    with `pack`                              whole documents packed into samples (see `encoder.py`)

Documents are read one after the other, for any size of the files. If some files are named train and the others val,
validation, dev or test, the latter are held out; otherwise, documents at evenly spread places of the input.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.sources import Block, PrepareOptions, Source, TextFields, held_out_mask, streams, token_source
from mpitrain.data.sources.encoder import Encoder, Packer, Tokens, make_encoder
from mpitrain.data.sources.table_files import ARROW, arrow_columns, arrow_schema
from mpitrain.errors import InputError

LINES = frozenset((".jsonl", ".ndjson"))
PAIRS_PACK = 1024  # default tokens per sample of prompts and completions
_NEXT = re.compile(r"[\s,\[]*")  # text between two elements of an array
_ENCODED_AT_ONCE = 256  # documents encoded together
_ROWS_AT_ONCE = 1024
_SPLIT = re.compile(r"(train|val|valid|validation|dev|test|held[_-]out)(?![a-z])")
_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def is_documents(path: Path, fields: TextFields) -> bool:
    """Return True if a file is JSON lines, a JSON array of objects, or parquet or Arrow with the given fields as text.

    Args:
        path: File to look at.
        fields: Fields of the text.
    """
    suffix = streams.plain_suffix(path)
    if suffix in LINES:
        return True
    if suffix == ".json":
        if _is_array(path):
            return True
        with streams.open_stream(path) as file:
            try:
                return isinstance(json.loads(file.readline(streams.CHUNK)), dict)
            except ValueError:
                return False
    if suffix not in ARROW:
        return False
    schema = arrow_schema(path)
    return all(name in schema.names and _is_text(schema.field(name).type) for name in fields.names)


def documents_of(path: Path, fields: TextFields, encoding: str | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each document: one text, or prompt and completion.

    Args:
        path: File of documents.
        fields: Fields of the text.
        encoding: Encoding of JSON files; None for UTF-8.

    Raises:
        InputError: A line or row is broken, or lacks a field; the message names it.
    """
    if streams.plain_suffix(path) in ARROW:
        return _rows(path, fields)
    if streams.plain_suffix(path) == ".json" and _is_array(path):
        return _elements(path, fields, encoding)
    return _lines(path, fields, encoding)


Read = Callable[[Path, TextFields, str | None], Iterator[tuple[str, ...]]]


def documents_source(files: Sequence[Path], options: PrepareOptions, read: Read = documents_of) -> Source:
    """Describe documents as a stream of tokens, or as samples that they are packed into.

    Args:
        files: JSON lines and parquet, in order.
        options: Tokenizer, fields, encoding, end token and packing.
        read: Function that yields the texts of each document of a file, such as `documents_of`.

    Raises:
        InputError: The tokenizer cannot be used, or documents to pack have no end token.
    """
    encoder, fields = make_encoder(options.tokenizer, options.end_token, documents=True), options.text_fields
    pack = options.pack or (PAIRS_PACK if fields.prompt is not None else None)
    if pack and encoder.end is None:
        raise InputError("packed documents need an end token; use --end-token to name a token of the tokenizer")
    splits = splits_by_name(files)
    packers: dict[str, Packer] = {}

    def blocks(held_out: float) -> Iterator[Block]:
        packers.clear()
        texts = ((path, read(path, fields, options.encoding)) for path in files)
        for is_held_out, documents in _by_split(texts, splits, held_out, encoder):
            split = HELD_OUT if is_held_out else TRAIN
            if pack:
                assert encoder.end is not None
                packer = packers.setdefault(split, Packer(pack, encoder.end, encoder.dtype, whole=bool(fields.prompt)))
                columns = packer.add(documents)
            else:
                columns = (np.concatenate([tokens for tokens, _ in documents]),)
            if len(columns[0]):
                yield split, columns
        for split, packer in packers.items():
            if len((last_columns := packer.finish())[0]):
                yield split, last_columns

    def notes() -> tuple[str, ...]:
        named = ((split.replace("_", " "), packer) for split, packer in packers.items())
        return tuple(f"{split}: {note}" for split, packer in named for note in packer.notes())

    dtype, vocabulary, end = encoder.dtype, encoder.vocabulary, encoder.end
    return token_source(len(files), blocks, options, dtype, vocabulary, end, pack=pack, late_notes=notes)


def splits_by_name(files: Sequence[Path]) -> dict[Path, str] | None:
    """Return the split of each file by its name, for Arrow that of its folder.

    It is None unless some are named train... and some val....

    Files of the held-out split are named val, validation, dev or test....

    Raises:
        InputError: Some files have names of both splits, and another file of neither.
    """
    # Hugging Face's `datasets` names the folder of the split, and the file data-00000-of-00001.arrow
    named = {path: path.parent.name if path.suffix == ".arrow" else streams.plain_stem(path) for path in files}
    matches = {path: _SPLIT.match(name) for path, name in named.items()}
    splits = {path: TRAIN if match[1] == "train" else HELD_OUT for path, match in matches.items() if match}
    if set(splits.values()) != {TRAIN, HELD_OUT}:
        return None
    other = next((path for path in files if path not in splits), None)
    if other is not None:
        raise InputError(f"source {other} is named neither train nor val, but others are; rename it, or leave it out")
    return splits


def _by_split(
    texts: Iterable[tuple[Path, Iterator[tuple[str, ...]]]],
    splits: dict[Path, str] | None,
    held_out: float,
    encoder: Encoder,
) -> Iterator[tuple[bool, list[tuple[Tokens, int]]]]:
    """Encode documents in batches, and yield each batch as (held_out, documents).

    held_out is True if the documents belong to the held-out split. A document is (tokens, number of prompt tokens).
    """
    number = 0
    for path, documents in texts:
        while batch := list(islice(documents, _ENCODED_AT_ONCE)):
            if splits is None:
                mask = held_out_mask(number, len(batch), held_out)
                number += len(batch)
            else:
                mask = np.full(len(batch), splits[path] == HELD_OUT)
            encoded = _encode_documents(batch, encoder)
            for which in (False, True):
                split_documents = [tokens for tokens, out in zip(encoded, mask.tolist(), strict=True) if out == which]
                if split_documents := [document for document in split_documents if len(document[0])]:
                    yield which, split_documents


def _encode_documents(documents: Sequence[tuple[str, ...]], encoder: Encoder) -> list[tuple[Tokens, int]]:
    """Return each document's tokens with the end token, and how many of them belong to the prompt.

    A document without text has no tokens.
    """
    parts = iter(encoder.encode([text for document in documents for text in document]))
    end = np.array([] if encoder.end is None else [encoder.end], encoder.dtype)
    encoded_documents = []
    for document in documents:
        tokens = [next(parts) for _ in document]
        prompt = len(tokens[0]) if len(tokens) > 1 else 0
        encoded_documents.append((np.concatenate([*tokens, end]) if any(map(len, tokens)) else end[:0], prompt))
    return encoded_documents


def _lines(path: Path, fields: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    with streams.open_stream(path, encoding) as file:
        for number, line in streams.lines_of(file, path):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = json.loads(line.strip())
            except UnicodeDecodeError:
                raise InputError(f"{where} is not UTF-8; convert the file, or set --encoding") from None
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", "nested too deeply")
                raise InputError(f"{where} is not valid JSON ({reason}); fix or remove the line") from None
            yield _texts(content, fields, where)


def _is_array(path: Path) -> bool:
    return re.match(rb"\s*\[\s*\{", streams.head(path, streams.CHUNK)) is not None


def _elements(path: Path, fields: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each object in a JSON array, read one after the other."""
    decode, rest, line, more = json.JSONDecoder().raw_decode, "", 1, True
    with streams.open_stream(path, encoding) as file:
        text = codecs.getreader("utf-8")(file)
        try:
            while more:
                chunk = text.read(max(streams.CHUNK, len(rest)))  # doubled each time: it is decoded again
                rest, more, at = rest + chunk, bool(chunk), 0
                while (start := _NEXT.match(rest, at)) and start.end() < len(rest) and rest[start.end()] != "]":
                    where = f"{path}, line {line + rest.count(chr(10), at, start.end())}"
                    try:
                        content, end = decode(rest, start.end())
                    except (ValueError, RecursionError) as error:
                        if more and len(rest) - at <= streams.LONGEST:
                            break  # it may continue in the next chunk
                        reason = getattr(error, "msg", "nested too deeply")
                        raise InputError(f"{where} is not valid JSON ({reason}); fix or remove the element") from None
                    yield _texts(content, fields, where)
                    line, at = line + rest.count("\n", at, end), end
                rest = rest[at:]
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 after line {line}; convert it, or set --encoding") from None
    if not rest.rstrip().endswith("]"):
        raise InputError(f"{path} ends after line {line}, before the ] of its array; restore that file")


def _texts(content: Any, fields: TextFields, where: str) -> tuple[str, ...]:
    """Return the texts in a document's fields. Raises InputError if one is missing or not text."""
    if not isinstance(content, dict):
        raise InputError(f'{where} is not an object with fields, such as {{"text": ...}}; fix or remove it')
    for name in fields.names:
        if name not in content:
            known = ", ".join(map(str, content))[:200]
            raise InputError(f"{where} has no field {name!r} (its fields: {known}); {fields.hint}")
        if not isinstance(value := content[name], str):
            kind = _KINDS.get(type(value), "null")
            raise InputError(f"{where}: field {name!r} is {kind}, not text; fix or remove it")
    return tuple(content[name] for name in fields.names)


def _rows(path: Path, fields: TextFields) -> Iterator[tuple[str, ...]]:
    _texts(dict.fromkeys(arrow_schema(path).names, ""), fields, str(path))
    row = 0
    for columns in arrow_columns(path, fields.names, _ROWS_AT_ONCE):
        for texts in zip(*columns, strict=True):
            row += 1
            yield _texts(dict(zip(fields.names, texts, strict=True)), fields, f"{path}, row {row}")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


# -- Text files as a stream of tokens: their bytes, or tokens of a Hugging Face `tokenizers` file
#
# Files are read in the order given. A file is a document. If documents have an end token (see `make_encoder`), it
# follows each of them. Whole files are held out if there are several and their bytes come
# near the fraction; otherwise the end of the stream is, cut after a line.
#
# With a tokenizer, text is encoded in pieces of about 256 KiB that end after a line, without special tokens. If
# documents are packed or end at blank lines, their texts are handled like the documents above.


_PIECE = 256 << 10
_PIECES_AT_ONCE = 16  # encoded in one call: the tokenizer library uses all cores
_LINE_SEARCH = 64 << 10
_SNIFF_BYTES = 64 << 10
_ARCHIVES = (".zip", ".tar", ".7z", ".h5", ".hdf5", ".parquet", ".arrow", ".safetensors", ".pdf", ".pyc")
NEVER_TEXT = frozenset((*_ARCHIVES, ".pt", ".pth", ".pkl", ".pickle"))
_NEAR_ENOUGH = 0.5  # whole files are held out if their bytes differ from the fraction by at most this part of it


@dataclass(frozen=True)
class _Range:
    """Bytes start ... stop-1 of a file, the split they belong to, and the encoding of the file's text (None: UTF-8)."""

    path: Path
    start: int
    stop: int
    split: str
    encoding: str | None
    ends: bool  # True if the file ends with this range


def is_text(path: Path) -> bool:
    """Return True if the first bytes of a file, after decompression, are text."""
    if streams.plain_suffix(path) in NEVER_TEXT:
        return False
    start = streams.head(path, _SNIFF_BYTES)
    return b"\0" not in start or streams.wide_encoding(start) is not None


def text_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe text as a stream of bytes (uint8, a vocabulary of 256), or of token numbers (uint16 or uint32).

    Args:
        files: Text files, in order.
        options: Tokenizer, encoding and end token; packing, and documents that end at blank lines.

    Raises:
        InputError: The encoding is unknown, or the tokenizer cannot be used.
    """
    encoding = encoding_of(files, options.encoding)
    if options.pack or options.blank_lines:
        read = _between_blank_lines if options.blank_lines else _whole_file
        return documents_source(files, replace(options, encoding=encoding), read)
    encoder = make_encoder(options.tokenizer, options.end_token, documents=False)

    def blocks(held_out: float) -> Iterator[Block]:
        for part in _ranges(files, held_out, encoding):
            if encoder.tokenizer is None:
                for chunk in _read(part, streams.CHUNK):
                    yield part.split, (np.asarray(np.frombuffer(chunk, np.uint8), encoder.dtype),)
            else:
                pieces = _pieces(part)
                while batch := list(islice(pieces, _PIECES_AT_ONCE)):
                    yield from ((part.split, (tokens,)) for tokens in encoder.encode(batch) if len(tokens))
            if part.ends and encoder.end is not None:
                yield part.split, (np.array([encoder.end], encoder.dtype),)

    return token_source(len(files), blocks, options, encoder.dtype, encoder.vocabulary, encoder.end)


def encoding_of(files: Sequence[Path], encoding: str | None) -> str | None:
    """Return the encoding in which to read text files; None for UTF-8.

    Args:
        files: Text files, which are checked if no encoding is given.
        encoding: Encoding given by the user, or None.

    Raises:
        InputError: The encoding is unknown; or none is given, and a file is UTF-16 or UTF-32.
    """
    if encoding is not None:
        try:
            "a".encode(encoding)
        except LookupError:  # unknown to Python, or not an encoding of text
            examples = "utf-8, utf-16, utf-32, latin-1, cp1252 ..."
            raise InputError(f"--encoding {encoding} is unknown; use {examples}") from None
        return None if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    for path in files:
        name = streams.wide_encoding(streams.head(path, _SNIFF_BYTES))
        if name is not None:
            raise InputError(f"text file {path} is {name.upper()}; add --encoding {name}, or convert it to UTF-8")
    return None


def text_pieces(path: Path, encoding: str | None) -> Iterator[str]:
    """Yield the text of a file in pieces that end after a line if possible.

    Args:
        path: Text file.
        encoding: Encoding of the text; None for UTF-8.
    """
    return _pieces(_Range(path, 0, streams.size_of(path, encoding), TRAIN, encoding, True))


def _ranges(files: Sequence[Path], fraction: float, encoding: str | None) -> list[_Range]:
    sizes = [streams.size_of(path, encoding) for path in files]
    total = sum(sizes)
    mask = held_out_files(sizes, fraction)
    held_bytes = sum(size for size, out in zip(sizes, mask, strict=True) if out)
    if abs(held_bytes - total * fraction) <= _NEAR_ENOUGH * total * fraction:
        return [
            _Range(path, 0, size, HELD_OUT if out else TRAIN, encoding, True)
            for path, size, out in zip(files, sizes, mask, strict=True)
            if size
        ]
    return list(_tail_ranges(files, sizes, round(total * (1 - fraction)), encoding))


def held_out_files(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Choose files to hold out as a whole, so that the held-out bytes follow the fraction as closely as possible.

    Args:
        sizes: Bytes of each file, in order.
        fraction: Fraction of the bytes to hold out.

    Returns:
        True for each file that is held out.
    """
    mask, owed = [], 0.0
    for size in sizes:
        owed += size * fraction
        mask.append(owed >= size / 2 and fraction > 0)
        if mask[-1]:
            owed -= size
    return mask


def _tail_ranges(files: Sequence[Path], sizes: Sequence[int], cut: int, encoding: str | None) -> Iterator[_Range]:
    """Yield ranges that hold out everything from byte `cut` of the stream on."""
    for path, size in zip(files, sizes, strict=True):
        inside = size if cut >= size else _after_line(path, cut, size, encoding) if cut > 0 else 0
        if inside:
            yield _Range(path, 0, inside, TRAIN, encoding, inside == size)
        if inside < size:
            yield _Range(path, inside, size, HELD_OUT, encoding, True)
        cut -= size


def _after_line(path: Path, offset: int, size: int, encoding: str | None) -> int:
    """Return the offset after `offset` at which the next line begins; without a line nearby, the next character."""
    near = next(_read(_Range(path, offset, size, TRAIN, encoding, False), _LINE_SEARCH))
    line = near.find(b"\n") + 1
    if line and offset + line < size:
        return offset + line
    return offset + next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)


def _read(part: _Range, size: int) -> Iterator[bytes]:
    with streams.open_stream(part.path, part.encoding) as file:
        file.seek(part.start) if file.seekable() else streams.skip(file, part.start)
        yield from streams.read_up_to(file, part.stop - part.start, size)


def _pieces(part: _Range) -> Iterator[str]:
    """Yield the text in pieces that end after a line, else after a space, else between two characters."""
    rest, offset = b"", part.start
    for chunk in _read(part, _PIECE):
        rest += chunk
        end = rest.rfind(b"\n") + 1 or rest.rfind(b" ") + 1 or _whole_characters(rest)
        yield _decode(rest[:end], part.path, offset)
        rest, offset = rest[end:], offset + end
    if rest:
        yield _decode(rest, part.path, offset)


def _whole_characters(text: bytes) -> int:
    """Return the length of the text without an incomplete UTF-8 character at its end."""
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 == 0xC0:
            return len(text) - back
    return len(text)


def _decode(text: bytes, path: Path, offset: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text file {path} is not UTF-8 at byte {offset + error.start}; "
            "convert it, set --encoding, or train on its bytes, without --tokenizer, --pack and --blank-lines"
        ) from None


# -- text files as documents


def _whole_file(path: Path, _: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    pieces, length = [], 0
    for piece in text_pieces(path, encoding):
        pieces.append(piece)
        length += len(piece)
        if length > streams.LONGEST:
            raise _too_long_error(path)
    yield ("".join(pieces),)


def _between_blank_lines(path: Path, _: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    """Yield the texts between blank lines, which contain only white space."""
    lines: list[str] = []
    length = 0
    for line in chain(_lines_of_text(text_pieces(path, encoding), path), [""]):
        if line.strip():
            lines.append(line)
            length += len(line)
            if length > streams.LONGEST:
                raise _too_long_error(path)
        elif lines:
            yield ("\n".join(lines).rstrip("\r"),)
            lines, length = [], 0


def _lines_of_text(pieces: Iterable[str], path: Path) -> Iterator[str]:
    begun: list[str] = []  # pieces of a line, joined at its end
    for piece in pieces:
        first, *others = piece.split("\n")
        begun.append(first)
        if sum(map(len, begun)) > streams.LONGEST:
            raise _too_long_error(path)
        if others:
            yield "".join(begun)
            yield from others[:-1]
            begun = others[-1:]
    yield "".join(begun)


def _too_long_error(path: Path) -> InputError:
    return InputError(
        f"text file {path} has a document of more than {streams.LONGEST >> 20} Mi characters; split it, or prepare "
        "a stream of tokens, without --pack and --blank-lines"
    )
