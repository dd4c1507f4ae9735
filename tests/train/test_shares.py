"""Data-parallel ranks with parts of each batch in proportion to their speeds (`parallel.shares time`)."""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path

import pytest
from train.jobs import run
from train.odd_models import SlowHere

from mpitrain.errors import InputError
from mpitrain.layout.boxes import split
from mpitrain.shard.virtual_workers import VirtualWorkers, proportional
from mpitrain.trainer import assemble

STEPS, BATCH = 4, 13
GPT = {"layers": 2, "width": 32, "heads": 4, "sequence": 16}
SLOW = {"factory": "train.odd_models:slow_here", "sequence": 16}


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (0.2, 1.0), (1.0, 0.3, 0.7), (1.0, 0.01, 0.02)])
def test_the_part_that_takes_longest_takes_as_little_as_possible(speeds):
    for size in range(1, 14):
        counts = [hi - lo for lo, hi in pairwise(proportional(size, speeds))]
        least = int(size >= len(speeds))
        choices = [c for c in product(range(least, size + 1), repeat=len(speeds)) if sum(c) == size]
        seconds = [max(n / speed for n, speed in zip(c, speeds, strict=True)) for c in (counts, *choices)]
        assert sum(counts) == size and min(counts) >= least and seconds[0] == min(seconds)
        assert len(set(speeds)) > 1 or list(proportional(size, speeds)) == split(size, len(speeds))


@pytest.mark.parametrize("speeds", [(), (1.0, 0.2, 0.7)])
def test_microbatches_are_all_samples_in_order_and_slow_ranks_have_as_many(speeds):
    for size, microbatch in product((1, 2, 3, 13, 24), (0, 1, 2, 5)):
        ranks = [VirtualWorkers(rank, 3, 3, speeds=speeds) for rank in range(3)]
        parts = [each.microbatches(size, microbatch)[0] for each in ranks]
        places = [
            each.share(size)[0] + at for each, part in zip(ranks, parts, strict=True) for m in part for at in range(*m)
        ]
        assert places == list(range(size))
        assert max(map(len, parts)) == ranks[0].rounds(size, microbatch)
        assert ranks[0].is_even(size, microbatch) == (len(set(map(len, parts))) == 1)
        assert all(1 <= hi - lo <= (microbatch or size) for part in parts for lo, hi in part)
        samples, rounds = [hi - lo for lo, hi in (r.share(size) for r in ranks)], ranks[0].rounds(size, microbatch)
        assert not (speeds and microbatch) or [*map(len, parts)] == [min(n, rounds) for n in samples]


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("shares"))))


def settings(text, model=GPT, **parallel):
    train = {"steps": STEPS, "batch": BATCH, "microbatch": parallel.pop("microbatch", 2), "evaluate_samples": 10}
    return {
        "data": {"path": text},
        "model": model,
        "train": train,
        "checkpoint": {"every": 2, "keep": 9},
        "parallel": parallel,
        "optim": {"schedule": "constant"},
    }


def alone(world, folder, sections):
    """Return the metrics of one process."""
    one = world.subgroup([0])
    return world.broadcast_object(run(one, folder, **sections) if one is not None else None)


def shares_of(folder):
    """Return the samples of each rank that the last start of a run recorded."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["shares"] for event in events if event["event"] == "start"][-1]


def assert_equal(lines, expected):
    expected = expected[-len(lines) :]
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in expected], rel=1e-6)
    assert [m["grad_norm"] for m in lines] == pytest.approx([m["grad_norm"] for m in expected], rel=1e-5)
    assert lines[-1]["held_out_loss"] == pytest.approx(expected[-1]["held_out_loss"], rel=1e-6)


def slow_down(monkeypatch, world, rank):
    """Let a rank measure five times the seconds of the others."""
    monkeypatch.setattr(assemble, "time_costs", lambda *_: [5.0 if world.rank == rank else 1.0])


@pytest.mark.ranks(2, 3, 4)
def test_unequal_shares_train_like_one_process_in_all_stages_of_zero(world, place, text, monkeypatch):
    expected = alone(world, place / "alone", settings(text))
    slow_down(monkeypatch, world, 0)
    layouts = [
        {"zero": zero, "microbatch": microbatch} for zero, microbatch in ((0, 0), (0, 4), (1, 1), (2, 4), (3, 0))
    ]
    layouts += [{"zero": 3, "share_node": False, "microbatch": microbatch} for microbatch in (1, 4)]
    for number, layout in enumerate(layouts):
        lines = run(world, place / f"{number}", **settings(text, shares="time", **layout))
        assert_equal(lines, expected)
    assert shares_of(place / "0") == {2: [2, 11], 3: [1, 6, 6], 4: [1, 4, 4, 4]}[world.size]


@pytest.mark.ranks(2, 3)
def test_a_run_is_resumed_with_the_shares_that_ranks_measure_then(world, place, text, monkeypatch):
    slow_down(monkeypatch, world, 0)
    whole = run(world, place / "whole", **settings(text, shares="time", zero=2))
    for slow in (0, 1):
        slow_down(monkeypatch, world, slow)
        sections = settings(text, shares="time", zero=2)
        sections["checkpoint"]["resume"] = str(place / "whole/checkpoints/step-00000002")
        lines = run(world, place / f"resumed-{slow}", **sections)
        assert [m["step"] for m in lines] == [3, 4]
        if slow == 0:  # the same shares: the same bits
            assert [m["loss"] for m in lines] == [m["loss"] for m in whole[2:]]
        assert_equal(lines, whole)


@pytest.mark.ranks(1, 2, 3)
def test_a_slow_rank_measures_itself_and_gets_fewer_samples(world, place, text, monkeypatch):
    monkeypatch.setattr(SlowHere, "seconds", 0.02 if world.rank == 0 else 0.004)
    expected = alone(world, place / "slow-alone", settings(text, SLOW))
    lines = run(world, place / "slow", **settings(text, SLOW, shares="time"))
    assert_equal(lines, expected)
    shares = shares_of(place / "slow")
    if world.size == 1:
        assert shares == [] and [m["loss"] for m in lines] == [m["loss"] for m in expected]
        return
    assert sum(shares) == BATCH and shares[0] == min(shares) < max(shares)  # how few depends on other jobs, too


@pytest.mark.ranks(2)
def test_shares_by_time_are_refused_with_reproducible_runs(world, place, text):
    sections = settings(text, shares="time") | {"run": {"reproducible": True, "dir": str(place / "refused")}}
    with pytest.raises(InputError, match=r"parallel\.shares time gives the ranks parts .* set one of them"):
        run(world, place / "refused", **sections)
