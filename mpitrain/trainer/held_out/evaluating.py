"""A checkpoint measured on a data set, on any layout, without a word into its run folder, which may be in use.

The model is built and divided as for training, by the settings of the run, and the checkpoint read into it.
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

_AGAIN = 3  # times that checkpoints are listed, where a run that goes on removes them meanwhile
# of a run's settings, what says which model there is and how it is measured
_KEPT = {"model": None, "data": None, "train": ("batch", "microbatch", "precision", "metrics")}


@dataclass(frozen=True)
class Evaluation:
    """The figures of one evaluation.

    Attributes:
        checkpoint: The folder of what was evaluated.
        step: Its step.
        data: The data set's path.
        samples: How many were taken.
        figures: The loss and the metrics, by name.
        classes: Their names, where y are classes.
        confusion: int64 [right class, class with the largest score]; None where it was not wanted.
    """

    checkpoint: Path
    step: int
    data: str
    samples: int
    figures: dict[str, float]
    classes: tuple[str, ...]
    confusion: torch.Tensor | None


class Evaluator(Trainer):
    """A trainer that takes no step. Collective to make, over the ranks of `world`.

    Args:
        asked: What is to be evaluated: the run folder `run`; its `checkpoint`, or None for the newest whole one;
            `data`, a data set as data.path names it, or None for the run's own; its `split`; at most so many `samples`,
            or None for all; whether the `confusion` matrix is wanted; `trust`, whether code in the run may be called.
        flags: Settings that win over the run's, as a command line has them; of the layout none of the run's hold.
        world: The ranks.
    """

    def __init__(self, asked: Namespace, flags: Sequence[str], world: Communicator) -> None:
        self.asked = asked
        super().__init__(lambda: _settings(asked, flags), world=world)

    def evaluation(self) -> Evaluation:
        """Load and measure. Collective.

        Raises:
            InputError: The data set is of another kind than that which the run was trained on.
            CheckpointError: No checkpoint is whole.
        """
        set_timeout(self.config.comm.timeout)
        carry_device_memory(self.config.comm.device)
        set_threads(self.world, self.config.run.reproducible)
        with full_told(self.device), self.open_store() as self.store:
            folder, manifest = self._first(lambda manifest: [])  # what is likely to be evaluated
            self._require_alike(manifest)
            self.prepare()
            folder, manifest = self._first(self._parts_without_states, folder)  # another one, if it is damaged or gone
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
        """The samples that are measured, as those of training."""
        return self._open(self.config.data.path, self.asked.split), None

    def _open(self, path: str, split: str) -> Dataset:
        world, sequence = self.world, self.config.model.sequence
        together(world, lambda: resolve(path) if world.local_rank == 0 else None)
        return together(world, lambda: open_dataset(resolve(path), split, sequence=sequence))

    def prepare(self) -> None:
        """Prepare as for training; and add the metrics that cost more."""
        together(self.world, self._require_trusted)
        super().prepare()
        description = self.data.description
        there = {metric.name for metric in self.meter.metrics}
        found = [metric for metric in measures_of(description, more=True) if metric.name not in there]
        if self.asked.confusion and not description.classes:
            raise refusal(f"--confusion is of classes, and the targets of {self.config.data.path} are none; leave it")
        self.meter.add([metric for metric in found if self.asked.confusion or not isinstance(metric, Confusion)])

    # -- inside

    def _require_trusted(self) -> None:
        """Raise InputError where the run names code in its own folder, unless that is trusted."""
        require_trusted(self.config.model, self.asked.run, self.asked.trust)
        for metric in () if self.asked.trust else self.config.train.metrics:
            if ":" in metric:
                require_outside("train.metrics", metric, self.asked.run)

    def _parts_without_states(self, manifest: Manifest) -> list[Part]:
        """Return the parts to fill, without the optimizer's states, which nobody needs here."""
        kept = {name: spec for name, spec in manifest.tensors.items() if not name.startswith(OPTIMIZER)}
        return self.engine.parts_to_load(replace(manifest, tensors=kept))

    def _first(self, parts_for: Any, likely: Path | None = None) -> tuple[Path, Manifest]:
        """The newest checkpoint of which those parts can be read."""
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
        """Raise InputError where the data set is of another kind than what the run was trained on."""
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
        """The form of the data that the run was trained on; None where that is not known."""
        told = manifest.values.get("task") or {}
        if "data" in told:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in told["data"].items()}
        own = self.world.on_root(lambda: read_toml(str(self.asked.run / CONFIG)).get("data", {}).get("path", ""))
        if self.asked.data is None or own == self.config.data.path:
            return None
        try:
            return _form(self._open(own, "train").description)
        except InputError:
            return None  # what does not fit the model is told when it is loaded


def checkpoint_of(run: Path, *, best: bool, step: int | None) -> tuple[Path, Path | None]:
    """The run folder that a path means, and the checkpoint in it that is asked for; None: the newest.

    Args:
        run: A run folder, or one of its checkpoints.
        best: The best one is asked for.
        step: The one of a step is asked for.

    Raises:
        InputError: There is no such run or checkpoint.
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
    """The settings of the run, without those of its layout, and with those of the flags."""
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
    """Return the properties of data that must be equal for a model to take the samples."""
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
