"""Ownership: which axes of the mesh divide a tensor of the model, and which rank acts for those that have a copy of it.

    axis       divides                                 replicates
    tensor     the parameters of divided layers        everything else
    pipeline   the model: each stage has its own part  parameters that several stages share
    data       what is trained in shares (ZeRO)        everything else

The record of a tensor is made once, when the model is divided. It answers

    who adds a gradient to the norm       the first copy along tensor and pipeline; of it each data rank its share
    whose value all data ranks begin with that of the data rank named as its source: the first
    who writes it into a checkpoint       the first copy along tensor and pipeline: each data rank its share, or, where
                                          the data axis replicates it, an equal part of all that is so
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mpitrain.layout.boxes import Slice, is_replicated, logical_of

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.layers.lora import BaseWeights
    from mpitrain.pipe.pipeline import Pipeline

TENSOR, DATA = "tensor", "data"  # axes that may divide a tensor


@dataclass(frozen=True)
class Ownership:
    """Who has what of one parameter or buffer.

    Attributes:
        slice: Part of the model's tensor that this rank and its data axis have.
        divided: Axes whose ranks have different elements of it; the others have copies.
        first: Whether this rank's is the first copy along all axes but data.
        leads: Whether this rank is the first along them that has any of it: it writes what all of these know, such as
            the optimizer's step.
        source: Number along the data axis of the rank whose value all ranks of that axis begin with.
    """

    slice: Slice
    divided: tuple[str, ...] = ()
    first: bool = True
    leads: bool = True
    source: int = 0

    @staticmethod
    def of(tensor: Tensor, tensor_rank: int = 0, *, copied: bool = False) -> Ownership:
        """Return the record of a parameter or buffer whose data axis is not placed yet.

        Args:
            tensor: This rank's.
            tensor_rank: Its number along the tensor axis.
            copied: Whether a lower rank of the pipeline has the same.
        """
        leads = not copied and not tensor_rank
        if is_replicated(tensor):
            return Ownership(logical_of(tensor), (), leads, leads)
        return Ownership(logical_of(tensor), (TENSOR,), not copied, leads)


def owners_of(module: nn.Module, tensor_rank: int, copied: Collection[str]) -> dict[str, Ownership]:
    """Return the records of a module's parameters and buffers by name.

    Args:
        module: This rank's part of the model.
        tensor_rank: This rank's number along the tensor axis.
        copied: Names of parameters that a lower rank of the pipeline has as well.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: Ownership.of(tensor, tensor_rank, copied=name in copied) for name, tensor in named}


@dataclass(frozen=True)
class Axes:
    """The module's place in a mesh of more axes than data parallel.

    Attributes:
        others: Communicators of the other axes, that of the tensor axis last.
        owners: Records of its parameters and buffers, by name; empty: the module is not divided.
        pipeline: What the module is a stage of; None without a pipeline.
        aliases: Further names of parameters in the whole model, each with the name they are saved under; None: as
            the module itself says.
        base: What is not saved, since it comes from its source again; None: all is saved.
    """

    others: tuple[Communicator, ...] = ()
    owners: Mapping[str, Ownership] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    aliases: Mapping[str, str] | None = None
    base: BaseWeights | None = None

    def owner(self, name: str, tensor: Tensor) -> Ownership:
        """Return the record of one parameter or buffer."""
        return self.owners.get(name) or Ownership.of(tensor, self.others[-1].rank if self.others else 0)
