"""Layers that a step leaves out are the same on all ranks, and their gradients are not sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shard.steps import engine_of, gpt, tokens, train_steps
from train.jobs import run

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT
from mpitrain.parallel.layer_drop import LayerDrop
from mpitrain.shard.flat import blocks_of

STEPS, LAYERS, DROP = 5, 4, 0.8
CASES = {
    1: [{"zero": 0}],
    2: [
        {"zero": 0},
        {"zero": 1},
        {"zero": 2},
        {"zero": 3, "share_node": False},
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 2, "schedule": "zero-bubble"},
    ],
    3: [{"zero": 2}],
    4: [{"pipeline": 2, "zero": 1}],
}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("layer-drop"))))


def settings(parallel, steps=STEPS, drop=DROP, **train):
    model = {"layers": LAYERS, "width": 16, "heads": 2, "sequence": 16, "layer_drop": drop}
    train = {"steps": steps, "batch": 12, "microbatch": 2, "evaluate_every": 0} | train
    return {"model": model, "train": train, "parallel": parallel, "comm": {"bucket_mb": 0.01}}


def losses(lines):
    return [line["loss"] for line in lines]


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_layout_leaves_out_the_same_layers(world, place):
    alone = world.subgroup([0])
    expected = world.broadcast_object(
        None if alone is None else losses(run(alone, place / "alone", **settings({"zero": 0})))
    )
    whole = world.broadcast_object(
        None if alone is None else losses(run(alone, place / "whole", **settings({"zero": 0}, drop=0.0)))
    )
    assert expected[0] != whole[0]
    for number, parallel in enumerate(CASES[world.size]):
        found = losses(run(world, place / f"{world.size}-{number}", **settings(parallel)))
        assert found == pytest.approx(expected, rel=2e-5), parallel
    folder = place / f"resumed-{world.size}"
    run(world, folder, **settings({}, steps=2))
    found = losses(run(world, folder, **settings({}, recompute=True)))
    assert found[-STEPS:] == pytest.approx(expected, rel=2e-5)


def test_the_expected_output_is_that_of_the_whole_model():
    torch.manual_seed(1)
    model, x = GPT(17, LAYERS, 16, 2, apart=3), torch.randint(17, (2, 8))
    whole = model.eval()(x)
    layer_drop = LayerDrop(model, blocks_of(model), DROP)
    assert torch.equal(model(x), whole)  # evaluation computes all blocks unchanged
    model.train()
    counts = torch.zeros(LAYERS)
    for step in range(400):
        dropped = layer_drop.draw(5, step)
        assert dropped == layer_drop.draw(5, step)
        out = [n for n, block in enumerate(model.blocks) if set(block.parameters()) <= dropped]
        assert dropped == {p for n in out for p in model.blocks[n].parameters()}
        counts[out] += 1
        if step < 4:
            stream, *ends = model.dropout(model.embedding(x))
            for n, block in enumerate(model.blocks):
                if n not in out:
                    added = type(block).forward(block, (stream, *ends))
                    added = added if torch.is_tensor(added) else added[0]
                    stream = stream + (added - stream) / (1 - DROP * (n + 1) / LAYERS)
            torch.testing.assert_close(model(x), model.head(model.norm(stream)))
    rates = torch.arange(1, LAYERS + 1) * DROP / LAYERS
    torch.testing.assert_close(counts / 400, rates, atol=0.1, rtol=0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_buckets_of_dropped_layers_are_not_sent(world, zero):
    model, sent = gpt(), []
    engine = engine_of(model, world, zero=zero, bucket_mb=0.001, clip=0.0, share_node=zero < 3)
    last = set(model.blocks[1].parameters())
    LayerDrop(model, blocks_of(model), 0.0)._dropped[1] = True
    engine.sharding.reducer.dropped = last
    reduction = engine.sharding.gradients.reduction
    for name, at in (("sum", 0), ("scatter", 1)):
        call = getattr(reduction, name)
        setattr(
            reduction,
            name,
            lambda *args, call=call, at=at, **more: (sent.append(args[at].numel()), call(*args, **more))[1],
        )
    train_steps(engine, world, tokens, steps=2, microbatches=2)
    groups = engine.sharding.groups
    buckets = [
        (g.members(b), g.layout.bounds[b + 1] - g.layout.bounds[b]) for g in groups for b in range(g.layout.buckets)
    ]
    expected = [numel for of, numel in buckets if not of or not last.issuperset(p for p, _ in of)]
    assert len(expected) < len(buckets)
    assert sorted(sent) == sorted(expected * (2 if zero < 2 else 4))
    engine.close()


@pytest.mark.parametrize(
    ("changed", "named"), [({"compile": True}, "model.compile"), ({"name": "mlp"}, "model.name mlp")]
)
def test_what_cannot_leave_layers_out_is_refused(changed, named):
    from mpitrain.trainer.assemble import _layer_drop

    config = Config.from_dict({"model": {"layer_drop": 0.1} | changed})
    with pytest.raises(InputError, match=f"cannot be combined with {named}"):
        _layer_drop(config, None)
