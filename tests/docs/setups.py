"""Preparations for blocks of the pages that are marked `<!-- test: with NAME -->`. Each gets the page's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from support import MACHINE, ROOT


def texts(folder: Path) -> None:
    """Write a folder of a user's own texts."""
    (folder / "my_texts").mkdir(exist_ok=True)
    for page in ("README.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/planner.md", "docs/architecture.md"):
        shutil.copy(ROOT / page, folder / "my_texts" / f"{Path(page).stem}.txt")


def machine(folder: Path) -> None:
    """Write a machine profile."""
    (folder / "machine.toml").write_text(MACHINE)


def extensions(folder: Path) -> None:
    """Copy tests/extensions.py, which extends the package from outside, and write an input for it."""
    import extensions as made

    shutil.copy(ROOT / "tests/extensions.py", folder / "extensions.py")
    made.write_numbers(folder / "points.numbers")
