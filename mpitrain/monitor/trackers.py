"""Trackers: tools such as TensorBoard, Weights & Biases, MLflow or a custom one that receive the figures of a run.

A tracker receives the figures of each step in addition to metrics.jsonl.
"""

from __future__ import annotations

import os
import posixpath
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mpitrain.config.named import describe_error, find
from mpitrain.config.run import MonitorSection
from mpitrain.errors import InputError, MpitrainError
from mpitrain.monitor.report.findings import flatten
from mpitrain.storage.disk import write_whole
from mpitrain.storage.run_folder import MLFLOW, TENSORBOARD, WANDB

IDENTITY = "mpitrain-run-id"  # name of the file in a tracker's folder that has the identity of the run
_OTHER_HOST = ("online", "shared")  # values of WANDB_MODE that need a login
# limits for MLflow
_FLUSH_EVERY = 5.0  # seconds
_BATCH = 900  # figures; MLflow accepts 1,000
_DISALLOWED = re.compile(r"[^\w\-. :/]")  # characters that MLflow does not allow in a name
_SETTINGS_AT_ONCE, _LONGEST = 100, 6000  # number of settings per call, and characters of one


class Tracker:
    """Base class of trackers, which send the figures of a run's steps to another tool.

    Rank 0 creates one without arguments. An exception in `start` ends the job. An exception in `log` or `close` is
    reported once, and training continues without the tracker. A tracker must not ask for input at a terminal.
    """

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Prepare for the first step, which is about to begin.

        Args:
            run_dir: Path of the run folder, where a tracker may store its files.
            config: Resolved settings by section and key; `config["monitor"]` has `project` and `name`.
            resume_step: Step from which the run resumes; None for a run from the start.
        """

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of one step.

        Args:
            step: Number of the step, larger than all before it in this job.
            figures: Numbers by their names in metrics.jsonl, without the time; they may be NaN or infinite.
        """

    def close(self) -> None:
        """Finish the record; no step follows in this job."""


def project_and_name(run_dir: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the project and the name of a run; the name is monitor.name, or else the name of its folder.

    Args:
        run_dir, config: See `Tracker.start`.
    """
    monitor = config["monitor"]
    return monitor["project"], monitor["name"] or run_dir.absolute().name


def stored_id(path: Path, resume_step: int | None) -> str:
    """Return the stored identity of a resumed run, or "" for a run from the start or without a stored identity.

    Args:
        path: Path of the file that has the identity.
        resume_step: See `Tracker.start`.
    """
    if resume_step is None:
        return ""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _package(name: str, key: str, extra: str) -> Any:
    """Import a package that a setting needs. Raises InputError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(
            f"{key} needs a package that is not installed ({error}); "
            f'pip install "mpitrain[{extra}]", or remove the setting'
        ) from error


class TensorBoard(Tracker):
    """Tracker that writes each figure as a scalar to event files in RUN/tensorboard.

    After a resume, TensorBoard shows each step once.
    """

    def __init__(self) -> None:
        self._make = _package("torch.utils.tensorboard", "monitor.tensorboard", "monitor").SummaryWriter

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        purge = None if resume_step is None else resume_step + 1
        self._board = self._make(str(run_dir / TENSORBOARD), purge_step=purge)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class WeightsAndBiases(Tracker):
    """Tracker for Weights & Biases: a run folder is one run, also when jobs resume it.

    It writes to RUN/wandb without a network unless WANDB_MODE requests otherwise; `wandb sync RUN/wandb/offline-run-*`
    uploads the files later. Each resumed job writes another part of the same run.
    """

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # importing wandb would otherwise contact a server
        self._wandb = _package("wandb", "monitor.wandb", "trackers")

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode in _OTHER_HOST and not self._wandb.api.api_key:  # wandb would ask for a key at the terminal
            raise InputError(
                f"monitor.wandb: WANDB_MODE is {mode} and nobody is logged in; set WANDB_API_KEY or unset WANDB_MODE"
            )
        project, name = project_and_name(run_dir, config)
        id_path = run_dir / WANDB / IDENTITY
        identity = stored_id(id_path, resume_step) or secrets.token_hex(4)
        id_path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(id_path, identity + "\n")
        settings = self._wandb.Settings(mode=mode, silent=True, console="off")
        self._run = self._wandb.init(
            project=project, name=name, dir=str(run_dir), id=identity, resume="allow", settings=settings
        )
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """Tracker for MLflow: a run folder is one run, which a resumed job continues without logging steps twice.

    It writes to RUN/mlflow without a network unless MLFLOW_TRACKING_URI requests otherwise. It uses files rather than
    SQLite because run folders are often on a network file system, whose locks SQLite cannot rely on.
    """

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = _package("mlflow", "monitor.mlflow", "trackers")
        self._make, self._entities = mlflow.MlflowClient, _package("mlflow.entities", "monitor.mlflow", "trackers")
        self._last = 0  # last step already logged
        self._unsent: list[Any] = []

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        where = run_dir.absolute() / MLFLOW
        where.mkdir(parents=True, exist_ok=True)
        self._client = self._make(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or where.as_uri())
        project, name = project_and_name(run_dir, config)
        self._run = stored_id(where / IDENTITY, resume_step)
        if self._run:
            self._client.set_terminated(self._run, "RUNNING")
            self._last = max((m.step for m in self._client.get_metric_history(self._run, "loss")), default=0)
        else:
            existing = self._client.get_experiment_by_name(project)
            experiment = existing.experiment_id if existing else self._client.create_experiment(project)
            self._run = self._client.create_run(experiment, run_name=name).info.run_id
            write_whole(where / IDENTITY, self._run + "\n")
            parameters = [self._entities.Param(key, str(value)[:_LONGEST]) for key, value in flatten(config).items()]
            for begin in range(0, len(parameters), _SETTINGS_AT_ONCE):
                self._client.log_batch(self._run, params=parameters[begin : begin + _SETTINGS_AT_ONCE])
        self._flushed = time.monotonic()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step <= self._last:
            return
        now = round(time.time() * 1000)
        metric = self._entities.Metric
        # MLflow normalizes names as paths
        named = {posixpath.normpath(_DISALLOWED.sub("_", name)): float(value) for name, value in figures.items()}
        self._unsent += [metric(name, value, now, step) for name, value in named.items()]
        if time.monotonic() - self._flushed > _FLUSH_EVERY or len(self._unsent) > _BATCH:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run)

    def _flush(self) -> None:
        waiting, self._unsent = self._unsent, []
        for begin in range(0, len(waiting), _BATCH):
            self._client.log_batch(self._run, metrics=waiting[begin : begin + _BATCH])
        self._flushed = time.monotonic()


