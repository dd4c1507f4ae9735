"""RUN/events.jsonl: one JSON object for each start of a run, and for what happened in it beside its steps.

    {"time": 1767225600.25, "event": "start", "step": 0, "version": "0.1.0", "ranks": 8, "hosts": ["n1", "n2"], ...}
    {"time": 1767225701.5, "event": "save", "step": 100, "folder": "step-00000100", "seconds": 0.8}
    {"time": 1767225702.1, "event": "end", "step": 100, "outcome": "stopped", "message": "SIGTERM", ...}

`time` is in unix seconds, `step` counts the steps that were done by then. Every start appends, and nothing is taken
away but a last line that was torn by a kill. A start that no end follows is a job that was killed.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mpitrain.errors import InputError
from mpitrain.monitor.json_lines import EventLine, LineWriter, read_lines
from mpitrain.storage.run_folder import EVENTS


class EventLog(LineWriter):
    """The writer of a run's events: of rank 0, while it holds the run folder.

    Args:
        run_dir: The run folder.

    Raises:
        InputError: The file cannot be opened.
    """

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / EVENTS, "events")

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Append one line. Where that fails, nothing of it is left in the file.

        Args:
            event: What happened, in a word.
            step: Steps done by then.
            fields: What else the line says, in this order; whatever JSON can hold.

        Raises:
            InputError: The line cannot be written.
        """
        self.append({"time": time.time(), "event": event, "step": step} | fields)


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
        return list(read_lines(path, "events", checked_event))
    except FileNotFoundError:
        return []


def checked_event(value: Any) -> dict[str, Any]:
    """Return an event as it is written. Raises ValueError for anything else."""
    try:
        EventLine.model_validate(value)
    except ValidationError:
        raise ValueError from None
    found: dict[str, Any] = value
    return found


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
