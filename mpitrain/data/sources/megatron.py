"""Megatron-LM's indexed data sets: NAME.idx says where the documents of NAME.bin lie.

    NAME.idx   MMIDIDX 00 00 | version 1, uint64 | dtype, uint8 | sequences, uint64 | borders, uint64
               lengths int32 [sequences] | offsets in NAME.bin int64 [sequences] | first sequences int64 [borders]
    NAME.bin   the tokens of the sequences

A document is the sequences from one of the borders to the next, so there is one border more than documents.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from mpitrain.data.sources.streams import is_compressed, opened, plain_suffix, read_up_to, size_of, skip
from mpitrain.errors import InputError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<QBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LOOKED_AT = 1000  # documents whose last token is compared

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Pair:
    """An index, and the tokens it is of.

    Attributes:
        index: The file of the index.
        data: The file of the tokens.
        dtype: Of the tokens.
        lengths: How many tokens each sequence has.
        offsets: Where each begins in `data`, in bytes.
        borders: The first sequence of each document, and their number at the end.
    """

    index: Path
    data: Path
    dtype: np.dtype[Any]
    lengths: Array
    offsets: Array
    borders: Array

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.borders) - 1

    def read(self) -> Iterator[Array]:
        """The tokens of each document. Reads forward where the offsets allow it."""
        with _Places(self.data) as places:
            for first, last in zip(self.borders[:-1].tolist(), self.borders[1:].tolist(), strict=True):
                parts = [
                    np.frombuffer(places.read(offset, length * self.dtype.itemsize), self.dtype)
                    for offset, length in zip(
                        self.offsets[first:last].tolist(), self.lengths[first:last].tolist(), strict=True
                    )
                ]
                yield parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])


class _Places:
    """Stretches of a file by their offsets; one that is compressed is read anew where an offset lies behind."""

    def __init__(self, path: Path) -> None:
        self._path, self._stack, self._at = path, ExitStack(), 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _Places:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, offset: int, count: int) -> bytes:
        if self._file is None or (offset < self._at and is_compressed(self._path)):
            self._stack.close()
            self._file, self._at = self._stack.enter_context(opened(self._path)), 0
        if offset != self._at:
            skip(self._file, offset - self._at) if is_compressed(self._path) else self._file.seek(offset)
        found = self._file.read(count)
        self._at = offset + len(found)
        if len(found) != count:
            raise InputError(f"{self._path} ends too early for its .idx; restore both files")
        return found


def is_index(path: Path) -> bool:
    """Whether a file begins as an index of Megatron's does."""
    with opened(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def pairs_of(files: Sequence[Path]) -> tuple[list[Pair], list[Path]]:
    """The pairs that are among the files, one of which is enough to name both, and the other files."""
    indices: dict[Path, Path] = {}  # index: data
    others: list[Path] = []
    for path in files:
        index, data = _sibling(path, ".bin", ".idx"), _sibling(path, ".idx", ".bin")
        if plain_suffix(path) == ".idx":
            if data is None:
                raise InputError(f"{path} has no .bin of the same name beside it; give both files")
            indices[path] = data
        elif plain_suffix(path) == ".bin" and index is not None and is_index(index):
            indices[index] = path
        else:
            others.append(path)
    return [_read_index(index, data) for index, data in indices.items()], others


def _sibling(path: Path, suffix: str, other: str) -> Path | None:
    """The file of the same name with another suffix, compressed or not."""
    if plain_suffix(path) != suffix:
        return None
    stem = path.with_suffix("") if not is_compressed(path) else path.with_suffix("").with_suffix("")
    beside = Path(f"{stem}{other}")
    packed = beside.with_name(beside.name + path.suffix)
    return next((each for each in (beside, packed) if each.is_file()), None)


def common_end(pairs: Sequence[Pair]) -> int | None:
    """The token that the first documents all end with; None where they do not, or there is one document."""
    found: set[int] = set()
    seen = 0
    for pair in pairs:
        for document, _ in zip(pair.read(), range(_LOOKED_AT - seen), strict=False):
            if len(document):
                found.add(int(document[-1]))
                seen += 1
            if len(found) > 1:
                return None
    return found.pop() if seen > 1 else None


def _read_index(index: Path, data: Path) -> Pair:
    with opened(index) as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
        if not head.startswith(_MAGIC) or len(head) < len(_MAGIC) + _HEADER.size:
            raise InputError(f"{index} is not an index of Megatron's; restore that file")
        version, code, sequences, borders = _HEADER.unpack_from(head, len(_MAGIC))
        if version != 1 or code not in _DTYPES:
            raise InputError(
                f"{index} has version {version} and type {code} of tokens; give version 1 of whole numbers"
            )
        content = read_up_to(file, 12 * sequences + 8 * borders)
    if len(content) < 12 * sequences + 8 * borders:
        raise InputError(f"{index} ends too early; restore that file")
    lengths = np.frombuffer(content, "<i4", sequences)
    offsets = np.frombuffer(content, "<i8", sequences, 4 * sequences)
    first = np.frombuffer(content, "<i8", borders, 12 * sequences)
    dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
    ordered = borders > 1 and first[0] == 0 and first[-1] == sequences and bool((np.diff(first) >= 0).all())
    last = size_of(data) - lengths.astype(np.int64) * dtype.itemsize  # where a sequence can begin; nothing overflows
    if not ordered or (lengths < 0).any() or (offsets < 0).any() or (offsets > last).any():
        raise InputError(f"{index} and {data} do not belong together; restore both files")
    return Pair(index, data, dtype, lengths, offsets, first)
