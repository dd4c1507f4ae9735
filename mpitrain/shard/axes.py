"""Where a module stands in a mesh of more axes than data parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from mpitrain.comm import Communicator
from mpitrain.layers.base_weights import BaseWeights

if TYPE_CHECKING:
    from mpitrain.pipe.pipeline import Pipeline

Microbatch = tuple[Any, Any]


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
        base: What is not saved, since it comes from its source again; None: all is saved.
    """

    others: tuple[Communicator, ...] = ()
    counted: Callable[[nn.Parameter], bool] = lambda p: True
    pipeline: Pipeline | None = None
    aliases: Mapping[str, str] | None = None
    base: BaseWeights | None = None
