"""Files that a command writes: whole, under a name of their own until then, and never in the place of another."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.storage.disk import reason, replacing


def require_new(path: Path) -> None:
    """Raise InputError where a file cannot be made under this name."""
    if os.path.lexists(path):
        raise InputError(f"--out {path} exists already; give another name, or remove it")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {path.parent}; make it, or give another name")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write a file under, which gets its own when all went well inside, and is removed otherwise."""
    require_new(path)
    try:
        with replacing(path) as aside:
            yield aside
            require_new(path)
    except OSError as error:
        raise InputError(f"--out {path} cannot be written: {reason(error)}; make room, or give another name") from None


def json_lines(path: Path | None, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line into a new file, or else to standard output."""
    if path is None:
        for line in lines:
            print(json.dumps(line), file=sys.stdout, flush=True)
        return
    with whole_file(path) as aside, open(aside, "x", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
