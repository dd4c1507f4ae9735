"""What blocks of the pages need before they are run: `<!-- test: with NAME -->`. Each gets the page's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from support import MACHINE, ROOT


def texts(folder: Path) -> None:
    """A folder of texts of one's own."""
    (folder / "my_texts").mkdir(exist_ok=True)
    for page in ("README.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/planner.md", "docs/architecture.md"):
        shutil.copy(ROOT / page, folder / "my_texts" / f"{Path(page).stem}.txt")


def machine(folder: Path) -> None:
    """A machine's profile."""
    (folder / "machine.toml").write_text(MACHINE)


def extensions(folder: Path) -> None:
    """What tests/extensions.py adds from outside of the package, and an input for it."""
    import extensions as made

    shutil.copy(ROOT / "tests/extensions.py", folder / "extensions.py")
    made.write_numbers(folder / "points.numbers")
