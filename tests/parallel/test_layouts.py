"""Layouts of axes from outside of the package: written, read, planned and predicted without an edit in the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner.planner_support import MadeUpModel

from mpitrain.config.settings import Config
from mpitrain.parallel.layouts import ParallelLayout, layout_of, read, settings, text
from mpitrain.parallel.places import Nodes
from mpitrain.parallel.rules import rules_of
from mpitrain.planner.candidates import candidates
from mpitrain.planner.machine import read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.search import best, given

REPLICA = (("extensions:Replica", 2),)
CONFIG = Config.from_dict({"parallel": {"axes": dict(REPLICA)}, "train": {"batch": 64, "microbatch": 2}})


def test_a_further_axis_is_a_word_of_a_layout_and_a_setting():
    layout = ParallelLayout(2, 2, 1, zero=1, microbatch=2, axes=REPLICA)
    assert text(layout) == "2x2x1 zero1 mb2 1f1b axes:extensions:Replica=2" and read(text(layout)) == layout
    assert [(axis.name, ranks) for axis, ranks in layout.sizes] == [
        ("data", 2),
        ("replica", 2),
        ("pipeline", 2),
        ("tensor", 1),
    ]
    assert (layout.ranks, layout.readers, layout.replicas) == (8, 4, 4)
    config = Config.from_dict(settings(layout))
    assert config.parallel.axes == dict(REPLICA) and layout_of(config, 8) == layout
    assert layout_of(CONFIG, 8) == ParallelLayout(4, microbatch=2, axes=REPLICA)


@pytest.mark.parametrize("line", ["8x1x1 mb2", "4x2x1 zero2 mb2 1f1b", "4x1x2 zero1 mb4", "8x1x1 zero3 mb2 private"])
@pytest.mark.parametrize("machine", ["cpu-128", "gpu-8"])
def test_an_axis_that_only_averages_takes_as_long_and_as_much_as_data_parallel(line, machine):
    predictor, layout = Predictor(MadeUpModel(), read_machine(machine), 2, 4), read(line)
    with_replicas = replace(layout, data=layout.data // 2, axes=REPLICA)
    one, other = predictor.predict(layout), predictor.predict(with_replicas)
    assert one.parts == other.parts and one.memory == other.memory


def test_all_layouts_have_the_axes_that_the_configuration_names():
    model, rules, nodes = MadeUpModel(), rules_of(CONFIG), Nodes(2, 4)
    found = list(candidates(model, nodes, rules))
    assert found and all(each.axes == REPLICA and each.ranks == 8 for each in found)
    half = {replace(each, axes=()) for each in found}
    assert {(each.data, each.pipeline, each.tensor) for each in half} == {
        (each.data, each.pipeline, each.tensor) for each in candidates(model, Nodes(1, 4))
    }
    predictor = Predictor(model, read_machine("cpu-128"), 2, 4)
    plan = best(predictor, rules, 1, wanted=given(CONFIG))
    assert plan.found[0].layout.axes == REPLICA and plan.found[0].layout.microbatch == 2
