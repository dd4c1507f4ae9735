"""Loading of trained models from run folders and checkpoints of any layout, without MPI.

    model = mt.load_model("runs/a")                a plain module on the CPU, in fp32, with the trained weights
    model = mt.load_model("runs/a", best=True)     from the checkpoint that checkpoint.best keeps

A checkpoint contains what is needed to build its model: the value `task` has the [model] section and the properties of
the data that a model depends on, as returned by `task_values`. For a checkpoint without it, RUN/config.toml and the
data set are read.
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
from mpitrain.checkpoint.manifest import DTYPES, MODEL, source_of, trained_source
from mpitrain.config.named import require_outside
from mpitrain.config.settings import Config
from mpitrain.config.training import ModelSection
from mpitrain.data import Description, open_dataset
from mpitrain.data.format import TOKENIZER, TRAIN, ColumnSpec, VariableSpec
from mpitrain.errors import CheckpointError, InputError, refusal
from mpitrain.layers.lora import require_whole
from mpitrain.layout.boxes import Piece, logical_of
from mpitrain.models import build_model
from mpitrain.models.hugging_face import PREFIX
from mpitrain.models.task import Task, TrainedBase
from mpitrain.storage.run_folder import CHECKPOINTS, CONFIG


def require_same_model(section: Mapping[str, Any], saved: Mapping[str, Any], folder: Path, fix: str = "") -> None:
    """Raise InputError if a checkpoint's gpt model computes something else than the run's.

    Args:
        section: Keys of [model] of the run.
        saved: Keys of [model] that the checkpoint was trained with; empty if unknown.
        folder: Folder of the checkpoint.
        fix: Advice for the message; by default, to train with the settings beside the checkpoint.
    """
    if section.get("factory") or saved.get("factory") or section["name"] != "gpt" or saved.get("name") != "gpt":
        return
    from mpitrain.models.gpt import Form

    for key in ("layers", "width", "heads", *(f.name for f in fields(Form) if f.name != "hidden"), "tied"):
        mine, theirs = section[key], saved.get(key, section[key])
        if key == "kv_heads":
            mine, theirs = mine or section["heads"], theirs or saved.get("heads", section["heads"])
        if mine != theirs:
            settings = folder.parent.parent / CONFIG
            how = fix or (f"train with {settings}" if settings.exists() else f"set model.{key} to {theirs}")
            raise refusal(f"{folder} is from a model with {key} {theirs}, but model.{key} is {mine}; {how}")


TASK = "task"  # key of a manifest's value that describes the model
BASE, LEFT_OUT = (
    "base",
    "left_out",
)  # keys in a checkpoint of adapters: its base, and names of base tensors that are not saved
_SPECS = {"columns": ColumnSpec, "variables": VariableSpec}  # conversions in a description
_OF_ONE_SPLIT = ("split", "samples", "identity")  # fields of a description that a model does not depend on
T = TypeVar("T")


@dataclass(frozen=True)
class SavedModel:
    """Checkpoint with the description of its model.

    Attributes:
        folder: Folder of the checkpoint.
        manifest: Contents of the checkpoint.
        section: The [model] section that the model was built from.
        description: Properties of the training data that the model depends on.
        trust: If true, code in the run's folder may build the model.
    """

    folder: Path
    manifest: Manifest
    section: ModelSection
    description: Description
    trust: bool = False

    @property
    def run(self) -> Path:
        """Folder of the run, or of the checkpoint if it is in no run folder."""
        return run_of(self.folder)

    @property
    def tokenizer(self) -> Path | None:
        """Path of the data's tokenizer; None for bytes, and for data other than text."""
        paths = (folder / TOKENIZER for folder in (self.folder, self.run))
        return next((path for path in paths if path.is_file()), None)

    def build(self) -> Task:
        """Return the model with new weights; a model with adapters gets the weights of their base.

        The state of torch's random generator is not changed.

        Raises:
            InputError: The model cannot be built, or the base of its adapters is missing or has changed, or its code is
                in the run's folder and not trusted.
            CheckpointError: The checkpoint has tensors that the model lacks.
        """
        require_trusted(self.section, self.run, self.trust)
        base = self.manifest.values.get(BASE)
        with torch.random.fork_rng(devices=[]):
            section, about = self.section, base if isinstance(base, dict) else {}
            if isinstance(about.get("seed"), int):
                torch.manual_seed(about["seed"])
            base_folder = about.get("checkpoint")  # checkpoint of the adapters' base, if it still exists
            if section.base and isinstance(base_folder, str) and Path(base_folder).is_dir():
                section = section.model_copy(update={"base": base_folder})
            task = build_task(section, self.description)
        if task.base is not None:
            task.base.require(base)
        else:
            require_whole(base)
        _require_known(task.module, self.folder, self.manifest)
        return task

    def load(self) -> Task:
        """Return the trained model in eval mode."""
        task = self.build()
        fill(task.module, self.folder, self.manifest)
        task.module.eval()
        return task


