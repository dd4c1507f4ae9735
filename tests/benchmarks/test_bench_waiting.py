"""The slow-rank benchmark: it slows one rank by the stated factor, and compares the ways to train with targets."""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise

import pytest
from warm import bench

from benchmarks.waiting import (
    CONTENDERS,
    SLOW,
    _config,
    _Slowed,
    main,
    median_run,
    parser,
    report,
    seconds_to,
    tokens_per_second,
)


@pytest.mark.campaign
def test_a_quick_run_writes_tokens_times_and_a_picture(tmp_path):
    only = "server, staleness 4; server, asynchronous, apart; local, 16 steps"
    done = bench("waiting", "--quick", "--ranks", "3", "--only", only, "--out", tmp_path, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "BENCH-waiting.json").read_text())
    ways = values["results"]["3"]
    assert {"sync", "server, staleness 4", "server, asynchronous, apart"} <= set(ways)
    for figures in ways.values():
        assert len(figures["loss"]) == len(figures["seconds"]) == 12 and figures["tokens"] == 2 * 4 * 32
        assert 3 < figures["loss"][-1] < figures["loss"][0] < 6 and 3 < figures["held_out_loss"] < 6
    text = (tmp_path / "BENCH-waiting.md").read_text()
    for words in ("Quick run", "2 workers, rank 1 slowed 3 times", "/ sync", "held-out loss"):
        assert words in text, words
    assert not list(tmp_path.glob("bench-waiting-*"))
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert (tmp_path / "BENCH-waiting.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["sync", "server, asynchronous"])
def test_the_slow_rank_sleeps_twice_the_time_of_its_passes(world, folder, monkeypatch, name):
    options = parser().parse(["--quick"])
    config = _config(options, world.size, CONTENDERS[name], folder / "r")
    trainer = _Slowed(config, world=world, slowed=3.0)
    slept, began, counted = [], [], []
    step, pause = trainer.train_step, time.sleep

    def train_step(batch):
        began.append(time.perf_counter())
        before = len(slept)
        result = step(batch)
        counted.append(len(slept) - before)
        return result

    def sleep(seconds):
        if sys._getframe(1).f_code.co_name == "_came":  # not the naps of those who wait
            slept.append((seconds, time.perf_counter() - began[-1], trainer.engine.sharding.reducer.passes))
        pause(seconds)

    monkeypatch.setattr(trainer, "train_step", train_step)
    monkeypatch.setattr(time, "sleep", sleep)
    assert trainer.fit() == 0
    if world.rank != SLOW:
        assert not slept
        return
    assert began and counted == [1] * len(began)
    assert all(0 < seconds <= 2 * took for seconds, took, _ in slept)
    assert all(b == a + 1 for (*_, a), (*_, b) in pairwise(slept)) and slept[0][2] == 0  # not reduced yet


def test_tokens_per_second_and_seconds_to_a_common_loss():
    base = {"tokens": 100, "held_out_loss": 1.0, "staleness_max": 0.0}
    sync = base | {"seconds": [9.0] + [2.0] * 19, "loss": [5.0 - 0.1 * i for i in range(20)]}
    fast = base | {"seconds": [9.0] + [1.0] * 19, "loss": [5.0 - 0.05 * i for i in range(20)]}
    assert tokens_per_second(sync) == pytest.approx(50.0)  # the first two steps do not count
    assert median_run([sync, fast, fast | {"tokens": 90}])["tokens"] == 90
    assert seconds_to(fast, 0.0) is None
    results = {5: {"sync": sync, "server, asynchronous": fast, "server, staleness 4": fast | {"tokens": 89}}}
    summary = report(results, argparse.Namespace(slowed=3.0))
    assert [target.met for target in summary.targets] == [True, False]
    [table] = summary.tables
    assert [row[2] for row in table.rows] == pytest.approx([1.0, 2.0, 1.78])
    assert table.rows[1][3] == pytest.approx(9.0 + 19.0)  # the loss that the slower learner has at the end
    assert table.rows[0][3] < 9.0 + 2 * 19.0
    assert not report(results, argparse.Namespace(slowed=1.0)).targets


def test_an_unknown_contender_is_refused_with_the_known_names(capsys):
    assert parser().parse(["--only", "sync; local, 16 steps"]).only == ["sync", "local, 16 steps"]
    with pytest.raises(SystemExit) as error:
        main(["--only", "gossip"])
    assert error.value.code == 2
    assert "'gossip'" in capsys.readouterr().err
