"""Terminal and files of a script whose run continues from a checkpoint.

While a script runs again up to the position of the checkpoint, it prints and writes nothing, because it has done so
before. At the position, the terminal is given back, and each file that was open gets the length that it had.
"""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from typing import Any, TextIO

from mpitrain.errors import InputError, printable


class Outputs:
    """Files that a script has opened to write, and its terminal.

    Attributes:
        is_silent: True while the script prints and writes nothing.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self._handles: list[tuple[str, str, weakref.ref[Any]]] = []  # path, mode, file
        self._modes: dict[str, str] = {}  # last mode of each file
        self._terminal: list[int] = []

    def add(self, path: str, mode: str, handle: Any) -> None:
        """ScriptRecord a file that was opened to write.

        Args:
            path: Path of the file.
            mode: Mode of `open`.
            handle: The open file.
        """
        self._handles = [each for each in self._handles if (file := each[2]()) is not None and not file.closed]
        self._handles.append((path, mode, weakref.ref(handle)))
        self._modes[path] = mode

    def silence(self) -> TextIO:
        """Print and write nothing until `speak`, and return standard error for messages about this run."""
        self.is_silent = True
        self._terminal = [os.dup(1), os.dup(2)]
        errors = os.fdopen(os.dup(2), "w", buffering=1)
        self._flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        return errors

    def speak(self) -> None:
        """Print and write again."""
        if not self.is_silent:
            return
        self._flush()
        for descriptor, original in zip((1, 2), self._terminal, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        self.is_silent = False

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def describe(self) -> list[list[Any]]:
        """Return path, mode, size in bytes, and whether it is open, of each file written; only rank 0 has written any.

        Raises:
            InputError: A file is open to read and write, so that its content is not known from its size.
        """
        self._flush()
        out: list[list[Any]] = []
        is_open = set()
        for path, mode, reference in self._handles:
            handle = reference()
            if handle is None or handle.closed:
                continue
            if "+" in mode:
                raise InputError(
                    f"--resume cannot save a script while {printable(path)} is open to read and write; open it to write"
                )
            handle.flush()
            is_open.add(path)
            out.append([path, mode, os.path.getsize(path), True])
        for path, mode in self._modes.items():
            if path not in is_open and os.path.exists(path):
                out.append([path, mode, os.path.getsize(path), False])
        return out

    def continue_files(self, files: list[list[Any]]) -> None:
        """Let open files continue those of the checkpoint, and shorten what was appended to after it.

        Args:
            files: List that `describe` returned when the checkpoint was saved.

        Raises:
            InputError: The script has opened other files, or a file is missing or shorter.
        """
        handles = [(m, h) for _, m, reference in self._handles if (h := reference()) is not None and not h.closed]
        are_open = [entry for entry in files if entry[3]]
        if [mode for mode, _ in handles] != [entry[1] for entry in are_open]:
            names = ", ".join(printable(entry[0]) for entry in are_open) or "none"
            raise InputError(f"--resume: other files are open for writing than at the checkpoint ({names})")
        for path, mode, size, is_open in files:
            length = os.path.getsize(path) if os.path.exists(path) else -1
            if length < size and (is_open or "a" in mode):
                raise InputError(f"--resume: {printable(path)} is shorter than at the checkpoint; restore it")
            if length > size and (is_open or "a" in mode):
                os.truncate(path, size)
        for (_, handle), (path, mode, _, _) in zip(handles, are_open, strict=True):
            handle.flush()
            descriptor = os.open(path, os.O_WRONLY | (os.O_APPEND if "a" in mode else 0))
            os.dup2(descriptor, handle.fileno())
            os.close(descriptor)
            with suppress(OSError, ValueError):
                handle.seek(0, os.SEEK_END)
        self._modes.update((path, mode) for path, mode, _, _ in files)
        self._handles = [
            (path, mode, weakref.ref(handle)) for (_, handle), (path, mode, _, _) in zip(handles, are_open, strict=True)
        ]
