"""All layouts that a model can be trained in: what the runtime takes, but for what is never better.

Left out, because another layout is always as good or cannot be told from it:

    zero 1-3 on one data-parallel rank                      there is nothing to share out
    share_node false, but at zero 3 without a pipeline      one copy a node takes less memory and fewer messages
    reshard false, but where zero 3 gathers                 it says nothing elsewhere
    offload without a device                                states are in the host's memory already
    slices of a sequence that is divided already            a block takes its lengths from a part of what it attends to
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from mpitrain.config.parallel import ParallelSection
from mpitrain.layout.mesh import LAYERS, Sizes, axes_of
from mpitrain.parallel.costs import ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import Nodes
from mpitrain.parallel.rules import LayoutRules

_STEPS = 4  # of the fewest microbatches of a rank, all numbers up to this are looked at


def candidates(model: ModelProfile, nodes: Nodes, rules: LayoutRules = LayoutRules()) -> Iterator[ParallelLayout]:
    """Every layout of a model on some nodes: all sizes and options that the axes of its mesh offer.

    Args:
        model: What is trained.
        nodes: Where.
        rules: What the rest of the configuration allows.
    """
    for base in shapes(model, nodes.count * nodes.each, rules):
        sizes, recomputes = microbatches(model.batch, base.readers), (False, True)[: 1 + _recomputes(model, base)]
        passes = [{"microbatch": size, "recompute": again} for size, again in product(sizes, recomputes)]
        options = [axis.options(base, model, nodes) for axis, _ in reversed(base.sizes)]
        inner = sum(axis.divides == LAYERS for axis, _ in base.sizes)
        for choices in product(*options[:inner], passes, *options[inner:]):
            layout = replace(base, **{key: value for choice in choices for key, value in choice.items()})
            if rules.allow(layout, model, nodes):
                yield layout


def shapes(model: ModelProfile, ranks: int, rules: LayoutRules = LayoutRules()) -> list[ParallelLayout]:
    """The meshes that a model and its batch can be divided over, as layouts without options."""
    rules, asked = replace(rules, offload=""), ParallelSection.model_construct(axes=dict(rules.axes))
    none = ParallelLayout(1, axes=rules.axes, microbatch=0)
    bases = [replace(none, **shape) for shape in _meshes(axes_of(asked), ranks, model)]
    return [base for base in bases if base.readers <= model.batch and rules.allow(base, model)]


def _meshes(axes: Sizes, ranks: int, model: ModelProfile) -> Iterator[dict[str, Any]]:
    """Ranks along each axis that has a setting of its own, the sizes of the innermost axis in the outermost loop."""
    if not axes:
        yield from [{}][: ranks == 1]
        return
    *outer, (axis, asked) = axes
    for size in axis.sizes(model, ranks, asked):
        if ranks % size == 0:
            named = {axis.name: size} if axis.name in ParallelSection.model_fields else {}
            yield from (rest | named for rest in _meshes(outer, ranks // size, model))


def _recomputes(model: ModelProfile, base: ParallelLayout) -> bool:
    """Whether activations can be computed again: of blocks by themselves, or of a stage."""
    return model.has_units or base.pipeline > 1


def microbatches(batch: int, readers: int) -> list[int]:
    """Sizes of microbatches that are looked at: powers of two, and a rank's share in one to a few equal pieces.

    Args:
        batch: Samples of a step.
        readers: Ranks that share them.
    """
    share = -(-batch // readers)
    powers = {1 << n for n in range((share - 1).bit_length())}
    return sorted(powers | {-(-share // pieces) for pieces in range(1, _STEPS + 1)})
