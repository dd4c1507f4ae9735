"""The strategies benchmark: the same training by each strategy, with its time, memory and traffic."""

from __future__ import annotations

import argparse
import json

import pytest
from warm import bench

from benchmarks.strategies import report, strategies

MODEL = {"layers": 4, "width": 64, "heads": 4, "sequence": 32}


@pytest.mark.campaign
@pytest.mark.timeout(240)
def test_a_quick_run_reports_time_memory_and_bytes_of_each_strategy(tmp_path):
    only = ["ZeRO-3", "ZeRO-3 gathered", "DDP, recompute", "data 2 x pipeline 2", "tensor 4", "torch DDP", "FSDP2"]
    command = ["strategies", "--quick", "--ranks", "4", "--out", tmp_path]
    done = bench(*command, "--only", "; ".join(only), timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "BENCH-strategies.json").read_text())["results"]["4"]
    runs = {name: figures for name, figures in result["found"].items() if "why" not in figures}
    assert {"DDP", *only} == set(runs)
    whole = runs["DDP"]["largest"]
    assert whole["states"] == pytest.approx(2 * whole["parameters"]) and whole["gradients"] == whole["parameters"]
    for kind in ("parameters", "gradients", "states"):
        for name in ("ZeRO-3", "ZeRO-3 gathered", "FSDP2"):
            assert runs[name]["largest"][kind] == pytest.approx(whole[kind] / 4, rel=0.05), (name, kind)
        assert runs["torch DDP"]["largest"][kind] == pytest.approx(whole[kind], rel=0.01)
    assert runs["DDP, recompute"]["largest"]["activations"] < 0.5 * whole["activations"]
    for name, figures in runs.items():
        assert figures["sent"]["between"] == 0
        assert figures["sent"]["inside"] > 1e5, name
    assert runs["ZeRO-3 gathered"]["sent"]["inside"] > runs["ZeRO-3"]["sent"]["inside"]
    assert runs["torch DDP"]["sent"]["inside"] == pytest.approx(1.5 * whole["parameters"], rel=0.2)  # 2 (N - 1) / N
    text = (tmp_path / "BENCH-strategies.md").read_text()
    assert "| data 2 x pipeline 2 |" in text and "GPT of layers 2" in text


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_strategies_use_all_ranks_and_fit_the_model(ranks):
    for name, values in strategies(ranks, MODEL).items():
        parallel = values["parallel"]
        stages, tensor = parallel.get("pipeline", 1), parallel.get("tensor", 1)
        assert ranks % (stages * tensor) == 0 and stages <= 4 and 4 % tensor == 0, name
    assert ("data 2 x pipeline 2 x tensor 2" in strategies(ranks, MODEL)) == (ranks == 8)
    assert ("tensor 4" in strategies(ranks, MODEL)) == (ranks == 4)


def test_the_report_compares_with_ddp_and_with_the_memory_of_peers():
    kinds = dict.fromkeys(("parameters", "gradients", "states", "activations", "buffers"), float(1 << 20))
    ours, theirs = {"inside": 2e6, "between": 1e6}, {"inside": None, "between": None}
    common = {"memory": 2.0 * (1 << 20), "largest": kinds, "losses": [3.0, 2.0, 1.0]}
    runs = {
        "DDP": {"seconds": [[0.2] * 3, [0.1] * 3], "sent": ours, **common},
        "torch DDP": {"seconds": [[0.15] * 3], "sent": theirs, **common, "memory": 1.0 * (1 << 20)},
    }
    summary = report({2: {"nodes": 1, "model": MODEL, "batch": 8, "found": runs}}, argparse.Namespace())
    first, second = summary.tables[0].rows
    assert first[1:4] == [100.0, 1.0, 2.0] and first[-3:] == [2.0, 1.0, "1.00000"]
    assert second[2] == pytest.approx(1.5) and second[-3:] == [None, None, "1.00000"]
    assert len(first) == len(summary.tables[0].columns)
    [of_ddp] = [target for target in summary.targets if target.met is not None]
    assert "DDP / torch DDP" in of_ddp.what and of_ddp.met is False and of_ddp.measured == "2.00"
