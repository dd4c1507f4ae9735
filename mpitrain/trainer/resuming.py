"""Which checkpoint a run goes on from: the newest one that is whole and of these data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.checkpoint import folders
from mpitrain.config.settings import Config
from mpitrain.errors import CheckpointError, refusal
from mpitrain.loading import require_same_model
from mpitrain.trainer.callback import Restored

if TYPE_CHECKING:
    from mpitrain.checkpoint import Manifest, Part
    from mpitrain.trainer.trainer import Trainer


def _named(config: Config) -> str:
    return f"data.mix {config.data.mix}" if config.data.mix else f"data.path {config.data.path!r}"


def require_given(trainer: Trainer) -> None:
    """Raise InputError where checkpoint.resume names a checkpoint and there is none. Collective."""
    resume = trainer.config.checkpoint.resume
    if resume not in ("auto", "never"):
        trainer.world.on_root(lambda: len(folders.require(Path(resume))))


def load_newest(trainer: Trainer) -> Restored:
    """The state of the newest checkpoint that is whole, loaded; of the start, where there is none. Collective."""
    resume, reasons = trainer.config.checkpoint.resume, []
    candidates = trainer.store.newest_first() if resume == "auto" else trainer.store.at(Path(resume))
    for folder in candidates:
        try:
            manifest = trainer.store.load(folder, partial(_wanted, trainer, folder))
            of, _ = manifest.value("data"), manifest.value("position")
        except CheckpointError as error:
            reasons.append(str(error))
            trainer.say(f"passed over {folder}: {error}")
            continue
        if of not in (None, trainer.data.description.identity):  # None: imported weights
            raise refusal(
                f"{folder} was trained on another data set than {_named(trainer.config)}; give that "
                "one, or another run.dir"
            )
        trainer.engine.finish_load(manifest)
        for repaired in trainer.store.repairs:
            trainer.say(repaired)
        trainer.say(f"resumed from {folder}")
        return Restored(manifest.step, manifest.values, own=trainer.store.owns(folder))
    if reasons:
        raise CheckpointError(f"none of {len(reasons)} checkpoints can be used: {reasons[0]}", agreed=True)
    return Restored(0, {}, own=False)


def _wanted(trainer: Trainer, folder: Path, manifest: Manifest) -> list[Part]:
    """What this rank fills from a checkpoint, once it is known to be of the run's model."""
    told = manifest.values.get("task") or {}
    require_same_model(trainer.config.model.model_dump(), told.get("model") or {}, folder)
    return trainer.engine.parts_to_load(manifest)
