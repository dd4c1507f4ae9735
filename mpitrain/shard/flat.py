"""Gradients laid end to end in one arena per dtype, in buckets that become ready one after the other in backward.

Parameters are laid out in reverse order of registration, because backward finishes the last layers first:

    arena   | bucket 0: last layers | bucket 1        | ...      | bucket k: first layers |
              1 MiB, so that         25 MiB each
              sending starts early

Each parameter's `.grad` is a view into the arena, so nothing is packed before a bucket is reduced or unpacked
after it. Parameters begin at multiples of 64 bytes; the gaps stay zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mpitrain.comm import Arena, Communicator

ALIGNMENT = 64  # bytes
FIRST_BUCKET = 1 << 20  # bytes


@dataclass(frozen=True)
class Place:
    """Where a parameter's elements lie in its arena, and in which bucket of it."""

    offset: int
    numel: int
    bucket: int


@dataclass(frozen=True)
class FlatPlan:
    """Places of parameters of one dtype. bounds: element offsets of the buckets, one more than there are."""

    places: tuple[Place, ...]
    bounds: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.bounds[-1]


def plan(sizes: Sequence[int], itemsize: int, bucket_bytes: int, first_bytes: int = FIRST_BUCKET) -> FlatPlan:
    """Lay parameters of the given sizes (elements) end to end in buckets of about bucket_bytes, the first smaller."""
    unit = max(1, ALIGNMENT // itemsize)
    places: list[Place] = []
    bounds = [0]
    offset = 0
    limit = min(first_bytes, bucket_bytes)
    for size in sizes:
        places.append(Place(offset, size, len(bounds) - 1))
        offset += -(-size // unit) * unit
        if (offset - bounds[-1]) * itemsize >= limit:
            bounds.append(offset)
            limit = bucket_bytes
    if offset > bounds[-1] or len(bounds) == 1:
        bounds.append(offset)
    return FlatPlan(tuple(places), tuple(bounds))


class FlatGradients:
    """The gradients of parameters of one dtype, in an arena. Collective to make."""

    def __init__(self, comm: Communicator, parameters: Sequence[nn.Parameter], bucket_bytes: int) -> None:
        """parameters: in the order in which their gradients are expected; all of one dtype and device."""
        first = parameters[0]
        self.parameters = list(parameters)
        self.plan = plan([p.numel() for p in parameters], first.element_size(), bucket_bytes)
        self.arena: Arena = comm.arena(self.plan.numel, first.dtype, first.device)
        self.arena.tensor.zero_()
        self.views = [
            self.arena.view(place.offset, p.shape) for place, p in zip(self.plan.places, parameters, strict=True)
        ]
        self.buckets = [
            self.arena.tensor[lo:hi] for lo, hi in zip(self.plan.bounds, self.plan.bounds[1:], strict=False)
        ]

    def attach(self) -> None:
        """Make every parameter's gradient its view, keeping what it has accumulated elsewhere."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            adopt(parameter, view)

    def zero(self) -> None:
        self.arena.tensor.zero_()


def adopt(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Make `view` the parameter's gradient, with the value it has; nothing where it already is."""
    grad = parameter.grad
    if grad is not None and grad.data_ptr() == view.data_ptr():
        return
    with torch.no_grad():
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)
    parameter.grad = view


def by_dtype(parameters: Iterable[nn.Parameter]) -> dict[tuple[torch.dtype, torch.device], list[nn.Parameter]]:
    """Parameters that can share an arena, in their order."""
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return groups
