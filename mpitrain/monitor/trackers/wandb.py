"""Weights & Biases: into RUN/wandb, without a network, unless WANDB_MODE says otherwise.

`wandb sync RUN/wandb/offline-run-*` uploads it later. A resumed job writes a part of its own for the same run.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import InputError
from mpitrain.monitor.trackers.base import Tracker, kept_id, missing, names
from mpitrain.storage.disk import write_whole

FOLDER, IDENTITY = "wandb", "mpitrain-run-id"
_ELSEWHERE = ("online", "shared")


class WeightsAndBiases(Tracker):
    """One run, under one identity for as long as the run folder goes on."""

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which would go to a server as it is imported
        try:
            import wandb
        except ImportError as error:
            raise missing("monitor.wandb", "trackers", error) from error
        self._wandb: Any = wandb
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode in _ELSEWHERE and not self._wandb.api.api_key:  # it would ask for one at the terminal
            raise InputError(
                f"monitor.wandb: WANDB_MODE is {mode} and nobody is logged in; set WANDB_API_KEY, or leave "
                "WANDB_MODE out"
            )
        project, name = names(run_dir, config)
        kept = run_dir / FOLDER / IDENTITY
        identity = kept_id(kept, resume_step) or secrets.token_hex(4)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, identity + "\n")
        settings = self._wandb.Settings(mode=mode, silent=True, console="off")
        self._run = self._wandb.init(
            project=project, name=name, dir=str(run_dir), id=identity, resume="allow", settings=settings
        )
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
