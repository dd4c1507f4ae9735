"""Findings of `mpitrain.doctor`: their verdicts, and how they are shown. Needs neither MPI nor torch."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import distributions

from mpitrain.early import __version__
from mpitrain.storage.text import counted

OK, WARN, BAD = "ok", "warn", "BAD"
Line = tuple[str, str, str]  # verdict, subject, finding


def as_text(lines: Sequence[Line]) -> str:
    """Return the findings for people: one line each, and a last line that counts errors and warnings."""
    bad, warned = (sum(verdict == which for verdict, _, _ in lines) for which in (BAD, WARN))
    shown = [f"{verdict:4}  {subject:16} {finding}" for verdict, subject, finding in lines]
    return "\n".join([*shown, f"{counted(bad, 'error')}, {counted(warned, 'warning')}"])


def as_json(lines: Sequence[Line]) -> str:
    """Return the findings as a JSON object for bug reports, with the versions of all installed packages."""
    content = {
        "mpitrain": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": dict(sorted({each.name.lower(): each.version for each in distributions()}.items())),
        "findings": [dict(zip(("verdict", "subject", "finding"), line, strict=True)) for line in lines],
    }
    return json.dumps(content, indent=1)
