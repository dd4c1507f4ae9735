"""The collectives benchmark: its files, its targets, and the tuning that later jobs use."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

import pytest
from support import job, one_line
from warm import bench

from benchmarks.__main__ import names, usage
from benchmarks.collectives import report
from benchmarks.runner.report import Report, ReportTable, ReportTarget, markdown, values_of
from mpitrain.comm.algorithms.messages import ring_all_reduce, tree_all_reduce
from mpitrain.comm.inspection import PlainMPI
from mpitrain.comm.programs.program import Machine, simulate
from mpitrain.speeds.links import Probes
from mpitrain.speeds.timing import measure_in_turns

KIB, MIB = 1 << 10, 1 << 20
FACTS = dict.fromkeys(("machine", "cores", "nodes", "MPI", "torch", "threads", "python", "date", "tuning", "load"), "x")
FACTS |= {"commit": "abc", "clean": False}


# -- the command ---------------------------------------------------------------------------------------------


def test_a_quick_run_writes_table_and_json_even_if_a_later_rank_count_fails(tmp_path):
    done = bench("collectives", "--quick", "--ranks", "2,1", "--sizes", "64,1Mi", "--out", tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "mpitrain: collectives on 1 rank ended with exit code 2" in done.stderr
    values = json.loads((tmp_path / "BENCH-collectives.json").read_text())
    assert values["quick"] is True
    header = values["header"]["2"]
    assert {"machine", "cores", "MPI", "torch", "date", "commit", "clean"} <= set(header) and header["ranks"] == 2
    result = values["results"]["2"]
    assert set(result["all_reduce"]) == {"64", str(MIB)}
    for times in result["all_reduce"].values():
        assert set(times) == {"arena", "tensor", "persistent", "library", "gloo", "memcpy"}
        assert all(0 < t["best"] <= t["median"] < 60 for t in times.values())
    text = (tmp_path / "BENCH-collectives.md").read_text()
    for words in ("library / arena", "gloo / arena", "arena / memcpy", "mean", "Quick run"):
        assert words in text, words
    targets = [target["what"] for target in values["targets"]]
    for words in ("library / ours", "gloo / ours", "memcpy", "fp16", "bf16", "reduce_scatter", "all_gather", "1 µs"):
        assert any(words in what for what in targets), words


@pytest.mark.full
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_on_a_device_each_transport_is_compared_with_copies(device, tmp_path):
    command = [sys.executable, "-m", "benchmarks", "collectives", "--quick", "--ranks", "2", "--sizes", "64,1Mi"]
    done = job(0, [*command, "--device", "auto", "--way", "staged,peer", "--out", str(tmp_path)], device=device.type)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "BENCH-collectives.json").read_text())
    result = values["results"]["2"]
    assert result["device"] == "Pretend 0" and "mpi" in result["obstacles"]
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        for times in result[operation].values():
            assert set(times) == {"staged", "peer", "copies", "host"}
            assert all(0 < t["best"] <= t["median"] < 60 for t in times.values())
    times = {name: figures["median"] for name, figures in result["all_reduce"][str(MIB)].items()}
    ratio = times["staged"] / max(times["copies"], times["host"])
    [target] = values["targets"]
    assert float(target["measured"]) == pytest.approx(ratio, abs=0.006) and target["met"] is None


def test_an_unknown_benchmark_is_refused_with_the_known_names():
    done = bench("colectives")
    one_line(done, "colectives", "collectives")


def test_help_describes_every_benchmark():
    assert "collectives" in names()
    text = usage()
    for name in names():
        [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 4, f"{name} does not say what it measures"


# -- prediction ----------------------------------------------------------------------------------------------


def test_copying_and_adding_overlap_only_between_nodes():
    size, segments, block = 4, 8, 1 << 20
    machine = Machine(latency=0, local_latency=0, step=0, bandwidth=1e9, local_bandwidth=1e9, reduce_rate=1e9)
    chunks = [block / segments] * (size * segments)
    moved, added = 2 * (size - 1) * block / 1e9, (size - 1) * block / 1e9
    assert simulate(ring_all_reduce(size, segments), chunks, machine) == pytest.approx(moved + added)
    between_nodes = simulate(ring_all_reduce(size, segments, tuple(range(size))), chunks, machine)
    assert moved < between_nodes < moved + added / 2


def test_ranks_without_a_core_wait_only_for_busy_ranks():
    """On one core, six waiting ranks do not slow the tree's working pair, while all eight ranks of a ring work."""
    size, nbytes = 8, 1 << 20
    roomy = Machine(latency=0, local_latency=0, step=0, local_bandwidth=1e9, reduce_rate=1e9, fence=0, cores=8)
    narrow = replace(roomy, cores=1)

    def slowdown(program):
        chunks = [nbytes / program.chunks] * program.chunks
        return simulate(program, chunks, narrow) / simulate(program, chunks, roomy)

    assert slowdown(ring_all_reduce(size)) == pytest.approx(8)
    assert 2 < slowdown(tree_all_reduce(size)) < 6


