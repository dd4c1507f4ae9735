"""Files, printed lines and clocks of a script that several ranks run: those of one process.

| a script | rank 0 | other ranks |
|---|---|---|
| prints | prints | are silent |
| opens a file to write | writes it | write to nothing, or to a private copy where they also read |
| reads a file | reads it, once all have come so far | read it then |
| writes a file in another thread | writes it | write to nothing |
| makes, removes, renames, lists, looks for files | does so | get the same result or error |
| fetches a file by urllib, unpacks an archive, calls `os.system` | does so | get the same result or error |
| reads a clock or a line of input | does so | get the same |

Only calls of the script itself are answered by rank 0, also through os, pathlib, shutil, glob and tempfile. Libraries
look at files by themselves, in an order that may differ between ranks; but rank 0 alone fetches and unpacks for them,
too. See `downloads` for libraries that look for files and fetch those that are missing.
"""

from __future__ import annotations

import builtins
import glob
import io
import os
import shutil
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import suppress
from email import message_from_string
from http.client import HTTPMessage
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mpitrain.run.session import ScriptRun
from mpitrain.run.tensors import WholeTensor

_WRITES = ("mkdir", "rmdir", "remove", "unlink", "rename", "replace", "symlink", "link", "truncate", "chmod", "utime")
_LOOKS = ("listdir", "access")
_OF_SHUTIL = ("rmtree", "copy", "copy2", "copyfile", "copytree", "move", "make_archive")
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_PASSES_ON = {"os", "posixpath", "genericpath", "pathlib", "shutil", "glob", "tempfile", "contextlib", __name__}
_TIMES = ("st_atime", "st_mtime", "st_ctime", "st_atime_ns", "st_mtime_ns", "st_ctime_ns")


