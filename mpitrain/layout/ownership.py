"""Ownership: which axes of the mesh divide a tensor of the model, and which of several ranks with a copy owns it.

Example of 4 ranks, numbered (a, b) along two axes a and b:

    tensor x of                  divided      rank 0,0   rank 0,1   rank 1,0   rank 1,1   owner
    a layer that b divides       (b,)         x0         x1         x0         x1         x0: rank 0,0; x1: rank 0,1
    a layer that both divide     (a, b)       x00        x01        x10        x11        every rank
    any other layer              ()           x          x          x          x          rank 0,0

All other axes replicate the tensor. An axis may also divide the blocks of the model, so that each of its ranks has
different parameters; a parameter that several of them have (a tied one) is a copy, too. The record of a tensor is
created once, when the model is divided. It answers these questions:

    which rank adds the gradient to the norm     the owner; if replicas have shares, each replica its share
    whose value do all copies start from         the replica named by `source`
    which ranks sum the gradient                 the replicas along the axes that do not divide it (`Division.copies`)
    which rank writes it into a checkpoint       the owner; each replica writes its share or, if all replicas have
                                                 the whole tensor, an equal part of all such tensors
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
    """The record of which ranks have which elements of one parameter or buffer.

    Attributes:
        slice: Part of the model's tensor that this rank and its replicas have.
        divided: Names of the axes along which ranks have different elements; along all other axes they have copies.
        shared: True if each replica has a share of the tensor (ZeRO) instead of a copy.
        is_owner: True if this rank is the first, along all axes that divide the model, with a copy of these elements.
            It adds the gradient to the norm, and writes the elements into a checkpoint.
        is_leader: True if this rank is the first, along these axes, with any elements of the tensor. It writes state
            that all of them have, such as the optimizer's step.
        source: Number of the replica from which all replicas get their initial value.
    """

    slice: Slice
    divided: tuple[str, ...] = ()
    shared: bool = False
    is_owner: bool = True
    is_leader: bool = True
    source: int = 0

    @staticmethod
    def of(tensor: Tensor, numbers: Mapping[str, int] = _NONE, *, copied: bool = False) -> Ownership:
        """Return the record of a parameter or buffer of which each replica has a copy, not a share.

        Args:
            tensor: This rank's parameter or buffer.
            numbers: This rank's number along each axis that divides layers, by name of the axis.
            copied: True if a rank with earlier blocks of the model has the same tensor.
        """
        divided = divided_by(tensor)
        is_owner = not copied and not any(number for axis, number in numbers.items() if axis not in divided)
        is_leader = not copied and not any(numbers.values())
        return Ownership(logical_of(tensor), divided, is_owner=is_owner, is_leader=is_leader)


def owners_of(module: nn.Module, numbers: Mapping[str, int], copied: Collection[str]) -> dict[str, Ownership]:
    """Return the records of all parameters and buffers of a module, by name.

    Args:
        module: This rank's part of the model.
        numbers: This rank's number along each axis that divides layers, by name of the axis.
        copied: Names of parameters that a rank with earlier blocks of the model also has.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: Ownership.of(tensor, numbers, copied=name in copied) for name, tensor in named}


@dataclass(frozen=True)
class Division:
    """The division of a model over the axes of a mesh.

    Attributes:
        model_axes: Communicators of the axes that divide the model, by name, outermost first.
        replicas: Communicators of the axes along which the model is replicated, by name; empty if no tensor is divided
            along any of them.
        owners: Records of the module's parameters and buffers, by name; empty if the module is not divided.
        pipeline: The pipeline of which the module is a stage; None without a pipeline.
        aliases: Additional names of tied parameters in the whole model, each with the name under which the parameter is
            saved; None: the names that the module itself has.
        base: Weights that are not saved, because a restart loads them from their source; None: all weights are saved.
    """

    model_axes: Mapping[str, Communicator] = field(default_factory=dict)
    replicas: Mapping[str, Communicator] = field(default_factory=dict)
    owners: Mapping[str, Ownership] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    aliases: Mapping[str, str] | None = None
    base: BaseWeights | None = None

    def owner(self, name: str, tensor: Tensor) -> Ownership:
        """Return the record of one parameter or buffer.

        Args:
            name: Name of the tensor in the module.
            tensor: This rank's parameter or buffer, from which a missing record is created.
        """
        return self.owners.get(name) or Ownership.of(tensor)

    def copies(self, owner: Ownership, comm: Communicator) -> list[Communicator]:
        """Return communicators which, used one after the other, reach all replicas that have a copy of a tensor.

        The initial value is broadcast over each of them in turn, and the gradient is summed over each in turn.

        Args:
            owner: Record of the tensor.
            comm: Communicator of all replicas.
        """
        if not set(owner.divided).intersection(self.replicas):
            return [comm]
        return [axis for name, axis in self.replicas.items() if name not in owner.divided]

    def dividing(self) -> dict[str, Communicator]:
        """Return the axes that divide a parameter on at least one rank, by name. Collective over `model_axes`."""
        names = {name for owner in self.owners.values() for name in owner.divided}
        for axis in self.model_axes.values():
            names = {name for of_rank in axis.all_gather_object(sorted(names)) for name in of_rank}
        return {name: axis for name, axis in self.model_axes.items() if axis.size > 1 and name in names}
