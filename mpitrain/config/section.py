"""Sections of the configuration, and the declaration of one setting in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field, StringConstraints
from pydantic.fields import FieldInfo

Named: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]  # something of the user's own code
ClassName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Z]\w*$")]  # a class of torch
Sections: TypeAlias = Mapping[str, Mapping[str, FieldInfo]]  # the settings of each section, by their keys


class Section(BaseModel, extra="forbid", frozen=True, validate_default=True, protected_namespaces=()):
    """A section: each attribute is a setting, under its key. It never changes once made, and knows no other keys."""


def setting(
    default: Any,
    description: str,
    *,
    alias: Sequence[str] = (),
    also: Sequence[str] = (),
    pattern: str | None = None,
    mode: str = "",
    loop: str = "",
    off: Any = None,
    decisive: bool = False,
    **limits: float,
) -> Any:
    """Declare a setting; its type is the annotation beside it.

    Args:
        default: Its value where none is given.
        description: A sentence for `--help`.
        alias: Other tools' names for the same setting, which are accepted.
        also: Other tools' names for something similar, so that an unknown key can be answered with this one.
        pattern: What a text must match.
        mode: Value of `parallel.mode` that the setting is for; empty: all.
        loop: Use of the setting in a loop of one's own; declare it by `followed` and its kin.
        off: Value that asks for nothing, where that is not an empty default: `mpitrain.initialize` then accepts it.
        decisive: Whether training would go another way without the setting, so that it cannot be passed over.
        **limits: Its range: ge, gt, le, lt, as `pydantic.Field` has them.
    """
    told = {"alias": list(alias), "also": list(also), "mode": mode, "loop": loop, "off": off, "decisive": decisive}
    return Field(default, description=description, json_schema_extra=told, pattern=pattern, **limits)  # type: ignore[call-overload]


# settings that `mpitrain.initialize` follows: alike on all ranks, or as each rank says; a folder of each rank's own, in
# which ranks use it alike; and those of the optimizer and its rates, unless the caller brings an optimizer
followed = partial(setting, loop="followed")
followed_apart = partial(setting, loop="followed_apart")
followed_folder = partial(setting, loop="followed_folder")
for_optimizer = partial(setting, loop="for_optimizer")


def other_names(field: FieldInfo) -> list[str]:
    """Other tools' names for a setting, or for something similar."""
    return [*declared(field, "alias"), *declared(field, "also")]


def declared(field: FieldInfo, kind: str) -> Any:
    """Return what `setting` was told of a setting: alias, also, mode, loop, off or decisive."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra[kind]
