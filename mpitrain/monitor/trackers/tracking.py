"""The trackers of a run, so that none of them can end it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.config.named import find, told
from mpitrain.config.run import MonitorSection
from mpitrain.errors import InputError, MpitrainError
from mpitrain.monitor.trackers.base import Tracker
from mpitrain.monitor.trackers.mlflow import MLflow
from mpitrain.monitor.trackers.tensorboard import TensorBoard
from mpitrain.monitor.trackers.wandb import WeightsAndBiases


def asked_for(section: MonitorSection) -> list[Tracker]:
    """The trackers that the settings ask for.

    Raises:
        InputError: A package is not there, or what `monitor.tracker` names is none.
    """
    wanted = ((section.tensorboard, TensorBoard), (section.wandb, WeightsAndBiases), (section.mlflow, MLflow))
    trackers: list[Tracker] = [kind() for asked, kind in wanted if asked]
    if section.tracker:
        made = find("monitor.tracker", section.tracker)()
        if not isinstance(made, Tracker):
            raise InputError(
                f"monitor.tracker {section.tracker} makes {type(made).__name__}, which is no "
                "mpitrain.monitor.trackers.Tracker; derive it from that class"
            )
        trackers.append(made)
    return trackers


class Tracking:
    """Trackers that were asked for; one that fails after the start is left out from then on.

    Args:
        trackers: In the order in which they are told.
        warn: Says a line to the person who looks.
    """

    def __init__(self, trackers: Sequence[Tracker], warn: Callable[[str], object]) -> None:
        self._trackers, self._warn = list(trackers), warn

    def start(self, run_dir: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Have each of them begin.

        Raises:
            InputError: One of them cannot.
        """
        for tracker in self._trackers:
            try:
                tracker.start(run_dir, config, resume_step)
            except MpitrainError:
                raise
            except Exception as error:
                raise InputError(f"{_name(tracker)} cannot start: {told(error)}; mend that, or leave it out") from error

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Give them what is a number of a step's figures."""
        if not self._trackers:
            return
        numbers = {name: value for name, value in figures.items() if type(value) in (int, float) and name != "time"}
        for tracker in list(self._trackers):
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._trackers.remove(tracker)
                self._warn(f"{_name(tracker)} failed and is left out from step {step} on: {told(error)}")
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        """Have each of them end."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                tracker.close()
            except Exception as error:
                self._warn(f"{_name(tracker)} failed as it ended: {told(error)}")


def _name(tracker: Tracker) -> str:
    return f"tracker {type(tracker).__name__}"
