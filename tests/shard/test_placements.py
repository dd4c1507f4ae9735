"""Placements of parameters and gradients, and the stage of ZeRO that parallel.zero "auto" stands for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import mpitrain
from mpitrain.config.settings import Config
from mpitrain.shard.flat import flat_groups
from mpitrain.shard.flat_parameters import is_shardable
from mpitrain.shard.gradients import Gradients, ShardedGradients, WholeGradients
from mpitrain.shard.optimizers import Muon
from mpitrain.shard.parameters import Parameters, ReplicatedParameters
from mpitrain.shard.placement import stage_of
from mpitrain.shard.sharded_parameters import ShardedParameters


def test_no_code_checks_the_type_of_a_placement():
    placements = {
        kind.__name__
        for base in (Parameters, Gradients)
        for kind in (base, *base.__subclasses__(), ShardedParameters, ShardedGradients, WholeGradients)
    }
    assert len(placements) >= 8
    package = Path(mpitrain.__file__).parent
    places = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass", "type")
        and placements & {name.id for part in node.args[1:] for name in ast.walk(part) if isinstance(name, ast.Name)}
    ]
    assert places == []


def test_replicated_parameters_give_views_of_the_module_itself():
    layer = nn.Linear(3, 4)
    (group,) = flat_groups([layer.bias, layer.weight], bucket_mb=1)
    parameters = ReplicatedParameters([group])
    offset = group.layout.places[1].offset
    parameters.local_view(0, offset + 3, offset + 6).fill_(7.0)
    assert torch.equal(layer.weight[1], torch.full((3,), 7.0))
    assert not parameters.gathers and parameters.buffer_bytes() == 0
    assert parameters.nbytes() == (12 + 4) * 4
    with parameters.unshard_all(), parameters.watch_saved(lambda tensor: None):
        pass


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({}, 1),
        ({"parallel": {"zero": "auto"}, "run": {"reproducible": True}}, 1),
        ({"parallel": {"zero": 0}}, 0),
        ({"parallel": {"zero": 3}, "elastic": {"mode": "shrink"}}, 3),
        ({"elastic": {"mode": "shrink"}}, 0),
        ({"comm": {"compression": "topk"}}, 0),
        ({"parallel": {"mode": "local"}}, 0),
        ({"parallel": {"mode": "server"}}, 0),
    ],
    ids=str,
)
def test_auto_is_stage_1_where_the_result_is_the_same(settings, stage):
    config = Config.from_dict(settings)
    assert stage_of(config, 2) == stage
    if config.parallel.zero == "auto":
        assert stage_of(config, 1) == stage_of(config, 2, shardable=False) == 0


def test_optimizers_that_are_not_element_wise_or_have_stepped_are_not_shardable():
    layer = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    assert is_shardable(optimizer) and is_shardable(Muon([layer.weight]))
    assert not is_shardable(torch.optim.Adafactor(layer.parameters()))
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    assert not is_shardable(optimizer)
