"""Incompatible settings, by the list of rules that jobs, users' loops and the planner share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.layout.mesh import SAMPLES, MeshAxis, axes_of
from mpitrain.parallel import rules
from mpitrain.parallel.rules import Combination, conflict, require_compatible, rules_of
from mpitrain.shard.virtual_workers import VirtualWorkers


def make_combination(parallel: dict[str, Any], **facts: Any) -> Combination:
    section = Config.from_dict({"parallel": {"data": 2} | parallel}).parallel
    return Combination(section, axes_of(section), **facts)


@pytest.mark.parametrize(
    ("parallel", "facts", "why"),
    [
        ({"whole": ["a"]}, {}, "parallel.whole is for layers that tensor ranks would divide, but parallel.tensor is 1"),
        (
            {"whole": ["a"], "tensor": 2, "sequence": True},
            {},
            "parallel.whole cannot be combined with parallel.sequence",
        ),
        (
            {"tensor": 2, "pipeline": 2, "sequence": True, "slices": 2},
            {},
            "parallel.sequence cannot be combined with parallel.slices",
        ),
        ({"cut": [2, 1]}, {}, r"parallel.cut \[2, 1\] is for the stages of a pipeline"),
        ({"cut": "time", "pipeline": 2}, {"has_data": False}, "parallel.cut time measures blocks with samples"),
        ({"shares": "time", "pipeline": 2}, {}, "parallel.shares time measures ranks that compute the whole model"),
        ({"shares": "time"}, {"reproducible": True}, "parallel.shares time gives the ranks parts that depend on"),
        ({"slices": 2, "pipeline": 2}, {"compiled": True}, "model.compile cannot be combined with parallel.slices"),
        ({}, {"compiled": True, "reproducible": True}, "model.compile cannot be combined with run.reproducible"),
        ({"tensor": 2}, {"reproducible": True}, "run.reproducible supports only data parallelism"),
        ({"zero": 3, "pipeline": 2}, {"one_copy": False}, "parallel.zero 3 would gather each block of a stage twice"),
        (
            {"zero": 3},
            {"compiled": True, "gathers": True},
            "model.compile cannot compile blocks whose parameters are gathered",
        ),
        ({}, {"compiled": True, "synchronous": True}, "model.compile cannot compile batch norms"),
        ({}, {"compiled": True, "has_blocks": False}, "model.compile needs a model with blocks"),
        ({}, {"workers": VirtualWorkers(0, 2, 2), "batches": [8, 1], "gathers": True}, "a batch of 1 samples leaves"),
        ({"axes": {"parallel.test_rules:Odd": 2}}, {}, "odd is odd"),
    ],
)
def test_incompatible_settings_are_refused_with_the_fix(parallel, facts, why):
    with pytest.raises(InputError, match=why):
        require_compatible(make_combination(parallel, **facts))


def test_rules_ignore_unknown_facts():
    for parallel in ({}, {"tensor": 2}, {"pipeline": 2, "zero": 3}, {"cut": [2, 1], "pipeline": 2}):
        assert not conflict(make_combination(parallel))


def test_jobs_and_planner_use_the_same_rules(monkeypatch):
    from planner.planner_support import MadeUpModel

    from mpitrain.parallel.layouts import ParallelLayout

    model, free = MadeUpModel(), rules_of(Config.from_dict({}))
    layout = ParallelLayout(2, tensor=2, microbatch=8)
    assert free.allow(layout, model) and not replace(free, workers=2).allow(layout, model)
    monkeypatch.setattr(rules, "RULES", (*rules.RULES, lambda of: "no" * (of.parallel.zero == 1)))
    assert free.allow(layout, model) and not free.allow(replace(layout, zero=1), model)
    with pytest.raises(InputError, match="no"):
        require_compatible(make_combination({"zero": 1}))


@pytest.mark.parametrize("mode", ["server", "local"])
def test_planner_refuses_modes_other_than_sync(mode):
    with pytest.raises(InputError, match=r"the planner supports only parallel.mode sync"):
        rules_of(Config.from_dict({"parallel": {"mode": mode, "auto": True}}))


class Odd(MeshAxis):
    """An axis that is incompatible with everything."""

    name, divides = "odd", SAMPLES

    def refuse(self, combination: Combination) -> str:
        return "odd is odd" if combination.size("odd") > 1 else ""
