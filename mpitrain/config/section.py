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
    default: Any, description: str, *, also: Sequence[str] = (), pattern: str | None = None, **limits: float
) -> Any:
    """Declare a setting; its type is the annotation beside it.

    Args:
        default: Its value where none is given.
        description: A sentence for `--help`.
        also: What other tools call it, so that an unknown key can be answered with this one.
        pattern: What a text must match.
        **limits: Its range: ge, gt, le, lt, as `pydantic.Field` has them.
    """
    return Field(default, description=description, json_schema_extra={"also": list(also)}, pattern=pattern, **limits)  # type: ignore[call-overload]


def other_names(field: FieldInfo) -> list[str]:
    """What other tools call a setting."""
    extra = field.json_schema_extra
    return [str(name) for name in extra["also"]] if isinstance(extra, dict) else []  # type: ignore[union-attr]
