"""Files of JSON lines that a job appends to, and that a kill may leave with a torn last line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.storage.disk import open_plain, reason


def whole_object(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None for a torn one, and for one that is no object with a step."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


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
    try:
        with open_plain(path) as file:
            for number, line in enumerate(file, 1):
                value = parsed(line)
                if value is not None:
                    found.append(value)
                elif line.endswith(b"\n"):
                    raise InputError(f"{what} {path}: line {number} is damaged; remove it")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read ({reason(error)}); give a run folder you may read") from None
    return found
