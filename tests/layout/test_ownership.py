"""Of all copies of a tensor one acts, and each element that the tensor axis divides has one rank."""

from __future__ import annotations

import torch
from torch import nn

from mpitrain.layout.boxes import logical_of
from mpitrain.layout.ownership import TENSOR, Axes, Ownership, owners_of
from mpitrain.tensor.linear import Features, part_of


def part(rank: int, size: int) -> nn.Module:
    """A tensor rank's part of a linear layer with a norm behind it, whose statistics are a buffer."""
    whole = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6))
    whole[0].weight = part_of(whole[0].weight, 0, Features((6,)), rank, size)
    whole[0].bias = part_of(whole[0].bias, 0, Features((6,)), rank, size)
    return whole


def test_the_first_of_the_tensor_ranks_acts_for_what_all_have_and_each_for_its_part():
    records = [owners_of(part(rank, 2), rank, ()) for rank in range(2)]
    for name in records[0]:
        divided = name.startswith("0.")
        assert [of[name].divided for of in records] == [(TENSOR,) if divided else ()] * 2
        assert [of[name].first for of in records] == [True, divided]
        assert [of[name].leads for of in records] == [True, False]
    assert set(records[0]) >= {"1.running_mean", "1.num_batches_tracked"}


def test_a_copy_of_what_a_lower_stage_has_does_not_act():
    module = part(0, 2)
    records = owners_of(module, 0, {"0.weight"})
    assert not records["0.weight"].first and records["0.bias"].first
    assert records["0.weight"].slice == logical_of(module[0].weight)


def test_a_module_that_nobody_divided_is_this_ranks_own():
    tensor = torch.zeros(2, 3)
    assert Axes().owner("any", tensor) == Ownership(logical_of(tensor), (), True)
