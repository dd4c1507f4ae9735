"""Nodes of different speed: stages in proportion, times by the formula, and the search that uses both."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from fakes import FakeModel
from planner_support import block

from mpitrain.comm.programs.program import Machine
from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.parallel.layouts import ParallelLayout, layout_of, read, text
from mpitrain.parallel.rules import LayoutRules
from mpitrain.planner.bounds import Bounds
from mpitrain.planner.candidates import candidates
from mpitrain.planner.machine import MachineProfile, read_machine, read_values, write_values
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.refine import Refinement, best_cut
from mpitrain.planner.search import best

EQUAL = MachineProfile("one core", "a test", 1, 8 << 30, Machine(cores=1), overhead=0.0, process=0)
UNEQUAL = replace(EQUAL, speeds=(1.0, 0.5))


def test_data_parallel_ranks_wait_for_the_slowest_and_the_order_of_nodes_does_not_matter():
    layout, model = ParallelLayout(2, microbatch=4), FakeModel()
    equal, unequal = (Predictor(model, machine, 2, 1).predict(layout) for machine in (EQUAL, UNEQUAL))
    assert unequal.times["compute"] == pytest.approx(2 * equal.times["compute"])
    assert unequal.times["update"] == pytest.approx(2 * equal.times["update"])
    assert unequal.times["gradients"] == pytest.approx(equal.times["gradients"])
    turned = Predictor(model, replace(EQUAL, speeds=(0.5, 1.0)), 2, 1).predict(layout)
    assert turned.seconds == pytest.approx(unequal.seconds)
    one = Predictor(model, UNEQUAL, 1, 2).predict(layout)  # on the first node alone
    assert one.times["compute"] == pytest.approx(Predictor(model, EQUAL, 1, 2).predict(layout).times["compute"])


def test_shares_by_time_take_the_seconds_of_the_rank_that_computes_longest():
    """A rank of half the speed gets 5 of 16 samples, which take as long as 10 at full speed; the other rank gets 11."""
    layout, model = ParallelLayout(2, microbatch=4), FakeModel()
    equal, unequal = Predictor(model, EQUAL, 2, 1), Predictor(model, UNEQUAL, 2, 1)
    by_time = replace(layout, shares="time")
    assert unequal.shares(by_time) == [11, 5] and unequal.busiest(layout) == (8, 2.0)
    compute = equal.predict(layout).times["compute"]
    assert unequal.predict(by_time).times["compute"] == pytest.approx(compute * 11 / 8)
    assert equal.predict(by_time).seconds == pytest.approx(equal.predict(layout).seconds)
    assert read(text(by_time)) == by_time
    nearly = Predictor(model, replace(EQUAL, speeds=(1.0, 0.96)), 2, 1)
    for predictor, shares in ((equal, {"equal"}), (nearly, {"equal"}), (unequal, {"time", "equal"})):
        assert {each.shares for each in Refinement(predictor)(layout)} == shares
    assert best(unequal, count=1, requested={"pipeline": 1}).predictions[0].layout.shares == "time"
    reproducible = best(unequal, LayoutRules(workers=2), count=3).predictions
    assert all(each.layout.shares == "equal" for each in reproducible)


def test_a_stage_takes_the_seconds_of_its_own_rank():
    """With many microbatches, a step takes those of the slowest stage: 1 / speed times its blocks' seconds."""
    model = FakeModel(10, batch=4096)
    for cut in ((6, 6), (8, 4), (4, 8)):
        layout = ParallelLayout(1, 2, microbatch=1, cut=cut)
        blocks = model.blocks(1)
        seconds = [sum(b.seconds for b in blocks[lo:hi]) for lo, hi in ((0, cut[0]), (cut[0], 12))]
        slowest = max(seconds[0], 2 * seconds[1])
        times = Predictor(model, UNEQUAL, 2, 1).predict(layout).times
        assert times["compute"] + times["pipeline"] == pytest.approx(4096 * slowest, rel=0.02)


