"""Documents with borders of their own: JSON lines, JSON arrays and tables of parquet, one a line, element or row.

    {"text": "..."}                          a stream of tokens, an end-of-document token after each document
    {"prompt": "...", "completion": "..."}   whole pairs packed into samples; tokens of prompts are not trained on
    with `pack`                              whole documents packed into samples (see `packing`)

Documents are read one after the other, whatever the size of the files. Held out are documents spread evenly over the
input, or the files that are named val, validation, dev or test, where others are named train.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.sources import Block, PrepareOptions, Source, TextFields, held_out_mask, token_source
from mpitrain.data.sources.encoder import Encoder, Packer, Tokens, make_encoder
from mpitrain.data.sources.streams import CHUNK, LONGEST, head, lines_of, opened, plain_stem, plain_suffix
from mpitrain.data.sources.table_files import parquet_columns, parquet_schema
from mpitrain.errors import InputError

LINES = frozenset((".jsonl", ".ndjson"))
PAIRS_PACK = 1024  # tokens of a sample of prompts and completions, unless told otherwise
_NEXT = re.compile(r"[\s,\[]*")  # what lies between two elements of an array
_AT_ONCE = 256  # documents encoded together
_ROWS_AT_ONCE = 1024
_SPLIT = re.compile(r"(train|val|valid|validation|dev|test|held[_-]out)(?![a-z])")
_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def is_documents(path: Path, fields: TextFields) -> bool:
    """Whether a file is JSON lines or an array of objects, or parquet that has these fields as text."""
    suffix = plain_suffix(path)
    if suffix in LINES:
        return True
    if suffix == ".json":
        if _is_array(path):
            return True
        with opened(path) as file:
            try:
                return isinstance(json.loads(file.readline(CHUNK)), dict)
            except ValueError:
                return False
    if suffix != ".parquet":
        return False
    schema = parquet_schema(path)
    return all(name in schema.names and _is_text(schema.field(name).type) for name in fields.names)


def documents_of(path: Path, fields: TextFields, encoding: str | None = None) -> Iterator[tuple[str, ...]]:
    """The texts of each document: one, or prompt and completion.

    Raises:
        InputError: A line or row is broken, or lacks a field; the message names it.
    """
    if plain_suffix(path) == ".parquet":
        return _rows(path, fields)
    if plain_suffix(path) == ".json" and _is_array(path):
        return _elements(path, fields, encoding)
    return _lines(path, fields, encoding)


Read = Callable[[Path, TextFields, str | None], Iterator[tuple[str, ...]]]


def documents_source(files: Sequence[Path], options: PrepareOptions, read: Read = documents_of) -> Source:
    """Describe documents as a stream of tokens, or as samples that they are packed into.

    Args:
        files: JSON lines and parquet, in order.
        options: Tokenizer, fields, encoding and end of documents; how they are packed.
        read: Gives the texts of each document of a file, as `documents_of`.
    """
    encoder, fields = make_encoder(options.tokenizer, options.end_token, documents=True), options.text_fields
    pack = options.pack or (PAIRS_PACK if fields.prompt is not None else None)
    if pack and encoder.end is None:
        raise InputError("packed documents need a token that ends each; name one of the tokenizer's with --end-token")
    splits = splits_by_name(files)
    packers: dict[str, Packer] = {}

    def blocks(held_out: float) -> Iterator[Block]:
        packers.clear()
        texts = ((path, read(path, fields, options.encoding)) for path in files)
        for held, documents in _by_split(texts, splits, held_out, encoder):
            split = HELD_OUT if held else TRAIN
            if pack:
                assert encoder.end is not None
                packer = packers.setdefault(split, Packer(pack, encoder.end, encoder.dtype, whole=bool(fields.prompt)))
                columns = packer.add(documents)
            else:
                columns = (np.concatenate([tokens for tokens, _ in documents]),)
            if len(columns[0]):
                yield split, columns
        for split, packer in packers.items():
            if len((rest := packer.finish())[0]):
                yield split, rest

    def notes() -> tuple[str, ...]:
        named = ((split.replace("_", " "), packer) for split, packer in packers.items())
        return tuple(f"{split}: {note}" for split, packer in named for note in packer.notes())

    dtype, vocabulary, end = encoder.dtype, encoder.vocabulary, encoder.end
    return token_source(len(files), blocks, options, dtype, vocabulary, end, pack=pack, found=notes)


def splits_by_name(files: Sequence[Path]) -> dict[Path, str] | None:
    """The split of each file, where some are named train... and some val, validation, dev or test...; else None.

    Raises:
        InputError: Others beside these are named neither.
    """
    found: dict[Path, str] = {}
    for path in files:
        if match := _SPLIT.match(plain_stem(path)):
            found[path] = TRAIN if match[1] == "train" else HELD_OUT
    if set(found.values()) != {TRAIN, HELD_OUT}:
        return None
    other = next((path for path in files if path not in found), None)
    if other is not None:
        raise InputError(f"source {other} is named neither train nor val, as others are; rename it, or leave it out")
    return found


def _by_split(
    texts: Iterable[tuple[Path, Iterator[tuple[str, ...]]]],
    splits: dict[Path, str] | None,
    held_out: float,
    encoder: Encoder,
) -> Iterator[tuple[bool, list[tuple[Tokens, int]]]]:
    """(held out, documents of (tokens, how many of them are of the prompt)), each time of some documents."""
    number = 0
    for path, documents in texts:
        while together := list(islice(documents, _AT_ONCE)):
            if splits is None:
                held = held_out_mask(number, len(together), held_out)
                number += len(together)
            else:
                held = np.full(len(together), splits[path] == HELD_OUT)
            encoded = _encoded(together, encoder)
            for which in (False, True):
                chosen = [tokens for tokens, out in zip(encoded, held.tolist(), strict=True) if out == which]
                if chosen := [document for document in chosen if len(document[0])]:
                    yield which, chosen


def _encoded(documents: Sequence[tuple[str, ...]], encoder: Encoder) -> list[tuple[Tokens, int]]:
    """The tokens of each document with its end, and how many of them are of the prompt. Empty texts give nothing."""
    parts = iter(encoder.encode([text for document in documents for text in document]))
    end = np.array([] if encoder.end is None else [encoder.end], encoder.dtype)
    found = []
    for document in documents:
        tokens = [next(parts) for _ in document]
        prompt = len(tokens[0]) if len(tokens) > 1 else 0
        found.append((np.concatenate([*tokens, end]) if any(map(len, tokens)) else end[:0], prompt))
    return found


def _lines(path: Path, fields: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    with opened(path, encoding) as file:
        for number, line in lines_of(file, path):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = json.loads(line.strip())
            except UnicodeDecodeError:
                raise InputError(f"{where}: not UTF-8; convert it, or give its --encoding") from None
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", "nested too deeply")
                raise InputError(f"{where}: not JSON ({reason}); mend or remove the line") from None
            yield _texts(content, fields, where)


def _is_array(path: Path) -> bool:
    return re.match(rb"\s*\[\s*\{", head(path, CHUNK)) is not None


def _elements(path: Path, fields: TextFields, encoding: str | None) -> Iterator[tuple[str, ...]]:
    """The objects of an array, read one after the other."""
    decode, rest, line, more = json.JSONDecoder().raw_decode, "", 1, True
    with opened(path, encoding) as file:
        text = codecs.getreader("utf-8")(file)
        try:
            while more:
                chunk = text.read(max(CHUNK, len(rest)))  # twice as much each time: what is not whole is decoded again
                rest, more, at = rest + chunk, bool(chunk), 0
                while (start := _NEXT.match(rest, at)) and start.end() < len(rest) and rest[start.end()] != "]":
                    try:
                        content, end = decode(rest, start.end())
                    except (ValueError, RecursionError) as error:
                        if more and len(rest) - at <= LONGEST:
                            break  # it may go on in the next chunk
                        where = f"{path}, line {line + rest.count(chr(10), at, start.end())}"
                        reason = getattr(error, "msg", "nested too deeply")
                        raise InputError(f"{where}: not JSON ({reason}); mend or remove the element") from None
                    where = f"{path}, line {line + rest.count(chr(10), at, start.end())}"
                    yield _texts(content, fields, where)
                    line, at = line + rest.count("\n", at, end), end
                rest = rest[at:]
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 after line {line}; convert it, or give its --encoding") from None
    if not rest.rstrip().endswith("]"):
        raise InputError(f"{path} ends after line {line} without the ] of its array; restore that file")


def _texts(content: Any, fields: TextFields, where: str) -> tuple[str, ...]:
    """Return the texts of a document."""
    if not isinstance(content, dict):
        raise InputError(f'{where}: not an object with fields, such as {{"text": ...}}; mend or remove it')
    for name in fields.names:
        if name not in content:
            raise InputError(
                f"{where}: no field {name!r} (there: {', '.join(map(str, content))[:200]}); "
                "name the field with --text, or --prompt and --completion"
            )
        if not isinstance(value := content[name], str):
            kind = _KINDS.get(type(value), "null")
            raise InputError(f"{where}: field {name!r} is {kind}, not text; mend or remove it")
    return tuple(content[name] for name in fields.names)


def _rows(path: Path, fields: TextFields) -> Iterator[tuple[str, ...]]:
    _texts(dict.fromkeys(parquet_schema(path).names, ""), fields, str(path))
    row = 0
    for columns in parquet_columns(path, fields.names, _ROWS_AT_ONCE):
        for texts in zip(*columns, strict=True):
            row += 1
            yield _texts(dict(zip(fields.names, texts, strict=True)), fields, f"{path}, row {row}")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
