"""Trained models out of run folders and checkpoints, whatever layout they were written by. Loads no MPI.

    model = mt.load_model("runs/a")                a plain module on the CPU, in fp32, with the trained weights
    model = mt.load_model("runs/a", best=True)     of the checkpoint that checkpoint.best keeps

A checkpoint says of its model what it takes to build it again: the value `task` has the [model] section and what the
data look like to a model, as `task_values` makes it. One that does not is read beside RUN/config.toml and the data set.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from mpitrain.checkpoint import Manifest, Part, TensorSpec, contents
from mpitrain.checkpoint.folders import find, marked_best, require
from mpitrain.checkpoint.manifest import DTYPES, MODEL, source_of
from mpitrain.config.named import require_outside
from mpitrain.config.settings import Config
from mpitrain.config.training import ModelSection
from mpitrain.data import Description, open_dataset
from mpitrain.data.format import TOKENIZER, TRAIN, ColumnSpec
from mpitrain.errors import CheckpointError, InputError, refusal
from mpitrain.layers.lora import require_whole
from mpitrain.layout.boxes import Piece, logical_of
from mpitrain.models import build_model
from mpitrain.models.hugging_face import PREFIX
from mpitrain.models.task import Task, TrainedBase
from mpitrain.storage.run_folder import CHECKPOINTS, CONFIG


def require_same_model(own: Mapping[str, Any], told: Mapping[str, Any], folder: Path, mend: str = "") -> None:
    """Raise InputError where a checkpoint is of a gpt that computes something else than the run's.

    Args:
        own: The keys of [model] of the run.
        told: Those that the checkpoint was trained with; empty where it does not say.
        folder: Of the checkpoint.
        mend: What to do about it; by default to train with the settings beside the checkpoint.
    """
    if own.get("factory") or told.get("factory") or own["name"] != "gpt" or told.get("name") != "gpt":
        return
    from mpitrain.models.gpt import Form

    for key in ("layers", "width", "heads", *(f.name for f in fields(Form) if f.name != "hidden"), "tied"):
        mine, theirs = own[key], told.get(key, own[key])
        if key == "kv_heads":
            mine, theirs = mine or own["heads"], theirs or told.get("heads", own["heads"])
        if mine != theirs:
            settings = folder.parent.parent / CONFIG
            how = mend or (f"train with {settings}" if settings.exists() else f"set model.{key} to {theirs}")
            raise refusal(f"{folder} is of a model with {key} {theirs}, and model.{key} is {mine}; {how}")


TASK = "task"  # the value of a manifest that says what the model is
BASE, LEFT_OUT = "base", "left_out"  # values of a checkpoint of adapters: what they are for, and its tensors' names
_OF_ONE_SPLIT = ("split", "samples", "identity")  # of a description: what does not matter to a model
T = TypeVar("T")


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint, and what it says of its model.

    Attributes:
        folder: The checkpoint's.
        manifest: What it holds.
        section: The [model] section that the model was built by.
        description: The data that it was trained on, as a model needs to know them.
        trust: Whether code that lies in the run's folder may build the model.
    """

    folder: Path
    manifest: Manifest
    section: ModelSection
    description: Description
    trust: bool = False

    @property
    def run(self) -> Path:
        """The folder of the run, or that of the checkpoint where it lies in none."""
        return run_of(self.folder)

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer of the data; None for bytes, and for what is no text."""
        found = (folder / TOKENIZER for folder in (self.folder, self.run))
        return next((path for path in found if path.is_file()), None)

    def build(self) -> Task:
        """The model with new weights; under adapters with those that they were trained on.

        torch's random generator is left as it was.

        Raises:
            InputError: The model cannot be built again, or what is under its adapters is not there as it was, or
                its code came with the run and is not trusted.
            CheckpointError: The checkpoint holds tensors that the model lacks.
        """
        require_trusted(self.section, self.run, self.trust)
        base = self.manifest.values.get(BASE)
        with torch.random.fork_rng(devices=[]):
            section, about = self.section, base if isinstance(base, dict) else {}
            if isinstance(about.get("seed"), int):
                torch.manual_seed(about["seed"])
            kept = about.get("checkpoint")  # that the adapters are for, if it is still there
            if section.base and isinstance(kept, str) and Path(kept).is_dir():
                section = section.model_copy(update={"base": kept})
            task = build_task(section, self.description)
        if task.base is not None:
            task.base.require(base)
        else:
            require_whole(base)
        _require_known(task.module, self.folder, self.manifest)
        return task

    def load(self) -> Task:
        """The trained model in eval mode."""
        task = self.build()
        fill(task.module, self.folder, self.manifest)
        task.module.eval()
        return task


def require_trusted(section: ModelSection, run: Path, trust: bool) -> None:
    """Raise InputError where model.factory is code in the run's own folder, unless that is trusted."""
    if section.factory and not section.factory.startswith(PREFIX) and not trust:
        require_outside("model.factory", section.factory, run)


