"""Parity with torch: with the same seed and data, our steps match those of DDP and FSDP2 over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shard.steps import OPTIMIZERS, engine_of, gpt, tokens
from torch import nn

import mpitrain as mt
from benchmarks.runner.peers import gloo

STEPS = 5


def batch(world, step):
    x, y = tokens(step)
    each = len(x) // world.size
    return x[each * world.rank : each * (world.rank + 1)], y[each * world.rank : each * (world.rank + 1)]


def train(world, model, loss, optimizer):
    losses = []
    for step in range(STEPS):
        x, y = batch(world, step)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        total = value.detach().clone()
        world.all_reduce(total, "avg")
        losses.append(float(total))
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ddp_and_fsdp2_over_gloo_take_the_same_steps(world, optimizer):
    from torch.distributed.fsdp import fully_shard

    make = OPTIMIZERS[optimizer]
    with gloo(world):
        theirs = nn.parallel.DistributedDataParallel(gpt())
        expected = train(world, theirs, gpt().loss, make(theirs.parameters()))
        sharded = gpt()
        for block in sharded.blocks:
            fully_shard(block)
        fully_shard(sharded)
        assert train(world, sharded, sharded.loss, make(sharded.parameters())) == pytest.approx(expected, rel=1e-5)
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in sharded.named_parameters()}
        assert dist.get_world_size() == world.size
    ours = mt.DistributedDataParallel(gpt(), world)
    assert train(world, ours, ours.module.loss, make(ours.parameters())) == pytest.approx(expected, rel=1e-5)
    for zero in (0, 1, 2, 3):
        engine = engine_of(gpt(), world, optimizer, zero=zero, clip=0.0)
        losses = []
        for step in range(STEPS):
            parts = engine.forward_backward([[batch(world, step)]], 10)
            engine.step()
            total = torch.tensor(parts)
            world.all_reduce(total)
            losses.append(float(total))
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in engine.state_dict().items():
            if name in whole:
                torch.testing.assert_close(value, whole[name].detach(), rtol=1e-5, atol=1e-6)
        engine.close()
