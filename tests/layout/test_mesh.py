"""The mesh: coordinates of the ranks, one communicator per axis, and shapes that do not fit."""

from __future__ import annotations

import pytest
import torch

from mpitrain.config.parallel import ParallelSection
from mpitrain.errors import InputError
from mpitrain.layout.mesh import Mesh, _crosses_nodes, axes_of, coordinates, shape_of


def test_tensor_ranks_are_neighbours():
    shape = {"data": 2, "pipeline": 2, "tensor": 2}
    places = [tuple(coordinates(r, shape).values()) for r in range(8)]
    assert places == [(d, p, t) for d in (0, 1) for p in (0, 1) for t in (0, 1)]
    assert coordinates(7, shape | {"pipeline": 4, "tensor": 1}) == {"data": 1, "pipeline": 3, "tensor": 0}


def mesh_shape(ranks: int, data: int | str, pipeline: int, tensor: int) -> tuple[int, ...]:
    parallel = ParallelSection.model_construct(data=data, pipeline=pipeline, tensor=tensor)
    return tuple(shape_of(axes_of(parallel), ranks).values())


def test_the_data_axis_gets_the_remaining_ranks():
    assert mesh_shape(8, "auto", 2, 2) == (2, 2, 2)
    assert mesh_shape(1, "auto", 1, 1) == (1, 1, 1)
    assert mesh_shape(8, 8, 1, 1) == (8, 1, 1)


@pytest.mark.parametrize(("data", "pipeline", "tensor"), [("auto", 3, 1), (3, 2, 1), (2, 2, 4), (16, 1, 1)])
def test_a_mesh_of_the_wrong_size_is_refused_with_valid_sizes(data, pipeline, tensor):
    with pytest.raises(InputError, match="does not give 8 ranks") as refused:
        mesh_shape(8, data, pipeline, tensor)
    listed = str(refused.value).split("can be ")[1].split(", ")
    for shape in listed:
        d, p, t = map(int, shape.split("x"))
        assert d * p * t == 8


def test_an_empty_axis_is_refused():
    with pytest.raises(InputError, match="at least 1"):
        mesh_shape(4, "auto", 0, 1)


def test_a_tensor_group_on_two_nodes_is_reported():
    assert not _crosses_nodes((0, 0, 1, 1), 2)
    assert _crosses_nodes((0, 0, 0, 1, 1, 1), 2)


@pytest.mark.ranks(1, 2, 4, 8)
def test_each_axis_connects_ranks_that_differ_only_along_it(world):
    pipeline, tensor = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (2, 2)}[world.size]
    mesh = Mesh.make(world, "auto", pipeline, tensor)
    assert mesh.shape == {"data": world.size // (pipeline * tensor), "pipeline": pipeline, "tensor": tensor}
    assert mesh.coordinates == coordinates(world.rank, mesh.shape)
    ranks, place = torch.arange(world.size).view(*mesh.shape.values()), tuple(mesh.coordinates.values())
    assert ranks[place] == world.rank
    for axis, comm in enumerate((mesh.data, mesh.pipeline, mesh.tensor)):
        members = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather(members, torch.tensor([world.rank]))
        along: list[int | slice] = list(place)
        along[axis] = slice(None)
        assert torch.equal(members, ranks[tuple(along)])
        assert comm.label == (("data", "pipeline", "tensor")[axis] if comm.size > 1 else "alone")
    assert mesh.readers is mesh.replicas is mesh.data and mesh.stages is mesh.pipeline and mesh.layers is mesh.tensor
    both = mesh.over("data", "tensor")
    assert both.size == mesh.data.size * mesh.tensor.size and both is mesh.over("tensor", "data")
    assert both.rank == mesh.number("data", "tensor")
    mesh.free()
