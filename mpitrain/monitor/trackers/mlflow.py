"""MLflow: into files in RUN/mlflow, without a network, unless MLFLOW_TRACKING_URI says otherwise.

Files, and not SQLite, as a run folder often lies on a network file system, whose locks SQLite cannot rely on.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain.monitor.trackers.base import Tracker, kept_id, missing, names
from mpitrain.storage.disk import write_whole

FOLDER, IDENTITY = "mlflow", "mpitrain-run-id"
_FLUSH_EVERY = 5.0  # seconds
_AT_ONCE = 900  # figures; MLflow takes 1,000
_FOREIGN = re.compile(r"[^\w\-. :/]")  # what MLflow takes in no name
_SETTINGS_AT_ONCE, _LONGEST = 100, 6000  # settings, characters: what MLflow takes


class MLflow(Tracker):
    """One run, which a resumed job goes on with: steps that are there already are not logged again."""

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise missing("monitor.mlflow", "trackers", error) from error
        self._make, self._entities = MlflowClient, entities
        self._client: Any = None
        self._run = ""
        self._last = 0  # step that is there
        self._waiting: list[Any] = []
        self._flushed = 0.0  # time.monotonic()

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        where = run_dir.absolute() / FOLDER
        where.mkdir(parents=True, exist_ok=True)
        self._client = self._make(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or where.as_uri())
        project, name = names(run_dir, config)
        self._run = kept_id(where / IDENTITY, resume_step)
        if self._run:
            self._client.set_terminated(self._run, "RUNNING")
            self._last = max((m.step for m in self._client.get_metric_history(self._run, "loss")), default=0)
        else:
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project)
            self._run = self._client.create_run(experiment, run_name=name).info.run_id
            write_whole(where / IDENTITY, self._run + "\n")
            told = [self._entities.Param(key, str(value)[:_LONGEST]) for key, value in _flat(config)]
            for begin in range(0, len(told), _SETTINGS_AT_ONCE):
                self._client.log_batch(self._run, params=told[begin : begin + _SETTINGS_AT_ONCE])
        self._flushed = time.monotonic()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step <= self._last:
            return
        now = round(time.time() * 1000)
        made = self._entities.Metric
        self._waiting += [made(_allowed(name), float(value), now, step) for name, value in figures.items()]
        if time.monotonic() - self._flushed > _FLUSH_EVERY or len(self._waiting) > _AT_ONCE:
            self._flush()

    def close(self) -> None:
        if self._run:
            self._flush()
            self._client.set_terminated(self._run)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), _AT_ONCE):
            self._client.log_batch(self._run, metrics=waiting[begin : begin + _AT_ONCE])
        self._flushed = time.monotonic()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _allowed(name: str) -> str:
    """The name of a figure as MLflow takes it, which may have paths in it."""
    return posixpath.normpath(_FOREIGN.sub("_", name))
