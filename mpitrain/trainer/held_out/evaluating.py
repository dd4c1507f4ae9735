"""Evaluation of a checkpoint on a data set, on any layout.

Nothing is written into the run folder, which another job may be using. The model is built and divided as for training,
by the settings of the run, and the checkpoint is loaded into it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.checkpoint import Manifest, Part
from mpitrain.checkpoint.folders import find, folder_name, marked_best
from mpitrain.comm import Communicator, carry_device_memory, set_timeout
from mpitrain.config.named import require_outside
from mpitrain.config.settings import Config, parse
from mpitrain.config.toml_file import read_toml
from mpitrain.data import Dataset, Description, open_dataset, resolve
from mpitrain.data.format import ColumnSpec
from mpitrain.errors import CheckpointError, InputError, refusal
from mpitrain.loading import require_trusted
from mpitrain.models.metrics import Confusion, measures_of
from mpitrain.storage.run_folder import CONFIG
from mpitrain.trainer.device import full_told, set_threads
from mpitrain.trainer.folder import together
from mpitrain.trainer.held_out.measuring import evaluated
from mpitrain.trainer.state import OPTIMIZER
from mpitrain.trainer.trainer import Trainer

_AGAIN = 3  # attempts to list the checkpoints, because a running job may remove some meanwhile
# settings of a run that define its model and how it is measured
_KEPT = {"model": None, "data": None, "train": ("batch", "microbatch", "precision", "metrics")}


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        checkpoint: Folder of the checkpoint.
        step: Step of the checkpoint.
        data: Path of the data set.
        samples: Number of samples evaluated.
        figures: Loss and metrics, by name.
        classes: Names of the classes, if y are classes; otherwise empty.
        confusion: Counts, int64 [true class, class with the largest score]; None if not requested.
    """

    checkpoint: Path
    step: int
    data: str
    samples: int
    figures: dict[str, float]
    classes: tuple[str, ...]
    confusion: torch.Tensor | None


class Evaluator(Trainer):
    """A trainer that takes no steps and evaluates a checkpoint. Its construction is collective over `world`.

    Args:
        asked: Request with these attributes: `run`, the run folder; `checkpoint`, or None for the newest complete one;
            `data`, a data set as data.path names it, or None for the run's own; `split` of the data set; `samples`, the
            largest number of samples, or None for all; `confusion`, true for the confusion matrix; `trust`, true if
            code in the run folder may be executed.
        flags: Settings that override the run's, as on a command line. Settings of the run's layout are never used.
        world: Ranks that evaluate.
    """

    def __init__(self, asked: Namespace, flags: Sequence[str], world: Communicator) -> None:
        self.asked = asked
        super().__init__(lambda: _settings(asked, flags), world=world)

    def evaluation(self) -> Evaluation:
        """Load the checkpoint and evaluate it. Collective.

        Raises:
            InputError: If the kind of the data set differs from that of the run's training data.
            CheckpointError: If no checkpoint can be used.
        """
        set_timeout(self.config.comm.timeout)
        carry_device_memory(self.config.comm.device)
        set_threads(self.world, self.config.run.reproducible)
        with full_told(self.device), self.open_store() as self.store:
            folder, manifest = self._first(lambda manifest: [])  # the checkpoint that is probably used
            self._require_alike(manifest)
            self.prepare()
            folder, manifest = self._first(self._parts_without_states, folder)  # another if it is damaged or removed
            self.engine.finish_load(manifest)
            samples = min(self.asked.samples or len(self.data), len(self.data))
            x, y = (torch.from_numpy(some).to(self.device) for some in self.data.read(np.zeros(1, dtype=np.int64)))
            figures = evaluated(
                self.config, self.places, self.engine, self.data, self.meter, most=samples, spare=(x, y)
            )
        counts = {name: value for name, value in self.meter.counts.items() if name == Confusion.name}
        classes = self.data.description.classes or ()
        matrix = Confusion(len(classes)).matrix(counts[Confusion.name]) if counts else None
        return Evaluation(folder, manifest.step, self.config.data.path, samples, figures, classes, matrix)

    def open_data(self) -> tuple[Dataset, Dataset | None]:
        """Return the samples to evaluate in place of training samples, and None. Collective."""
        return self._open(self.config.data.path, self.asked.split), None

    def _open(self, path: str, split: str) -> Dataset:
        world, sequence = self.world, self.config.model.sequence
        together(world, lambda: resolve(path) if world.local_rank == 0 else None)
        return together(world, lambda: open_dataset(resolve(path), split, sequence=sequence))

    def prepare(self) -> None:
        """Prepare as for training, and add the metrics that training leaves out because they take longer.

        Collective.
        """
        together(self.world, self._require_trusted)
        super().prepare()
        description = self.data.description
        there = {metric.name for metric in self.meter.metrics}
        found = [metric for metric in measures_of(description, more=True) if metric.name not in there]
        if self.asked.confusion and not description.classes:
            raise refusal(f"--confusion is of classes, and the targets of {self.config.data.path} are none; leave it")
        self.meter.add([metric for metric in found if self.asked.confusion or not isinstance(metric, Confusion)])

    # -- internals

    def _require_trusted(self) -> None:
        """Raise InputError if the run uses code in its own folder, unless the user trusts it."""
        require_trusted(self.config.model, self.asked.run, self.asked.trust)
        for metric in () if self.asked.trust else self.config.train.metrics:
            if ":" in metric:
                require_outside("train.metrics", metric, self.asked.run)

    def _parts_without_states(self, manifest: Manifest) -> list[Part]:
        """Return the parts to read, without optimizer states, which an evaluation does not need."""
        kept = {name: spec for name, spec in manifest.tensors.items() if not name.startswith(OPTIMIZER)}
        return self.engine.parts_to_load(replace(manifest, tensors=kept))

    def _first(self, parts_for: Any, likely: Path | None = None) -> tuple[Path, Manifest]:
        """Return the newest checkpoint whose parts can be read, and its manifest.

        Args:
            parts_for: Function from a manifest to the parts to read.
            likely: Checkpoint to try first; None for the newest.
        """
        reasons: list[str] = []
        for _ in range(_AGAIN):
            asked = self.asked.checkpoint
            folders = [asked] if asked is not None else self.store.newest_first()
            for folder in dict.fromkeys(folders if likely is None else [likely, *folders]):
                try:
                    return folder, self.store.load(folder, parts_for)
                except CheckpointError as error:
                    reasons.append(str(error))
            likely = None
        if reasons:
            raise CheckpointError(f"no checkpoint of {self.asked.run} can be used: {reasons[0]}", agreed=True)
        raise refusal(f"run folder {self.asked.run} has no checkpoint yet; give one that was saved")

    def _require_alike(self, manifest: Manifest) -> None:
        """Raise InputError if the kind of the data set differs from that of the run's training data."""
        path, trained = self.config.data.path, self._trained_on(manifest)
        if trained is None:
            return
        description = self._open(path, self.asked.split).description
        columns = trained.get("columns")
        if columns and tuple(ColumnSpec(**each) for each in columns) != description.columns:
            raise refusal(
                f"data set {path or 'of data.path'} made numbers of its columns otherwise than the one that "
                f"{self.asked.run} was trained on; prepare it with --like and that data set"
            )
        for key, value in _form(description).items():
            if trained.get(key, value) != value:
                mine, theirs = _told(key, value), _told(key, trained[key])
                raise refusal(
                    f"data set {path or 'of data.path'} has {mine}, and {self.asked.run} was trained on {theirs}; give "
                    "data that were prepared alike"
                )

    def _trained_on(self, manifest: Manifest) -> dict[str, Any] | None:
        """Return the properties of the run's training data; None if unknown."""
        told = manifest.values.get("task") or {}
        if "data" in told:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in told["data"].items()}
        own = self.world.on_root(lambda: read_toml(str(self.asked.run / CONFIG)).get("data", {}).get("path", ""))
        if self.asked.data is None or own == self.config.data.path:
            return None
        try:
            return _form(self._open(own, "train").description)
        except InputError:
            return None  # loading the model then reports what does not fit


