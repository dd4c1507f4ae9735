"""`model.base`: the keys of [model] that are not given come from the run whose weights stand under the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.config.toml_file import read_toml
from mpitrain.errors import InputError

CONFIG = "config.toml"  # of a run folder
_OWN = ("base", "compile", "lora", "lora_alpha", "lora_dropout", "lora_targets", "preset")  # not those of the base


def with_base(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [model]: those given, and for all others what the settings of the run `base` say.

    A checkpoint that lies in no run has no settings; its weights then tell what does not fit.

    Raises:
        InputError: There is no such run, or its settings cannot be read.
    """
    path = Path(str(given["base"])).expanduser()
    if not path.exists():
        raise InputError(f"model.base: {path} does not exist; give a checkpoint folder or a run folder")
    for folder in (path, path.absolute().parent.parent):
        if (folder / CONFIG).is_file():
            found = read_toml(str(folder / CONFIG)).get("model", {})
            return {key: value for key, value in found.items() if key not in _OWN} | dict(given)
    return dict(given)
