"""Defaults that depend on the model: what a run gets where model.name is chosen and nothing else is said.

A key that a person gives always wins. Where the optimizer is chosen, its other settings have their general defaults,
since a rate that suits one optimizer suits no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.choices import Model

# of the keys that a model wants otherwise than `ModelSection` and `OptimSection` declare them
BY_MODEL: dict[Model, dict[str, dict[str, Any]]] = {
    # the 18 layers and 64 channels of He et al. 2015; their momentum; the decay and the rate at which everybody trains
    # it on images as small as CIFAR's, for batches of 32 to 128
    "resnet": {
        "model": {"layers": 18, "width": 64},
        "optim": {"name": "sgd", "lr": 0.05, "weight_decay": 5e-4, "options": {"momentum": 0.9}},
    },
}


def completed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a configuration, by section and key, with the defaults of the model that they name."""
    given = BY_MODEL.get(_model(values.get("model")), {})
    made = dict(values)
    for section, defaults in given.items():
        known = made.get(section, {})
        if isinstance(known, Mapping) and not (section == "optim" and "name" in known):
            made[section] = {**defaults, **known}
    return made


def told(section: str, key: str) -> str:
    """The other defaults of a setting, for people: "resnet: 18"."""
    of_models = ((name, sections.get(section, {})) for name, sections in BY_MODEL.items())
    return ", ".join(f"{name}: {defaults[key]!r}" for name, defaults in of_models if key in defaults)


def _model(section: Any) -> Any:
    """The name of the model that is built, which model.factory replaces."""
    if not isinstance(section, Mapping) or section.get("factory"):
        return None
    name = section.get("name")
    return name if isinstance(name, str) else None