def test_the_slowest_rank_with_the_same_stages_counts():
    predictor = Predictor(FakeModel(), replace(EQUAL, speeds=(1.0, 1.0, 0.5)), 4, 2)
    assert predictor.slowness(ParallelLayout(1, 8)) == (1, 1, 1, 1, 2, 2, 1, 1)
    assert predictor.slowness(ParallelLayout(2, 4)) == (2, 2, 1, 1)
    assert predictor.slowness(ParallelLayout(4, 2)) == (2, 2)
    assert predictor.slowness(ParallelLayout(1, 4, 2)) == (1, 1, 2, 1)
    assert predictor.slowness(ParallelLayout(8)) == (2,)


def test_the_best_cut_is_in_proportion_and_equals_exhaustive_search():
    blocks = [block(1.0) for _ in range(12)]
    assert best_cut(blocks, 2, 100, slowness=[1.0, 2.0]) == [0, 8, 12]
    blocks = [block(seconds) for seconds in (3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0)]
    slowness = [1.0, 3.0, 0.5]

    def seconds(cut):
        stages = [
            slow * sum(b.seconds for b in blocks[lo:hi]) for slow, (lo, hi) in zip(slowness, pairwise(cut), strict=True)
        ]
        return sum(stages) + 9 * max(stages)

    cuts = [[0, *inner, 7] for inner in combinations(range(1, 7), 2)]
    assert best_cut(blocks, 3, 10, slowness=slowness) == min(cuts, key=seconds)


def test_the_search_cuts_in_proportion_and_prefers_a_pipeline_across_unequal_nodes():
    """Two equal nodes are best used by equal shares, with which the faster one of two unequal nodes waits."""
    model, requested = FakeModel(10, batch=256, numel=1 << 10), {"shares": "equal"}
    plans = [
        best(Predictor(model, machine, 2, 1), count=1, requested=requested).predictions[0]
        for machine in (EQUAL, UNEQUAL)
    ]
    assert plans[0].layout.pipeline == 1
    assert plans[1].layout.pipeline == 2
    fast, slow = sum(plans[1].layout.cut[0::2]), sum(plans[1].layout.cut[1::2])
    assert fast > slow
    data = Predictor(model, UNEQUAL, 2, 1).predict(plans[0].layout)
    assert plans[1].seconds < 0.85 * data.seconds
    predictor = Predictor(model, UNEQUAL, 2, 1)
    bounds, refine = Bounds(predictor), Refinement(predictor)
    for layout in list(candidates(model, predictor.at))[::17]:
        for variant in refine(layout):
            assert bounds.lower_bound(layout) <= predictor.predict(variant).seconds * (1 + 1e-9), variant


def test_a_cut_by_time_is_explained_as_it_is_trained():
    config = Config.from_dict({"parallel": {"pipeline": 2, "cut": "time"}, "train": {"batch": 16}})
    blocks = [block(1.0) for _ in range(12)]
    predictor = Predictor(FakeModel(10), UNEQUAL, 2, 1)
    assert layout_of(config, 2, blocks, predictor.slowness).cut == (8, 4)
    assert layout_of(config, 2, blocks).cut == ()


def test_speeds_are_read_written_and_checked(tmp_path: Path):
    path = tmp_path / "machine.toml"
    path.write_text('speeds = [1, "50 %", 0.25]\n')
    values = read_values(str(path))
    assert values["speeds"] == [1.0, 0.5, 0.25]
    write_values(values, path)
    assert read_machine(f"cpu-128,{path}").speeds == (1.0, 0.5, 0.25)
    for wrong in ("0.0", '["fast"]', "[-1]"):
        path.write_text(f"speeds = {wrong}\n")
        with pytest.raises(InputError, match=r"speeds = .* is not a positive quantity"):
            read_values(str(path))
