"""Nodes of the ranks of a layout, in the numbering of the mesh."""

from __future__ import annotations

from itertools import product

import pytest

from mpitrain.layout.mesh import BLOCKS, LAYERS, PARTS, SAMPLES, coordinates
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import LayoutPlaces, Nodes

AXES = [(), (("extensions:Replica", 2),), (("extensions:Replica", 3), ("train.height_axis:Height", 2))]


@pytest.mark.parametrize("axes", AXES, ids=["none", "replica", "replica and height"])
def test_groups_are_those_of_the_mesh(axes):
    for data, pipeline, tensor, each in product((1, 2, 3), (1, 2), (1, 2), (1, 2, 4, 6)):
        layout = ParallelLayout(data, pipeline, tensor, axes=axes)
        places, shape = LayoutPlaces(Nodes(layout.ranks, each), 8, layout), {a.name: n for a, n in layout.sizes}
        groups = [(places.replicas, (SAMPLES, PARTS)), (places.layers, (LAYERS,)), (places.stages, (BLOCKS,))]
        for group, kinds in groups:
            fixed = [axis.name for axis, _ in layout.sizes if axis.divides not in kinds]
            every = range(layout.ranks)
            ranks = [rank for rank in every if not any(coordinates(rank, shape)[name] for name in fixed)]
            assert group.nodes == tuple(rank // each for rank in ranks)


def test_a_layout_has_the_readers_and_replicas_of_the_mesh():
    layout = ParallelLayout(2, 2, axes=AXES[2])
    assert (layout.ranks, layout.readers, layout.replicas) == (24, 6, 12)
    assert [axis.name for axis, _ in layout.sizes] == ["data", "replica", "pipeline", "height", "tensor"]
