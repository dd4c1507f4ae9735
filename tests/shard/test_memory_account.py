"""Memory account: bytes of parameters, gradients and optimizer states match the ZeRO paper's formulas."""

from __future__ import annotations

import pytest
import torch
from shard.steps import engine_of, gpt, tokens, train_steps
from torch import nn

from mpitrain.shard.placement import STAGES, formula


class Even(nn.Module):
    """Two matrices whose sizes need no padding, for up to 8 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
        self.loss = nn.functional.mse_loss

    def forward(self, x):
        return self.layers(x)


def data(step):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    return x, x


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_match_the_formula_without_sharing(world, zero):
    numel, n = 2 * 64 * 128, world.size
    for precision, totals in (
        ("bf16", (16 * numel, 4 * numel + 12 * numel // n, 2 * numel + 14 * numel // n, 16 * numel // n)),
        ("fp32", (16 * numel, 8 * numel + 8 * numel // n, 4 * numel + 12 * numel // n, 16 * numel // n)),
    ):
        engine = engine_of(Even(), world, "adam", precision=precision, zero=zero, share_node=False)
        train_steps(engine, world, data, steps=1)
        memory = engine.memory()
        assert memory.padding == 0
        assert memory.parameters + memory.gradients + memory.states == totals[zero]
        measured = {"parameters": memory.parameters, "gradients": memory.gradients, "states": memory.states}
        assert measured == memory.expected
        assert memory.activations > 0
        engine.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_one_copy_per_node_takes_less(world, zero):
    engine = engine_of(Even(), world, "adam", precision="bf16", zero=zero)
    train_steps(engine, world, data, steps=1)
    memory = engine.memory()
    assert memory.parameters == 2 * 2 * 64 * 128 // world.size
    assert memory.gradients == memory.expected["gradients"] and memory.states == memory.expected["states"]
    engine.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_above_the_formula_are_padding(world, zero):
    engine = engine_of(gpt(), world, "adam", zero=zero, share_node=False, bucket_mb=0.004)
    train_steps(engine, world, tokens, steps=1)
    memory = engine.memory()
    averages = torch.tensor([memory.parameters + memory.gradients + memory.states, memory.padding], dtype=torch.float64)
    world.all_reduce(averages, "avg")
    formula_bytes = sum(memory.expected.values())
    assert float(averages[0]) == pytest.approx(formula_bytes + float(averages[1]), rel=2e-3)
    engine.close()


def test_formula_matches_the_paper():
    totals = [formula(stage, 64, 7_500_000_000, 2, 2).total / 1e9 for stage in STAGES]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)  # table 1 of the paper, 7.5 B parameters
