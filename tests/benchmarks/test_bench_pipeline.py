"""The pipeline benchmark and its results."""

from __future__ import annotations

import json

import pytest
from warm import bench


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_the_benchmark_compares_every_schedule(tmp_path):
    small = ["--layers", "5", "--microbatches", "4"]
    done = bench("pipeline", "--quick", "--ranks", "2", *small, "--out", tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "BENCH-pipeline.json").read_text())["results"]["2"]
    for size in ("small", "large"):
        assert set(results[size]) == {"gpipe", "1f1b", "interleaved", "zero-bubble"}
        for figures in results[size].values():
            assert figures["mpitrain"]["median"] > 0 and figures["torch"]["median"] > 0
            assert 0 <= figures["idle"]["measured"] < 1 and 0 < figures["idle"]["predicted"] < 1
