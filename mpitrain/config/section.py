"""What a section of the configuration is, and how one setting in it is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.fields import FieldInfo

Named: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]  # something of the user's own code
ClassName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Z]\w*$")]  # a class of torch
Sections: TypeAlias = Mapping[str, Mapping[str, FieldInfo]]  # the settings of each section, by their keys


class Section(BaseModel):
    """A section: each attribute is a setting, under its key. It never changes once made, and knows no other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


def setting(
    default: Any,
    description: str,
    *,
    alias: Sequence[str] = (),
    also: Sequence[str] = (),
    pattern: str | None = None,
    **limits: float,
) -> Any:
    """Declare a setting; its type is the annotation beside it.

    Args:
        default: Its value where none is given.
        description: A sentence for `--help`.
        alias: Other tools' names for the same setting, which are accepted.
        also: Other tools' names for something similar, so that an unknown key can be answered with this one.
        pattern: What a text must match.
        **limits: Its range: ge, gt, le, lt, as `pydantic.Field` has them.
    """
    extra = {"alias": list(alias), "also": list(also)}
    return Field(default, description=description, json_schema_extra=extra, pattern=pattern, **limits)  # type: ignore[call-overload]


def aliases(field: FieldInfo) -> list[str]:
    """Other tools' names for a setting, which are accepted."""
    return _names(field, "alias")


def other_names(field: FieldInfo) -> list[str]:
    """Other tools' names for a setting, or for something similar."""
    return [*aliases(field), *others(field)]


def others(field: FieldInfo) -> list[str]:
    """Other tools' names for something similar."""
    return _names(field, "also")


def _names(field: FieldInfo, kind: str) -> list[str]:
    extra = field.json_schema_extra
    return [str(name) for name in extra[kind]] if isinstance(extra, dict) else []  # type: ignore[union-attr]
