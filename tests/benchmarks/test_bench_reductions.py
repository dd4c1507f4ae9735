"""The reductions benchmark: sizes of buckets, passes between two reductions, and rings."""

from __future__ import annotations

import argparse
import json

import pytest
from warm import bench

from benchmarks.reductions import EVERY, OURS, RINGS, TORCH, report
from benchmarks.runner.report import plot, values_of


@pytest.mark.campaign
@pytest.mark.timeout(240)
def test_a_quick_run_measures_each_size_and_converges_as_torch_does(tmp_path):
    done = bench("reductions", "--quick", "--out", tmp_path, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "BENCH-reductions.json").read_text())
    result = values["results"]["2"]
    assert all(min(by.values()) > 0 for what in ("buckets", "rings") for by in result[what].values())
    assert set(result["rings"]["DDP"]) == set(map(str, RINGS)) and set(result["buckets"]) == {"DDP", "ZeRO-2", TORCH}
    losses = {name: {every: of["losses"] for every, of in by.items()} for name, by in result["no_sync"].items()}
    for every in map(str, EVERY):
        assert losses[OURS][every] == pytest.approx(losses[TORCH][every], rel=1e-3), every
    assert losses[OURS]["1"][0] == losses[OURS]["8"][0]
    assert losses[OURS]["1"][1:8] != losses[OURS]["8"][1:8]  # updated after the first pass, and after the eighth
    assert (tmp_path / "BENCH-reductions.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_has_a_table_and_a_plot_of_each_sweep(tmp_path):
    passes = {"1": {"seconds": 0.2, "losses": [3.0, 2.0]}, "8": {"seconds": 0.1, "losses": [3.0, 2.5]}}
    result = {"overlaps": False, "buckets": {"DDP": {"0.5": 0.3, "25": 0.2}}, "rings": {"DDP": {"1": 0.2, "2": 0.1}}}
    summary = report({2: result | {"no_sync": {OURS: passes}}}, argparse.Namespace(passes=2))
    buckets, rings, sync = summary.tables
    assert buckets.columns == ("contender", "0.5", "25") and buckets.rows == [("DDP", 300.0, 200.0)]
    assert rings.rows == [("DDP", 200.0, 100.0)] and sync.rows == [(OURS, 200.0, 100.0)]
    assert "No core is free" in buckets.note
    assert [panel.across for panel in summary.panels] == ["MiB of a bucket", "rings", "passes", "passes"]
    assert summary.panels[0].lines["DDP"] == ([0.5, 25.0], [300.0, 200.0])
    assert summary.panels[3].lines["reduced every 8"] == ([1, 2], [3.0, 2.75])
    values = values_of("reductions", summary, {2: {"commit": "abc", "clean": True}}, False)
    assert plot(values, tmp_path / "reductions.png")
