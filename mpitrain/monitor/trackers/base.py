"""What a tracker of runs is: another place, beside metrics.jsonl, that the figures of each step go to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError


class Tracker:
    """Takes the figures of a run's steps to a tool that shows them. Rank 0 has one, made without arguments.

    What is raised by `start` ends the job. What `log` and `close` raise is said once, and training goes on without
    the tracker. Nothing may be asked for at a terminal.
    """

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """The first step is about to begin.

        Args:
            run_dir: The run folder, in which a tracker keeps what it has to.
            config: The resolved settings, by section and key; `config["monitor"]` has `project` and `name`.
            resume_step: The step that the run goes on from; None where it is a run from the start.
        """

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of one step, by their names in metrics.jsonl; some may be NaN or infinite.

        Args:
            step: Its number, later than all before it in this job.
            figures: What is a number in its line of metrics.jsonl, without its time.
        """

    def close(self) -> None:
        """No step follows in this job."""


def names(run_dir: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """The project of a run, and its own name: monitor.name, or that of its folder."""
    monitor = config["monitor"]
    return monitor["project"], monitor["name"] or run_dir.absolute().name


def kept_id(path: Path, resume_step: int | None) -> str:
    """The identity of a run that goes on; empty for one from the start, or where none is kept."""
    if resume_step is None:
        return ""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def missing(key: str, extra: str, error: ImportError) -> InputError:
    """What to say where a package is not there."""
    return InputError(
        f'{key} needs a package that is not there ({error}); pip install "mpitrain[{extra}]", or leave it out'
    )
