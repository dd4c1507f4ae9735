"""Tokens made by another tool: flat files of numbers, and pairs of .idx and .bin from Megatron-LM.

    train.bin, val.bin     numbers of uint16 or uint32, one after the other, as nanoGPT writes them; also compressed
    tokens.npy             a one-dimensional array of integers
    data.idx + data.bin    documents of Megatron-LM

Flat files are read in the order given. If some files are named train... and the others val... (see `splits_by_name`),
the latter are held out. Otherwise, the end of the flat files is held out, or documents at evenly spread places of
Megatron's files.

In Megatron-LM's indexed data sets, NAME.idx lists the places of the documents in NAME.bin.

    NAME.idx   MMIDIDX 00 00 | version 1, uint64 | dtype, uint8 | sequences, uint64 | borders, uint64
               lengths int32 [sequences] | offsets in NAME.bin int64 [sequences] | first sequences int64 [borders]
    NAME.bin   the tokens of the sequences

A document consists of the sequences from one border to the next, so there is one border more than documents.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.sources import Block, PrepareOptions, Source, held_out_mask, token_source
from mpitrain.data.sources.arrays import npy_header
from mpitrain.data.sources.documents import splits_by_name
from mpitrain.data.sources.encoder import NO_END, end_of_vocabulary, load_tokenizer, smallest_dtype
from mpitrain.data.sources.streams import CHUNK, open_stream, plain_stem, plain_suffix, read_up_to, size_of, skip
from mpitrain.errors import InputError

Tokens = np.ndarray[Any, Any]
_LARGEST = 1 << 32
_LABELS = ("x", "y", "x_train", "y_train", "x_test", "y_test")  # names of arrays that `arrays` reads


def is_tokens(path: Path) -> bool:
    """Return True if a file is named .bin, is an index of Megatron-LM, or is a one-dimensional array of integers."""
    suffix = plain_suffix(path)
    if suffix == ".npy" and plain_stem(path) not in _LABELS:
        try:
            shape, dtype = _read_header(path)
        except InputError:
            return False  # `arrays` reports the problem
        return len(shape) == 1 and dtype.kind in "iu"
    return suffix == ".bin" or (suffix == ".idx" and is_index(path))


def tokens_source(files: Sequence[Path], options: PrepareOptions) -> Source:
    """Describe files of tokens, in order.

    Args:
        files: Flat files, or pairs of index and data.
        options: Tokenizer or vocabulary, end token and dtype.

    Raises:
        InputError: Sizes or dtypes do not fit, or the tokenizer cannot be read.
    """
    pairs, flats = pairs_of(files)
    if pairs and flats:
        raise InputError(f"sources {pairs[0].index} and {flats[0]} are of different kinds; prepare each separately")
    if pairs and options.dtype:
        raise InputError(f"--dtype is for flat files of tokens, but {pairs[0].index} defines its own; remove it")
    vocabulary, end = _vocabulary_and_end(options)
    if end is None and options.end_token is None and pairs:
        end = common_end(pairs)
    forms = [_dtype_and_length(path, options.dtype) for path in flats]
    stored = np.result_type(*(pair.dtype for pair in pairs), *(dtype for dtype, _ in forms))
    dtype = smallest_dtype(vocabulary) if vocabulary else stored.name if stored.kind == "u" else "uint32"
    most = vocabulary or min(_LARGEST, np.iinfo(dtype).max + 1)

    def blocks(held_out: float) -> Iterator[Block]:
        pieces = _documents(pairs, held_out, end) if pairs else _flat_blocks(flats, forms, held_out)
        for split, tokens, path, start in pieces:
            _check_tokens(tokens, most, path, start)
            yield split, (tokens.astype(dtype),)

    return token_source(2 * len(pairs) + len(flats), blocks, options, dtype, vocabulary, end)


def _vocabulary_and_end(options: PrepareOptions) -> tuple[int | None, int | None]:
    """Return the size of the vocabulary and the end token, each None if unknown."""
    vocabulary, named = options.vocabulary, options.end_token
    end = int(named) if named is not None and named.isdecimal() else None
    if options.tokenizer is not None:
        known = load_tokenizer(options.tokenizer).get_vocab()
        vocabulary = vocabulary or max(known.values()) + 1
        end = end_of_vocabulary(known, named, options.tokenizer) if end is None else end
    elif end is None and named not in (None, NO_END):
        raise InputError(f"--end-token {named} is a name; add the --tokenizer, or use the token's number")
    if vocabulary is not None and end is not None and end >= vocabulary:
        raise InputError(f"--end-token {end} is outside the vocabulary of {vocabulary}; use a smaller number")
    return vocabulary, end


def _check_tokens(tokens: Tokens, most: int, path: Path, start: int) -> None:
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < most:
        at = int(np.flatnonzero((tokens < 0) | (tokens >= most))[0])
        raise InputError(
            f"{path}, token {start + at}: {int(tokens[at])} is not in a vocabulary of {most:,}; use the --tokenizer "
            "or the --dtype that the file was made with"
        )


def _dtype_and_length(path: Path, dtype_name: str | None) -> tuple[np.dtype[Any], int]:
    """Return the dtype and the number of the tokens in a flat file."""
    if plain_suffix(path) == ".npy":
        shape, dtype = _read_header(path)
        return dtype, shape[0]
    dtype, size = np.dtype(dtype_name or "uint16").newbyteorder("<"), size_of(path)
    if size % dtype.itemsize:
        raise InputError(
            f"{path} has {size:,} bytes, which is not a multiple of {dtype.itemsize}, the size of {dtype.name}; set "
            "--dtype to the type of its tokens"
        )
    return dtype, size // dtype.itemsize


def _flat_blocks(
    files: Sequence[Path], forms: Sequence[tuple[np.dtype[Any], int]], held_out: float
) -> Iterator[tuple[str, Tokens, Path, int]]:
    """Yield (split, tokens, their file, index of the first token in it)."""
    splits = splits_by_name(files)
    cut = round(sum(length for _, length in forms) * (1 - held_out))
    for path, (dtype, length) in zip(files, forms, strict=True):
        done = 0
        for tokens in _read_flat(path, dtype):
            inside = len(tokens) if splits else min(max(0, cut - done), len(tokens))
            split = splits[path] if splits else TRAIN
            if inside:
                yield split, tokens[:inside], path, done
            if inside < len(tokens):
                yield HELD_OUT, tokens[inside:], path, done + inside
            done += len(tokens)
        if done != length:
            raise InputError(f"{path} ends after {done:,} of {length:,} tokens; restore that file")
        cut -= length


def _read_flat(path: Path, dtype: np.dtype[Any]) -> Iterator[Tokens]:
    with open_stream(path) as file:
        if plain_suffix(path) == ".npy":
            npy_header(file, f"array {path}")
        rest = b""
        while chunk := file.read(CHUNK):
            rest += chunk
            whole = len(rest) // dtype.itemsize * dtype.itemsize
            if whole:
                yield np.frombuffer(rest[:whole], dtype)
            rest = rest[whole:]


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with open_stream(path) as file:
        shape, _, dtype = npy_header(file, f"array {path}")
    return shape, dtype


def _documents(pairs: Sequence[Pair], held_out: float, end: int | None) -> Iterator[tuple[str, Tokens, Path, int]]:
    """Yield (split, tokens, their file, index of the first token in it) of documents, each with its end token.

    Neighbouring documents of the same split are joined.
    """
    splits = splits_by_name([pair.index for pair in pairs])
    number = 0
    for pair in pairs:
        mask = held_out_mask(number, pair.documents, 0.0 if splits else held_out)
        number += pair.documents
        waiting: dict[str, list[Tokens]] = {TRAIN: [], HELD_OUT: []}
        offset = 0
        for document, out in zip(pair.read(), mask.tolist(), strict=True):
            split = splits[pair.index] if splits else HELD_OUT if out else TRAIN
            if end is not None and len(document) and document[-1] != end:
                document = np.append(document, document.dtype.type(end))
            waiting[split].append(document)
            if sum(map(len, waiting[split])) * pair.dtype.itemsize >= CHUNK:
                yield split, np.concatenate(waiting[split]), pair.data, offset
                waiting[split] = []
            offset += len(document)
        for split, documents in waiting.items():
            if documents and any(map(len, documents)):
                yield split, np.concatenate(documents), pair.data, offset


_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<QBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_DOCUMENTS_COMPARED = 1000  # documents whose last token is compared


@dataclass(frozen=True, eq=False)
class Pair:
    """An index file and its file of tokens.

    Attributes:
        index: Index file.
        data: File of tokens.
        dtype: Dtype of the tokens.
        lengths: Number of tokens in each sequence.
        offsets: Offset of each sequence in `data`, in bytes.
        borders: First sequence of each document, then the number of sequences.
    """

    index: Path
    data: Path
    dtype: np.dtype[Any]
    lengths: Tokens
    offsets: Tokens
    borders: Tokens

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.borders) - 1

    def read(self) -> Iterator[Tokens]:
        """Yield the tokens of each document. The file is read forward if the offsets allow it."""
        size = self.dtype.itemsize
        places = zip(self.offsets, self.lengths, strict=True)
        slices = _read_slices(self.data, ((int(offset), int(length) * size) for offset, length in places))
        for count in np.diff(self.borders).tolist():
            parts = [np.frombuffer(part, self.dtype) for part in islice(slices, count)]
            yield parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])


def _read_slices(path: Path, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes at each (offset, count) of a file.

    A file that is not seekable, such as a compressed one, is opened again for an earlier offset.
    """
    with ExitStack() as stack:
        file, at = stack.enter_context(open_stream(path)), 0
        for offset, count in places:
            if file.seekable():
                file.seek(offset)
            else:
                if offset < at:
                    stack.close()
                    file, at = stack.enter_context(open_stream(path)), 0
                skip(file, offset - at)
            data = file.read(count)
            at = offset + len(data)
            if len(data) != count:
                raise InputError(f"{path} is shorter than its .idx says; restore both files")
            yield data


