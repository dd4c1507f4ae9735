"""Flat groups: parameters of one dtype laid end to end, in the order in which backward finishes their gradients.

Backward finishes the last layers first, so parameters are laid out in reverse order of registration, in buckets:

    | bucket 0: last layers | bucket 1        | ...      | bucket k: first layers |
      1 MiB, so that         25 MiB each
      sending starts early

Sharded parameters are laid out by the units in which they are made whole and given back (FSDP's name for them). A unit
is a block of the model (a child of an outermost ModuleList or Sequential), or a tile of a tiled layer; what
belongs to no unit, or to several (tied weights), is in the root unit, which stays gathered from the forward pass to
the end of backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn

from mpitrain.layers.tiled_linear import TiledLinear
from mpitrain.layout.boxes import Flat, in_buckets, lay_out

FIRST_BUCKET = 1 << 20  # bytes
MIB = 1 << 20
T = TypeVar("T", bound=torch.Tensor)
MULTIPLE = 16  # elements that a share of a bucket is a multiple of


@dataclass(frozen=True)
class FlatGroup:
    """Parameters of one dtype and device, and where each lies in a flat tensor of `layout.numel` elements."""

    parameters: tuple[nn.Parameter, ...]
    layout: Flat

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.parameters[0].device

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor laid out like the group, in its shape."""
        return [
            flat[place.offset : place.offset + place.numel].view(p.shape)
            for place, p in zip(self.layout.places, self.parameters, strict=True)
        ]

    def buckets(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The buckets of a tensor laid out like the group, as views."""
        return [flat[lo:hi] for lo, hi in pairwise(self.layout.bounds)]

    def members(self, bucket: int) -> list[tuple[nn.Parameter, int]]:
        """The parameters that lie in a bucket, in order, and the offset of each in it."""
        begin, pairs = self.layout.bounds[bucket], zip(self.parameters, self.layout.places, strict=True)
        return [(p, place.offset - begin) for p, place in pairs if place.bucket == bucket]

    def in_shares(self, at: int, rank: int) -> int:
        """Where element `at` of a rank's share of some bucket is, when the rank's shares lie end to end."""
        layout = self.layout
        bucket = next(b for b in range(layout.buckets) if layout.bounds[b] <= at < layout.bounds[b + 1])
        return layout.bounds[bucket] // layout.parts + at - layout.share(bucket, rank)[0]


def lay_in_buckets(sizes: Sequence[int], itemsize: int, bucket_mb: float, parts: int, multiple: int = MULTIPLE) -> Flat:
    """Lay tensors of one dtype out in buckets, of which the first is smaller, so that its reduction starts early.

    Args:
        sizes: Elements of each tensor, in the order in which they are laid out.
        itemsize: Bytes of an element.
        bucket_mb: MiB of a bucket.
        parts: Equal shares that each bucket is divided into.
        multiple: Elements that a share is a multiple of.
    """
    numbers = in_buckets(sizes, itemsize, int(bucket_mb * MIB), FIRST_BUCKET)
    return lay_out([[sizes[n] for n in bucket] for bucket in numbers], itemsize, parts, multiple)


def flat_groups(
    parameters: Iterable[nn.Parameter], bucket_mb: float, parts: int = 1, multiple: int = MULTIPLE
) -> list[FlatGroup]:
    """Lay parameters out in groups, one for each dtype and device.

    Args:
        parameters: In the order in which backward finishes their gradients.
        bucket_mb: MiB of a bucket.
        parts: Equal shares that each bucket is divided into.
        multiple: Elements that a share is a multiple of.
    """
    groups = []
    for members in by_dtype(parameters):
        sizes, itemsize = [p.numel() for p in members], members[0].element_size()
        groups.append(FlatGroup(tuple(members), lay_in_buckets(sizes, itemsize, bucket_mb, parts, multiple)))
    return groups


def numbered(groups: Sequence[FlatGroup]) -> list[tuple[int, int]]:
    """(number of the group, number in the group) of every bucket, in the order in which they are numbered through."""
    return [(g, b) for g, group in enumerate(groups) for b in range(group.layout.buckets)]


def by_dtype(parameters: Iterable[T]) -> list[list[T]]:
    """Parameters of the same dtype and device together, in their order."""
    groups: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(groups.values())


def adopt(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Copy a parameter's gradient into `view`, zeros if there is none, and make that its `.grad`.

    Nothing is done where `.grad` lies there already.
    """
    grad = parameter.grad
    if grad is not None and grad.data_ptr() == view.data_ptr():
        return
    with torch.no_grad():
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)
    parameter.grad = view


def in_backward_order(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, last registered first: the likely order of their gradients."""
    return [p for p in module.parameters() if p.requires_grad][::-1]


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model that have parameters to train, in order.

    Blocks are the children of its outermost nn.ModuleLists and nn.Sequentials.
    """
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, (nn.ModuleList, nn.Sequential)):
            found.append(child)
        else:
            found += blocks_of(child)
    return [block for block in found if any(p.requires_grad for p in block.parameters())]


def units_of(module: nn.Module) -> list[nn.Module]:
    """The blocks, each followed by the tiles of the tiled layers in it; then the tiles outside blocks."""
    found: list[nn.Module] = []
    for block in (*blocks_of(module), module):
        tiles = [tile for layer in block.modules() if isinstance(layer, TiledLinear) for tile in layer.tiles]
        found += [block] if block is not module else []
        found += [tile for tile in tiles if tile not in found]
    return found


def members(module: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The trained parameters of each unit, in the order of `units`, and those of the root unit last.

    A parameter belongs to the innermost unit around it; one that several units use belongs to the root.
    """
    numbers = {unit: number for number, unit in enumerate(units)}
    owners: dict[nn.Parameter, set[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        at, owner = module, len(units)
        for part in name.split(".")[:-1]:
            at = at.get_submodule(part)
            owner = numbers.get(at, owner)
        owners.setdefault(parameter, set()).add(owner)
    found: list[list[nn.Parameter]] = [[] for _ in range(len(units) + 1)]
    for parameter, where in owners.items():
        if parameter.requires_grad:
            found[where.pop() if len(where) == 1 else len(units)].append(parameter)
    return found


def unit_groups(parameters: Sequence[Sequence[nn.Parameter]], parts: int, multiple: int) -> list[FlatGroup]:
    """Flat groups, one for each dtype and device, whose buckets are the units.

    Args:
        parameters: Of each unit in the order of the forward pass, and of the root last (see `members`).
        parts: Shares that each bucket is divided into.
        multiple: Elements that a share is a multiple of.

    Returns:
        Groups whose buckets are in the order in which backward finishes the units, the root last. Every group has as
        many buckets as there are units and the root; those of units without a parameter of its dtype are empty.
    """
    ordered = [list(unit)[::-1] for unit in (*parameters[-2::-1], parameters[-1])]
    groups = []
    for same in by_dtype(p for unit in ordered for p in unit):
        alike = set(same)
        buckets = [[p for p in unit if p in alike] for unit in ordered]
        layout = lay_out([[p.numel() for p in b] for b in buckets], same[0].element_size(), parts, multiple)
        groups.append(FlatGroup(tuple(same), layout))
    return groups
