"""The planner's machine profile, measured by `mpitrain.plan --measure`."""

from __future__ import annotations

import os
import re
import sys

import pytest
from support import job
from warm import command

from mpitrain.planner.machine import lines_of, read_machine
from mpitrain.speeds.kept import values_from

GIB = 1 << 30


@pytest.mark.campaign
def test_a_quick_run_writes_a_profile_with_plausible_figures(tmp_path):
    options = ["--measure", "--quick", "--ranks", "2", "--device", "cpu"]
    done = command("plan", *options, "--out", tmp_path / "machine.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[core.matrix]" in done.stdout
    machine, links = read_machine(tmp_path / "machine.toml"), read_machine(tmp_path / "machine.toml").links
    assert machine.cores == links.cores == len(os.sched_getaffinity(0)) and machine.memory > GIB / 4
    assert all(1e7 < rate < 1e14 for table in machine.matrix.values() for _, rate in table)
    assert 1e6 < machine.update_rate < 1e11 and 0 < machine.threads <= 1 and 0 < machine.overhead < 10
    assert 1e5 < machine.rank_write_rate < 1e12 and 1e5 < machine.write_rate < 1e12
    assert 50 << 20 < machine.process < 4 * GIB
    assert 0 < links.local_latency < 1 and 0 < links.step < 1 and 1e7 < links.copy_rate < 1e12
    assert {row.operation for row in machine.collectives} == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    assert {row.memory for row in machine.collectives} == {"arena", "private"}
    assert all(row.ranks == 2 and row.nodes == 1 and 0 < row.seconds < 60 for row in machine.collectives)


@pytest.mark.full
def test_a_job_that_plans_measures_its_machine_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"run.dir": tmp_path / "run", "run.device": "cpu", "parallel.auto": "true", "parallel.tensor": 1}
    settings |= {"model.layers": 2, "model.width": 16, "model.heads": 2, "model.sequence": 16, "train.steps": 2}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    written = []
    for _ in range(2):
        done = job(2, [sys.executable, "-m", "mpitrain.train", *words, "--checkpoint.resume", "never"], timeout=100)
        assert done.returncode == 0 and "parallel.auto: " in done.stdout, done.stdout + done.stderr
        (profile,) = (tmp_path / "mpitrain").glob("machine-*.toml")
        written.append(profile.stat().st_mtime_ns)
    machine = read_machine(profile)
    assert machine.origin.endswith("at the start of a job") and machine.links.local_latency > 0
    assert written[0] == written[1]


@pytest.mark.serial
def test_several_rank_counts_make_one_profile():
    links = {"latency": 1.0, "bandwidth": 2.0, "local_latency": 3.0, "local_bandwidth": 4.0, "copy_rate": 5.0}
    links |= {"reduce_rate": 6.0, "memory_rate": 1e15, "step": 8.0, "fence": 9.0, "cores": 4}

    def at(ranks, nodes):
        return {
            "nodes": [rank % nodes for rank in range(ranks)],
            "links": links | {"local_latency": float(ranks)},
            "collectives": [["all_reduce", "ring", ranks, nodes, "arena", 4096, 1e-5]],
        }

    seconds = {"copy": 0.5, "copy alone": 0.25, "update": 0.1, "threads": 0.25, "fp32 64": 0.5}
    cores = {"cores": 4, "seconds": seconds, "threads": 4, "copied": 100, "updated": 10, "threaded": 64}
    whole = {"machine": "", "memory": 1000, "process": 10, "device": None, "overhead": 0.5, "cores": cores}
    whole["folder"] = {"write_rate": 7.0}
    values = values_from({2: at(2, 1) | whole, 4: at(4, 1), 8: at(8, 1)}, quick=False)
    assert values["inside"]["latency"] == 4  # of the most ranks that have a core each
    assert "network" not in values  # one node tells nothing of it
    assert values["node"]["memory_bandwidth"] == 2 * 4 * 100 / 0.5
    assert values["core"]["threads"] == pytest.approx(1 / 3) and values["core"]["copy_rate"] == 5
    assert values["core"]["matrix"]["fp32"] == {64: 2 * 64**3 / 0.5}
    assert len(values["collectives"]) == 3
    assert values_from({8: at(8, 2) | whole}, quick=False)["network"] == {"latency": 1.0, "bandwidth": 2.0}
    assert values_from({8: at(8, 1) | whole}, quick=True)["inside"]["latency"] == 8  # there is no better
    assert re.search("cores = 4 .*that ranks run on", "\n".join(lines_of(values)))