class Files:
    """Replacement of the functions with which a script reaches files, clocks and its terminal.

    Args:
        session: Run of the script.
    """

    def __init__(self, session: ScriptRun) -> None:
        self._session = session
        self._has_written = False
        self._written: set[str] = set()  # files that libraries, too, look at only when rank 0 has written them

    def install(self) -> None:
        """Replace the functions; from now on, other ranks than rank 0 are silent."""
        session = self._session
        if session.rank:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            os.fsync = os.fdatasync = lambda fd: None  # the null device, to which scripts write here, refuses both
        self._open = builtins.open
        builtins.open = io.open = self.open
        savers: list[Any] = [torch, torch.jit, torch.jit.RecursiveScriptModule]
        for owner in savers:
            owner.save = self._saving(owner.save)
        for owner in savers[:2]:
            owner.load = self._loading(owner.load)
        for name in (*_WRITES, *_LOOKS):
            setattr(os, name, self._by_first_rank(f"os.{name}", getattr(os, name), writes=name in _WRITES))
        for name in ("stat", "lstat"):
            setattr(os, name, self._stat(getattr(os, name)))
        os.walk = self._by_first_rank("os.walk", os.walk, result=lambda walk: [list(x) for x in walk])
        glob.glob = self._by_first_rank("glob.glob", glob.glob)
        for name in _OF_SHUTIL:
            function = self._by_first_rank(f"shutil.{name}", getattr(shutil, name), writes=True, result=_as_text)
            setattr(shutil, name, function)
        tempfile.mkdtemp = self._by_first_rank("tempfile.mkdtemp", tempfile.mkdtemp, writes=True)
        for name in _CLOCKS:
            setattr(time, name, self._by_first_rank(f"time.{name}", getattr(time, name)))
        builtins.input = self._by_first_rank("input", builtins.input)
        os.system = self._by_first_rank("os.system", os.system)
        self._fetch_on_first_rank()

    # -- reading and writing

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as `open` does; where a script writes, only rank 0 writes the file.

        Args:
            file: Path or descriptor.
            mode: Mode of `open`.
            *args: Further arguments of `open`.
            **kwargs: Further arguments of `open`.
        """
        session = self._session
        if session.alone or not isinstance(file, (str, bytes, os.PathLike)):
            return self._open(file, mode, *args, **kwargs)
        writes = bool(set(mode) & set("wax+"))
        if not session.is_main():  # ranks only meet in the script's main thread
            if writes and "+" not in mode and session.rank:
                file, mode = os.devnull, mode.replace("x", "w")
            return self._open(file, mode, *args, **kwargs)
        if writes:
            self._record(file)
            if session.outputs.is_silent:
                return self._follow(file, mode, self._open(os.devnull, mode.replace("x", "w"), *args, **kwargs))
            if "+" in mode and self._is_called_by_script():
                return self._open_both(file, mode, *args, **kwargs)
            if session.rank == 0:
                return self._follow(file, mode, self._open(file, mode, *args, **kwargs))
            if "+" in mode:
                return self._private(None, mode, *args, **kwargs)
            return self._open(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        if self._is_written(file) or self._is_called_by_script():
            session.meet(f"reading {os.path.basename(os.fspath(file))!r}")
        return self._open(file, mode, *args, **kwargs)

    def _open_both(self, file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        """Open a file to read and write: on rank 0 itself, elsewhere a private copy."""
        session = self._session
        session.meet(f"opening {os.path.basename(os.fspath(file))!r} to read and write")
        content = None
        if session.rank and "w" not in mode and "x" not in mode:
            with suppress(FileNotFoundError), self._open(file, "rb") as source:
                content = source.read()
        session.meet(f"writing {os.path.basename(os.fspath(file))!r}")
        if session.rank == 0:
            return self._follow(file, mode, self._open(file, mode, *args, **kwargs))
        return self._private(content, mode, *args, **kwargs)

    def _follow(self, file: Any, mode: str, handle: Any) -> Any:
        """Record a file that is open to write, for checkpoints of the script."""
        self._session.outputs.add(os.fsdecode(file), mode, handle)
        return handle

    def _private(self, content: bytes | None, mode: str, *args: Any, **kwargs: Any) -> Any:
        with self._session.without_meetings():
            descriptor, path = tempfile.mkstemp()
            if content is not None:
                os.write(descriptor, content)
            os.close(descriptor)
            handle = self._open(path, mode.replace("x", "w"), *args, **kwargs)
            os.unlink(path)
        return handle

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that saves as `torch.save` does, with batches as whole tensors; only rank 0 writes a file.

        Args:
            original: Function that saves an object, its first argument, in a path or an open file, its second one.
        """

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            obj = tree_map(lambda x: x.whole().clone() if isinstance(x, WholeTensor) else x, obj)
            is_path = isinstance(f, (str, os.PathLike))
            if is_path:
                self._record(f)
            if is_path and self._session.outputs.is_silent:
                return None
            to_null = is_path and self._session.rank != 0  # an object may contain batches, which all ranks gather
            return original(obj, os.devnull if to_null else f, *args, **kwargs)

        return save

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that loads as `torch.load` does, once rank 0 has saved what the script saved before.

        Args:
            original: Function that loads from a path or an open file, its first argument.
        """

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if self._has_written and not self._session.alone and isinstance(f, (str, os.PathLike)):
                self._session.meet(f"loading {os.path.basename(os.fspath(f))!r}")
            return original(f, *args, **kwargs)

        return load

    def _record(self, *paths: Any) -> None:
        self._has_written = True
        self._written.update(_absolute(path) for path in paths if isinstance(path, (str, bytes, os.PathLike)))

    def _is_written(self, path: Any) -> bool:
        return isinstance(path, (str, bytes, os.PathLike)) and _absolute(path) in self._written

    def _fetch_on_first_rank(self) -> None:
        """Replace the functions that fetch a file or unpack an archive, for libraries, too."""
        for kind in (tarfile.TarFile, zipfile.ZipFile):
            for name in ("extract", "extractall"):
                full = f"{kind.__name__}.{name}"
                setattr(kind, name, self._by_first_rank(full, getattr(kind, name), writes=True, of_libraries=True))
        for module, name in ((shutil, "unpack_archive"), (torch.hub, "download_url_to_file")):
            setattr(module, name, self._by_first_rank(name, getattr(module, name), writes=True, of_libraries=True))
        fetch = self._by_first_rank(
            "urlretrieve",
            urllib.request.urlretrieve,
            writes=True,
            of_libraries=True,
            result=lambda value: [value[0], str(value[1])],
        )

        def urlretrieve(*args: Any, **kwargs: Any) -> tuple[str, Any]:
            path, headers = fetch(*args, **kwargs)
            return path, message_from_string(headers, HTTPMessage) if isinstance(headers, str) else headers

        urllib.request.urlretrieve = urlretrieve

    # -- what rank 0 answers

    def _is_called_by_script(self) -> bool:
        """Return whether the script called, directly or through a module that passes calls on to `os`."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _PASSES_ON:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None and self._session.is_script(frame.f_code.co_filename)

    def _by_first_rank(
        self,
        name: str,
        original: Callable[..., Any],
        *,
        writes: bool = False,
        of_libraries: bool = False,
        result: Callable[[Any], Any] = lambda value: value,
    ) -> Callable[..., Any]:
        """Return a function that rank 0 performs for all ranks if the script calls it.

        Args:
            name: Name for messages.
            original: Function to perform.
            writes: True if it changes files.
            of_libraries: True if rank 0 also performs it for libraries.
            result: Function that makes its result a value that JSON can represent.
        """
        session = self._session

        def function(*args: Any, **kwargs: Any) -> Any:
            if session.alone or not session.is_main() or not (of_libraries or self._is_called_by_script()):
                return original(*args, **kwargs)
            if writes:
                self._record(*args)
                if session.outputs.is_silent and name != "tempfile.mkdtemp" and not of_libraries:
                    return args[1] if name.startswith("shutil.") and len(args) > 1 else None
            session.meet(name)
            answer: list[Any] = [None, None]
            if session.rank == 0:
                try:
                    with session.without_meetings():  # what it calls inside is its own affair
                        answer[0] = result(original(*args, **kwargs))
                except Exception as error:
                    answer[1] = _parts_of(error)
            value, failure = session.world.broadcast_object(answer)
            if failure is None:
                return value
            kind = getattr(builtins, failure[0], OSError)
            if len(failure) > 4:
                raise kind(failure[1], failure[2], failure[3], None, failure[4])
            raise kind(*failure[1:])

        return function

    def _stat(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fields(value: os.stat_result) -> list[Any]:
            return [list(value[:10]), {name: getattr(value, name) for name in _TIMES}]

        ask = self._by_first_rank("os.stat", original, result=fields)
        ask_always = self._by_first_rank("os.stat", original, of_libraries=True, result=fields)

        def function(*args: Any, **kwargs: Any) -> Any:
            value = (ask_always if args and self._is_written(args[0]) else ask)(*args, **kwargs)
            return os.stat_result(value[0], value[1]) if isinstance(value, list) else value

        return function


def _parts_of(error: Exception) -> list[Any]:
    """Return the name of an error's class and its arguments, as values that JSON can represent."""
    if isinstance(error, OSError) and error.errno is not None:
        names = [None if name is None else os.fspath(name) for name in (error.filename, error.filename2)]
        return [type(error).__name__, error.errno, error.strerror, *names]
    return [type(error).__name__, str(error.args[0] if len(error.args) == 1 else error)]


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value
