"""Files of JSON lines that a job appends to, and that a kill may leave with a torn last line.

They are read line by line, so memory is that of one line, whatever the size of the file; a line that is longer than any
that a job writes is damage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from mpitrain.errors import InputError, first_problem
from mpitrain.storage.disk import open_plain, reason

LONGEST = 16 << 20  # bytes of a line
_PIECE = 1 << 22  # bytes read at once
M = TypeVar("M", bound=BaseModel)


def whole_object(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None for a torn one, and for one that is no object with a step."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def lines_within(file: IO[bytes], most: int = LONGEST) -> Iterator[bytes | None]:
    """Yield the lines of a stream, and None in place of one that has more than `most` bytes.

    The rest of such a line is passed over after None was given, so whoever stops there has read `most` bytes of it.
    """
    while line := file.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        yield None
        while line and not line.endswith(b"\n"):
            line = file.readline(most)


def read_lines(
    path: Path, what: str, parsed: Callable[[bytes], dict[str, Any] | None] = whole_object
) -> list[dict[str, Any]]:
    """The objects of a file, in order. A torn last line is left out.

    Args:
        path: The file.
        what: What a message calls it.
        parsed: The object of a line; None where it is none.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: It cannot be read, or a line inside it is damaged.
    """
    found: list[dict[str, Any]] = []
    for number, line in _numbered(path, what):
        if (value := parsed(line)) is None:
            raise _damaged(path, what, number)
        found.append(value)
    return found


def _never(line: Any) -> bool:
    return False


def lines_of(path: Path, what: str, kind: type[M], after_torn: Callable[[M], bool] = _never) -> Iterator[M]:
    """The lines of a file of JSON lines, checked. A torn last line is left out.

    Args:
        path: The file.
        what: What a message calls it.
        kind: What each line must be.
        after_torn: Whether a line can follow one that a killed job left torn: the first of the next job.

    Raises:
        InputError: The file cannot be read, or a line inside it is damaged.
        FileNotFoundError: It is not there.
    """
    torn: InputError | None = None
    for number, line in _numbered(path, what):
        try:
            value = kind.model_validate(json.loads(line))
        except ValidationError as error:
            problem = first_problem(error)
            raise InputError(f"{what} {path}, line {number}: {problem}; mend that line") from None
        except (ValueError, RecursionError):
            if torn is not None:
                raise torn from None
            torn = _damaged(path, what, number)
            continue
        if torn is not None and not after_torn(value):
            raise torn
        torn = None
        yield value
    if torn is not None:
        raise torn


def _numbered(path: Path, what: str) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a file with their numbers."""
    try:
        with open_plain(path) as file:
            for number, line in enumerate(lines_within(file), 1):
                if line is None:
                    raise InputError(f"{what} {path}: line {number} has more than {LONGEST >> 20} MiB; remove it")
                if line.endswith(b"\n"):
                    yield number, line
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read ({reason(error)}); give a run folder you may read") from None


def _damaged(path: Path, what: str, number: int) -> InputError:
    return InputError(f"{what} {path}: line {number} is damaged; remove it")


class GrowingFile:
    """Gives whole lines once each.

    Args:
        path: The file, which need not be there yet.
        last_bytes: Begin at most so many bytes before its end; None: at its beginning.

    Attributes:
        begun_anew: How often the file was found replaced, or shorter than what had been read of it.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self.begun_anew = 0
        self._last_bytes = last_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._read = 0  # bytes, up to the end of a line
        self._passing = False  # whether that is the middle of a line too long to be one, which is given as an empty one

    def new_lines(self) -> Iterator[bytes]:
        """The lines that came since the last call. Where the file was begun anew, all of them again.

        Whether it was is known before the first line is given. A file that is not there, or cannot be read now, has
        none.
        """
        try:
            with open_plain(self.path) as file:  # opened each time, so that a network file system asks its server
                status = os.fstat(file.fileno())
                first = self._file is None
                if not first and (self._file != (status.st_dev, status.st_ino) or status.st_size < self._read):
                    self.begun_anew += 1
                    self._read, self._passing = 0, False
                self._file = (status.st_dev, status.st_ino)
                if first and self._last_bytes is not None and status.st_size > self._last_bytes:
                    file.seek(status.st_size - self._last_bytes)
                    self._read = file.tell() + len(file.readline(LONGEST))  # which is a part of a line
                file.seek(self._read)
                rest = b""
                while piece := file.read(_PIECE):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        self._read += len(line) + 1
                        yield b"\n" if self._passing else line + b"\n"
                        self._passing = False
                    if len(rest) > LONGEST or self._passing:
                        self._passing = True
                        self._read += len(rest)
                        rest = b""
        except OSError:
            return
