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
from mpitrain.data.folders import agree_on_errors
from mpitrain.data.format import ColumnSpec, VariableSpec
from mpitrain.data.mix import data_paths, open_split
from mpitrain.errors import CheckpointError, InputError, refusal
from mpitrain.loading import require_trusted
from mpitrain.models.metrics import Confusion, measures_of
from mpitrain.storage.run_folder import CONFIG
from mpitrain.trainer.device import explain_out_of_memory, set_threads
from mpitrain.trainer.held_out.measuring import evaluate_samples
from mpitrain.trainer.state import OPTIMIZER
from mpitrain.trainer.trainer import Trainer

_ATTEMPTS = 3  # attempts to list the checkpoints, because a running job may remove some meanwhile
# settings of a run that define its model and how it is measured
_USED_SETTINGS = {"model": None, "data": None, "train": ("batch", "microbatch", "precision", "metrics", "average")}


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
        request: Options with these attributes: `run`, the run folder; `checkpoint`, or None for the newest complete
            one; `data`, a data set as data.path names it, or None for the run's own; `split` of the data set;
            `samples`, the largest number of samples, or None for all; `confusion`, true for the confusion matrix;
            `trust`, true if code in the run folder may be executed.
        flags: Settings that override the run's, as on a command line. Settings of the run's layout are never used.
        world: Ranks that evaluate.
    """

    def __init__(self, request: Namespace, flags: Sequence[str], world: Communicator) -> None:
        self.request = request
        super().__init__(lambda: _settings(request, flags), world=world)

    def evaluation(self) -> Evaluation:
        """Load the checkpoint and evaluate it. Collective.

        Raises:
            InputError: If the kind of the data set differs from that of the run's training data.
            CheckpointError: If no checkpoint can be used.
        """
        set_timeout(self.config.comm.timeout)
        carry_device_memory(self.config.comm.device)
        set_threads(self.world, self.config.run.reproducible)
        with explain_out_of_memory(self.device), self.open_store() as self.store:
            folder, manifest = self._first_readable(lambda manifest: [])  # the checkpoint that is probably used
            self._require_matching_data(manifest)
            self.prepare()
            # another checkpoint if this one is damaged or removed
            folder, manifest = self._first_readable(self._parts_without_states, folder)
            self.engine.finish_load(manifest)
            samples = min(self.request.samples or len(self.data), len(self.data))
            x, y = (torch.from_numpy(some).to(self.device) for some in self.data.read(np.zeros(1, dtype=np.int64)))
            with self.engine.averaged():
                figures = evaluate_samples(
                    self.config, self.places, self.engine, self.data, self.meter, most=samples, spare=(x, y)
                )
        counts = {name: value for name, value in self.meter.counts.items() if name == Confusion.name}
        classes = self.data.description.classes or ()
        matrix = Confusion(len(classes)).matrix(counts[Confusion.name]) if counts else None
        return Evaluation(folder, manifest.step, data_paths(self.config)[0], samples, figures, classes, matrix)

    def open_data(self) -> tuple[Dataset, Dataset | None]:
        """Return the samples to evaluate in place of training samples, and None. Collective."""
        return self._open(self.config.data.path, self.request.split), None

    def _open(self, path: str, split: str) -> Dataset:
        world, sequence = self.world, self.config.model.sequence
        if self.config.data.factory and self.request.data is None:
            agree_on_errors(world, self._require_trusted)
            if (data := agree_on_errors(world, lambda: open_split(self.config, split))) is None:
                raise refusal(f"data.factory {self.config.data.factory} has no {split} samples; choose another --split")
            return data
        agree_on_errors(world, lambda: resolve(path) if world.local_rank == 0 else None)
        threads = world.process.cores.per_rank
        return agree_on_errors(world, lambda: open_dataset(resolve(path), split, sequence=sequence, threads=threads))

    def prepare(self) -> None:
        """Prepare as for training, and add the metrics that training leaves out because they take longer.

        Collective.
        """
        agree_on_errors(self.world, self._require_trusted)
        super().prepare()
        description = self.data.description
        existing = {metric.name for metric in self.meter.metrics}
        metrics = [metric for metric in measures_of(description, more=True) if metric.name not in existing]
        if self.request.confusion and not description.classes:
            raise refusal(f"--confusion needs classes, which {self.config.data.path} does not have; remove --confusion")
        self.meter.add([metric for metric in metrics if self.request.confusion or not isinstance(metric, Confusion)])

    # -- internals

    def _require_trusted(self) -> None:
        """Raise InputError if the run uses code in its own folder, unless the user trusts it."""
        require_trusted(self.config.model, self.request.run, self.request.trust)
        for metric in () if self.request.trust else self.config.train.metrics:
            if ":" in metric:
                require_outside("train.metrics", metric, self.request.run)
        if self.config.data.factory and not self.request.trust:
            require_outside("data.factory", self.config.data.factory, self.request.run)

    def _parts_without_states(self, manifest: Manifest) -> list[Part]:
        """Return the parts to read, without optimizer states, which an evaluation does not need."""
        tensors = {name: spec for name, spec in manifest.tensors.items() if not name.startswith(OPTIMIZER)}
        return self.engine.parts_to_load(replace(manifest, tensors=tensors))

    def _first_readable(self, parts_for: Any, likely: Path | None = None) -> tuple[Path, Manifest]:
        """Return the newest checkpoint whose parts can be read, and its manifest.

        Args:
            parts_for: Function from a manifest to the parts to read.
            likely: Checkpoint to try first; None for the newest.
        """
        reasons: list[str] = []
        for _ in range(_ATTEMPTS):
            requested = self.request.checkpoint
            folders = [requested] if requested is not None else self.store.newest_first()
            for folder in dict.fromkeys(folders if likely is None else [likely, *folders]):
                try:
                    return folder, self.store.load(folder, parts_for)
                except CheckpointError as error:
                    reasons.append(str(error))
            likely = None
        if reasons:
            raise CheckpointError(f"no checkpoint of {self.request.run} can be used: {reasons[0]}", agreed=True)
        raise refusal(f"run folder {self.request.run} has no checkpoint yet; give a run that has saved one")

    def _require_matching_data(self, manifest: Manifest) -> None:
        """Raise InputError if the kind of the data set differs from that of the run's training data."""
        path, trained = self.config.data.path, self._trained_on(manifest)
        if trained is None:
            return
        description = self._open(path, self.request.split).description
        columns = tuple(ColumnSpec(**each) for each in trained.get("columns") or ())
        variables = [VariableSpec(**each).meaning for each in trained.get("variables") or ()]
        if columns not in ((), description.columns) or variables not in (
            [],
            [each.meaning for each in description.variables or ()],
        ):
            raise refusal(
                f"data set {path or 'of data.path'} converted its columns or variables in another way than the "
                f"training data of {self.request.run}; prepare it with --like and that data set"
            )
        for key, value in _data_properties(description).items():
            if trained.get(key, value) != value:
                mine, theirs = _describe(key, value), _describe(key, trained[key])
                raise refusal(
                    f"data set {path or 'of data.path'} has {mine}, but {self.request.run} was trained on {theirs}; "
                    "prepare it in the same way as the training data"
                )

    def _trained_on(self, manifest: Manifest) -> dict[str, Any] | None:
        """Return the properties of the run's training data; None if unknown."""
        task = manifest.values.get("task") or {}
        if "data" in task:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in task["data"].items()}
        trained_path = self.world.on_root(
            lambda: read_toml(str(self.request.run / CONFIG)).get("data", {}).get("path", "")
        )
        if self.request.data is None or trained_path == self.config.data.path:
            return None
        try:
            return _data_properties(self._open(trained_path, "train").description)
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
        raise InputError(f"{run} is not a run folder, because it has no {CONFIG}; give the run.dir of a training run")
    if best:
        folder = marked_best(run)
    if step is not None:
        matches = [path for path in find(run) if path.name == folder_name(step)]
        if not matches:
            raise InputError(
                f"{run} has no checkpoint of step {step}; list those it has with python -m mpitrain.checkpoint ls {run}"
            )
        folder = matches[0]
    return run, folder