@pytest.mark.ranks(2, 3)
def test_the_probes_return_speeds(world):
    plain, arena = PlainMPI(world), world.arena(64 * KIB)
    probes = Probes(world, plain, arena)
    times = measure_in_turns(world, probes.contenders, repeats=3)
    machine = probes.machine({name: of.median for name, of in times.items()})
    for speed in (machine.local_bandwidth, machine.copy_rate, machine.reduce_rate):
        assert 1e6 < speed < 1e13
    assert 0 < machine.step < 1 and 0 < machine.fence < 1
    arena.free()
    plain.free()


# -- reports -------------------------------------------------------------------------------------------------


def times(**seconds: float) -> dict[str, dict[str, float]]:
    return {name: {"median": value, "best": value} for name, value in seconds.items()}


def test_targets_use_the_measured_values():
    size = str(16 * MIB)
    result = {
        "nodes": 1,
        "all_reduce": {
            "64": times(arena=5e-6, tensor=5e-6, persistent=5e-6, library=1e-6, gloo=1e-3, memcpy=1e-7),
            size: times(arena=1.0, tensor=2.0, persistent=2.0, library=3.5, gloo=14.0, memcpy=0.8),
        },
        "halves": {size: times(fp16=1.0, bf16=1.0)},
        "reduce_scatter": {size: times(arena=1.0, tensor=2.0, library=2.5)},
        "all_gather": {size: times(arena=1.0, tensor=1.5, library=1.5)},
    }
    summary = report({2: result}, argparse.Namespace(device="cpu"))
    verdicts = {target.what.removeprefix("2 ranks: "): target.met for target in summary.targets}
    assert verdicts == {
        "all_reduce in an arena, library / ours, from 256 KiB": True,
        "all_reduce in an arena, gloo / ours, from 256 KiB": False,
        "all_reduce in an arena, ours / memcpy, from 4 MiB": False,
        "all_reduce of ordinary tensors, library / ours, from 1 MiB": True,
        "all_reduce of ordinary tensors, ours / (1 µs + 1.05 x library)": False,
        "reduce_scatter of ordinary tensors, ours / (1 µs + 1.05 x library)": True,
        "all_gather of ordinary tensors, ours / (1 µs + 1.05 x library)": True,
        "reduce_scatter of ordinary tensors, library / ours, from 1 MiB": False,
        "fp16 in an arena, library's fp16 / ours, from 256 KiB": None,
        "bf16 in an arena, library's fp16 / ours, from 256 KiB": None,
        "reduce_scatter in an arena, library / ours, from 256 KiB": True,
        "all_gather in an arena, library / ours, from 256 KiB": False,
    }


def test_between_hosts_every_operation_is_compared_with_plain_sockets():
    small, size = times(arena=5.0, tensor=5.0, library=5.0, tcp=1.0), str(16 * MIB)
    every = {"64": small, size: times(arena=1.1, tensor=1.3, library=9.0, tcp=1.0)}
    result = {"nodes": 3, "halves": {}, **dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), every)}
    summary = report({6: result}, argparse.Namespace(device="cpu"))
    verdicts = [(target.met, target.measured) for target in summary.targets]
    assert verdicts == 3 * [(True, "1.10 at 16 MiB (mean 1.10)"), (False, "1.30 at 16 MiB (mean 1.30)")]
    assert all("arena / tcp" in table.columns for table in summary.tables if table.rows)


def test_on_a_device_the_table_compares_staging_with_the_slower_of_copies_and_host():
    small, large = times(copies=3e-6, host=1e-6, staged=9e-6), times(copies=1.0, host=2.0, staged=2.4, peer=0.5)
    every = {"64": small, str(MIB): large}
    every = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), every)
    result = {"device": "D", "obstacles": {"mpi": "not built", "staged": ""}, **every}
    summary = report({2: result}, argparse.Namespace(device="cuda"))
    first = summary.tables[0]
    assert first.columns == ("size", "staged µs", "peer µs", "copies µs", "host µs", "staged / max(copies, host)")
    assert [row[0] for row in first.rows] == ["64 bytes", "1 MiB"] and first.rows[0][2] is None
    assert [row[-1] for row in first.rows] == pytest.approx([3.0, 1.2])
    assert first.note == "Medians over the repetitions. On D. Not available here: mpi: not built."
    [target] = summary.targets
    assert target.measured == "1.20" and target.met is True


def test_a_missed_target_is_shown():
    summary = Report(
        "T", [ReportTable("t", ("a", "b"), [["x", 1234.5], ["y", None]])], [ReportTarget("speed", "≥ 3", "2.0", False)]
    )
    text = markdown(values_of("t", summary, {2: FACTS}, quick=False))
    assert "| speed | ≥ 3 | 2.0 | MISSED |" in text
    assert "| x | 1,234 |" in text and "| y | - |" in text
    assert "measured at commit abc with changes that are not committed" in text
