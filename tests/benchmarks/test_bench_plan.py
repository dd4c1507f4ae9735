"""The planner benchmark: predictions beside measurements, and their comparison."""

from __future__ import annotations

import argparse
import json

import pytest
from support import MACHINE
from warm import bench

from benchmarks.plan import report, spread
from mpitrain.parallel import layouts


@pytest.mark.campaign
@pytest.mark.timeout(200)
def test_a_quick_run_compares_predictions_with_measurements(tmp_path):
    (tmp_path / "machine.toml").write_text(MACHINE)
    machine = ["--machine", tmp_path / "machine.toml"]
    done = bench("plan", "--quick", "--ranks", "2", "--out", tmp_path, *machine, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "BENCH-plan.json").read_text())["results"]["2"]["gpt"]
    assert len(rows) >= 12 and {row["choice"] for row in rows} >= {-1, 0}
    for row in rows:
        assert layouts.text(layouts.read(row["layout"])) == row["layout"]
        assert [len(times) for times in row["measured"]["seconds"]] == [3] and min(row["measured"]["seconds"][0]) > 0
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"])
        predicted, counted = row["memory"], row["measured"]["account"]
        for kind in ("parameters", "gradients", "states", "activations"):  # as rank 0 of the training counts them
            if layouts.read(row["layout"]).pipeline == 1:
                assert predicted[kind] == pytest.approx(counted[kind], rel=0.01), (row["layout"], kind)
            else:  # what is predicted is of the rank that has most
                assert predicted[kind] > 0.99 * counted[kind], (row["layout"], kind)
    assert "| gpt | 2 |" in (tmp_path / "BENCH-plan.md").read_text()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_spread_contains_every_kind_of_layout_once(ranks):
    layouts = spread(ranks, 16, 8)
    assert len(layouts) == len(set(layouts)) >= 12 and all(layout.ranks == ranks for layout in layouts)
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.schedule for layout in layouts} == {"gpipe", "1f1b", "interleaved", "zero-bubble"}
    assert any(layout.sequence for layout in layouts) and any(layout.recompute for layout in layouts)


def _row(choice: int, predicted: float, measured: float, memory: float = 1.0) -> dict[str, object]:
    return {
        "layout": f"{choice}",
        "choice": choice,
        "seconds": predicted,
        "parts": {"compute": predicted},
        "memory": {"parameters": memory * (1 << 20), "process": 1e9, "allocator": 1e9},
        "measured": {
            "seconds": [[2 * measured] * 3, [measured] * 3],
            "memory": 1 << 20,
            "account": {"parameters": 1 << 20},
        },
    }


def test_targets_use_the_figures():
    near = [_row(0, 1.0, 1.1), _row(-1, 2.0, 2.1), _row(-1, 3.0, 3.1), _row(-1, 4.0, 4.2)]
    good = report({2: {"gpt": near}}, argparse.Namespace())
    assert [target.met for target in good.targets] == [True] * 4
    assert good.tables[0].rows == [("gpt", 2, 4, *map(pytest.approx, (100 / 21, 0.0, 1.0, 1.0, 1.0)))]
    far = [_row(0, 1.0, 2.0, 2.0), _row(-1, 2.0, 1.0, 2.0), _row(-1, 3.0, 0.5, 2.0)]
    assert [target.met for target in report({2: {"gpt": far}}, argparse.Namespace()).targets] == [False] * 4
