"""optim.groups: name patterns, and what is another way for the parameters that they match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OWN = ("match", "optimizer", "lr", "lr_scale")  # keys that are no options of an optimizer


def checked_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups as they were given. Raises ValueError with a line for people where one of them cannot be meant."""
    for number, group in enumerate(groups):
        where = f"optim.groups, entry {number + 1}"
        if not patterns_of(group):
            raise ValueError(f'{where}: match = {group.get("match")!r} is no pattern; write match = "*.norm.*"')
        if not group.keys() - {"match"}:
            raise ValueError(f"{where}: nothing but match; say what is another way: lr_scale = 0.1, weight_decay = 0.0")
        if {"lr", "lr_scale"} <= group.keys():
            raise ValueError(f"{where}: lr and lr_scale are two ways to say one thing; give one")
        for key in {"lr", "lr_scale", "weight_decay"} & group.keys():
            value = group[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ValueError(f"{where}: {key} = {value!r} is wrong; give a number of at least 0")
        if not isinstance(group.get("optimizer", ""), str):
            raise ValueError(f'{where}: optimizer = {group["optimizer"]!r} is no name; write optimizer = "sgd"')
    return [dict(group) for group in groups]


def patterns_of(group: Mapping[str, Any]) -> list[str]:
    """The patterns of a group; none where they are not text."""
    match = group.get("match")
    found = [match] if isinstance(match, str) else match
    if not isinstance(found, (list, tuple)) or not all(isinstance(pattern, str) and pattern for pattern in found):
        return []
    return list(found)
