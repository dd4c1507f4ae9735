"""The search for layouts finds the same ones as an exhaustive search."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_support import MadeUpModel, MadeUpPredictor, block

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.parallel import layouts as notation
from mpitrain.parallel.costs import Divided
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.memory import recomputed
from mpitrain.parallel.places import Nodes
from mpitrain.parallel.rules import LayoutRules
from mpitrain.pipe.schedule import make_schedule
from mpitrain.planner import refine as refine_module
from mpitrain.planner.bounds import Bounds
from mpitrain.planner.candidates import candidates, microbatches, shapes
from mpitrain.planner.machine import MachineProfile, read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.refine import (
    Limits,
    Pairs,
    Refinement,
    best_cut,
    choose,
    pairs_of,
    peak_microbatches,
    stage_fits,
    stage_seconds,
    whole_patterns,
)
from mpitrain.planner.report import nothing_fits
from mpitrain.planner.search import best_of, rank_predictions

MACHINE = MachineProfile("made up", "specification", 8, 64 << 30)
MIB = 1 << 20


def all_cuts(blocks, stages):
    for inner in combinations(range(1, blocks), stages - 1):
        yield [0, *inner, blocks]


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    chunks=st.sampled_from([1, 1, 2]),
    room=st.one_of(st.none(), st.integers(1, 60)),
    recompute=st.booleans(),
)
def test_best_cut_equals_exhaustive_search(costs, stages, microbatches, chunks, room, recompute):
    blocks = [block(seconds, kept_bytes, given_bytes, numel=1) for seconds, kept_bytes, given_bytes in costs]
    in_flight = peak_microbatches(stages, 1, microbatches, "1f1b")
    kept = recomputed(ParallelLayout(1, stages, recompute=recompute), blocks, range(len(blocks)))
    limits = None if room is None else Limits(room, in_flight, 1.0, kept)

    def message(nbytes):
        return 0.25 * nbytes

    def bound(bounds):
        seconds = stage_seconds(blocks, message, limits.recomputed if limits is not None else ())
        each = [seconds[lo, hi] for lo, hi in pairwise(bounds)]
        return sum(each) / chunks + (microbatches * chunks - 1) * max(each)

    fits = None if limits is None else stage_fits(blocks, limits)
    possible = [
        bounds
        for bounds in all_cuts(len(blocks), stages)
        if fits is None or all(fits[s][lo, hi] for s, (lo, hi) in enumerate(pairwise(bounds)))
    ]
    cut = best_cut(blocks, stages, microbatches, chunks, message, limits)
    if not possible:
        assert cut is None
        return
    assert cut in possible
    assert bound(cut) == pytest.approx(min(map(bound, possible)), rel=1e-6)


def test_the_first_stage_is_smaller_if_memory_is_limited():
    blocks = [block(1.0, saved_bytes=10) for _ in range(8)]
    assert best_cut(blocks, 2, 8) == [0, 4, 8]
    limits = Limits(room=65, microbatches=peak_microbatches(2, 1, 8, "1f1b"), per_element=1.0)
    assert best_cut(blocks, 2, 8, limits=limits) == [0, 3, 8]
    assert best_cut(blocks, 2, 8, limits=replace(limits, room=40)) is None
    assert best_cut([block(n) for n in (3, 1, 1, 1, 1, 1, 1)], 3, 4) == [0, 1, 4, 7]  # of equal ones the most even


def total(counts, pairs, of):
    return sum(n * getattr(each, of) for n, each in zip(counts, pairs, strict=True))


def choose_exhaustively(pairs, limit):
    combinations = product(*(range(len(each.patterns) + 1) for each in pairs))
    fitting = (counts for counts in combinations if total(counts, pairs, "nbytes") <= limit)
    return min(fitting, key=lambda counts: total(counts, pairs, "seconds"), default=None)


def check_choice(pairs, limit, *, tolerance=0.0):
    optimum, choice = choose_exhaustively(pairs, limit), choose(pairs, limit)
    assert (choice is None) == (optimum is None)
    if optimum is not None and choice is not None:
        assert total(choice, pairs, "nbytes") <= limit
        assert total(choice, pairs, "seconds") <= total(optimum, pairs, "seconds") + tolerance + 1e-12


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=5),
    st.integers(-20, 40),
)
def test_whole_layers_equal_exhaustive_search(classes, limit):
    check_choice(
        [Pairs((("x",),) * count, seconds * 1e-6, nbytes * 1e6) for count, seconds, nbytes in classes], limit * 1e6
    )


def test_whole_layers_equal_exhaustive_search_for_fractions():
    draw = np.random.default_rng(1)
    for _ in range(200):
        classes = draw.integers(1, 6)
        pairs = [
            Pairs((("x",),) * count, seconds, nbytes)
            for count, seconds, nbytes in zip(
                draw.integers(1, 4, classes), draw.normal(size=classes), draw.normal(size=classes), strict=True
            )
        ]
        check_choice(pairs, draw.normal())


@pytest.mark.parametrize("most", [1, 2, 16, 1 << 14])
def test_thinning_out_stays_within_its_error_bound(most, monkeypatch):
    monkeypatch.setattr(refine_module, "_MOST", most)
    draw = np.random.default_rng(most)
    for _ in range(40):
        gains = draw.uniform(1, 2, 8)  # the faster the larger, so that no combination beats another one in both
        pairs = [Pairs((("x",),) * 2, -gain, gain) for gain in gains]
        everything = 2 * gains.sum()
        check_choice(
            pairs, draw.uniform(0, everything), tolerance=len(pairs) * everything / most if most < 1 << 14 else 0.0
        )


def test_many_classes_are_chosen_quickly():
    draw = np.random.default_rng(1)
    gains = draw.uniform(1, 2, 60)
    pairs = [Pairs((("x",),) * 3, -gain, gain) for gain in gains]
    limit = 1.5 * gains.sum()
    assert -total(choose(pairs, limit), pairs, "seconds") == pytest.approx(limit, rel=1e-2)


def test_small_pairs_stay_whole():
    model = MadeUpModel(blocks=4, vocabulary=10)
    pairs = pairs_of(model, 2, Divided(4), exchange=lambda each: 1e-4, microbatches=2, per_element=16.0)
    assert [len(each.patterns) for each in pairs] == [1, 4, 4, 1]
    assert pairs[1].patterns[0] == ("blocks.0.attention.*",) and pairs[0].patterns == (("embedding",),)
    counts = choose(pairs, 1e12)
    assert counts == (1, 0, 0, 1)  # the vocabulary is small, the blocks are not
    assert whole_patterns(pairs, (1, 4, 2, 0)) == (
        "embedding",
        "blocks.*.attention.*",
        "blocks.0.mlp.*",
        "blocks.1.mlp.*",
    )
    assert choose(pairs, -1.0) is None
    whole = sum(each.forward * 6 for each in model.blocks(2, Divided(4, whole=("embedding",))))
    divided = sum(each.forward * 6 for each in model.blocks(2, Divided(4)))
    assert pairs[0].seconds == pytest.approx(whole - divided - 2 * 2 * 1e-4)


@pytest.mark.parametrize("room", [4 * MIB, 40 * MIB, 1 << 40])
@pytest.mark.parametrize("ranks_per_node", [4, 8])
def test_the_search_finds_the_best_layouts_of_all_predictions(room, ranks_per_node):
    model = MadeUpModel()
    layouts = list(candidates(model, Nodes(2, ranks_per_node)))
    assert len(layouts) == len(set(layouts)) > 200
    predictor = MadeUpPredictor(model, room)
    plan = best_of(predictor, layouts, count=7, limit=1 << 30)
    pruned = predictor.simulations
    everything = [
        predictor.predict(layout)
        for layout in layouts
        if layout.microbatch != 3 and sum(predictor.memory(layout).values()) <= room
    ]
    assert [each.layout for each in plan.predictions] == [each.layout for each in rank_predictions(everything)[:7]]
    assert pruned < 0.9 * len(everything) or not everything
    assert plan.predicted == pruned
    assert all(each.missing > 0 and each.largest_category in each.memory for each in plan.excess)
    if not everything:
        assert plan.excess[0].missing == min(each.missing for each in plan.excess)


def test_equally_fast_layouts_are_in_order_of_simplicity():
    simple, zero, cut = ParallelLayout(4), ParallelLayout(4, zero=1), ParallelLayout(4, cut=(1, 2))
    predictor = MadeUpPredictor(MadeUpModel(), 1e12)
    predictions = [replace(predictor.predict(simple), layout=layout) for layout in (cut, zero, simple)]
    assert [each.layout for each in rank_predictions(predictions)] == [simple, cut, zero]


def test_states_are_offloaded_only_if_necessary():
    model = MadeUpModel()
    layouts = [ParallelLayout(4, microbatch=1), ParallelLayout(4, microbatch=1, offload="host")]
    numel = sum(weight.numel for each in model.blocks(1) for weight in each.weights)
    for room, offloads in ((1e12, [""]), (11 * numel, ["host"])):
        plan = best_of(MadeUpPredictor(model, room), layouts)
        assert [each.layout.offload for each in plan.predictions] == offloads


def test_variants_of_a_layout_are_searched():
    layouts = [ParallelLayout(2, 2), ParallelLayout(4)]
    plan = best_of(
        MadeUpPredictor(MadeUpModel(), 1e12), layouts, variants=lambda each: [each, replace(each, recompute=True)]
    )
    assert len(plan.predictions) == plan.predicted == 4 and plan.layouts == 2


def test_the_runtime_accepts_every_candidate():
    model, machine = MadeUpModel(blocks=14, batch=24), MACHINE
    for nodes, each in ((1, 8), (3, 4), (1, 6)):
        for layout in candidates(model, Nodes(nodes, each, machine.device is not None)):
            assert layout.ranks == nodes * each
            share = -(-model.batch // layout.data)
            assert layout.microbatch <= share
            if layout.pipeline > 1:
                count = -(-share // layout.microbatch)
                schedule = make_schedule(layout.schedule, layout.pipeline, count, layout.chunks, layout.slices)
                assert schedule.stages <= 16
                assert not (layout.zero == 3 and not layout.share_node and layout.data > 1)
            assert layout.data > 1 or layout.zero == 0
            assert not layout.offload and (layout.reshard or not layout.share_node)
            assert not layout.sequence or layout.tensor > 1
    model.synchronous = True
    even = list(candidates(model, Nodes(1, 8), LayoutRules(workers=8)))
    warm = shapes(model, 8, LayoutRules(workers=8, warmup=(4,)))  # 24 and 4 samples on 8 ranks
    model.synchronous = False
    assert not warm and shapes(model, 8, LayoutRules(workers=8, warmup=(4,)))
    assert {(each.pipeline, each.tensor) for each in even} == {(1, 1)}
    assert {each.microbatch for each in even} == {1, 2, 3}  # each rank has 3, 2 or 1 of them
    assert shapes(model, 16) and microbatches(100, 8) == [1, 2, 4, 5, 7, 8, 13]


def test_best_cut_with_unequal_messages_equals_exhaustive_search():
    rng = np.random.default_rng(3)
    blocks = [block(float(rng.integers(1, 50)), output_bytes=int(rng.integers(0, 99))) for _ in range(12)]
    seconds = stage_seconds(blocks, lambda nbytes: nbytes / 10)

    def bound(bounds):
        each = [seconds[lo, hi] for lo, hi in pairwise(bounds)]
        return sum(each) + 5 * max(each)

    cut = best_cut(blocks, 4, 6, message=lambda nbytes: nbytes / 10)
    assert bound(cut) == pytest.approx(min(map(bound, all_cuts(12, 4))))


def real(machine, nodes, each, **model):
    """Return a predictor of a small GPT on a machine of the package, with counted costs."""
    machine_profile = read_machine(machine)
    sections = {
        "model": {"name": "gpt", "heads": 4, "sequence": 32} | model,
        "train": {"batch": 16, "precision": "bf16"},
    }
    integers = np.dtype("int64")
    tokens = Description("tokens", "train", 1000, (32,), integers, (32,), integers, 256, None, "x")
    profile = profile_of(Config.from_dict(sections), tokens, machine_profile, measure=False)
    return Predictor(profile, machine_profile, nodes, each)


CASES = [
    ("gpu-4", 1, 4, {"layers": 3, "width": 1024}),
    ("gpu-8x8", 2, 2, {"layers": 6, "width": 4096}),
    ("cpu-128", 2, 2, {"layers": 4, "width": 256}),
    ("gpu-8", 2, 4, {"layers": 2, "width": 2048}),
    ("cpu-128", 4, 2, {"layers": 2, "width": 1024}),
    ("gpu-4", 4, 4, {"layers": 1, "width": 1024}),
]


def check_first_fifty(machine, nodes, each, allowed=lambda layout: True, **model):
    """Compare the best of all variants of all layouts with the best of a search that simulates fifty."""
    predictor = real(machine, nodes, each, **model)
    bounds, refine = Bounds(predictor), Refinement(predictor)
    layouts = [each for each in candidates(predictor.model, predictor.at) if allowed(each)]
    everything = []
    for layout in layouts:
        for variant in dict.fromkeys(refine(layout)):
            with suppress(InputError):
                if sum(bounds.memory(variant).values()) <= bounds.room():
                    everything.append(bounds.predict(variant).seconds)
    plan = best_of(bounds, layouts, variants=refine, limit=50)
    assert len(everything) > 250 and plan.predicted <= 50
    assert plan.predictions[0].seconds == pytest.approx(min(everything), rel=1e-6)


@pytest.mark.parametrize("machine", ["gpu-4", "cpu-128"])
def test_the_first_fifty_simulations_contain_the_best_layout(machine):
    few = {"allowed": lambda layout: layout.zero < 2 and layout.slices == 1}
    check_first_fifty(machine, 2, 2, **few, layers=2, width=512)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("machine", "nodes", "each", "model"), CASES, ids=str)
def test_the_first_fifty_simulations_contain_the_best_layout_of_each_kind(machine, nodes, each, model):
    check_first_fifty(machine, nodes, each, **model)


def test_the_result_does_not_depend_on_the_search_time(monkeypatch):
    model = MadeUpModel()
    layouts = list(candidates(model, Nodes(2, 8)))
    calm = best_of(MadeUpPredictor(model, 1e12), layouts)
    now = iter(range(0, 1 << 40, 1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))  # a clock by which each step takes a quarter hour
    busy = best_of(MadeUpPredictor(model, 1e12), layouts)
    assert calm == busy and calm.predicted > 10
    short = best_of(MadeUpPredictor(model, 1e12), layouts, seconds=1.0)
    assert short.predicted == 1 and short.unvisited > 100  # on request


def test_the_layout_closest_to_fitting_is_reported_with_its_bytes():
    model = MadeUpModel()
    layouts = list(candidates(model, Nodes(2, 4)))
    predictor = MadeUpPredictor(model, 1.0)
    plan = best_of(predictor, layouts)
    totals = {layout: sum(predictor.memory(layout).values()) for layout in layouts if layout.microbatch != 3}
    least = plan.excess[0]
    assert not plan.predictions and sum(least.memory.values()) == min(totals.values())
    message = nothing_fits(plan)
    assert notation.text(least.layout) in message and f"{least.missing:,.0f} bytes" in message and "\n" not in message
