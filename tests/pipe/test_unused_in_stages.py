"""Parameters that a step does not use: a pipeline, like one process, neither decays them nor counts the step."""

from __future__ import annotations

import pytest
import torch
from pipe.pipe_models import SCHEDULES
from support import config_of
from torch import nn

from mpitrain.layout.mesh import Mesh
from mpitrain.parallel.dividing import ModelPart, divide
from mpitrain.trainer.engine import Engine

BLOCKS = 8
TIED = 1 | 1 << BLOCKS - 1  # the first and the last block have the same second layer
STEPS = (  # of each replica, of each microbatch, the blocks whose second layer is used, as bits
    ((0, 0), (0, 0)),
    ((6, 0), (0, 0)),
    ((0, 0), (1, 16)),
    ((0, 0), (0, 0)),
    ((0, 1 << BLOCKS - 1), (6, 6)),
    ((255, 255), (255, 255)),
    ((0, 64), (64, 0)),
)


class Block(nn.Module):
    """Block whose second layer is switched on by a bit of the sample's first number."""

    def __init__(self, number):
        super().__init__()
        self.number, self.first, self.second = number, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x[:, 1:]).tanh()
        if int(x[0, 0]) >> self.number & 1:
            y = y + self.second(y)
        return torch.cat([x[:, :1].detach(), y], 1)


def model():
    torch.manual_seed(4)
    blocks = nn.Sequential(*map(Block, range(BLOCKS)))
    blocks[-1].second = blocks[0].second
    return blocks


def loss_of(output, y):
    return (output[:, 1:] - y).square().mean()


def optimizer(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def samples(step, replica):
    draw = torch.Generator().manual_seed(10 * step + replica)
    microbatches = []
    for bits in STEPS[step][replica]:
        x, y = torch.randn(3, 4, generator=draw), torch.randn(3, 4, generator=draw)
        microbatches.append((torch.cat([torch.full((3, 1), float(bits)), x], 1), y))
    return microbatches


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("kind", "zero", "recompute"),
    [("1f1b", 0, False), ("1f1b", 1, True), ("zb-h1", 2, False), ("zb-v", 1, False), ("interleaved", 0, False)],
)
def test_unused_parameters_are_neither_decayed_nor_counted(world, kind, zero, recompute):
    """Test parameters on one stage, tied ones on two stages, and stage replicas of which only one uses them."""
    mesh = Mesh.make(world, pipeline=2 if world.size == 4 else world.size)
    settings = config_of(pipeline=mesh.pipeline.size, zero=zero, recompute=recompute, **SCHEDULES[kind])
    divided = divide(ModelPart(model(), settings.parallel, lambda: loss_of), mesh)
    stage_optimizer = optimizer(divided.module)
    engine = Engine(divided.module, loss_of, stage_optimizer, mesh.data, settings, division=divided.division)
    whole, replicas = model(), mesh.data.size
    plain = optimizer(whole)
    for step in range(len(STEPS)):
        engine.forward_backward([samples(step, mesh.data.rank)], 6 * replicas)
        engine.step()
        plain.zero_grad()
        for replica in range(replicas):
            for x, y in samples(step, replica):
                (loss_of(whole(x), y) / (2 * replicas)).backward()
        plain.step()
        expected = whole.state_dict()
        for name, value in engine.state_dict().items():
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), (step, name)
    engine.close()