def _settings(request: Namespace, flags: Sequence[str]) -> Config:
    """Return the settings of the run without its layout, overridden by the flags."""
    path = request.run / CONFIG
    trained, (file, overrides) = read_toml(str(path)), parse(flags)
    if file is not None:
        raise refusal(f"unexpected argument {file}; give one RUN, and settings as --section.key value")
    Config.from_dict(trained, str(path))
    values: dict[str, dict[str, Any]] = {}
    for section, keys in _USED_SETTINGS.items():
        saved = trained.get(section, {})
        values[section] = {key: value for key, value in saved.items() if keys is None or key in keys}
    values["model"].pop("compile", None)
    values["data"].pop("stage", None)
    values["optim"] = {"name": "sgd"}  # has no states
    values["run"] = {"seed": trained.get("run", {}).get("seed", 1)}
    for section, flagged in overrides.items():
        values.setdefault(section, {}).update(flagged)
    if request.data is not None:
        values["data"] |= {"path": request.data, "factory": "", "options": {}}
    values["run"]["dir"] = str(request.run)
    return Config.from_dict(values, f"{path} with the command line")


def _data_properties(description: Description) -> dict[str, Any]:
    """Return the properties of data that must match for a model to accept the samples."""
    return {
        "kind": description.kind,
        "vocabulary": description.vocabulary,
        "classes": None if description.classes is None else tuple(description.classes),
        "x_shape": tuple(description.x_shape),
        "y_shape": tuple(description.y_shape),
    }


def _describe(key: str, value: Any) -> str:
    if key == "classes":
        more = ", ..." if value and len(value) > 4 else ""
        return f"{len(value)} classes ({', '.join(value[:4])}{more})" if value else "no classes"
    if key == "kind":
        return str(value)
    if key == "vocabulary":
        return f"a vocabulary of {value}"
    return f"{key[0]} of {math.prod(value)} numbers {list(value)}"