def build_task(section: ModelSection, description: Description) -> Task:
    """The model of a run, with new weights; with model.base its adapters are for the trained ones there.

    Raises:
        InputError: It cannot be built, or the base is missing, or of another model.
        CheckpointError: The base is damaged.
    """
    if not section.base:
        return build_model(section, description)
    try:
        folder = contents.only(Path(section.base).expanduser())
        saved = saved_in(folder)
    except InputError as error:
        raise InputError(f"model.base: {error}") from None
    if isinstance(saved.manifest.values.get(BASE), dict):
        raise InputError(
            f"model.base {folder} holds adapters alone; have python -m mpitrain.adapters merge and python -m "
            "mpitrain.checkpoint import make a run of the whole model"
        )
    told = saved.section.model_dump()
    require_same_model(section.model_dump(), told, folder, f"leave the keys of [model] out that {section.base} has")
    sizes = {
        "vocabulary": told["vocabulary"] or saved.description.vocabulary or 0,
        "hidden": told["hidden"],
        "max_positions": told["max_positions"] or told["sequence"],
    }
    own = {key: getattr(section, key) or size for key, size in sizes.items()}

    def put(module: nn.Module) -> None:
        _require_known(module, folder, saved.manifest)
        fill(module, folder, saved.manifest)

    return build_model(section.model_copy(update=own), description, TrainedBase(str(folder), put))


def load_model(path: str | Path, *, best: bool = False, trust: bool = False) -> nn.Module:
    """The trained model of a run, without anything of mpitrain's around it: on the CPU, in fp32, in eval mode.

    No MPI is started. Code of your own that built the model (`model.factory`) must be there to be imported.

    Args:
        path: A run folder, of which the newest whole checkpoint is taken, or one step-... folder.
        best: Of a run folder, take the checkpoint that checkpoint.best keeps instead.
        trust: Import `model.factory` also where its module lies in the run's folder, which runs the code there.

    Raises:
        InputError: There is no such checkpoint, or the model cannot be built again, or its code is not trusted.
        CheckpointError: The checkpoint is damaged, or holds another model.
    """
    task, _ = load_task(path, best=best, trust=trust)
    return task.module


def load_task(path: str | Path, *, best: bool = False, trust: bool = False) -> tuple[Task, Description]:
    """The trained model of a run with its loss, as `load_model`, and what its data look like to a model."""
    task, saved = first_whole(candidates(path, best=best), lambda folder: load_folder(folder, trust=trust))
    return task, saved.description


