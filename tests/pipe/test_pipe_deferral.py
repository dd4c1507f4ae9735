"""Choice of the graphs whose weight gradients are deferred: by simulation of measured times."""

from __future__ import annotations

import itertools

import pytest
import torch
from pipe.pipe_models import SCHEDULES, even, gpt, layers, mean_square, numbers, train_both

from mpitrain.pipe.deferral import GraphSeconds, StageSeconds, StageTimes, choose_deferred, costs_of
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.pipe.schedule import make_schedule
from mpitrain.pipe.simulate import simulate
from mpitrain.pipe.stage import Stage


def stages_of(count: int, extra: float) -> list[StageSeconds]:
    """Return times of stages with two graphs, whose halves take `extra` more than the whole."""
    return [StageSeconds(2.0, (GraphSeconds(2.0, 1.0, 1.0 + extra),) * 2) for _ in range(count)]


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (2, 2), (3, 1), (4, 2)])
def test_halves_are_chosen_only_where_the_simulated_batch_ends_earlier(ranks, chunks):
    schedule = make_schedule("zero-bubble", ranks, 8, chunks)
    for extra in (0.0, 0.1, 0.5, 2.0):
        stages = stages_of(ranks * chunks, extra)
        chosen = choose_deferred(schedule, [dict(enumerate(stages))], shared=False)
        ends = {
            late: simulate(schedule, costs_of(stages, [(late, late)] * len(stages))).makespan for late in (False, True)
        }
        assert simulate(schedule, costs_of(stages, chosen)).makespan <= min(ends.values()) * 1.01
        if extra == 2.0:
            assert not any(itertools.chain(*chosen))
        if extra == 0.0:
            assert ends[True] < ends[False] and any(itertools.chain(*chosen))


def test_ranks_that_share_cores_defer_only_what_costs_nothing():
    schedule = make_schedule("zero-bubble", 2, 8, 1)
    for extra, deferred in ((0.0, True), (0.1, False)):
        measured = [dict(enumerate(stages_of(2, extra)))]
        assert choose_deferred(schedule, measured, shared=True) == [(deferred, deferred)] * 2


def test_the_slowest_replica_counts_and_a_stage_without_times_leaves_the_choice_open():
    schedule, cheap, dear = make_schedule("zero-bubble", 2, 8, 1), stages_of(2, 0.0), stages_of(2, 3.0)
    dear = [stage._replace(forward=3.0) for stage in dear]
    replicas = [{0: cheap[0]}, {1: cheap[1]}, {0: dear[0]}, {1: dear[1]}]
    assert choose_deferred(schedule, replicas, shared=False) == [(False, False)] * 2
    assert choose_deferred(schedule, [{0: cheap[0]}, {1: None}], shared=False) is None


@pytest.mark.parametrize("deferred", list(itertools.product((False, True), repeat=3)))
def test_every_choice_gives_the_same_bits(deferred):
    def gradients(choice):
        torch.manual_seed(1)
        blocks = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(12)]
        stage = Stage(blocks, first=False, recompute=False, halves=choice is not None)
        if choice is not None:
            stage.defer(choice)
        inputs = []
        for _ in range(2):
            output, saved = stage.forward(torch.randn(3, 6, requires_grad=True))
            run = stage.backward if choice is None else stage.backward_input
            inputs += run(saved, [torch.ones_like(output)])
            stage.backward_weight(saved)
        return [*inputs, *(p.grad for block in blocks for p in block.parameters())]

    assert all(map(torch.equal, gradients(deferred), gradients(None)))


def test_a_stage_that_defers_nothing_has_all_gradients_after_its_input_half():
    module = torch.nn.Linear(4, 4)
    stage = Stage([module], first=False, recompute=False, halves=True)
    stage.defer((False,))
    output, saved = stage.forward(torch.randn(2, 4, requires_grad=True))
    stage.backward_input(saved, [torch.ones_like(output)])
    assert module.weight.grad is not None and saved.weights == []


def test_halves_and_whole_passes_are_measured_in_different_batches():
    stage = Stage([torch.nn.Linear(4, 4)], first=False, recompute=False, halves=True)
    stage.times = StageTimes()
    for halves in (True, True, False):
        assert stage.shortest_times() is None
        stage.times.halves = halves
        output, saved = stage.forward(torch.randn(2, 4, requires_grad=True))
        stage.backward_input(saved, [torch.ones_like(output)])
        assert bool(saved.weights) == halves
        stage.backward_weight(saved)
    assert stage.shortest_times() is not None
    assert {key: len(times) for key, times in stage.times.backward.items()} == {
        (0, "input"): 2,
        (0, "weight"): 2,
        (0, "whole"): 1,
    }


def test_graphs_that_share_a_parameter_are_always_deferred():
    shared = torch.nn.Linear(4, 4)
    stage = Stage([torch.nn.Linear(4, 4), *[shared] * 7], first=False, recompute=False, halves=True)
    assert [shared.weight in graph for graph in stage.graph_parameters()] == [True, True]
    stage.choosable, stage.times = [False, False], StageTimes(halves=False)
    output, saved = stage.forward(torch.randn(2, 4, requires_grad=True))
    stage.backward_input(saved, [torch.ones_like(output)])
    assert len(saved.weights) == 2
    stage.backward_weight(saved)
    seconds = stage.shortest_times()
    schedule = make_schedule("zero-bubble", 1, 4, 1)
    assert seconds is not None and choose_deferred(schedule, [{0: seconds}], shared=False) == [(True, True)]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["zb-h1", "zb-v"])
def test_training_ends_measuring_with_equal_bits(world, kind):
    batches = [numbers(count) for count in (4, 1, 2, 4, 4, 4, 4)]
    pipeline, _, results = train_both(world, layers, lambda m: mean_square, SCHEDULES[kind], batches)
    assert [(loss, error) for loss, _, error in results] == [(expected, 0.0) for _, expected, _ in results]
    assert all(stage.times is None for stage in pipeline._stages.values())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("deferred", [False, True])
def test_every_rank_makes_one_choice_from_the_times_of_every_stage(world, deferred):
    pipeline = Pipeline(layers(), mean_square, world, **SCHEDULES["zb-h1"])
    for _ in range(5):
        pipeline.forward_backward(numbers(4), even(4))
    for stage in pipeline._stages.values():
        whole, of_input, weight = (3.0, 1.0, 1.0) if deferred else (1.0, 1.0, 9.0)
        for kind, seconds in (("whole", whole), ("input", of_input), ("weight", weight)):
            stage.times.backward[0, kind] = [seconds]
    pipeline.forward_backward([], [])
    assert [(stage.deferred, stage.times) for stage in pipeline._stages.values()] == [((deferred,), None)]


@pytest.mark.ranks(2)
def test_a_parameter_in_two_stages_of_a_rank_fixes_the_choice(world):
    model = gpt()
    pipeline = Pipeline(model, model.loss, world, **SCHEDULES["zb-v"])  # embedding and head, on rank 0
    choosable = [all(stage.choosable) for stage in pipeline._stages.values()]
    assert choosable == [world.rank != 0] * 2
