"""The growth benchmark: the share of a step that is not computing, measured and predicted."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import MACHINE, job

from benchmarks import growth
from benchmarks.runner import jobs
from benchmarks.runner.report import plot, values_of
from mpitrain.planner.machine import read_machine


def result(nodes=1, **times):
    between = {"latency": 1e-3, "bandwidth": 1e8} if nodes > 1 else {}
    return {"nodes": nodes, "between": between, "times": {name.replace("_", " "): of for name, of in times.items()}}


@pytest.mark.campaign
@pytest.mark.timeout(200)
def test_a_quick_run_measures_steps_and_their_computing(tmp_path):
    (tmp_path / "machine.toml").write_text(MACHINE)
    command = [sys.executable, "-m", "benchmarks", "growth", "--quick", "--ranks", "2", "--out", str(tmp_path)]
    done = job(0, [*command, "--machine", str(tmp_path / "machine.toml")], timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "BENCH-growth.json").read_text())
    for of in values["results"].values():
        step, computing = of["times"]["5 M"]
        assert 0 < computing < 2 * step
    on_hosts = values["results"].get("3")
    assert "no hosts: " in done.stderr or (on_hosts["nodes"] == 3 and on_hosts["between"]["latency"] > 0)
    assert (tmp_path / "BENCH-growth.png").read_bytes().startswith(b"\x89PNG")


def test_results_of_hosts_are_read_and_a_run_that_fails_has_none(monkeypatch):
    commands, codes = [], [0, 1]

    def run(command, cwd, env, check):
        commands.append(command)
        assert (cwd / command[1]).exists() and env["MPIEXEC_TIMEOUT"] == "60"
        folder = Path(command[command.index("--out") + 1])
        (folder / "BENCH-growth.json").write_text('{"results": {"3": 1}}')
        return subprocess.CompletedProcess(command, codes.pop(0))

    monkeypatch.setattr(jobs.subprocess, "run", run)
    assert jobs.run_on_hosts("growth", ["--quick"], 60.0, "--ranks", "1,1,1") == (0, {"results": {"3": 1}})
    assert jobs.run_on_hosts("growth", [], 60.0) == (1, {})
    assert commands[0][2:4] == ["--ranks", "1,1,1"] and commands[0].index("benchmarks") < commands[0].index("--quick")


def test_the_share_is_what_a_step_takes_beyond_its_computing(tmp_path):
    results = {6: result(3, **{"5_M": [0.4, 0.1]}), 2: result(**{"5_M": [0.2, 0.15], "80_M": [1.0, 0.9]})}
    planned = {name: {"2 on 1": 0.2, "6 on 3": 0.5} | {str(n): 0.3 for n in growth.PLANNED} for name in growth.SIZES}
    summary = growth.report(results, planned)
    shares = {tuple(row[:3]): (row[5], row[6]) for row in summary.tables[0].rows}
    assert shares == {
        ("5 M", 1, 2): pytest.approx((25.0, 20.0)),
        ("5 M", 3, 6): pytest.approx((75.0, 50.0)),
        ("80 M", 1, 2): pytest.approx((10.0, 20.0)),
    }
    [panel] = summary.panels
    assert "80 M, 3 host(s), measured" not in panel.lines
    assert panel.lines["5 M, 3 host(s), measured"] == ([6], [75.0]) and panel.styles["5 M, planner"]["marker"] == ""
    assert panel.lines["80 M, planner"] == (growth.PLANNED, [30.0] * 13) and growth.PLANNED[-1] == 4096
    alone = growth.report(results, {})
    assert alone.tables[0].rows[0][6] is None and not any("planner" in label for label in alone.panels[0].lines)
    facts = {"commit": "abc", "clean": True}
    assert plot(values_of("growth", summary, {2: facts}, False), tmp_path / "growth.png")


def test_predictions_use_the_measured_network_and_the_shared_cores(tmp_path, monkeypatch):
    (tmp_path / "machine.toml").write_text(MACHINE)
    seen = {}

    class Profile:
        close = staticmethod(lambda: None)

    def predicted(model, ranks, nodes, machine):
        seen[ranks, nodes, machine.cores] = machine.seen_cores, machine.links.latency
        return 0.5

    monkeypatch.setattr(growth, "profile_of", lambda *args, **kwargs: Profile())
    monkeypatch.setattr(growth, "_predicted", predicted)
    cores = read_machine(tmp_path / "machine.toml").cores
    shares = growth.predictions({2: result(**{"5_M": [1.0, 1.0]}), 6: result(3)}, str(tmp_path / "machine.toml"))
    assert shares["5 M"].keys() == {"2 on 1", "6 on 3", *map(str, growth.PLANNED)}
    assert seen[6, 3, cores / 3] == (cores, 1e-3)
    assert seen[4096, 4096 // cores, cores][1] == 1e-3


def test_models_that_do_not_fit_into_memory_are_left_out(monkeypatch):
    options = argparse.Namespace(sizes=None, quick=False)
    monkeypatch.setattr(growth.proc, "nbytes_of", lambda *names: 16 << 30)
    assert growth._fitting(2, options) == list(growth.SIZES)
    assert growth._fitting(8, options) == ["5 M", "20 M", "80 M"]
    assert re.fullmatch(r"\d+ M", growth._fitting(2, argparse.Namespace(sizes=None, quick=True))[0])
