"""The benchmark of images: a quick run, and targets for what it measured."""

from __future__ import annotations

import argparse
import json

import pytest
from warm import bench

from benchmarks.images import report


@pytest.mark.campaign
def test_a_quick_run_reads_whole_batches_with_every_loader(tmp_path):
    done = bench("images", "--quick", "--images", 40, "--batch", 16, "--ranks", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "BENCH-images.json").read_text())["results"]["1"]
    assert result["images"] == 32
    assert [len(seconds) for seconds in result["seconds"].values()] == [3] * 4
    assert "mpitrain, a thread per core" in (tmp_path / "BENCH-images.md").read_text()


def test_a_loader_that_is_slower_than_the_peer_misses_its_target():
    names = ("Pillow, num_workers 0", "Pillow, num_workers 2", "mpitrain, 1 thread", "mpitrain, a thread per core")
    seconds = dict(zip(names, ([2.0, 2.2, 2.1], [1.0, 1.1, 1.2], [2.0, 2.0, 2.0], [1.3, 1.2, 1.2]), strict=True))
    summary = report({1: {"images": 110, "seconds": seconds}}, argparse.Namespace(batch=8))
    assert [target.met for target in summary.targets] == [True, False]
    assert [row[1] for row in summary.tables[0].rows][:2] == pytest.approx([110 / 2.1, 100.0])