def requested_trackers(section: MonitorSection) -> list[Tracker]:
    """Return the trackers that the settings request.

    Raises:
        InputError: A package is not installed, or `monitor.tracker` does not name a tracker.
    """
    candidates = ((section.tensorboard, TensorBoard), (section.wandb, WeightsAndBiases), (section.mlflow, MLflow))
    trackers: list[Tracker] = [kind() for enabled, kind in candidates if enabled]
    if section.tracker:
        tracker = find("monitor.tracker", section.tracker)()
        if not isinstance(tracker, Tracker):
            raise InputError(
                f"monitor.tracker {section.tracker} returns a {type(tracker).__name__}, which is not a "
                "mpitrain.monitor.trackers.Tracker; derive it from that class"
            )
        trackers.append(tracker)
    return trackers


class Tracking:
    """Requested trackers of a run; one that fails after the start is removed.

    Args:
        trackers: Trackers in the order in which they are called.
        warn: Function that shows a line of text to the user.
    """

    def __init__(self, trackers: Sequence[Tracker], warn: Callable[[str], object]) -> None:
        self._trackers, self._warn = list(trackers), warn

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Start each tracker.

        Args:
            run_dir, config, resume_step: See `Tracker.start`.

        Raises:
            InputError: A tracker cannot start.
        """
        for tracker in self._trackers:
            try:
                tracker.start(run_dir, config, resume_step)
            except MpitrainError:
                raise
            except Exception as error:
                raise InputError(
                    f"{_name(tracker)} cannot start: {describe_error(error)}; fix the problem or remove the tracker"
                ) from error

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Pass the numeric figures of a step to each tracker.

        Args:
            step: Number of the step.
            figures: Values of the step's line in metrics.jsonl; those that are not numbers, and the time, are left out.
        """
        if not self._trackers:
            return
        numbers = {name: value for name, value in figures.items() if type(value) in (int, float) and name != "time"}
        for tracker in list(self._trackers):
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._trackers.remove(tracker)
                self._warn(f"{_name(tracker)} failed at step {step} and is not used any more: {describe_error(error)}")
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        """Close each tracker."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                tracker.close()
            except Exception as error:
                self._warn(f"{_name(tracker)} failed when it was closed: {describe_error(error)}")


def _name(tracker: Tracker) -> str:
    return f"tracker {type(tracker).__name__}"
