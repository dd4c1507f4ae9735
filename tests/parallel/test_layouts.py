"""Layouts as text and as settings; axes defined outside the package are planned like any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from planner.planner_support import MadeUpModel, block

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.parallel.costs import REPLICAS
from mpitrain.parallel.layouts import ParallelLayout, layout_of, read, settings, text
from mpitrain.parallel.places import Nodes
from mpitrain.parallel.rules import rules_of
from mpitrain.planner.candidates import candidates
from mpitrain.planner.machine import read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.search import best, explicit_settings

INT, FLOAT = np.dtype("int64"), np.dtype("float32")
REPLICA = (("extensions:Replica", 2),)
CONFIG = Config.from_dict({"parallel": {"axes": dict(REPLICA)}, "train": {"batch": 64, "microbatch": 2}})


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.builds(
        ParallelLayout,
        data=st.integers(1, 4096),
        pipeline=st.integers(1, 64),
        tensor=st.integers(1, 8),
        zero=st.integers(0, 3),
        share_node=st.booleans(),
        shard_within=st.sampled_from(["all", "node"]),
        reshard=st.booleans(),
        microbatch=st.integers(1, 100),
        schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble", "my_own.schedules:late"]),
        chunks=st.integers(1, 4),
        slices=st.integers(1, 4),
        cut=st.lists(st.integers(1, 9), max_size=6).map(tuple),
        recompute=st.booleans(),
        offload=st.sampled_from(["", "host", "/tmp/states"]),
        sequence=st.booleans(),
        whole=st.sampled_from([(), ("embedding", "blocks.*.mlp.*")]),
        axes=st.sampled_from([(), REPLICA]),
    )
)
def test_a_layout_can_be_parsed_from_its_text(layout):
    line = text(layout)
    assert read(line) == layout and "\n" not in line


@pytest.mark.parametrize(
    "line",
    ["", "zero1", "4x2", "4x2x1 zero4", "4x2x1 mb0", "4x0x1", "4x2x1 fast", "4x1x1 cut:0,2", "4x1x1 axes:replica=2"],
)
def test_invalid_layouts_are_refused(line):
    with pytest.raises(InputError) as refused:
        read(line)
    assert "write" in str(refused.value) and "\n" not in str(refused.value)


def test_a_layout_converts_to_settings_and_back():
    layout = ParallelLayout(
        2, 2, 2, zero=1, microbatch=4, schedule="gpipe", cut=(3, 5), recompute=True, whole=("embedding",)
    )
    for each in (
        layout,
        ParallelLayout(8, zero=3, share_node=False, reshard=False, microbatch=4),
        ParallelLayout(2, 4, microbatch=2),
    ):
        config = Config.from_dict(settings(each))
        assert layout_of(config, each.ranks) == each
    left = layout_of(Config.from_dict({"train": {"batch": 32}, "parallel": {"pipeline": 2}}), 8)
    assert left == ParallelLayout(4, 2, zero=1, microbatch=2)
    blocks = [block(1.0, numel=n) for n in (9, 1, 1, 1)]
    cut = Config.from_dict({"parallel": {"pipeline": 2, "cut": "parameters"}})
    assert layout_of(cut, 2, blocks).cut == (1, 3)


@pytest.mark.parametrize("recompute", ["selective", "every 4", [0, 2, 3, 4], True, False])
def test_a_layout_has_every_way_of_recomputing(recompute):
    config = Config.from_dict({"train": {"recompute": recompute, "microbatch": 2, "batch": 64}})
    layout = layout_of(config, 8)
    assert layout.recompute == config.train.recompute and read(text(layout)) == layout
    assert layout_of(Config.from_dict(settings(layout)), 8) == layout
    predictor = Predictor(MadeUpModel(), read_machine("cpu-128"), 2, 4)
    plan = best(predictor, rules_of(config), 1, requested=explicit_settings(config))
    assert [each.layout.recompute for each in plan.predictions] == [layout.recompute]


def test_an_additional_axis_is_part_of_the_layout_and_a_setting():
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
    assert layout_of(CONFIG, 8) == ParallelLayout(4, zero=1, microbatch=2, axes=REPLICA)


@pytest.mark.parametrize("line", ["8x1x1 mb2", "4x2x1 zero2 mb2 1f1b", "4x1x2 zero1 mb4", "8x1x1 zero3 mb2 private"])
@pytest.mark.parametrize("machine", ["cpu-128", "gpu-8"])
def test_an_averaging_axis_costs_as_much_as_data_parallelism(line, machine):
    predictor, layout = Predictor(MadeUpModel(), read_machine(machine), 2, 4), read(line)
    with_replicas = replace(layout, data=layout.data // 2, axes=REPLICA)
    one, other = predictor.predict(layout), predictor.predict(with_replicas)
    assert one.times == other.times and one.memory == other.memory


def test_all_layouts_have_the_configured_axes():
    model, rules, nodes = MadeUpModel(), rules_of(CONFIG), Nodes(2, 4)
    layouts = list(candidates(model, nodes, rules))
    assert layouts and all(each.axes == REPLICA and each.ranks == 8 for each in layouts)
    half = {replace(each, axes=()) for each in layouts}
    assert {(each.data, each.pipeline, each.tensor) for each in half} == {
        (each.data, each.pipeline, each.tensor) for each in candidates(model, Nodes(1, 4))
    }
    predictor = Predictor(model, read_machine("cpu-128"), 2, 4)
    plan = best(predictor, rules, 1, requested=explicit_settings(CONFIG))
    assert plan.predictions[0].layout.axes == REPLICA and plan.predictions[0].layout.microbatch == 2


def test_the_plan_includes_the_exchanges_of_a_sample_axis():
    """Code of the axis divides the model and the samples; its calls of a communicator are recorded."""
    axes = {"train.height_axis:Height": 2}
    images = Description("arrays", "train", 1000, (13, 8), FLOAT, (), INT, None, tuple("012"), "x")
    config = Config.from_dict(
        {"model": {"factory": "train.height_axis:network"}, "train": {"batch": 12}, "parallel": {"axes": axes}}
    )
    machine = read_machine("cpu-128")
    profile = profile_of(config, images, machine, measure=False)
    predictor = Predictor(profile, machine, 1, 4)
    [prediction] = best(predictor, rules_of(config), 1).predictions
    assert prediction.layout.axes == tuple(axes.items()) and prediction.times["tensor"] > 0
    whole, half = (profile.blocks(6, each.divided) for each in (ParallelLayout(2), prediction.layout))
    assert {each.axis for block in half for each in block.forwards} == {"height", REPLICAS}
    assert sum(block.saved_bytes for block in half) < 0.8 * sum(block.saved_bytes for block in whole)
