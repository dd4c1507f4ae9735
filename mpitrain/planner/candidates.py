"""All layouts that a model can be trained in, except those that are never better than another one.

Left out, because another layout is always at least as good or is identical:

    zero 1-3 on one data-parallel rank                      there is nothing to shard
    share_node false, except at zero 3 without a pipeline   one copy per node takes less memory and fewer messages
    reshard false, except where zero 3 gathers              it has no effect elsewhere
    offload without a device                                states are in the host's memory already
    slices of a sequence that is divided already            a block cannot tell its length from a part of the sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import isqrt
from typing import Any

from mpitrain.config.parallel import ParallelSection
from mpitrain.layout.mesh import LAYERS, Sizes, axes_of
from mpitrain.parallel.costs import ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import Nodes
from mpitrain.parallel.recompute import Recompute
from mpitrain.parallel.rules import LayoutRules

_STEPS = 4  # every number of microbatches of a rank up to this one is tried


def candidates(model: ModelProfile, nodes: Nodes, rules: LayoutRules = LayoutRules()) -> Iterator[ParallelLayout]:
    """Yield every layout of a model on some nodes: all sizes and options that the axes of its mesh offer.

    Args:
        model: Profile of the model to train.
        nodes: Nodes that it runs on.
        rules: Restrictions from the rest of the configuration.
    """
    for base in shapes(model, nodes.count * nodes.each, rules):
        sizes, ways = microbatches(model.batch, base.readers), _ways_to_recompute(model, base, rules)
        passes = [{"microbatch": size, "recompute": way} for size, way in product(sizes, ways)]
        options = [axis.options(base, model, nodes) for axis, _ in reversed(base.sizes)]
        inner = sum(axis.divides == LAYERS for axis, _ in base.sizes)
        for choices in product(*options[:inner], passes, *options[inner:]):
            layout = replace(base, **{key: value for choice in choices for key, value in choice.items()})
            if rules.allow(layout, model, nodes):
                yield layout


def shapes(model: ModelProfile, ranks: int, rules: LayoutRules = LayoutRules()) -> list[ParallelLayout]:
    """Return the meshes that a model and its batch can be divided over, as layouts without options.

    Args:
        model: Profile of the model to train.
        ranks: Number of ranks of the mesh.
        rules: Restrictions from the rest of the configuration.
    """
    rules, section = replace(rules, offload=""), ParallelSection.model_construct(axes=dict(rules.axes))
    none = ParallelLayout(1, axes=rules.axes, microbatch=0)
    bases = [replace(none, **shape) for shape in _meshes(axes_of(section), ranks, model)]
    return [base for base in bases if base.readers <= model.batch and rules.allow(base, model)]


def _meshes(axes: Sizes, ranks: int, model: ModelProfile) -> Iterator[dict[str, Any]]:
    """Yield the ranks along each axis that has a setting of its own; the innermost axis varies slowest."""
    if not axes:
        yield from [{}][: ranks == 1]
        return
    *outer, (axis, section) = axes
    for size in axis.sizes(model, ranks, section):
        if ranks % size == 0:
            named = {axis.name: size} if axis.name in ParallelSection.model_fields else {}
            yield from (rest | named for rest in _meshes(outer, ranks // size, model))


def _ways_to_recompute(model: ModelProfile, base: ParallelLayout, rules: LayoutRules) -> list[Recompute]:
    """Return values of train.recompute: block by block, or true in a pipeline, which recomputes stage by stage.

    Segments of N blocks keep least if N is the square root of the number of blocks (Chen et al. 2016, section 4.2).
    """
    ways: list[Recompute] = [False, True] if model.has_units or base.pipeline > 1 else [False]
    if model.has_units and not rules.compiled:
        units = sum(block.is_unit for block in model.blocks(1))
        ways.append("selective")
        if base.pipeline == 1 and units > 1:
            ways += [tuple(range(units // 2)), *([f"every {isqrt(units)}"] if units > 3 else [])]
    if rules.recompute is None:
        return ways
    requested = rules.recompute
    return [requested] if requested in ways or (model.has_units and not isinstance(requested, bool)) else []


def microbatches(batch: int, readers: int) -> list[int]:
    """Return the microbatch sizes to try: powers of two, and a rank's share divided into one to four equal pieces.

    Args:
        batch: Samples of a step.
        readers: Ranks that share them.
    """
    share = -(-batch // readers)
    powers = {1 << n for n in range((share - 1).bit_length())}
    return sorted(powers | {-(-share // pieces) for pieces in range(1, _STEPS + 1)})
