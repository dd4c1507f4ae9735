"""What a manifest's payload must look like before anything in it is believed: every type, every range, every name.

A payload with a right hash may still be wrong: made by hand, by another program, or to do harm. So names of files are
plain ones, a tensor is no larger than the stretches of files that hold it, and they fit into their files, whose sizes
are compared with those on the disk before anything is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, StringConstraints, ValidationError

from mpitrain.errors import first_problem

FORMAT = "mpitrain checkpoint 2"

Size = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Crc = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
FileName = Annotated[StrictStr, StringConstraints(pattern=r"^[a-z]+(-[0-9]+)*\.(h5|bin)$", max_length=100)]
NoFile = Literal[""]
Shape = Annotated[tuple[Size, ...], Field(max_length=64)]
Scalar = StrictInt | StrictFloat | bool | StrictStr | None
PieceNumbers = tuple[Size, Size, Size, Size, Size, Size, Size]  # outer, dim, inner, start, stop, lo, hi


class _OpenPayload(BaseModel):
    """Values of which some are known; a job may add others."""

    model_config = ConfigDict(extra="allow")


class LossScalePayload(_OpenPayload):
    """What is kept of a loss scale."""

    scale: Annotated[StrictFloat, Field(gt=0)] | Annotated[StrictInt, Field(gt=0)]
    good: Size


class EnginePayload(_OpenPayload):
    """What `mpitrain.initialize`'s engine keeps."""

    steps: Size
    skipped: Size
    values: dict[str, Any]


class ValuesPayload(_OpenPayload):
    """The values that are known here, each of which may be missing; a job may have others."""

    position: Size = 0
    data: StrictStr | None = None
    tied: dict[str, StrictStr] = {}
    optimizer: dict[str, dict[str, Scalar]] = {}
    data_ranks: Size = 0
    loss_scale: LossScalePayload = LossScalePayload(scale=1, good=0)
    engine: EnginePayload = EnginePayload(steps=0, skipped=0, values={})


class Payload(BaseModel):
    """What a manifest holds as JSON has it, where lists stand for tuples; see `mpitrain.checkpoint.manifest`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["mpitrain checkpoint 2"]
    step: Size
    tensors: tuple[tuple[StrictStr, Shape, StrictStr], ...]
    files: dict[FileName, Annotated[Size, Field(ge=1)]]
    rest: dict[FileName, Crc]
    views: dict[FileName, tuple[Size, Crc]]
    parity: tuple[tuple[tuple[FileName | NoFile, ...], tuple[FileName, ...], Size], ...]
    extents: tuple[tuple[StrictStr, PieceNumbers, FileName, Size, tuple[Crc, ...]], ...]
    values: ValuesPayload


def checked(content: Any) -> Payload:
    """Check what a manifest holds. Raises ValueError with what is wrong, in one line."""
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r:.40}, this version reads {FORMAT!r}")
    try:
        return Payload.model_validate(content)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
