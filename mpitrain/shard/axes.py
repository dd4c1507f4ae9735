"""Where a module stands in a mesh of more axes than data parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from mpitrain.comm import Communicator

Microbatch = tuple[Any, Any]


class Stages(Protocol):
    """What the engine needs of a pipeline that its module is a part of (`mpitrain.pipe.pipeline.Pipeline`)."""

    def forward_backward(self, microbatches: Sequence[Microbatch], weights: Sequence[float]) -> float: ...

    def evaluate(self, x: Any, y: Any) -> float: ...

    def synchronize_tied(self) -> None: ...


@dataclass(frozen=True)
class Axes:
    """The module's place in a mesh of more axes than data parallel.

    others: communicators of the other axes. counted: whether a parameter belongs to this rank's part of the norm and
    of a checkpoint, rather than to that of a rank along another axis. pipeline: what the module is a stage of.
    aliases: further names of parameters in the whole model, to the first.
    """

    others: tuple[Communicator, ...] = ()
    counted: Callable[[nn.Parameter], bool] = lambda p: True
    pipeline: Stages | None = None
    aliases: Mapping[str, str] | None = None
