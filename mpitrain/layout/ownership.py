"""Ownership: which axes of the mesh divide a tensor of the model, and which rank acts for those that have a copy of it.

    tensor, 4 ranks along the axes a x b, numbered (a, b)      divided      rank 0,0   0,1    1,0    1,1
    of a layer that b divides                                  (b,)         x0         x1     x0     x1
    of a layer that both divide                                (a, b)       x00        x01    x10    x11
    of any other layer                                         ()           x          x      x      x
                                                                            first for what it has: of x0 rank 0,0,
                                                                            of x1 rank 0,1, of x rank 0,0

The other axes replicate it. An axis may also divide the blocks of the model, so that each of its ranks has parameters
of its own; those that several have (tied ones) are copies too. The record of a tensor is made once, when the model is
divided. It answers

    who adds a gradient to the norm       the first copy; of what is shared out each replica its share
    whose value all copies begin with     that of the replica named as its source
    which ranks sum its gradient          the replicas along the axes that do not divide it (`Division.copies`)
    who writes it into a checkpoint       the first copy: each replica its share, or, where they all have it, an equal
                                          part of all that is so
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mpitrain.layout.boxes import Slice, divided_by, logical_of

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.layers.lora import BaseWeights
    from mpitrain.pipe.pipeline import Pipeline

_NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Ownership:
    """Who has what of one parameter or buffer.

    Attributes:
        slice: Part of the model's tensor that this rank and its replicas have.
        divided: Names of the axes whose ranks have different elements of it; the others have copies.
        shared: Whether the replicas have shares of it (ZeRO) rather than copies.
        first: Whether this rank's is the first copy along all axes that divide the model.
        leads: Whether this rank is the first along them that has any of it: it writes what all of these know, such as
            the optimizer's step.
        source: Number of the replica whose value all of them begin with.
    """

    slice: Slice
    divided: tuple[str, ...] = ()
    shared: bool = False
    first: bool = True
    leads: bool = True
    source: int = 0

    @staticmethod
    def of(tensor: Tensor, numbers: Mapping[str, int] = _NONE, *, copied: bool = False) -> Ownership:
        """Return the record of a parameter or buffer that is not shared out to the replicas.

        Args:
            tensor: This rank's.
            numbers: This rank's number along each axis that divides layers.
            copied: Whether a rank with earlier blocks of the model has the same.
        """
        divided = divided_by(tensor)
        first = not copied and not any(number for axis, number in numbers.items() if axis not in divided)
        leads = not copied and not any(numbers.values())
        return Ownership(logical_of(tensor), divided, first=first, leads=leads)


def owners_of(module: nn.Module, numbers: Mapping[str, int], copied: Collection[str]) -> dict[str, Ownership]:
    """Return the records of a module's parameters and buffers by name.

    Args:
        module: This rank's part of the model.
        numbers: This rank's number along each axis that divides layers.
        copied: Names of parameters that a rank with earlier blocks of the model has as well.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: Ownership.of(tensor, numbers, copied=name in copied) for name, tensor in named}


@dataclass(frozen=True)
class Division:
    """How a model is divided over the axes of a mesh.

    Attributes:
        others: Communicators of the axes that divide the model, by name, outermost first.
        replicas: Communicators of the axes along which the model is replicated, by name; empty: no tensor is divided
            along them.
        owners: Records of the module's parameters and buffers, by name; empty: the module is not divided.
        pipeline: What the module is a stage of; None without a pipeline.
        aliases: Further names of parameters in the whole model, each with the name they are saved under; None: as
            the module itself says.
        base: What is not saved, since it comes from its source again; None: all is saved.
    """

    others: Mapping[str, Communicator] = field(default_factory=dict)
    replicas: Mapping[str, Communicator] = field(default_factory=dict)
    owners: Mapping[str, Ownership] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    aliases: Mapping[str, str] | None = None
    base: BaseWeights | None = None

    def owner(self, name: str, tensor: Tensor) -> Ownership:
        """Return the record of one parameter or buffer."""
        return self.owners.get(name) or Ownership.of(tensor)

    def copies(self, owner: Ownership, comm: Communicator) -> list[Communicator]:
        """Return the groups that together, one after the other, join all replicas that have a copy of a tensor.

        Its initial value is sent over them, and its gradient is summed over them.

        Args:
            owner: The record of the tensor.
            comm: All replicas.
        """
        if not set(owner.divided).intersection(self.replicas):
            return [comm]
        return [axis for name, axis in self.replicas.items() if name not in owner.divided]

    def dividing(self) -> dict[str, Communicator]:
        """Return the axes that divide some parameter on whichever rank, by name. Collective over `others`."""
        names = {name for owner in self.owners.values() for name in owner.divided}
        for axis in self.others.values():
            names = {name for of_rank in axis.all_gather_object(sorted(names)) for name in of_rank}
        return {name: axis for name, axis in self.others.items() if axis.size > 1 and name in names}
