"""Flat groups: parameters of one dtype laid end to end, in the order in which backward finishes their gradients.

Backward usually finishes the last layers first. Parameters are therefore laid out in reverse order of registration, in
buckets. `mpitrain.shard.reducer` traces the order in which the buckets are really finished, and starts them in it.

    | bucket 0: last layers | bucket 1        | ...      | bucket k: first layers |
      1 MiB, so that         25 MiB each
      sending starts early

Sharded parameters are laid out by units (FSDP's name), the parameters that are gathered and freed together. A unit is a
block of the model (a child of an outermost ModuleList or Sequential) or a tile of a tiled layer. Parameters that belong
to no unit, or to several (tied weights), are in the root unit, which stays gathered from the forward pass to the end of
backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn

from mpitrain.layers.tiled_linear import TiledLinear
from mpitrain.layout.boxes import Flat, divide_into_buckets, lay_out

FIRST_BUCKET = 1 << 20  # bytes
MIB = 1 << 20
T = TypeVar("T", bound=torch.Tensor)
MULTIPLE = 16  # the number of elements of each share is a multiple of this


@dataclass(frozen=True)
class FlatGroup:
    """Parameters of one dtype and device, and their places in a flat tensor of `layout.numel` elements."""

    parameters: tuple[nn.Parameter, ...]
    layout: Flat

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.parameters[0].device

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one view per parameter, in its shape, of a tensor laid out like the group."""
        return [
            flat[place.offset : place.offset + place.numel].view(p.shape)
            for place, p in zip(self.layout.places, self.parameters, strict=True)
        ]

    def buckets(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the buckets of a tensor laid out like the group, as views."""
        return [flat[lo:hi] for lo, hi in pairwise(self.layout.bounds)]

    def members(self, bucket: int) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters in a bucket, in order, each with its offset from the start of the bucket."""
        begin, pairs = self.layout.bounds[bucket], zip(self.parameters, self.layout.places, strict=True)
        return [(p, place.offset - begin) for p, place in pairs if place.bucket == bucket]

    def in_shares(self, at: int, rank: int) -> int:
        """Return the index of an element in the concatenation of a rank's shares of all buckets.

        Args:
            at: Index of the element in the layout; it lies in one of the rank's shares.
            rank: Rank that owns the share.
        """
        layout = self.layout
        bucket = next(b for b in range(layout.buckets) if layout.bounds[b] <= at < layout.bounds[b + 1])
        return layout.bounds[bucket] // layout.parts + at - layout.share(bucket, rank)[0]


def move_into(group: FlatGroup, flat: torch.Tensor, *, fill: bool) -> None:
    """Make the parameters of a group views of a flat tensor.

    Args:
        group: Group of parameters.
        flat: Tensor laid out like the group.
        fill: If true, first copy the values of the parameters into the tensor.
    """
    for parameter, view in zip(group.parameters, group.views(flat), strict=True):
        if fill:
            view.copy_(parameter.data)
        parameter.data = view


def move_out(group: FlatGroup) -> None:
    """Give each parameter its own memory, with its current value."""
    for parameter in group.parameters:
        parameter.data = parameter.data.clone()


def lay_in_buckets(sizes: Sequence[int], itemsize: int, bucket_mb: float, parts: int, multiple: int = MULTIPLE) -> Flat:
    """Lay tensors of one dtype out in buckets; the first bucket is smaller, so that its reduction starts early.

    Args:
        sizes: Elements of each tensor, in the order of the layout.
        itemsize: Bytes of an element.
        bucket_mb: MiB of a bucket.
        parts: Number of equal shares of each bucket.
        multiple: Divisor of the number of elements of a share.
    """
    numbers = divide_into_buckets(sizes, itemsize, int(bucket_mb * MIB), FIRST_BUCKET)
    return lay_out([[sizes[n] for n in bucket] for bucket in numbers], itemsize, parts, multiple)


def flat_groups(
    parameters: Iterable[nn.Parameter], bucket_mb: float, parts: int = 1, multiple: int = MULTIPLE
) -> list[FlatGroup]:
    """Lay parameters out in groups, one for each dtype and device.

    Args:
        parameters: Parameters in the order in which backward finishes their gradients.
        bucket_mb: MiB of a bucket.
        parts: Number of equal shares of each bucket.
        multiple: Divisor of the number of elements of a share.
    """
    groups = []
    for members in by_dtype(parameters):
        sizes, itemsize = [p.numel() for p in members], members[0].element_size()
        groups.append(FlatGroup(tuple(members), lay_in_buckets(sizes, itemsize, bucket_mb, parts, multiple)))
    return groups


def bucket_indices(groups: Sequence[FlatGroup]) -> list[tuple[int, int]]:
    """Return (number of the group, number of the bucket in the group) for every bucket, in the order of the groups."""
    return [(g, b) for g, group in enumerate(groups) for b in range(group.layout.buckets)]


def by_dtype(parameters: Iterable[T]) -> list[list[T]]:
    """Return lists of parameters with the same dtype and device; each list keeps the order of the parameters."""
    groups: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(groups.values())


def move_gradient(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Copy a parameter's gradient into `view` and make `view` its `.grad`; without a gradient, fill `view` with zeros.

    Nothing is copied if the gradient is already at that address.

    Args:
        parameter: Parameter whose gradient is copied.
        view: Memory in the parameter's shape.
    """
    grad = parameter.grad
    with torch.no_grad():
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
    parameter.grad = view


def in_backward_order(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters, last registered first: the likely order of their gradients in backward."""
    return [p for p in module.parameters() if p.requires_grad][::-1]


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that have trained parameters, in order.

    Blocks are the children of the model's outermost nn.ModuleLists and nn.Sequentials, and of those directly inside
    them. A child of a class derived from one of these is a block as a whole.
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and type(child) not in (nn.ModuleList, nn.Sequential):
            blocks.append(child)
        else:
            blocks += blocks_of(child)
    return [block for block in blocks if any(p.requires_grad for p in block.parameters())]


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return the units of a model: each block and the tiles of its tiled layers; then the tiles outside blocks."""
    units: list[nn.Module] = []
    for block in (*blocks_of(module), module):
        tiles = [tile for layer in block.modules() if isinstance(layer, TiledLinear) for tile in layer.tiles]
        units += [block] if block is not module else []
        units += [tile for tile in tiles if tile not in units]
    return units


def members(module: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each unit, in the order of `units`, and those of the root unit last.

    A parameter belongs to the innermost unit that contains it. A parameter that several units use belongs to the root
    unit.

    Args:
        module: Model.
        units: Units of the model without the root (see `units_of`).
    """
    numbers = {unit: number for number, unit in enumerate(units)}
    owners: dict[nn.Parameter, set[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        at, owner = module, len(units)
        for part in name.split(".")[:-1]:
            at = at.get_submodule(part)
            owner = numbers.get(at, owner)
        owners.setdefault(parameter, set()).add(owner)
    by_unit: list[list[nn.Parameter]] = [[] for _ in range(len(units) + 1)]
    for parameter, where in owners.items():
        if parameter.requires_grad:
            by_unit[where.pop() if len(where) == 1 else len(units)].append(parameter)
    return by_unit


def unit_groups(parameters: Sequence[Sequence[nn.Parameter]], parts: int, multiple: int) -> list[FlatGroup]:
    """Return flat groups, one for each dtype and device, whose buckets are the units.

    Args:
        parameters: Parameters of each unit in the order of the forward pass, those of the root unit last (see
            `members`).
        parts: Number of equal shares of each bucket.
        multiple: Divisor of the number of elements of a share.

    Returns:
        Groups whose buckets are in the order in which backward finishes the units, the root last. Every group has one
        bucket per unit and one for the root; a bucket is empty if its unit has no parameter of the group's dtype.
    """
    ordered = [list(unit)[::-1] for unit in (*parameters[-2::-1], parameters[-1])]
    groups = []
    for same in by_dtype(p for unit in ordered for p in unit):
        of_dtype = set(same)
        buckets = [[p for p in unit if p in of_dtype] for unit in ordered]
        layout = lay_out([[p.numel() for p in b] for b in buckets], same[0].element_size(), parts, multiple)
        groups.append(FlatGroup(tuple(same), layout))
    return groups
