"""Averages of the weights: torch's, at every stage, and exchanged with the weights without a trace."""

from __future__ import annotations

import pytest
import torch
from shard.steps import OPTIMIZERS, engine_of, gpt, images, on_device, resnet, tokens, train_steps
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn

from mpitrain.layers.sync_batchnorm import SyncBatchNorm
from mpitrain.shard.averages import WeightAverage

OPTIONS = [{"zero": 0}, {"zero": 2}, {"zero": 3, "share_node": False}, {"zero": 1, "share_node": False}]


def averages_of_torch(decay, steps, model, data=tokens, optimizer="adamw"):
    """Return the averaged parameters and buffers by torch, after steps in one process."""
    function = get_swa_avg_fn() if decay is None else get_ema_avg_fn(decay)
    averaged = AveragedModel(model, avg_fn=function, use_buffers=True)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        x, y = data(step)
        optimizer.zero_grad()
        model.loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        averaged.update_parameters(model)
    return averaged.module.state_dict()


def engine_with_average(world, decay, model=None, optimizer="adamw", **options):
    engine = engine_of(gpt() if model is None else model, world, optimizer, **options)
    engine.average = WeightAverage(engine.sharding, decay)
    return engine


def train(engine, world, steps, data=tokens):
    for step in range(steps):
        train_steps(engine, world, data, first=step, steps=1)
        engine.average.add()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("decay", [None, 0.8], ids=["swa", "ema"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_averages_are_those_of_torch_at_every_stage(world, options, decay):
    engine = engine_with_average(world, decay, **options)
    train(engine, world, 4)
    with engine.averaged():
        state = engine.state_dict()
    for name, expected in averages_of_torch(decay, 4, gpt()).items():
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-6)
    engine.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("decay", [None, 0.8], ids=["swa", "ema"])
def test_running_statistics_are_averaged_like_those_of_torch(world, decay):
    engine = engine_with_average(world, decay, SyncBatchNorm.convert(resnet(), world), "sgd", zero=2)
    train(engine, world, 3, images)
    before = engine.state_dict()
    with engine.averaged():
        state = engine.state_dict()
    expected = averages_of_torch(decay, 3, resnet(), images, "sgd")
    statistics = [name for name in state if "running" in name]
    assert statistics and not any(torch.equal(state[name], before[name]) for name in statistics)
    for name in statistics:
        torch.testing.assert_close(state[name], expected[name], rtol=1e-3, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_training_continues_bit_by_bit_after_the_average_was_used(world, options, precision):
    losses = []
    for used in (False, True):
        engine = engine_with_average(world, 0.9, precision=precision, **options)
        train(engine, world, 3)
        before = engine.state_dict()
        if used:
            with engine.averaged():
                assert any(not torch.equal(value, before[name]) for name, value in engine.state_dict().items())
                assert not engine.settled
            assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        losses.append(train_steps(engine, world, tokens, first=3, steps=2))
        engine.close()
    assert losses[0] == losses[1]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 2}, {"zero": 3}], ids=str)
def test_averages_of_parameters_that_the_host_updates(world, device, options):
    losses = []
    for used in (False, True):
        engine = engine_of(gpt().to(device), world, precision="bf16", offload="host", **options)
        engine.average = WeightAverage(engine.sharding, 0.9)
        data = on_device(device, tokens)
        train_steps(engine, world, data, steps=2)
        engine.average.add()
        train_steps(engine, world, data, first=2, steps=1)
        before = engine.state_dict()
        if used:
            with engine.averaged():
                assert any(not torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        losses.append(train_steps(engine, world, data, first=3, steps=2))
        engine.close()
    assert losses[0] == losses[1]


class Branches(nn.Module):
    """Two layers, of which the second is not always used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.both = nn.Linear(5, 5), nn.Linear(5, 5), True

    def forward(self, x):
        return self.second(self.first(x)) if self.both else self.first(x)

    def loss(self, output, y):
        return nn.functional.mse_loss(output, y)


@pytest.mark.ranks(1, 2)
def test_unused_parameters_keep_their_average_when_they_get_an_update_of_their_own(world):
    model, whole = Branches(), Branches()
    engine = engine_of(model, world, zero=1, share_node=False)
    engine.average = WeightAverage(engine.sharding, None)
    pieces = len(engine.sharding.flat_parameters)
    optimizer, averaged = OPTIMIZERS["adamw"](whole.parameters()), AveragedModel(whole)
    for step in range(5):
        model.both = whole.both = step not in (2, 3)
        x, y = torch.randn(2, 10, 5, generator=torch.Generator().manual_seed(step))
        train_steps(engine, world, lambda step, x=x, y=y: (x, y), steps=1)
        engine.average.add()
        optimizer.zero_grad()
        whole.loss(whole(x), y).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        averaged.update_parameters(whole)
    assert world.size > 1 or len(engine.sharding.flat_parameters) > pieces
    with engine.averaged():
        state = engine.state_dict()
    for name, expected in averaged.module.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-6)
    engine.close()


@pytest.mark.ranks(1, 2)
def test_averages_count_as_states(world):
    engine = engine_with_average(world, None, zero=2)
    train_steps(engine, world, tokens, steps=1)
    without = engine.memory()
    engine.average.add()
    account = engine.memory()
    assert account.states - without.states == sum(flat.value.nbytes for flat in engine.sharding.flat_parameters)
    assert account.expected["states"] == without.expected["states"] * 3 // 2
    engine.close()
