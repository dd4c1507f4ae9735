"""Placements of parameters and gradients: no code asks for the kind of placement."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch import nn

import mpitrain
from mpitrain.shard.flat import flat_groups
from mpitrain.shard.gradients import Gradients, ShardedGradients, WholeGradients
from mpitrain.shard.parameters import Parameters, ReplicatedParameters, ShardedParameters


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
