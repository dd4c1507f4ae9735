"""Recompute and tiles: less memory, the same results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shard.steps import engine_of, gpt, tokens, train_alone, train_steps
from torch import nn

from mpitrain.config.training import ModelSection
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.layers.tiled_linear import TiledLinear
from mpitrain.models import build_model
from mpitrain.models.gpt import GPT
from mpitrain.parallel.recompute import recompute_blocks
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


TOKENS = Description("tokens", "train", 9, (8,), np.dtype("int64"), (8,), np.dtype("int64"), 17, None, "")


def test_layers_named_by_a_pattern_are_tiled_and_the_model_computes_the_same():
    def build(tiled):
        torch.manual_seed(0)
        section = ModelSection(layers=2, width=16, heads=2, sequence=8, tiled=tiled)
        return build_model(section, TOKENS).module, torch.rand(2)

    (whole, after), (tiled, after_tiled) = build({}), build({"mlp.*": [2, 3], "blocks.1.mlp.up": [1, 4]})
    assert torch.equal(after, after_tiled)  # no random numbers are drawn for the tiles
    layers = {name: len(m.tiles) for name, m in tiled.named_modules() if isinstance(m, TiledLinear)}
    assert layers == {"blocks.0.mlp.up": 6, "blocks.0.mlp.down": 6, "blocks.1.mlp.up": 4, "blocks.1.mlp.down": 6}
    x = torch.randint(17, (3, 8))
    for model in (whole, tiled):
        model(x).square().mean().backward()
    torch.testing.assert_close(tiled(x), whole(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tiled.embedding.weight.grad, whole.embedding.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("tiled", "message"),
    [
        ({"mlp.upp": [1, 2]}, "model.tiled: 'mlp.upp' matches no linear layer of the model; did you mean"),
        ({"head": [1, 2]}, "model.tiled: head shares its weight"),
        ({"mlp.up": [17, 1]}, "cannot have 17 x 1 tiles"),
    ],
)
def test_layers_that_cannot_be_tiled_are_refused(tiled, message):
    with pytest.raises(InputError, match=message):
        build_model(ModelSection(layers=1, width=16, heads=2, sequence=8, tiled=tiled), TOKENS)


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
@pytest.mark.parametrize(
    "options",
    [{"zero": 0}, {"zero": 2}, {"zero": 3, "share_node": False}, {"zero": 3, "offload_parameters": "files"}],
    ids=str,
)
@pytest.mark.parametrize("recompute", [True, "selective", "every 2"])
def test_recomputed_activations_and_tiles_train_like_one_process(world, options, recompute, folder):
    options = options | ({"offload_parameters": str(folder)} if "offload_parameters" in options else {})
    model = gpt()
    expected, _ = train_alone(
        model, model.loss, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1), tokens, steps=4
    )
    model = gpt()
    model.blocks[1].mlp.down = TiledLinear.of(model.blocks[1].mlp.down, in_tiles=2, out_tiles=2)
    assert recompute_blocks(model, recompute) == 2
    engine = engine_of(model, world, **options)
    assert train_steps(engine, world, tokens, steps=4) == pytest.approx(expected, rel=1e-5)
    engine.close()


@pytest.mark.ranks(1, 2)
def test_recompute_keeps_fewer_activations_and_the_same_dropout(world):
    def train(recompute=False):
        torch.manual_seed(3)
        model = GPT(vocabulary=17, layers=4, width=16, heads=2, dropout=0.2)
        if recompute:
            recompute_blocks(model, recompute)
        engine = engine_of(model, world)
        torch.manual_seed(7 + world.rank)
        losses = train_steps(engine, world, tokens, steps=3)
        activations = engine.memory().activations
        engine.close()
        return losses, activations

    (plain, all_activations), (again, few_activations), (selective, more) = train(), train(True), train("selective")
    assert again == selective == plain
    assert few_activations < more < all_activations
    assert few_activations < all_activations / 2


def test_recompute_without_blocks_is_refused():
    with pytest.raises(InputError, match="needs a model with blocks"):
        recompute_blocks(nn.Linear(2, 2))