def require_trusted(section: ModelSection, run: Path, trust: bool) -> None:
    """Raise InputError if model.factory is code in the run's own folder, unless `trust` is true.

    Args:
        section: The [model] section.
        run: Folder of the run.
        trust: If true, allow code in the run's folder.
    """
    if section.factory and not section.factory.startswith(PREFIX) and not trust:
        require_outside("model.factory", section.factory, run)


def build_task(section: ModelSection, description: Description) -> Task:
    """Return the model of a run with new weights; with model.base, adapters on the trained weights of that base.

    Args:
        section: The [model] section.
        description: Properties of the training data.

    Raises:
        InputError: The model cannot be built, or the base is missing or has another model.
        CheckpointError: The base is damaged.
    """
    if not section.base:
        return build_model(section, description)
    try:
        folder = contents.resolve(Path(section.base).expanduser())
        saved = read_saved_model(folder)
    except InputError as error:
        raise InputError(f"model.base: {error}") from None
    if isinstance(saved.manifest.values.get(BASE), dict):
        raise InputError(
            f"model.base {folder} contains only adapters; merge them with python -m mpitrain.adapters merge, and "
            "make a run of the result with python -m mpitrain.checkpoint import"
        )
    base_values = saved.section.model_dump()
    require_same_model(
        section.model_dump(), base_values, folder, f"remove the keys of [model] that {section.base} sets"
    )
    sizes = {
        "vocabulary": base_values["vocabulary"] or saved.description.vocabulary or 0,
        "hidden": base_values["hidden"],
        "max_positions": base_values["max_positions"] or base_values["sequence"],
    }
    updates = {key: getattr(section, key) or size for key, size in sizes.items()}

    def put(module: nn.Module) -> None:
        _require_known(module, folder, saved.manifest)
        fill(module, folder, saved.manifest)

    return build_model(section.model_copy(update=updates), description, TrainedBase(str(folder), put))


def load_model(path: str | Path, *, best: bool = False, trust: bool = False) -> nn.Module:
    """Return the trained model of a run as a plain module on the CPU, in fp32 and in eval mode.

    MPI is not started. If your own code built the model (`model.factory`), Python must be able to import it.

    Args:
        path: A run folder, whose newest whole checkpoint is used, or one step-... folder.
        best: If true, use the checkpoint of the run folder that checkpoint.best keeps.
        trust: If true, import `model.factory` even if its module is in the run's folder, which executes that code.

    Raises:
        InputError: There is no such checkpoint, the model cannot be built, or its code is not trusted.
        CheckpointError: The checkpoint is damaged, or holds another model.
    """
    task, _ = load_task(path, best=best, trust=trust)
    return task.module


def load_task(path: str | Path, *, best: bool = False, trust: bool = False) -> tuple[Task, Description]:
    """Return the trained model of a run with its loss, and the properties of its data. See `load_model`.

    Args:
        path: A run folder, whose newest whole checkpoint is used, or one step-... folder.
        best: If true, use the checkpoint of the run folder that checkpoint.best keeps.
        trust: If true, import `model.factory` even if its module is in the run's folder.
    """
    task, saved = first_complete(candidates(path, best=best), lambda folder: load_folder(folder, trust=trust))
    return task, saved.description


