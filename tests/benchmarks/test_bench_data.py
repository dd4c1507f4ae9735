"""The data benchmark: loaders that give the same samples, and targets for what it measured."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
import torch
from warm import bench

from benchmarks.data import _compare, report


@pytest.mark.campaign
def test_a_quick_run_writes_samples_and_shares_of_a_step(tmp_path):
    done = bench("data", "--quick", "--ranks", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "BENCH-data.json").read_text())["results"]["2"]
    assert result["loading"]["samples"] == ((1 << 20) - 1) // 128 // 16 * 16  # whole batches of 8 on 2 ranks
    assert len(result["loading"]["seconds"]) == 5
    for times in result["steps"]["default GPT"].values():
        assert 0 < times["waiting"] < times["step"]
    text = (tmp_path / "BENCH-data.md").read_text()
    for words in ("Quick run", "mpitrain, workers 1, first epoch", "≤ 2%"):
        assert words in text, words
    assert not list(tmp_path.glob("bench-data-*"))


def test_loaders_with_different_samples_are_refused():
    batch = (torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="batch 1"):
        _compare(iter([batch, batch]), iter([batch, (batch[0], batch[0])]), 2)


def test_a_large_share_and_a_slow_loader_miss_their_targets():
    seconds = {"plain": [1.0, 1.2, 1.1], "mpitrain, workers 0, later epochs": list(np.array([1.0, 1.2, 1.1]) * 2)}
    steps = {"default GPT": {"workers 0": {"step": 1.0, "waiting": 0.03, "share": 0.03}}}
    steps["default GPT"]["workers 1"] = {"step": 1.0, "waiting": 0.01, "share": 0.01}
    result = {1: {"loading": {"samples": 110, "seconds": seconds}, "steps": steps}}
    summary = report(result, argparse.Namespace(quick=False, batch=8))
    assert [target.met for target in summary.targets] == [False, True, False]
    assert [row[2] for row in summary.tables[0].rows] == pytest.approx([1.0, 0.5])
    assert summary.tables[0].rows[0][1] == pytest.approx(100.0)
