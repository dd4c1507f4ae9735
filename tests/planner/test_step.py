"""Seconds and bytes of a step: sums that can be checked by hand, and overlap of computing and exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeModel

from mpitrain.comm.programs.program import Machine
from mpitrain.errors import InputError
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.places import Group
from mpitrain.pipe.schedule import make_schedule
from mpitrain.pipe.simulate import Costs, simulate
from mpitrain.planner import predictor as step
from mpitrain.planner.collectives import CollectiveTimes
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.predictor import Predictor
from mpitrain.shard.placement import STAGES, formula

LINKS = Machine(cores=2)
TWO = MachineProfile("two cores", "a test", 2, 8 << 30, LINKS, overhead=0.0, process=0)  # none is left for messages
MANY = replace(TWO, cores=16, links=replace(LINKS, cores=16))
NUMEL = 5 << 16  # of the fake model: four blocks and the embedding, to which the head is tied


def pass_seconds(model: FakeModel, samples: int) -> float:
    """Return the seconds of one microbatch."""
    return sum(block.forward + block.input + block.weight for block in model.blocks(samples))


def test_one_rank_computes_and_updates() -> None:
    model = FakeModel()
    prediction = Predictor(model, TWO, 1, 1).predict(ParallelLayout(1, microbatch=4))
    # a rank has both cores, for two threads
    assert prediction.times["compute"] == pytest.approx(4 * pass_seconds(model, 4) / 2)
    assert prediction.times["gradients"] == prediction.times["parameters"] == prediction.times["pipeline"] == 0.0
    assert prediction.seconds == pytest.approx(sum(prediction.times.values()))
    again = Predictor(model, TWO, 1, 1).predict(ParallelLayout(1, microbatch=4, recompute=True))
    blocks = sum(block.forward for block in model.blocks(4)[1:-1])
    assert again.times["compute"] == pytest.approx(prediction.times["compute"] + 4 * blocks / 2)


def test_reductions_overlap_with_backward_only_on_a_free_core() -> None:
    model = FakeModel(numel=1 << 22)
    layout = ParallelLayout(2, microbatch=8)
    after = Predictor(model, TWO, 1, 2).predict(layout)
    whole = CollectiveTimes(LINKS).seconds("all_reduce", 5 * (4 << 22), Group((0, 0)))
    assert after.times["gradients"] == pytest.approx(whole)
    under = Predictor(model, MANY, 1, 2).predict(layout)
    assert 0 < under.times["gradients"] < whole / 2
    slow = Predictor(model, replace(MANY, links=replace(MANY.links, memory_rate=1e8)), 1, 2).predict(layout)
    assert slow.times["gradients"] > 5 * under.times["gradients"]  # what does not fit under backward is left over


def test_sharded_gradients_are_reduced_in_each_pass() -> None:
    one = Predictor(FakeModel(), TWO, 1, 2).predict(ParallelLayout(2, zero=2, microbatch=8))
    four = Predictor(FakeModel(), TWO, 1, 2).predict(ParallelLayout(2, zero=2, microbatch=2))
    assert four.times["gradients"] == pytest.approx(4 * one.times["gradients"])
    whole = Predictor(FakeModel(), TWO, 1, 2).predict(ParallelLayout(2, zero=1, microbatch=2))
    assert whole.times["gradients"] == pytest.approx(one.times["gradients"])


def test_ranks_beyond_the_cores_take_turns() -> None:
    model = FakeModel(batch=16)
    two = Predictor(model, TWO, 1, 2).predict(ParallelLayout(2, microbatch=2))
    eight = Predictor(model, TWO, 1, 8).predict(ParallelLayout(8, microbatch=2))
    assert eight.times["compute"] == pytest.approx(two.times["compute"])  # the same work on the same cores
    assert eight.times["update"] > 3 * two.times["update"]  # each rank updates all


def test_waiting_ranks_keep_their_cores_busy() -> None:
    model = FakeModel(batch=12)
    three = Predictor(model, TWO, 1, 3).predict(ParallelLayout(3, microbatch=4))
    assert three.times["compute"] == pytest.approx(
        2 * pass_seconds(model, 4)
    )  # two turns on two cores, not one and a half
    one = replace(TWO, cores=1, links=replace(LINKS, cores=1))
    layout = ParallelLayout(1, 2, microbatch=2, schedule="1f1b")
    alone, sleeping, spinning = (
        Predictor(model, machine, 1, 2).predict(layout) for machine in (TWO, one, replace(one, seen_cores=2))
    )
    inside = [prediction.times["compute"] + prediction.times["pipeline"] for prediction in (alone, sleeping, spinning)]
    assert inside[0] < inside[1] < inside[2]  # who believes to have a core does not sleep while it waits
    assert inside[2] == pytest.approx(2 * inside[0], rel=1e-3)


def test_a_pipeline_runs_its_schedule() -> None:
    model = FakeModel(layers=6, batch=16)
    layout = ParallelLayout(1, 2, microbatch=2, schedule="1f1b")
    prediction = Predictor(model, TWO, 1, 2).predict(layout)
    blocks = model.blocks(2)
    stages = [blocks[:4], blocks[4:]]
    message = CollectiveTimes(LINKS).message(blocks[3].output_bytes, True)
    costs = Costs(
        [sum(b.forward for b in s) + step._STEP for s in stages],
        [sum(b.input for b in s) + step._STEP for s in stages],
        [sum(b.weight for b in s) for s in stages],
        message,
    )
    expected = simulate(make_schedule("1f1b", 2, 8), costs)
    parts = prediction.times
    assert parts["compute"] + parts["pipeline"] == pytest.approx(expected.makespan, rel=1e-3)
    assert Predictor(model, TWO, 1, 2).predict(replace(layout, cut=(3, 5))).seconds != prediction.seconds
    with pytest.raises(InputError, match=r"parallel.cut \[3, 4\] lists 7 blocks"):
        Predictor(model, TWO, 1, 2).predict(replace(layout, cut=(3, 4)))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_predicted_bytes_equal_the_formula(zero: int) -> None:
    memory = Predictor(FakeModel(numel=1 << 20), MANY, 2, 2).memory(
        ParallelLayout(4, zero=zero, share_node=False, microbatch=1)
    )
    expected = formula(STAGES[zero], 4, 5 << 20, 4, 2)
    for kind in ("parameters", "gradients", "states"):
        assert memory[kind] == pytest.approx(getattr(expected, kind), rel=1e-3), kind


def test_pipeline_memory_is_that_of_the_largest_rank() -> None:
    predictor = Predictor(FakeModel(layers=6), TWO, 1, 2)
    gpipe, early = (
        predictor.memory(ParallelLayout(1, 2, microbatch=2, schedule=name))["activations"] for name in ("gpipe", "1f1b")
    )
    assert gpipe > 3 * early
    again = predictor.memory(ParallelLayout(1, 2, microbatch=2, schedule="gpipe", recompute=True))
    assert again["activations"] < gpipe / 4


def test_a_layout_with_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="does not have the 4 ranks of 2 nodes with 2 ranks each"):
        Predictor(FakeModel(), TWO, 2, 2).predict(ParallelLayout(2, microbatch=1))
