"""Base class of the sections of the configuration, and functions that declare a setting in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field, StringConstraints
from pydantic.fields import FieldInfo

Named: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]  # of the user's own code
ClassName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Z]\w*$")]  # a class of torch
Sections: TypeAlias = Mapping[str, Mapping[str, FieldInfo]]  # declarations of the settings, by section and key


class Section(BaseModel, extra="forbid", frozen=True, validate_default=True, protected_namespaces=()):
    """A section of the configuration, with one attribute per setting; immutable, and unknown keys are an error."""


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
    """Declare a setting of a section; its type is the annotation of the attribute.

    Args:
        default: Value used if the configuration does not set it.
        description: Text for `--help`.
        alias: Names of other tools for the same setting, accepted in its place.
        also: Names of other tools for something similar; an error about such a name suggests this setting.
        pattern: Regular expression that a text value must match.
        mode: Only value of `parallel.mode` with which the setting has a meaning; empty, the default: every mode.
        loop: Use of the setting in `mpitrain.initialize`; use `followed` and the functions below it instead.
        off: Value that switches the feature off, if it is not the empty default; `mpitrain.initialize` accepts it.
        decisive: If true, ignoring the setting would change the training, so `mpitrain.initialize` refuses it.
        **limits: Range of the value: ge, gt, le or lt, as in `pydantic.Field`.
    """
    extra = {"alias": list(alias), "also": list(also), "mode": mode, "loop": loop, "off": off, "decisive": decisive}
    return Field(default, description=description, json_schema_extra=extra, pattern=pattern, **limits)  # type: ignore[call-overload]


# Settings that `mpitrain.initialize` uses:
#   followed         must be equal on all ranks
#   followed_apart   may differ between ranks
#   followed_folder  a folder whose path may differ between ranks, which all ranks set or none
#   for_optimizer    optimizer and learning rate; not used if the caller passes an optimizer
followed = partial(setting, loop="followed")
followed_apart = partial(setting, loop="followed_apart")
followed_folder = partial(setting, loop="followed_folder")
for_optimizer = partial(setting, loop="for_optimizer")


def other_names(field: FieldInfo) -> list[str]:
    """Return the names of other tools for a setting or for something similar."""
    return [*declared(field, "alias"), *declared(field, "also")]


def declared(field: FieldInfo, kind: str) -> Any:
    """Return the value of one argument of the `setting` call that declared a field.

    Args:
        field: Field of a `Section`.
        kind: Name of the argument: alias, also, mode, loop, off or decisive.
    """
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra[kind]
