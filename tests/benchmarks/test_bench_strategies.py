"""The strategies benchmark: the same training by each strategy, with its time, memory and traffic."""

from __future__ import annotations

import argparse
import json

import pytest
from warm import bench

from benchmarks import comparison
from benchmarks.runner import training_runs
from benchmarks.runner.report import plot, values_of
from benchmarks.strategies import report, strategies
from mpitrain.comm import init
from mpitrain.monitor.energy import EnergyMeter

MODEL = {"layers": 4, "width": 64, "heads": 4, "sequence": 32}


@pytest.mark.campaign
@pytest.mark.timeout(240)
def test_a_quick_run_reports_time_memory_and_bytes_of_each_strategy(tmp_path):
    only = ["ZeRO-3", "ZeRO-3 gathered", "DDP, recompute", "data 2 x pipeline 2", "tensor 4", "torch DDP", "FSDP2"]
    command = ["strategies", "--quick", "--ranks", "4", "--out", tmp_path]
    done = bench(*command, "--only", "; ".join(only), timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "BENCH-strategies.json").read_text())["results"]["4"]
    runs = {name: figures for name, figures in result["results"].items() if "why" not in figures}
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
        "DDP": {"seconds": [[0.2] * 3, [0.1] * 3], "joules": [40.0, 30.0], "sent": ours, **common},
        "torch DDP": {"seconds": [[0.15] * 3], "joules": [None], "sent": theirs, **common, "memory": 1.0 * (1 << 20)},
    }
    summary = report({2: {"nodes": 1, "model": MODEL, "batch": 8, "results": runs}}, argparse.Namespace())
    first, second = summary.tables[0].rows
    assert first[1:4] == [100.0, 1.0, 2.0] and first[-4:] == [2.0, 1.0, 30.0, "1.00000"]
    assert second[2] == pytest.approx(1.5) and second[-4:] == [None, None, None, "1.00000"]
    assert len(first) == len(summary.tables[0].columns)
    [of_ddp] = [target for target in summary.targets if target.met is not None]
    assert "DDP / torch DDP" in of_ddp.what and of_ddp.met is False and of_ddp.measured == "2.00"


# -- the full comparison -----------------------------------------------------------------------------------


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_a_quick_full_run_has_the_memory_within_a_step_of_each_strategy(tmp_path):
    few = "ZeRO-2, 4 checkpoints; DDP, activations in files; pipeline 2; torch DDP; FSDP2"
    command = ["strategies", "--full", "--quick", "--models", "ResNet-18", "--ranks", "2", "--out", tmp_path]
    done = bench(*command, "--strategies", few, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "BENCH-comparison.json").read_text())
    runs = values["results"]["2"]["ResNet-18"]["results"]
    assert set(runs) == {"DDP", *few.split("; ")}
    for name, of in runs.items():
        assert of["losses"] == pytest.approx(runs["DDP"]["losses"], rel=2e-4), name
    curves = {name: of["curve"] for name, of in runs.items()}
    peaks = {name: comparison.peak(curve) for name, curve in curves.items()}
    whole, divided = peaks["DDP"], peaks["ZeRO-2, 4 checkpoints"]
    assert divided["states"] == pytest.approx(whole["states"] / 2, rel=0.05)
    assert divided["gradients"] == pytest.approx(whole["gradients"] / 2, rel=0.05)
    assert divided["activations"] < 0.7 * whole["activations"] > 0
    in_files = peaks["DDP, activations in files"]
    assert in_files["activations"] < 0.1 * whole["activations"] and in_files["states"] == whole["states"]
    for kind in ("parameters", "gradients", "states", "activations"):
        assert peaks["torch DDP"][kind] == pytest.approx(whole[kind], rel=0.02), kind
    assert peaks["FSDP2"]["activations"] == pytest.approx(whole["activations"], rel=0.1)
    for name, curve in curves.items():  # activations are kept in forward, and freed in backward
        sizes = [nbytes["activations"] for _, nbytes in curve]
        assert sizes[0] == sizes[-1] == 0 and [at for at, _ in curve] == sorted(at for at, _ in curve), name
    assert (tmp_path / "BENCH-comparison.png").read_bytes().startswith(b"\x89PNG")


def test_four_checkpoints_divide_the_blocks_of_each_model(tmp_path):
    def settings(**model):
        return comparison.contenders(2, model, tmp_path)

    recompute = {
        layers: settings(options={"layers": layers})["ZeRO-2, 4 checkpoints"]["train"]["recompute"]
        for layers in (18, 50, 101)
    }
    assert recompute == {18: "every 2", 50: "every 4", 101: "every 9"}
    gpt, resnet = settings(**MODEL), settings(options={"layers": 18})
    assert {"pipeline 2", "tensor 2", "ZeRO-3 gathered"} < set(gpt) and set(gpt) - set(resnet) == {"tensor 2"}


def test_the_comparison_draws_curves_side_by_side_and_bars(tmp_path):
    mib = float(1 << 20)

    def run(activations):
        curve = [(at, dict.fromkeys(comparison.KINDS, mib) | {"activations": x * mib}) for at, x in activations]
        kinds = dict.fromkeys(training_runs.KINDS, mib)
        return {"seconds": [[0.2]], "joules": [None], "sent": {"inside": 1e6, "between": 0.0}, "curve": curve} | {
            "memory": mib, "largest": kinds, "losses": [1.0]
        }  # fmt: skip

    runs = {"DDP": run([(0.0, 0), (0.1, 8), (0.2, 0)]), comparison.SHOWN[1]: run([(0.0, 0), (0.4, 2)])}
    runs |= {"DeepSpeed ZeRO-1": run([])}
    result = {"nodes": 1, "model": {}, "batch": 8, "results": runs}
    summary = comparison.report({2: {"ResNet-101": result}}, argparse.Namespace())
    assert [row[1:4] for row in summary.tables[1].rows] == [[4.0, 12.0, 1.0], [4.0, 6.0, 1.0], [None] * 3]
    first, second, every, seconds, memory, sent = summary.panels
    assert first.lines["activations"] == ([0.0, pytest.approx(50.0), 100.0], [0.0, 8.0, 0.0]) and first.kind == "areas"
    assert second.lines["activations"][1] == [0.0, 2.0] and first.top == second.top == every.top == pytest.approx(13.2)
    assert every.lines["DDP"][1] == [4.0, 12.0, 4.0]
    assert memory.lines["activations"] == (["DDP", comparison.SHOWN[1]], [8.0, 2.0])
    assert seconds.lines[""][1] == [0.2] * 3 and sent.lines[""][1] == [1.0] * 3
    plotted = comparison.report({2: {"GPT": result | {"results": {"DDP": runs["DDP"]}}}}, argparse.Namespace())
    assert len(plotted.panels) == 3
    values = values_of("comparison", summary, {2: {"commit": "abc", "clean": True}}, False)
    assert plot(values, tmp_path / "comparison.png")


def test_joules_are_those_of_the_counters_or_unknown(tmp_path):
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "5000000"), ("max_energy_range_uj", "9000000")):
        (package / name).write_text(text)
    meter = EnergyMeter(powercap=tmp_path)
    (package / "energy_uj").write_text("1000000")  # after a wrap-around
    assert training_runs.joules_of(init(), meter) == pytest.approx(5.0)
    assert training_runs.joules_of(init(), EnergyMeter(powercap=tmp_path / "missing")) is None
