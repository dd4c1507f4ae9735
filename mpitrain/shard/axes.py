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

    def forward_backward(self, microbatches: Sequence[Microbatch], weights: Sequence[float]) -> float:
        """Add the gradients of the weighted sum of the microbatches' losses to `.grad`; returns that sum."""

    def evaluate(self, x: Any, y: Any) -> float:
        """The mean loss of some samples, without gradients."""

    def synchronize_tied(self) -> None:
        """Sum the gradients of parameters that several stages share."""


@dataclass(frozen=True)
class Axes:
    """The module's place in a mesh of more axes than data parallel.

    Attributes:
        others: Communicators of the other axes.
        counted: Whether a parameter belongs to this rank's part of the norm and of a checkpoint, rather than to that
            of a rank along another axis.
        pipeline: What the module is a stage of; None without a pipeline.
        aliases: Further names of parameters in the whole model, each with the name they are saved under; None: as
            the module itself says.
    """

    others: tuple[Communicator, ...] = ()
    counted: Callable[[nn.Parameter], bool] = lambda p: True
    pipeline: Stages | None = None
    aliases: Mapping[str, str] | None = None
