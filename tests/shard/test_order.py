"""Buckets are started in the order in which backward finishes their gradients, whatever the order of registration."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from shard.steps import OPTIMIZERS, engine_of, train_alone, train_steps
from torch import nn

from mpitrain.shard import reducer

BRANCHES, STEPS = 4, 8


class Sum(nn.Module):
    """Sum of branches, computed in an order that can change; backward finishes the branch that was computed last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(BRANCHES))
        self.order = list(range(BRANCHES))[::-1]  # the reverse of the order of registration

    def forward(self, x):
        return sum(self.branches[number](x) for number in self.order)

    def loss(self, output, y):
        return (output - y).square().mean()


def data(step):
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("settings", [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3, "share_node": False}], ids=str)
def test_buckets_start_in_the_order_of_gradients_also_when_the_graph_changes(world, settings, monkeypatch):
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, spare_cores=1))
    monkeypatch.setattr(reducer, "RETRACE", 3)
    comm, model, started = world.split(0), Sum(), []
    engine = engine_of(model, comm, bucket_mb=1e-5, **settings)
    gradients, owners = engine.sharding.gradients, {p: n for n, b in enumerate(model.branches) for p in b.parameters()}
    start, buckets = gradients.start, [(g, b) for g in gradients.groups for b in range(g.layout.buckets)]

    def record(bucket, background):
        group, number = buckets[bucket]
        started.extend(owners[p] for p, _ in group.members(number))
        return start(bucket, background)

    gradients.start = record
    losses, orders = [], []
    for step in range(STEPS):
        if step == 3:
            model.order = [1, 3, 0, 2]  # traced again after step 5; the optimizer's state has moved since
        if comm.rank and settings["zero"] < 3:
            model.order = list(range(BRANCHES))  # only rank 0's order counts
        losses += train_steps(engine, comm, data, first=step, steps=1)
        orders.append(list(dict.fromkeys(started)))
        started.clear()
    assert orders[0] == [3, 2, 1, 0]
    assert orders[1:6] == [[0, 1, 2, 3]] * 5
    assert orders[6:] == [[2, 0, 3, 1]] * 2
    alone = Sum()
    expected = train_alone(alone, alone.loss, OPTIMIZERS["adamw"](alone.parameters()), data, steps=STEPS)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    state = engine.state_dict()
    for name, value in expected[1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    engine.close()
    comm.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("zero", [0, 2])
def test_buckets_on_several_communicators_have_the_same_bits(world, zero, monkeypatch):
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, spare_cores=1))
    comm, results = world.split(0), []
    for rings in (1, 3):
        engine = engine_of(Sum(), comm, bucket_mb=1e-5, zero=zero, rings=rings)
        comms = engine.sharding.gradients.reduction.comms
        before = [each._background_record.sequence for each in comms]
        results.append((train_steps(engine, comm, data, steps=4), engine.state_dict()))
        turns = [each._background_record.sequence - n for each, n in zip(comms, before, strict=True)]
        assert len(turns) == rings and min(turns) >= 4 * (2 * BRANCHES // rings)
        engine.close()
    (losses, state), (expected, reference) = results
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in reference.items())
    comm.free()
