"""A file as a stream of bytes, decompressed (.gz, .bz2, .xz, .zst) and converted from its text encoding to UTF-8.

    a.jsonl.zst     decompressed as it is read; the name without the last suffix, a.jsonl, tells its kind
    UTF-16, UTF-32  recognised by their byte order mark or their zeros; converted to UTF-8 if the encoding is given

Memory use: one chunk, for any size of the file.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mpitrain.data.folders import os_errors, require_package
from mpitrain.errors import InputError

CHUNK = 1 << 20
LONGEST = 64 << 20  # largest line, element or document in bytes: each is in memory as a whole
_ZEROS = 0.3  # least fraction of zero bytes in UTF-16 or UTF-32 text without a byte order mark
_MARKS = {"utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}
_WIDE = (  # in each four bytes: which are mostly zero, the least fraction of them, and which are hardly ever zero
    ("utf-32-be", (0, 1), 0.8, (3,)),
    ("utf-32-le", (2, 3), 0.8, (0,)),
    ("utf-16-be", (0, 2), 2 * _ZEROS, (1, 3)),
    ("utf-16-le", (1, 3), 2 * _ZEROS, (0, 2)),
)


class _Pieces(io.RawIOBase):
    """A stream of bytes made of pieces, any of which may be empty."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        super().__init__()
        self._pieces, self._ready = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready and (piece := next(self._pieces, None)) is not None:
            self._ready = memoryview(piece)
        count = min(len(into), len(self._ready))
        into[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._pieces.close()
        super().close()


def _decompress_zstandard(path: Path) -> Generator[bytes, None, None]:
    """Yield the content of zstandard frames.

    An incomplete frame is an error, which the stream class of the package would ignore.
    """
    with require_package(f"{path} needs", "zstandard"):
        import zstandard
    decompressor, frame, packed = zstandard.ZstdDecompressor(), None, b""
    with open(path, "rb") as file:
        while packed := packed or file.read(CHUNK):
            frame = frame or decompressor.decompressobj()
            try:
                piece = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            yield piece
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("its last frame is incomplete")


def _transcode(file: IO[bytes], path: Path, encoding: str) -> Generator[bytes, None, None]:
    """Yield text in some encoding, converted to UTF-8."""
    decoder, taken, chunk = codecs.getincrementaldecoder(encoding)(), 0, b"more"
    while chunk:
        chunk = file.read(CHUNK)
        try:
            piece = decoder.decode(chunk, final=not chunk).encode("utf-8")
        except UnicodeError:
            raise InputError(
                f"text file {path} is not {encoding} after byte {taken}; use the right --encoding"
            ) from None
        taken += len(chunk)
        yield piece


_OPENERS: dict[str, Callable[[Path], Any]] = {  # each returns a stream of the decompressed bytes
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: io.BufferedReader(_Pieces(_decompress_zstandard(path)), CHUNK),
}


def is_compressed(path: Path) -> bool:
    """Return True if the file name is one of a compressed file that can be read as a stream."""
    return path.suffix.lower() in _OPENERS


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file's decompressed content, in lower case: `.jsonl` for a.jsonl and for a.jsonl.zst."""
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def plain_stem(path: Path) -> str:
    """Return the name of a file's decompressed content without suffix, in lower case: `train` for train.jsonl.zst."""
    return Path(path.stem if is_compressed(path) else path.name).stem.lower()


@contextmanager
def open_stream(path: Path, encoding: str | None = None) -> Iterator[IO[bytes]]:
    """Open the decompressed content of a file.

    Args:
        path: File to open.
        encoding: Encoding of its text, which is converted to UTF-8; None leaves the bytes unchanged.

    Raises:
        InputError: In the `with` block, if the file cannot be read, is damaged, or is not in this encoding.
    """
    with os_errors(f"{path} cannot be read"):
        try:
            file = _OPENERS[path.suffix.lower()](path) if is_compressed(path) else open(path, "rb")  # noqa: SIM115
            with file:
                yield file if encoding is None else io.BufferedReader(_Pieces(_transcode(file, path, encoding)), CHUNK)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and (error.errno is not None or not is_compressed(path)):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{path} is damaged or cut off ({reason}); restore that file") from None


def head(path: Path, size: int) -> bytes:
    """Return the first bytes of a file's decompressed content.

    Args:
        path: File to read.
        size: Largest number of bytes to return.
    """
    with open_stream(path) as file:
        return file.read(size)


def wide_encoding(start: bytes) -> str | None:
    """Return the encoding of text with this beginning if it is UTF-16 or UTF-32, else None.

    It is recognised by its byte order mark or by its many zeros.
    """
    for name, marks in _MARKS.items():
        if start.startswith(marks):
            return name
    zeros = [start[i::4].count(0) / max(1, len(start[i::4])) for i in range(4)]
    if len(start) < 8 or sum(zeros) / 4 < _ZEROS:
        return None
    for name, empty, least, full in _WIDE:
        if min(zeros[i] for i in empty) > least and max(zeros[i] for i in full) < 0.1:
            return name
    return None


def size_of(path: Path, encoding: str | None = None) -> int:
    """Return the number of bytes in a file's content, decompressed and as UTF-8.

    A compressed file, or one in another encoding, is read to its end.

    Args:
        path: File to measure.
        encoding: Encoding of its text; None for UTF-8, or for bytes.
    """
    if encoding is None and not is_compressed(path):
        with os_errors(f"{path} cannot be read"):
            return path.stat().st_size
    with open_stream(path, encoding) as file:
        return sum(len(chunk) for chunk in iter(lambda: file.read(CHUNK), b""))


def lines_of(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) of a stream.

    Args:
        file: Stream to read.
        path: File, for the message.

    Raises:
        InputError: A line is longer than `LONGEST`.
    """
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        if len(line) > LONGEST:
            raise InputError(f"{path}, line {number} is longer than {LONGEST >> 20} MiB; split or remove it")
        yield number, line


def read_up_to(file: IO[bytes], count: int, size: int = CHUNK) -> Iterator[bytes]:
    """Yield the next `count` bytes of a stream, or all that remain, in pieces.

    Args:
        file: Stream to read.
        count: Number of bytes.
        size: Largest number of bytes in a piece.
    """
    while count and (piece := file.read(min(size, count))):
        yield piece
        count -= len(piece)


def skip(file: IO[bytes], count: int) -> None:
    """Skip `count` bytes of a stream that need not be seekable.

    Args:
        file: Stream to read.
        count: Number of bytes.
    """
    for _ in read_up_to(file, count):
        pass
