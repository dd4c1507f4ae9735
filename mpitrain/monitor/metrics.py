"""RUN/metrics.jsonl: one JSON object a line, one line a step, steps rising.

    {"step": 1, "time": 1767225600.25, "loss": 5.53, "lr": 0.00015, "grad_norm": 2.1, ..., "world_size": 8}
    {"step": 2, ...}

Each line is one write, so a reader that follows the file sees whole lines, and a killed run tears at most its last
one. A run resumed from step k first takes away what the killed one wrote after k: each step stands once. A figure
that is not finite is null, as JSON knows no NaN.
"""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.monitor.json_lines import lines_within, read_lines, whole_object
from mpitrain.storage.disk import free_name, open_plain, reason, replacing
from mpitrain.storage.run_folder import METRICS


class MetricsWriter:
    """Rank 0's writer of the run's metrics."""

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        """Open the file.

        Args:
            run_dir: The run folder.
            resume_step: None for a run from the start (an earlier file is set aside as metrics.jsonl.1, .2, …); k to
                keep the
                lines up to step k and go on after them.

        Raises:
            InputError: The folder is not writable, or the disk is full.
        """
        self.path = Path(run_dir) / METRICS
        self._last_step = -1
        try:
            if resume_step is None:  # an earlier run's file, unless empty, gets the first free number
                if self.path.exists() and self.path.stat().st_size:
                    os.rename(self.path, free_name(self.path))
            elif self.path.exists():
                self._last_step = _cut_after(self.path, resume_step)
            self._file = io.FileIO(self.path, "a")  # unbuffered
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, *, step: int, **figures: Any) -> None:
        """Append the line of one step, which is later than all before it.

        Args:
            step: Its number.
            figures: What else the line says, in this order; whatever JSON can hold. A run writes of each step time (in
                unix seconds, at its end), loss, lr, grad_norm (None where it was not taken), samples, tokens, step_s
                (seconds), tokens_per_s, memory_bytes (the peak per rank) and world_size (ranks); of some held_out_loss
                or ids (the samples' numbers).

        Raises:
            InputError: The line cannot be written.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}: each step stands once")
        self._last_step = step
        line = {"step": step} | {name: _finite(value) for name, value in figures.items()}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError("only a part of a line was written; the disk may be full")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a run, in order. A torn last line is left out.

    Args:
        path: A run folder, or its metrics.jsonl.

    Raises:
        InputError: There is no such file, or a line inside it is damaged.
    """
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    try:
        return read_lines(path, "metrics")
    except FileNotFoundError:
        raise InputError(f"metrics {path} do not exist; give the folder of a run that took a step") from None


def _cut_after(path: Path, resume_step: int) -> int:
    """Rewrites the file without what came after resume_step; returns the last step in it (-1: none)."""
    last = -1
    with replacing(path) as aside, open_plain(path) as lines, open(aside, "wb") as file:
        for line in lines_within(lines):
            value = whole_object(line) if line is not None else None
            if line is not None and value is not None and last < value["step"] <= resume_step:
                last = value["step"]
                file.write(line)
    return last


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"metrics {path} cannot be written ({reason(error)}); make room, or choose another run.dir")
