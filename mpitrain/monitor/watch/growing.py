"""A file that another process appends lines to, read as it grows: each byte once, on a shared file system, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mpitrain.monitor.json_lines import LONGEST
from mpitrain.storage.disk import open_plain

_PIECE = 1 << 22  # bytes read at once


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