def is_index(path: Path) -> bool:
    """Return True if a file begins like an index of Megatron-LM."""
    with open_stream(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def pairs_of(files: Sequence[Path]) -> tuple[list[Pair], list[Path]]:
    """Return the pairs (.bin, .idx) among the files, and the remaining files.

    A pair is found even if only one of its two files is listed.
    """
    indices: dict[Path, Path] = {}  # index: data
    others: list[Path] = []
    for path in files:
        index, data = _sibling(path, ".bin", ".idx"), _sibling(path, ".idx", ".bin")
        if plain_suffix(path) == ".idx":
            if data is None:
                raise InputError(f"{path} needs a .bin of the same name in its folder; put it there")
            indices[path] = data
        elif plain_suffix(path) == ".bin" and index is not None and is_index(index):
            indices[index] = path
        else:
            others.append(path)
    return [_read_index(index, data) for index, data in indices.items()], others


def _sibling(path: Path, suffix: str, other: str) -> Path | None:
    """Return the file of the same name with another suffix, compressed or not."""
    if plain_suffix(path) != suffix:
        return None
    stem = path.with_suffix("") if path.suffix.lower() == suffix else path.with_suffix("").with_suffix("")
    beside = Path(f"{stem}{other}")
    return next((each for each in (beside, beside.with_name(beside.name + path.suffix)) if each.is_file()), None)


def common_end(pairs: Sequence[Pair]) -> int | None:
    """Return the token at the end of each of the first documents.

    Returns:
        None if these tokens differ, or if there are fewer than two documents with tokens.
    """
    ends: set[int] = set()
    count = 0
    for pair in pairs:
        for document, _ in zip(pair.read(), range(_DOCUMENTS_COMPARED - count), strict=False):
            if len(document):
                ends.add(int(document[-1]))
                count += 1
            if len(ends) > 1:
                return None
    return ends.pop() if count > 1 else None


def _read_index(index: Path, data: Path) -> Pair:
    with open_stream(index) as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
        if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEADER.size:
            raise InputError(f"{index} is not an index file of Megatron-LM; restore it")
        version, code, sequences, borders = _HEADER.unpack_from(head, len(_MAGIC))
        if version != 1 or code not in _DTYPES:
            raise InputError(f"{index} has version {version} and token type {code}; use version 1 with integer tokens")
        content = b"".join(read_up_to(file, 12 * sequences + 8 * borders))
    if len(content) < 12 * sequences + 8 * borders:
        raise InputError(f"{index} ends too early; restore that file")
    lengths = np.frombuffer(content, "<i4", sequences)
    offsets = np.frombuffer(content, "<i8", sequences, 4 * sequences)
    first = np.frombuffer(content, "<i8", borders, 12 * sequences)
    dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
    ordered = borders > 1 and first[0] == 0 and first[-1] == sequences and bool((np.diff(first) >= 0).all())
    last = size_of(data) - lengths.astype(np.int64) * dtype.itemsize  # last possible offset; nothing overflows
    if not ordered or (lengths < 0).any() or (offsets < 0).any() or (offsets > last).any():
        raise InputError(f"{index} and {data} do not match; restore both files")
    return Pair(index, data, dtype, lengths, offsets, first)
