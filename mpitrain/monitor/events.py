"""RUN/events.jsonl: one JSON object for each start of a run, and for what happened in it beside its steps.

    {"time": 1767225600.25, "event": "start", "step": 0, "version": "0.1.0", "ranks": 8, "hosts": ["n1", "n2"], ...}
    {"time": 1767225701.5, "event": "save", "step": 100, "folder": "step-00000100", "seconds": 0.8}
    {"time": 1767225702.1, "event": "end", "step": 100, "outcome": "stopped", "message": "SIGTERM", ...}

`time` is in unix seconds, `step` counts the steps that were done by then. Every start appends, and nothing is taken
away but a last line that was torn by a kill. A start that no end follows is a job that was killed.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.monitor.json_lines import read_lines
from mpitrain.monitor.line_kinds import EventLine, parsed_object
from mpitrain.storage.disk import reason
from mpitrain.storage.run_folder import EVENTS

_LOOK_BACK = 1 << 16  # bytes read at once to find where the last whole line ends


class EventLog:
    """The writer of a run's events: of rank 0, while it holds the run folder.

    Args:
        run_dir: The run folder.

    Raises:
        InputError: The file cannot be opened.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / EVENTS
        try:
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0) as file:
                _cut_torn(file)
            self._file = io.FileIO(self.path, "a")  # unbuffered
        except OSError as error:
            raise self._unwritable(error) from None

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Append one line. Where that fails, nothing of it is left in the file.

        Args:
            event: What happened, in a word.
            step: Steps done by then.
            fields: What else the line says, in this order; whatever JSON can hold.

        Raises:
            InputError: The line cannot be written.
        """
        line = {"time": time.time(), "event": event, "step": step} | {k: _plain(v) for k, v in fields.items()}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) != len(data):
                raise OSError("only a part of a line was written; the disk may be full")
        except OSError as error:
            with suppress(OSError):
                os.truncate(self._file.fileno(), size)
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"events {self.path} cannot be written ({reason(error)}); make room, or choose another run.dir"
        )


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a run, in order. A torn last line is left out; a run without the file has none.

    Args:
        path: A run folder, or its events.jsonl.

    Raises:
        InputError: The file cannot be read, or a line inside it is damaged.
    """
    path = Path(path)
    path = path / EVENTS if path.is_dir() else path
    try:
        return read_lines(path, "events", parsed_event)
    except FileNotFoundError:
        return []


def why_no_step(folder: Path) -> str:
    """What to say of a run folder without a finished step: by its events, why there is none.

    Args:
        folder: The run folder.
    """
    none = f"run folder {folder} has no finished step"
    try:
        last = (read_events(folder) or [{}])[-1]
    except InputError:
        last = {}
    if last.get("outcome") == "failed":
        return f"{none}: its job failed ({last.get('message') or 'without a message'}); mend that, and start it again"
    if last:
        return f"{none}; python -m mpitrain.report --watch {shlex.quote(str(folder))} shows what becomes of it"
    return f"{none}; give the folder of a run that took one"


def parsed_event(line: bytes) -> dict[str, Any] | None:
    """The event of a whole line; None for a torn or foreign one."""
    value = parsed_object(EventLine, line)
    return value if value is not None and "step" in value else None


def _cut_torn(file: io.FileIO) -> None:
    """Take away what stands after the last whole line."""
    end = size = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _LOOK_BACK)
        file.seek(begin)
        newline = (file.read(end - begin) or b"").rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        file.truncate(end)


def _plain(value: Any) -> Any:
    """The value with null for numbers that are not finite, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