def load_folder(folder: Path, *, trust: bool = False) -> tuple[Task, SavedModel]:
    """The trained model of one checkpoint, and what that says of it. trust: see `load_model`."""
    saved = saved_in(folder, trust=trust)
    return saved.load(), saved


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fill a module's parameters and buffers from a checkpoint, in place.

    Args:
        module: The model that was trained, or the part of it that a rank has after `mt.parallelize` or in a pipeline.
        path: A run folder, or one step-... folder.

    Raises:
        InputError: There is no checkpoint.
        CheckpointError: The checkpoint is damaged, or lacks a tensor, or has it in another shape.
    """
    first_whole(candidates(path), lambda folder: fill(module, folder, contents.whole(folder)))


def saved_in(folder: Path, *, trust: bool = False) -> SavedModel:
    """What a checkpoint says of its model; no weights are read. trust: see `load_model`.

    Raises:
        InputError: It says nothing, and there is no run around it that would.
        CheckpointError: It is not whole.
    """
    manifest = contents.whole(folder)
    if TASK in manifest.values:
        section, description = _said(folder, manifest)
    else:
        section, description = _of_run(folder)
    return SavedModel(folder, manifest, section, description, trust)


def candidates(path: str | Path, *, best: bool = False) -> list[Path]:
    """The checkpoint folders that a path means, newest first. Raises InputError where there are none.

    best: The one that checkpoint.best keeps, alone.
    """
    path = Path(path)
    if best:
        return [marked_best(path)]
    if (path / CONFIG).is_file() and not find(path):
        raise InputError(f"run {path} has no checkpoint yet; wait for its first (checkpoint.every), or give another")
    return require(path)


def first_whole(folders: Sequence[Path], act: Callable[[Path], T], say: Callable[[str], object] = warnings.warn) -> T:
    """What `act` makes of the first of some checkpoints that is whole.

    Args:
        folders: At least one.
        act: Raises CheckpointError for one that is not.
        say: Told where that is not the first.

    Raises:
        CheckpointError: None of them is whole: of the first, what is wrong with it.
    """
    first: CheckpointError | None = None
    for folder in folders:
        try:
            made = act(folder)
        except CheckpointError as error:
            first = first or error
            continue
        if first is not None:
            say(f"an older checkpoint was taken, {folder}: {first}")
        return made
    assert first is not None
    raise first


def task_values(section: ModelSection, description: Description) -> dict[str, Any]:
    """What a checkpoint keeps as its value `task`, for `saved_in`."""
    data = {f.name: getattr(description, f.name) for f in fields(description) if f.name not in _OF_ONE_SPLIT}
    if description.columns is not None:
        data["columns"] = [spec.model_dump(mode="json") for spec in description.columns]
    data = {name: str(value) if isinstance(value, np.dtype) else value for name, value in data.items()}
    return {"model": section.model_dump(mode="json"), "data": data}


def _said(folder: Path, manifest: Manifest) -> tuple[ModelSection, Description]:
    """The model's section and the data's description that a manifest has."""
    try:
        model, data = manifest.values[TASK]["model"], dict(manifest.values[TASK]["data"])
        known = {f.name for f in fields(Description)}
        for name, value in data.items():
            if name.endswith("_dtype"):
                data[name] = np.dtype(value)
            elif name == "columns" and value is not None:
                data[name] = tuple(ColumnSpec(**column) for column in value)
            elif isinstance(value, list):
                data[name] = tuple(value)
        identity = manifest.values.get("data") or ""
        told = {name: value for name, value in data.items() if name in known}
        description = Description(**told | {"split": TRAIN, "samples": 0, "identity": identity})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its manifest's value {TASK!r} is none of ours ({error})") from None
    return Config.from_dict({"model": model}, str(folder)).model, description


def _of_run(folder: Path) -> tuple[ModelSection, Description]:
    """The same of a checkpoint that says nothing, from the settings of its run and the data set."""
    settings = run_of(folder) / CONFIG
    if not settings.is_file():
        raise InputError(
            f"{folder} says nothing of its model, and there is no {settings}; build the model yourself and use "
            "mpitrain.loading.load_weights(model, PATH)"
        )
    config = Config.from_args([str(settings)])
    try:
        data = open_dataset(config.data.path, sequence=config.model.sequence)
    except InputError as error:
        raise InputError(f"{folder} does not say what its model was trained on, and {error}") from None
    data.close()
    return config.model, data.description


def run_of(folder: Path) -> Path:
    """The run folder that a checkpoint lies in; the checkpoint itself where it lies in none."""
    root = Path(os.path.abspath(folder)).parent
    return root.parent if root.name == CHECKPOINTS else folder


def fill(module: nn.Module, folder: Path, manifest: Manifest) -> None:
    """Fill the parameters and buffers of a module, or of a rank's part of one, from a checkpoint of any layout.

    Raises:
        CheckpointError: Bytes are damaged, or the tensors are not those of the module.
    """
    parts: list[Part] = []
    beside: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors that cannot be read into, and what is
    for name, tensor in _wanted(module, manifest):
        source = source_of(manifest, MODEL + name, tensor.dtype)
        spec = manifest.tensors.get(source)
        stored = DTYPES[spec.dtype] if spec is not None else tensor.dtype
        castable = stored.is_floating_point and tensor.dtype.is_floating_point
        dtype = stored if castable else tensor.dtype
        flat = tensor.detach()
        if not flat.is_contiguous() or flat.dtype != dtype or not flat.is_cpu:
            flat = torch.empty(tensor.shape, dtype=dtype)
            beside.append((tensor, flat))
        flat, part = flat.view(-1), logical_of(tensor)
        wanted = TensorSpec(source, part.shape, str(dtype).removeprefix("torch."))
        pieces = part.pieces(source, 0, part.numel) or [(0, Piece.whole(source, 0))]
        parts += [Part(wanted, piece, flat[at : at + piece.numel]) for at, piece in pieces]
    contents.read_parts(folder, manifest, parts)
    with torch.no_grad():
        for tensor, flat in beside:
            tensor.copy_(flat)


def _require_known(module: nn.Module, folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless a whole module has a place for each of the model's tensors in a checkpoint."""
    known = {MODEL + name for name, _ in _wanted(module, manifest)}
    lacking = sorted(name for name in manifest.tensors if name.startswith(MODEL) and name not in known)
    if lacking:
        raise CheckpointError(
            f"{folder} holds {lacking[0].removeprefix(MODEL)}, which {type(module).__name__} lacks "
            f"({len(lacking)} of {len(manifest.tensors)} tensors); give the code or the settings that it was trained by"
        )


def _wanted(module: nn.Module, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module that a checkpoint is to have, under the names that it has them under."""
    tied = manifest.values.get("tied", {})
    kept = set(module.state_dict(keep_vars=True))
    left_out = set(manifest.values.get(LEFT_OUT, ()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, nn.Parameter):
            if name in left_out and not tensor.requires_grad:
                continue  # the model brings it along
        elif name not in kept:
            continue  # a buffer that is computed, not saved
        saved = name if MODEL + name in manifest.tensors else tied.get(name, name)
        yield saved, tensor
