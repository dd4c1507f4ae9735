"""The units in which sharded parameters are made whole and given back (FSDP's name for them).

A unit is a block of the model (a child of an outermost ModuleList or Sequential), or a tile of a tiled layer; what
belongs to no unit, or to several (tied weights), is in the root unit, which stays gathered from the forward pass to
the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mpitrain.layers.tiled_linear import TiledLinear
from mpitrain.layout import lay_out
from mpitrain.shard.flat import FlatGroup, by_dtype


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
