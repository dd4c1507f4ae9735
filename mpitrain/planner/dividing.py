"""A model divided over tensor ranks by its own plan, and its batch norms over data-parallel ones, without the others.

One process plays rank 0 of an axis. What that rank would exchange with the others is noted and not done: a tensor of
the right shape comes back at once, whose numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.planner.model import AxisExchange, Divided
from mpitrain.tensor.axis import Axis, RngTracker
from mpitrain.tensor.plan import parallelize, plan_for

if TYPE_CHECKING:
    from mpitrain.comm import Communicator


class StandIn(Axis):
    """Rank 0 of a tensor axis, all by itself.

    Args:
        size: Ranks of the axis.
        times: Whether passes are timed: results then cost no time, because they are not computed but shared.

    Attributes:
        noted: The exchanges since somebody last put another list here.
    """

    def __init__(self, size: int, *, times: bool = False) -> None:
        self.rank, self.size = 0, size
        self.rng = RngTracker(0) if times else _NoStreams(0)
        self.column_input: object = None
        self.noted: list[AxisExchange] = []
        self._tags = 0
        self._slots = None
        self._pool: dict[tuple[Any, ...], torch.Tensor] | None = {} if times else None

    def all_reduce(self, x: torch.Tensor, tag: int = 0) -> torch.Tensor:
        """A tensor like x."""
        self.noted.append(AxisExchange("all_reduce", x.nbytes))
        return self._like(x, x.shape)

    def reduce_scatter(self, x: torch.Tensor, dim: int, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor like rank 0's part of x."""
        self.noted.append(AxisExchange("reduce_scatter", x.nbytes))
        return self._like(x, _resized(x.shape, dim, lengths[0] if lengths else self.bounds(x.shape[dim])[1]))

    def all_gather(
        self, x: torch.Tensor, dim: int, tag: int = 0, lengths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """A tensor like all ranks' x; where nobody knows the others' lengths, they are taken to be that of x."""
        told = list(lengths) if lengths is not None else [x.shape[dim]] * self.size
        whole = self._like(x, _resized(x.shape, dim, sum(told)))
        self.noted.append(AxisExchange("all_gather", whole.nbytes))
        return whole, told

    def _like(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        if self._pool is None:
            return x.new_empty(shape)
        key = (tuple(shape), x.dtype, x.device)
        kept = self._pool.get(key)
        if kept is None:
            kept = self._pool[key] = x.new_full(tuple(shape), 0.01)
        # no view for autograd, so that it may be written to in place
        return kept.new_empty(0).set_(kept.untyped_storage(), 0, kept.shape, kept.stride())


class _NoStreams(RngTracker):
    """Draws nothing: where tensors have no values, generators have no states."""

    def enter(self, opener: object, device: torch.device) -> None:
        """Do nothing."""

    def leave(self, opener: object = None) -> None:
        """Do nothing."""


class DataStandIn:
    """Two data-parallel ranks, as far as batch norms ask them for sums: one's own are left as they are.

    Attributes:
        noted: The exchanges since somebody last put another list here.
    """

    size = 2

    def __init__(self) -> None:
        self.noted: list[AxisExchange] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        """Note it."""
        self.noted.append(AxisExchange("all_reduce", x.nbytes, "data"))


def synchronize(model: nn.Module, axis: DataStandIn) -> nn.Module:
    """The model with batch norms that sum up over the axis, in place; a new module where it is a batch norm itself."""
    return SyncBatchNorm.convert(model, cast("Communicator", axis))


def divide(model: nn.Module, divided: Divided, *, times: bool = False) -> StandIn | None:
    """Divide a model in place, as tensor rank 0 has it.

    Args:
        model: The whole model.
        divided: How.
        times: Whether passes through it are to be timed.

    Returns:
        The axis; None where there is one rank alone.

    Raises:
        InputError: The model cannot be divided so.
    """
    if divided.tensor == 1:
        return None
    plan = plan_for(model, sequence=divided.sequence)
    axis = StandIn(divided.tensor, times=times)
    parallelize(model, axis, plan, sequence=divided.sequence, whole=divided.whole)
    return axis


def _resized(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    changed = list(shape)
    changed[dim] = length
    return tuple(changed)
