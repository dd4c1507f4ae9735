"""The parameter server benchmark: times of pushes and pulls in each mode."""

from __future__ import annotations

import json

import pytest
from warm import bench


@pytest.mark.campaign
def test_a_quick_run_measures_every_transport(tmp_path):
    done = bench("server", "--quick", "--ranks", "2,3", "--sizes", "64Ki", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "BENCH-server.json").read_text())["results"]
    for ranks in "23":
        [ways] = results[ranks].values()
        assert set(ways) == {"memcpy", "torch rpc", "parallel.mode server"}
        assert all(0 < ways[way][act]["best"] <= ways[way][act]["median"] < 60 for way in ways for act in ways[way])
    assert "/ memcpy" in (tmp_path / "BENCH-server.md").read_text()