def checkpoint_of(run: Path, *, best: bool, step: int | None) -> tuple[Path, Path | None]:
    """Return the run folder of a path, and the requested checkpoint in it; None for the newest.

    Args:
        run: A run folder, or one of its checkpoints.
        best: If true, the best checkpoint is requested.
        step: Step of the requested checkpoint; None for any.

    Raises:
        InputError: If there is no such run or checkpoint.
    """
    folder: Path | None = None
    if not (run / CONFIG).exists() and find(run) == [run]:
        run, folder = run.parent.parent, run
    if not (run / CONFIG).exists():
        raise InputError(f"{run} is no run folder, which has a {CONFIG}; give the run.dir of a training run")
    if best:
        folder = marked_best(run)
    if step is not None:
        found = [path for path in find(run) if path.name == folder_name(step)]
        if not found:
            raise InputError(
                f"{run} has no checkpoint of step {step}; python -m mpitrain.checkpoint ls {run} lists them"
            )
        folder = found[0]
    return run, folder


def _settings(asked: Namespace, flags: Sequence[str]) -> Config:
    """Return the settings of the run without its layout, overridden by the flags."""
    path = asked.run / CONFIG
    trained, (file, given) = read_toml(str(path)), parse(flags)
    if file is not None:
        raise refusal(f"{file} is not understood; give one RUN, and settings as --section.key value")
    Config.from_dict(trained, str(path))
    values: dict[str, dict[str, Any]] = {}
    for section, keys in _KEPT.items():
        own = trained.get(section, {})
        values[section] = {key: value for key, value in own.items() if keys is None or key in keys}
    values["model"].pop("compile", None)
    values["data"].pop("stage", None)
    values["optim"] = {"name": "sgd"}  # has no states
    values["run"] = {"seed": trained.get("run", {}).get("seed", 1)}
    for section, flagged in given.items():
        values.setdefault(section, {}).update(flagged)
    if asked.data is not None:
        values["data"]["path"] = asked.data
    values["run"]["dir"] = str(asked.run)
    return Config.from_dict(values, f"{path} with the command line")


def _form(description: Description) -> dict[str, Any]:
    """Return the properties of data that must match for a model to accept the samples."""
    return {
        "kind": description.kind,
        "vocabulary": description.vocabulary,
        "classes": None if description.classes is None else tuple(description.classes),
        "x_shape": tuple(description.x_shape),
        "y_shape": tuple(description.y_shape),
    }


def _told(key: str, value: Any) -> str:
    if key == "classes":
        more = ", ..." if value and len(value) > 4 else ""
        return f"{len(value)} classes ({', '.join(value[:4])}{more})" if value else "no classes"
    if key == "kind":
        return str(value)
    if key == "vocabulary":
        return f"a vocabulary of {value}"
    return f"{key[0]} of {math.prod(value)} numbers {list(value)}"
