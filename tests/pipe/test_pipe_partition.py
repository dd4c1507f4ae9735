"""Partition of a model into stages."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT
from mpitrain.pipe.partition import (
    listed_blocks,
    parameter_costs,
    partition,
    stage_bounds,
    time_costs,
)


def test_partition_minimizes_the_largest_part():
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0]
    for parts in range(1, len(costs) + 1):
        bounds = partition([costs] * parts)
        assert bounds[0] == 0 and bounds[-1] == len(costs) and all(a < b for a, b in pairwise(bounds))
        cuts = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), parts - 1))
        best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
        assert max(sum(costs[a:b]) for a, b in pairwise(bounds)) == best


def test_partition_balances_the_other_parts():
    assert partition([[10, 1, 1, 1, 1]] * 3) == [0, 1, 3, 5]


def test_parts_of_slower_ranks_are_smaller_and_the_largest_is_least():
    assert partition([[1.0] * 12, [2.0] * 12]) == [0, 8, 12]  # half the speed, half the blocks
    draw = random.Random(0)
    for parts in (1, 2, 3, 4):
        costs = [[draw.random() * speed for _ in range(7)] for speed in (1.0, 3.0, 0.5, 2.0)[:parts]]
        cuts = [[0, *inner, 7] for inner in combinations(range(1, 7), parts - 1)]
        largest = [max(sum(c[a:b]) for c, (a, b) in zip(costs, pairwise(cut), strict=True)) for cut in cuts]
        assert partition(costs) == cuts[largest.index(min(largest))]


def test_blocks_by_number_by_parameters_and_by_time():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400), nn.Linear(400, 4), nn.Linear(4, 4))
    blocks = listed_blocks(model)
    assert [name for name, _ in blocks] == ["0", "1", "2", "3"]
    assert stage_bounds(blocks, 3) == [0, 2, 3, 4]
    assert parameter_costs(blocks) == [20, 2000, 1604, 20]
    assert stage_bounds(blocks, 2, costs=[parameter_costs(blocks)] * 2) == [0, 2, 4]


def test_stages_can_have_given_numbers_of_blocks():
    blocks = listed_blocks(nn.Sequential(*(nn.ReLU() for _ in range(5))))
    assert stage_bounds(blocks, 3, (1, 3, 1)) == [0, 1, 4, 5]
    with pytest.raises(InputError, match=r"\[1, 3, 1\] is for 3 stages, but there are 2"):
        stage_bounds(blocks, 2, (1, 3, 1))
    for numbers in ((1, 2, 1), (0, 4, 1)):
        with pytest.raises(InputError, match="and each stage needs at least one; make the numbers add up to 5"):
            stage_bounds(blocks, 3, numbers)


def test_measuring_blocks_changes_nothing_in_the_model():
    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.1)  # longer than a loaded machine makes another block wait
            return 2 * x

    model = nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5), Slow(), nn.Linear(32, 32))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    costs = time_costs(listed_blocks(model), torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.rand(3), expected)
    assert max(costs) == costs[2]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_blocks_that_overwrite_their_input_can_be_measured():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    assert min(time_costs(listed_blocks(model), torch.randn(3, 4))) > 0


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_blocks_are_measured_on_the_ranks_own_device(device):
    seen = []

    class Notes(nn.Linear):
        def forward(self, x):
            seen.append((x.device.type, self.weight.device.type))
            return super().forward(x)

    model = nn.Sequential(Notes(4, 4), nn.BatchNorm1d(4), Notes(4, 4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert min(time_costs(listed_blocks(model), torch.randn(3, 4), device)) > 0
    assert set(seen) == {(device.type, device.type)}
    assert all(v.device.type == "cpu" and torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_an_indivisible_model_is_refused():
    with pytest.raises(InputError, match="pipeline_blocks"):
        listed_blocks(nn.Linear(2, 2))
    with pytest.raises(InputError, match="3 blocks, but there are 4 stages"):
        stage_bounds(listed_blocks(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())), 4)


def test_a_parameter_outside_all_blocks_is_refused():
    model = GPT(10, 1, 8, 2)
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(InputError, match="extra"):
        listed_blocks(model)
