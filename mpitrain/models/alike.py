"""Whether a checkpoint is of the gpt that [model] describes, though its tensors may have the same shapes anyway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import refusal
from mpitrain.storage.run_folder import CONFIG

_OF_A_GPT = [
    "layers",
    "width",
    "heads",
    "kv_heads",
    "norm",
    "norm_eps",
    "positions",
    "rope_base",
    "mlp",
    "bias",
    "qkv_bias",
    "qk_norm",
    "tied",
]


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
    for key in _OF_A_GPT:
        mine, theirs = own[key], told.get(key, own[key])
        if key == "kv_heads":
            mine, theirs = mine or own["heads"], theirs or told.get("heads", own["heads"])
        if mine != theirs:
            settings = folder.parent.parent / CONFIG
            how = mend or (f"train with {settings}" if settings.exists() else f"set model.{key} to {theirs}")
            raise refusal(f"{folder} is of a model with {key} {theirs}, and model.{key} is {mine}; {how}")
