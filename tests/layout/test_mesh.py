"""The mesh: who is where, one communicator per axis, and shapes that do not fit."""

from __future__ import annotations

import pytest
import torch

from mpitrain.errors import InputError
from mpitrain.layout.mesh import Mesh, _crosses_nodes, coordinates, mesh_shape


def test_tensor_ranks_are_neighbours():
    shape = (2, 2, 2)
    assert [coordinates(r, shape) for r in range(8)] == [(d, p, t) for d in (0, 1) for p in (0, 1) for t in (0, 1)]
    assert coordinates(7, (2, 4, 1)) == (1, 3, 0)


def test_data_takes_what_is_left():
    assert mesh_shape(8, "auto", 2, 2) == (2, 2, 2)
    assert mesh_shape(1, "auto", 1, 1) == (1, 1, 1)
    assert mesh_shape(8, 8, 1, 1) == (8, 1, 1)


@pytest.mark.parametrize(("data", "pipeline", "tensor"), [("auto", 3, 1), (3, 2, 1), (2, 2, 4), (16, 1, 1)])
def test_a_product_that_does_not_fit_is_refused_with_those_that_do(data, pipeline, tensor):
    with pytest.raises(InputError, match="does not make 8 ranks") as refused:
        mesh_shape(8, data, pipeline, tensor)
    listed = str(refused.value).split("may be ")[1].split(", ")
    for shape in listed:
        d, p, t = map(int, shape.split("x"))
        assert d * p * t == 8


def test_no_axis_is_empty():
    with pytest.raises(InputError, match="at least 1"):
        mesh_shape(4, "auto", 0, 1)


def test_a_tensor_group_over_two_nodes_is_noticed():
    assert not _crosses_nodes((0, 0, 1, 1), 2)
    assert _crosses_nodes((0, 0, 0, 1, 1, 1), 2)


@pytest.mark.ranks(1, 2, 4, 8)
def test_each_axis_connects_the_ranks_that_differ_along_it_alone(world):
    pipeline, tensor = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (2, 2)}[world.size]
    mesh = Mesh.make(world, "auto", pipeline, tensor)
    assert mesh.shape == (world.size // (pipeline * tensor), pipeline, tensor)
    assert mesh.coordinates == coordinates(world.rank, mesh.shape)
    ranks = torch.arange(world.size).view(mesh.shape)
    assert ranks[mesh.coordinates] == world.rank
    for axis, comm in enumerate((mesh.data, mesh.pipeline, mesh.tensor)):
        members = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather(members, torch.tensor([world.rank]))
        along: list[int | slice] = list(mesh.coordinates)
        along[axis] = slice(None)
        assert torch.equal(members, ranks[tuple(along)])
        assert comm.label == ("data", "pipeline", "tensor")[axis]
    for comm in (mesh.tensor, mesh.pipeline, mesh.data):
        comm.free()
