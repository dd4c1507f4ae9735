"""Ownership: each element of a tensor has one owner among the ranks that hold it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.layout.boxes import compose, divided_by, logical_of, mark
from mpitrain.layout.ownership import Division, Ownership, owners_of
from mpitrain.shard.sharding import Sharding
from mpitrain.tensor.axis import Axis
from mpitrain.tensor.linear import Features, part_of
from mpitrain.trainer.engine import broadcast_copies


def along(rank: int, size: int, name: str = "rows") -> Axis:
    return cast(Axis, SimpleNamespace(rank=rank, size=size, names=(name,)))


def part(rank: int, size: int) -> nn.Module:
    """Return a rank's part of a linear layer, and a batch norm behind it, whose statistics are buffers."""
    whole = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6))
    whole[0].weight = part_of(whole[0].weight, 0, Features((6,)), along(rank, size))
    whole[0].bias = part_of(whole[0].bias, 0, Features((6,)), along(rank, size))
    return whole


def test_the_first_rank_owns_copies_and_each_rank_owns_its_part():
    records = [owners_of(part(rank, 2), {"rows": rank}, ()) for rank in range(2)]
    for name in records[0]:
        divided = name.startswith("0.")
        assert [of[name].divided for of in records] == [("rows",) if divided else ()] * 2
        assert [of[name].is_owner for of in records] == [True, divided]
        assert [of[name].is_leader for of in records] == [True, False]
    assert set(records[0]) >= {"1.running_mean", "1.num_batches_tracked"}


def test_a_copy_of_an_earlier_stages_parameter_is_not_owned():
    module = part(0, 2)
    records = owners_of(module, {"rows": 0}, {"0.weight"})
    assert not records["0.weight"].is_owner and records["0.bias"].is_owner
    assert records["0.weight"].slice == logical_of(module[0].weight)


def test_an_undivided_module_is_owned_entirely():
    tensor = torch.zeros(2, 3)
    assert Division().owner("any", tensor) == Ownership(logical_of(tensor))


def test_each_element_has_one_owner_if_two_axes_divide_a_tensor():
    whole = nn.Parameter(torch.arange(35.0).view(5, 7))
    counts = torch.zeros(5, 7)
    for row in range(2):
        for column in range(3):
            half = part_of(whole, 0, Features((5,)), along(row, 2))
            cell = part_of(half, 1, Features((7,)), along(column, 3, "columns"))
            assert divided_by(cell) == ("rows", "columns")
            [box] = logical_of(cell).boxes
            assert torch.equal(box.of(whole.detach()), cell.detach())
            ranks = {"rows": row, "columns": column}
            assert Ownership.of(cell, ranks).is_owner and Ownership.of(cell, ranks).is_leader == (row == column == 0)
            assert Ownership.of(half, ranks).is_owner == (column == 0)
            assert Ownership.of(whole, ranks).is_owner == (row == column == 0)
            box.of(counts)[...] += 1
    assert (counts == 1).all()


def test_a_part_across_sections_of_a_fused_layer_is_refused():
    fused = part_of(nn.Parameter(torch.zeros(12, 5)), 0, Features((6, 6)), along(1, 2))
    again = part_of(fused, 1, Features((5,)), along(0, 2, "columns"))
    assert again.shape == (6, 3) and logical_of(again).shape == (12, 5)
    with pytest.raises(ValueError, match="in the other order"):
        part_of(fused, 0, Features((6,)), along(1, 4, "columns"))
    unequal = part_of(nn.Parameter(torch.zeros(12, 5)), 0, Features((8, 4)), along(1, 2))
    with pytest.raises(ValueError, match="in the other order"):
        compose(logical_of(unequal), logical_of(again))


@pytest.mark.ranks(4)
def test_initial_values_differ_along_a_replica_axis_that_divides_a_parameter(world):
    """Replicas along data x expert, 2 x 2: experts are divided along expert, so their copies are along data."""
    data, expert = world.rank // 2, world.rank % 2
    replicas = {"data": world.split(expert, data, label="data"), "expert": world.split(data, expert, label="expert")}
    module = nn.ParameterDict(
        {"expert": torch.full((3,), float(world.rank)), "gate": torch.full((3,), 1.0 + world.rank)}
    )
    whole = nn.Parameter(torch.zeros(6))
    mark(module["expert"], logical_of(part_of(whole, 0, Features((6,)), along(expert, 2))), ("expert",))
    division = Division(replicas=replicas, owners=owners_of(module, {}, ()))
    broadcast_copies(module, world, division)
    assert module["expert"].tolist() == [expert] * 3  # that of rank 0 along data
    assert module["gate"].tolist() == [1.0] * 3
    records: dict[str, Any] = dict(division.owners)
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(InputError, match="expert is divided over ranks that sum gradients"):
        Sharding(module, optimizer, world, Config(), division)
    assert division.copies(records["expert"], world) == [replicas["data"]]
    assert division.copies(records["gate"], world) == [world]
    for comm in replicas.values():
        comm.free()