def load_folder(folder: Path, *, trust: bool = False) -> tuple[Task, SavedModel]:
    """Return the trained model of one checkpoint, and the checkpoint's description of it.

    Args:
        folder: Folder of the checkpoint.
        trust: See `load_model`.
    """
    saved = read_saved_model(folder, trust=trust)
    return saved.load(), saved


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fill a module's parameters and buffers from a checkpoint, in place.

    Args:
        module: Model that was trained, or the part of it that a rank has after `mt.parallelize` or in a pipeline.
        path: A run folder, or one step-... folder.

    Raises:
        InputError: There is no checkpoint.
        CheckpointError: The checkpoint is damaged, lacks a tensor, or has a tensor in another shape.
    """
    first_complete(candidates(path), lambda folder: fill(module, folder, contents.complete_manifest(folder)))


def read_saved_model(folder: Path, *, trust: bool = False) -> SavedModel:
    """Return the description of a checkpoint's model, without reading weights.

    Args:
        folder: Folder of the checkpoint.
        trust: See `load_model`.

    Raises:
        InputError: The checkpoint has no description, and there is no run folder to take it from.
        CheckpointError: The checkpoint is not whole.
    """
    manifest = contents.complete_manifest(folder)
    if TASK in manifest.values:
        section, description = _read_description(folder, manifest)
    else:
        section, description = _description_of_run(folder)
    return SavedModel(folder, manifest, section, description, trust)


def candidates(path: str | Path, *, best: bool = False) -> list[Path]:
    """Return the checkpoint folders that a path refers to, newest first. Raises InputError if there are none.

    Args:
        path: A run folder, or one step-... folder.
        best: If true, return only the checkpoint that checkpoint.best keeps.
    """
    path = Path(path)
    if best:
        return [marked_best(path)]
    if (path / CONFIG).is_file() and not find(path):
        raise InputError(
            f"run {path} has no checkpoint yet; wait for the first one (checkpoint.every), or use another run"
        )
    return require(path)


def first_complete(
    folders: Sequence[Path], act: Callable[[Path], T], warn: Callable[[str], object] = warnings.warn
) -> T:
    """Return the result of `act` for the first checkpoint that is whole.

    Args:
        folders: Checkpoint folders, at least one.
        act: Function that raises CheckpointError for a checkpoint that is not whole.
        warn: Function called with a message if an older checkpoint was used.

    Raises:
        CheckpointError: No checkpoint is whole; the error is that of the first.
    """
    first: CheckpointError | None = None
    for folder in folders:
        try:
            result = act(folder)
        except CheckpointError as error:
            first = first or error
            continue
        if first is not None:
            warn(f"an older checkpoint is used, {folder}: {first}")
        return result
    assert first is not None
    raise first


def task_values(section: ModelSection, description: Description) -> dict[str, Any]:
    """Return the value `task` of a checkpoint, which `read_saved_model` reads.

    Args:
        section: The [model] section.
        description: Properties of the training data.
    """
    data = {f.name: getattr(description, f.name) for f in fields(description) if f.name not in _OF_ONE_SPLIT}
    for name in ("columns", "variables"):
        if data[name] is not None:
            data[name] = [spec.model_dump(mode="json") for spec in data[name]]
    data = {name: str(value) if isinstance(value, np.dtype) else value for name, value in data.items()}
    return {"model": section.model_dump(mode="json"), "data": data}


def _read_description(folder: Path, manifest: Manifest) -> tuple[ModelSection, Description]:
    """Return the model's section and the data's description stored in a manifest."""
    try:
        model, data = manifest.values[TASK]["model"], dict(manifest.values[TASK]["data"])
        known = {f.name for f in fields(Description)}
        for name, value in data.items():
            if name.endswith("_dtype"):
                data[name] = np.dtype(value)
            elif name in _SPECS and value is not None:
                data[name] = tuple(_SPECS[name](**each) for each in value)
            elif isinstance(value, list):
                data[name] = tuple(value)
        identity = manifest.values.get("data") or ""
        values = {name: value for name, value in data.items() if name in known}
        description = Description(**values | {"split": TRAIN, "samples": 0, "identity": identity})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its manifest's value {TASK!r} is not valid ({error})") from None
    return Config.from_dict({"model": model}, str(folder)).model, description


def _description_of_run(folder: Path) -> tuple[ModelSection, Description]:
    """Return the model's section from the settings of a checkpoint's run, and the description of its data set."""
    settings = run_of(folder) / CONFIG
    if not settings.is_file():
        raise InputError(
            f"{folder} does not describe its model, and there is no {settings}; build the model yourself and use "
            "mpitrain.loading.load_weights(model, PATH)"
        )
    config = Config.from_args([str(settings)])
    try:
        data = open_dataset(config.data.path, sequence=config.model.sequence)
    except InputError as error:
        raise InputError(f"{folder} does not describe the data of its training, and {error}") from None
    data.close()
    return config.model, data.description


def run_of(folder: Path) -> Path:
    """Return the run folder that contains a checkpoint, or the checkpoint itself if there is none."""
    root = Path(os.path.abspath(folder)).parent
    return root.parent if root.name == CHECKPOINTS else folder


def fill(module: nn.Module, folder: Path, manifest: Manifest) -> None:
    """Fill the parameters and buffers of a module, or of a rank's part of it, from a checkpoint of any layout.

    Args:
        module: Module to fill in place.
        folder: Folder of the checkpoint.
        manifest: Contents of the checkpoint.

    Raises:
        CheckpointError: Bytes are damaged, or the tensors are not those of the module.
    """
    parts: list[Part] = []
    indirect: list[
        tuple[torch.Tensor, torch.Tensor]
    ] = []  # tensors that cannot be read into directly, and the tensors that are read instead
    for name, tensor in _tensors_to_load(module, manifest):
        source = source_of(manifest, trained_source(manifest, name), tensor.dtype)
        spec = manifest.tensors.get(source)
        stored = DTYPES[spec.dtype] if spec is not None else tensor.dtype
        castable = stored.is_floating_point and tensor.dtype.is_floating_point
        dtype = stored if castable else tensor.dtype
        flat = tensor.detach()
        if not flat.is_contiguous() or flat.dtype != dtype or not flat.is_cpu:
            flat = torch.empty(tensor.shape, dtype=dtype)
            indirect.append((tensor, flat))
        flat, part = flat.view(-1), logical_of(tensor)
        target = TensorSpec(source, part.shape, str(dtype).removeprefix("torch."))
        pieces = part.pieces(source, 0, part.numel) or [(0, Piece.whole(source, 0))]
        parts += [Part(target, piece, flat[at : at + piece.numel]) for at, piece in pieces]
    contents.read_parts(folder, manifest, parts)
    with torch.no_grad():
        for tensor, flat in indirect:
            tensor.copy_(flat)


def _require_known(module: nn.Module, folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if a whole module lacks one of the model's tensors in a checkpoint."""
    known = {MODEL + name for name, _ in _tensors_to_load(module, manifest)}
    lacking = sorted(name for name in manifest.tensors if name.startswith(MODEL) and name not in known)
    if lacking:
        raise CheckpointError(
            f"{folder} has {lacking[0].removeprefix(MODEL)}, which {type(module).__name__} does not have "
            f"({len(lacking)} of {len(manifest.tensors)} tensors); use the code and the settings of its training"
        )


def _tensors_to_load(module: nn.Module, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module that a checkpoint must have, with their names in the checkpoint."""
    tied = manifest.values.get("tied", {})
    saved_names = set(module.state_dict(keep_vars=True))
    left_out = set(manifest.values.get(LEFT_OUT, ()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, nn.Parameter):
            if name in left_out and not tensor.requires_grad:
                continue  # frozen base weight that is not saved
        elif name not in saved_names:
            continue  # non-persistent buffer
        saved = name if MODEL + name in manifest.tensors else tied.get(name, name)
        yield saved, tensor
