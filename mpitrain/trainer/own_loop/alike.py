"""What ranks must be given alike, compared before anything is divided among them.

Each rank updates its slice of the parameters with the settings that it has itself: others on another rank would be
training that nobody asked for, and no error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.nn.parameter import is_lazy

from mpitrain.comm import Communicator
from mpitrain.errors import refusal

# of a rank's own: its device and files, how long it waits, and what is only printed
_OWN = {"device", "timeout", "without_effect", "filled", "trackers", "machine"}
_FILES = {"offload", "offload_parameters"}  # host, or a folder, whose path may be of the rank's own
_UNNAMED = {"settings", "settings.options"}  # whose fields are named as if they were not in it


def settings_told(value: Any, name: str = "settings") -> Iterator[tuple[str, str]]:
    """The plain numbers, strings and booleans in settings, by name; of objects only what kind they are."""
    inside = "" if name in _UNNAMED else f"{name.removeprefix('settings.')}."
    if isinstance(value, BaseModel):
        value = {key: getattr(value, key) for key in type(value).model_fields}
    elif is_dataclass(value) and not isinstance(value, type):
        yield (name, type(value).__name__)
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            if key in _FILES:
                yield (inside + key, value[key] if value[key] in ("", "host") else "a folder")
            elif key not in _OWN:
                yield from settings_told(value[key], f"{inside}{key}" if inside else f"settings.{key}")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from settings_told(each, f"{name}[{number}]")
    else:
        yield (name.removeprefix("settings."), _shown(value))


def model_told(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The shapes of a model's parameters, and which are trained."""
    for name, p in model.named_parameters():
        if not is_lazy(p):
            kind = str(p.dtype).removeprefix("torch.")
            yield (f"model.{name}", f"{kind} {list(p.shape)}{'' if p.requires_grad else ' frozen'}")


def groups_told(optimizer: torch.optim.Optimizer, *, whole: bool) -> Iterator[tuple[str, str]]:
    """What the groups of an optimizer are updated with. whole: Whether ranks have the same parameters in them."""
    yield ("optimizer", type(optimizer).__name__)
    for number, group in enumerate(optimizer.param_groups):
        name = f"optimizer.param_groups[{number}]"
        yield from settings_told(
            {key: each for key, each in group.items() if key not in ("params", "param_names")}, name
        )
        if whole:
            yield (f"parameters in {name}", str(len(group["params"])))


def require_alike(comm: Communicator, told: Sequence[tuple[str, str]]) -> None:
    """Raise InputError where ranks were told unlike things, naming the first of them. Collective."""
    mine = dict(told)
    digests = comm.all_gather_object(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    everything = comm.all_gather_object(mine)
    first, other = everything[0], everything[rank]
    name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), "the order of parameters")
    raise refusal(
        f"{name} is {first.get(name, 'not there')} on rank 0 and {other.get(name, 'not there')} on rank {rank}; "
        "give mt.initialize the same on every rank"
    )


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # 1.0 is no other setting than 1
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain = value is None or isinstance(value, (bool, int, float, str))
    return str(value) if plain else type(value).__name__
