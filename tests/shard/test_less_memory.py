"""Recompute and tiles: less memory, the same results."""

from __future__ import annotations

import pytest
import torch
from shard.steps import engine_of, gpt, tokens, train_alone, train_steps
from torch import nn

from mpitrain.errors import InputError
from mpitrain.layers.tiled_linear import TiledLinear
from mpitrain.models.gpt import GPT
from mpitrain.parallel.dividing import recompute_blocks
from mpitrain.shard.flat import members, units_of


@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (5, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiled_layer_matches_the_whole_layer(tiles, bias):
    torch.manual_seed(0)
    linear = nn.Linear(11, 7, bias=bias)
    tiled = TiledLinear.of(linear, in_tiles=tiles[0], out_tiles=tiles[1])
    x = torch.randn(2, 3, 11, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    linear(x).square().sum().backward()
    tiled(z).square().sum().backward()
    torch.testing.assert_close(tiled(z), linear(x))
    torch.testing.assert_close(z.grad, x.grad)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in linear.parameters())


def test_more_tiles_than_features_are_refused():
    with pytest.raises(InputError, match="9 x 1 tiles"):
        TiledLinear(8, 8, in_tiles=9)


def test_units_are_blocks_and_tiles_and_tied_weights_are_in_the_root():
    model = gpt()
    model.blocks[0].mlp.up = TiledLinear.of(model.blocks[0].mlp.up, out_tiles=3)
    units = units_of(model)
    assert units == [model.blocks[0], *model.blocks[0].mlp.up.tiles, model.blocks[1]]
    parameters = members(model, units)
    assert [p.shape for p in parameters[1]] == [(16, 12), (16,)]
    assert any(p is model.embedding.weight for p in parameters[-1])
    assert sum(map(len, parameters)) == len(list(model.parameters()))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 2}, {"zero": 3, "share_node": False}], ids=str)
def test_recomputed_activations_and_tiles_train_like_one_process(world, options):
    model = gpt()
    expected, _ = train_alone(
        model, model.loss, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1), tokens, steps=4
    )
    model = gpt()
    model.blocks[1].mlp.down = TiledLinear.of(model.blocks[1].mlp.down, in_tiles=2, out_tiles=2)
    assert recompute_blocks(model) == 2
    engine = engine_of(model, world, **options)
    assert train_steps(engine, world, tokens, steps=4) == pytest.approx(expected, rel=1e-5)
    engine.close()


@pytest.mark.ranks(1, 2)
def test_recompute_keeps_fewer_activations_and_the_same_dropout(world):
    def train(recompute):
        torch.manual_seed(3)
        model = GPT(vocabulary=17, layers=4, width=16, heads=2, dropout=0.2)
        if recompute:
            recompute_blocks(model)
        engine = engine_of(model, world)
        torch.manual_seed(7 + world.rank)
        losses = train_steps(engine, world, tokens, steps=3)
        activations = engine.memory().activations
        engine.close()
        return losses, activations

    (plain, all_activations), (again, few_activations) = train(False), train(True)
    assert again == plain
    assert few_activations < all_activations / 2


def test_recompute_without_blocks_is_refused():
    with pytest.raises(InputError, match="finds no blocks"):
        recompute_blocks(nn.Linear(2, 2))
