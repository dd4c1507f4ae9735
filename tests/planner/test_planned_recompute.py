"""Ways of recomputing in the planner: what each keeps, and which one is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeModel

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.memory import recomputed
from mpitrain.planner.machine import read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.search import best

GPT = {"layers": 6, "width": 32, "heads": 4, "sequence": 32}
TOKENS = Description("tokens", "train", 1000, (32,), np.dtype("int64"), (32,), np.dtype("int64"), 256, None, "x")


@pytest.mark.serial
def test_a_segment_ends_with_its_stage():
    blocks = FakeModel(6).blocks(1)  # units 1 to 6, after an embedding
    every, listed = ParallelLayout(1, recompute="every 4"), ParallelLayout(1, recompute=(0, 5))
    first, inner = blocks[1].input_bytes, blocks[1].saved_bytes
    assert [each.kept_bytes for each in recomputed(every, blocks)[1:7]] == [first, 0, 0, 0, first, 0]
    assert [each.kept_bytes for each in recomputed(every, blocks, (0, 3))[1:7]] == [first, 0, first, 0, first, 0]
    assert [each.kept_bytes for each in recomputed(listed, blocks)[1:7]] == [first, inner, inner, inner, inner, first]
    stages = recomputed(ParallelLayout(1, 2, recompute=True), blocks, (0, 3))
    assert [each.kept_bytes for each in stages[1:7]] == [0, 0, first, 0, 0, 0]


@pytest.mark.serial
def test_the_fastest_way_of_recomputing_that_fits_is_chosen():
    config = Config.from_dict({"model": GPT | {"width": 256}, "train": {"batch": 16, "microbatch": 16}})
    machine = read_machine("gpu-8")
    model = profile_of(config, TOKENS, machine, measure=False)
    layouts = [ParallelLayout(1, microbatch=16, recompute=way) for way in (False, True, "selective", "every 2")]
    layouts.append(replace(layouts[0], recompute=(0, 1, 2)))
    predictor = Predictor(model, machine, 1, 1)
    taken = {layout: sum(predictor.memory(layout).values()) for layout in layouts}
    seconds = {layout: predictor.predict(layout).seconds for layout in layouts}
    chosen = set()
    for room in taken.values():
        expected = min((each for each in layouts if taken[each] <= room), key=lambda each: seconds[each])
        plan = best(Predictor(model, machine, 1, 1, room), requested={"microbatch": 16, "offload": ""})
        assert [each.layout for each in plan.predictions] == [expected]
        chosen.add(expected.recompute)
    assert {False, True} < chosen
