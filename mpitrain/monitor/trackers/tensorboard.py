"""TensorBoard's event files, in RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.monitor.trackers.base import Tracker, missing

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """A scalar for each figure. TensorBoard shows each step once after a resume."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("monitor.tensorboard", "monitor", error) from error
        self._make: Any = SummaryWriter
        self._board: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        purge = None if resume_step is None else resume_step + 1
        self._board = self._make(str(run_dir / FOLDER), purge_step=purge)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
