"""The collectives benchmark runs, writes what it promises, and its tuning is used by later jobs."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import warm
from support import clean_environment, job, one_line
from warm import bench

from benchmarks.__main__ import names, usage
from benchmarks.collectives.check import _all_reduce, judged
from benchmarks.collectives.prediction import predicted
from benchmarks.collectives.report import correlation, report
from benchmarks.runner.jobs import byte_sizes
from benchmarks.runner.report import Report, ReportTable, ReportTarget, markdown
from mpitrain.comm import init
from mpitrain.comm.algorithms.ring import ring_all_reduce
from mpitrain.comm.algorithms.tree import tree_all_reduce
from mpitrain.comm.collectives import all_reduce
from mpitrain.comm.plain_mpi import PlainMPI
from mpitrain.comm.programs.simulate import Machine, simulate
from mpitrain.comm.selection.setting import Setting
from mpitrain.comm.selection.tuning import Tuning, describe, keep, key, load, rules_from, table_path
from mpitrain.speeds.probes import Probes
from mpitrain.speeds.timing import Contender, extents, geometric_mean, interleaved, rank_correlation

KIB, MIB = 1 << 10, 1 << 20


# -- the command ---------------------------------------------------------------------------------------------


def test_a_quick_run_writes_table_json_and_plot_even_if_a_later_rank_count_fails(tmp_path):
    done = bench("collectives", "--quick", "--ranks", "2,1", "--sizes", "64,1Mi", "--out", tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "mpitrain: collectives on 1 rank ended with exit code 2" in done.stderr
    values = json.loads((tmp_path / "BENCH-collectives.json").read_text())
    assert values["quick"] is True
    header = values["header"]["2"]
    assert {"machine", "cores", "MPI", "torch", "date", "ranks"} <= set(header) and header["ranks"] == 2
    result = values["results"]["2"]
    assert set(result["all_reduce"]) == {"64", str(MIB)}
    for times in result["all_reduce"].values():
        assert set(times) == {"arena", "tensor", "library", "gloo", "memcpy"}
        assert all(0 < t["best"] <= t["median"] < 60 for t in times.values())
    for times in result["algorithms"].values():
        assert set(times) == {"mpi", "ring", "tree", "halving", "shared"}
    assert all(set(p) == {"mpi", "ring", "tree", "halving", "shared"} for p in result["predicted"].values())
    text = (tmp_path / "BENCH-collectives.md").read_text()
    for words in ("library / arena", "gloo / arena", "arena / memcpy", "Spearman", "Geometric means", "quick run"):
        assert words in text, words
    targets = [target["what"] for target in values["targets"]]
    for words in ("library / ours", "gloo / ours", "memcpy", "fp16", "bf16", "reduce_scatter", "all_gather", "64 KiB"):
        assert any(words in what for what in targets), words
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert (tmp_path / "BENCH-collectives.png").read_bytes().startswith(b"\x89PNG")


def test_quick_alone_says_of_each_collective_whether_it_works_here(tmp_path):
    done = bench("collectives", "--quick", "--ranks", 2, "--out", tmp_path / "none")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert "2 ranks" in first and last == "all 11 work here" and not (tmp_path / "none").exists()
    assert {tuple(line.split("  ")[1:2]) for line in lines} >= {("all_reduce",), ("all_to_all",), ("barrier",)}
    assert all(" ok" in line for line in lines), done.stdout


def test_a_collective_that_gives_something_wrong_is_named_with_the_place():
    world = init()
    right = judged(world, "all_reduce", _all_reduce, all_reduce.ALGORITHMS)
    assert right.line(10) == "  all_reduce  ok (mpi, ring, tree, halving, shared, two_level)"

    def one_bit_off(world, elements, dtype, algorithm):
        got, wanted = _all_reduce(world, elements, dtype, algorithm)
        got[-1] += elements == 1001
        return got, wanted

    wrong = judged(world, "all_reduce", one_bit_off, all_reduce.ALGORITHMS)
    assert wrong.line(10) == (
        "  all_reduce  failed: rank 0, algorithm auto, 1,001 x float32: element 1000 is 13.0 instead of 12.0"
    )


def test_tuning_writes_a_table_that_later_jobs_choose_by(tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = bench(
        "collectives", "--tune", "--quick", "--ranks", 2, "--sizes", "4Ki", "--out", tmp_path, **cache
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (tmp_path / "cache" / "mpitrain").glob("tuning-*.json")
    assert str(path) in done.stdout
    written = Tuning.from_json(path.read_text())
    assert {key.rpartition("/")[2] for key in written.measured} == {"2"}
    operations = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
    places = {key.rpartition("/")[0].removesuffix(" oversubscribed") for key in written.measured}
    assert places == {f"{operation} {place}" for operation in operations for place in ("node arena", "node")}
    told = warm.job(2, [sys.executable, "-m", "mpitrain.doctor"], **cache)
    assert told.returncode == 0, told.stdout + told.stderr
    lines = [line for line in told.stdout.splitlines() if " algorithms " in line]
    assert len(lines) == 2 and all("(measured " in line for line in lines)
    rules = [rules for key, rules in written.measured.items() if key.startswith("all_reduce")]
    assert len(rules) == 2 and all(any(describe(rule) in line for line in lines) for rule in rules)


@pytest.mark.full
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_on_a_device_each_way_stands_beside_the_copies_and_the_host(device, tmp_path):
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
    times = {name: of["median"] for name, of in result["all_reduce"][str(MIB)].items()}
    ratio = times["staged"] / max(times["copies"], times["host"])
    [target] = values["targets"]
    assert float(target["measured"]) == pytest.approx(ratio, abs=0.006) and target["met"] == (ratio <= 1.25)


def test_a_benchmark_that_does_not_exist_is_named_with_those_that_do():
    done = bench("colectives")
    one_line(done, "colectives", "collectives")


def test_help_lists_every_benchmark_with_what_it_measures():
    assert "collectives" in names()
    text = usage()
    for name in names():
        [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 4, f"{name} does not say what it measures"


def test_a_job_that_takes_too_long_is_ended_and_leaves_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _SLEEP, str(tmp_path / "pid")],
        capture_output=True, text=True, timeout=60, env=clean_environment(),
    )  # fmt: skip
    assert "not done after" in done.stderr and done.stdout.split()[-1] == "1", done.stdout + done.stderr
    place = Path("/proc") / (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 10
    while place.exists() and time.monotonic() < deadline:  # mpirun may leave a moment before its ranks
        time.sleep(0.05)
    assert not place.exists()


_SLEEP = """
import os, sys
from benchmarks.runner.jobs import start
code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
for seconds in (2.5, 40):  # the longer one where a busy machine has not started it by then
    ended = start(["-c", code, sys.argv[1]], 1, seconds)
    if os.path.exists(sys.argv[1]):
        break
print(ended)
"""


# -- statistics ----------------------------------------------------------------------------------------------


def test_geometric_mean_of_known_numbers():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([3.0]) == pytest.approx(3.0)
    assert math.isnan(geometric_mean([]))


def test_rank_correlation_of_known_orders():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 3, 4, 5]) == pytest.approx(0.9)  # 1 - 6*2 / (5*24)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)  # ties share the mean rank
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))


def test_times_within_the_tolerance_are_no_order():
    assert rank_correlation([1, 2, 2.05], [1, 2.05, 2]) == pytest.approx(0.5)
    assert rank_correlation([1, 2, 2.05], [1, 2.05, 2], tolerance=0.1) == pytest.approx(1.0)


@pytest.mark.ranks(2, 3)
def test_a_repetition_lasts_from_the_first_start_to_the_last_end(world):
    stamps = np.array([[[1.0, 4.0], [7.0, 8.0]]]) if world.rank == 0 else np.array([[[2.0, 5.0], [3.0, 6.0]]])
    assert extents(world, stamps).tolist() == [[4.0, 5.0]]


@pytest.mark.ranks(2, 3)
def test_contenders_take_turns_and_all_ranks_get_the_same_times(world):
    seen: list[str] = []
    contenders = {
        "a": Contender(lambda: seen.append("a"), lambda: seen.append("prepare"), single=True),
        "b": Contender(lambda: seen.append("b"), single=True),
    }
    times = interleaved(world, contenders, repeats=4)
    assert seen == ["prepare", "a", "b"] * 6  # two rounds to warm up
    told = world.all_gather_object([list(times["a"].all), list(times["b"].all)])
    assert all(one == told[0] for one in told) and len(told[0][0]) == 4


# -- tuning --------------------------------------------------------------------------------------------------


def test_rules_change_half_way_and_only_for_a_clear_gain():
    times = {
        1 * KIB: {"mpi": 1.0, "shared": 2.0},
        4 * KIB: {"mpi": 1.0, "shared": 0.98},  # within the noise: no change yet
        16 * KIB: {"mpi": 2.0, "shared": 1.0},
        64 * KIB: {"mpi": 9.0, "shared": 1.0},
    }
    rules = rules_from(times)
    assert rules[:-1] == ((8 * KIB, "mpi"),) and rules[-1][1] == "shared"
    assert describe(rules) == "mpi below 8 KiB, then shared"
    table = Tuning({key("all_reduce", "node", 2): rules}, "measured")
    assert [chosen(table, 2, n) for n in (0, 8 * KIB - 1, 8 * KIB, 1 << 40)] == ["mpi", "mpi"] + ["shared"] * 2


def chosen(table: Tuning, ranks: int, nbytes: int) -> str:
    return table.algorithm(all_reduce.ALGORITHMS, Setting(nbytes, nbytes // 4, (0,) * ranks, "private"))


def test_a_kept_table_is_loaded_and_keeps_what_it_had(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load("x").origin == "built-in"
    first, second = ((1 << 62, "ring"),), ((100, "mpi"), (1 << 62, "tree"))
    assert keep("x", {key("all_reduce", "node", 2): first}, "one") == table_path("x")
    keep("x", {key("all_reduce", "node", 4): second}, "two")
    table = load("x")
    assert table.origin == "two"
    assert chosen(table, 2, 5) == "ring" and chosen(table, 4, 500) == "tree"
    assert table.is_measured("all_reduce", "node", 2) and not table.is_measured("all_reduce", "node", 8)
    assert table.rules("all_reduce", "node", 8) == Tuning().rules("all_reduce", "node", 8)


@pytest.mark.parametrize("text", ["", "[]", '{"measured": {"node/2": [[5, "mpi"]]}, "origin": ""}'])
def test_a_table_that_cannot_be_used_is_as_none(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table_path("x")
    path.parent.mkdir()
    path.write_text(text)
    assert load("x") == Tuning()


def test_rules_of_an_algorithm_that_nobody_has_registered_are_passed_over():
    table = Tuning.from_json('{"measured": {"all_reduce node/2": [[4611686018427387904, "teleport"]]}, "origin": ""}')
    assert chosen(table, 2, 8) == chosen(Tuning(), 2, 8)


def test_a_table_of_earlier_versions_is_one_of_all_reduce():
    text = '{"measured": {"node arena crowded/2": [[4611686018427387904, "ring"]]}, "origin": ""}'
    assert list(Tuning.from_json(text).measured) == ["all_reduce node arena oversubscribed/2"]


# -- prediction ----------------------------------------------------------------------------------------------


def test_inside_a_node_moving_and_adding_take_turns_and_between_nodes_they_overlap():
    size, segments, block = 4, 8, 1 << 20
    machine = Machine(latency=0, local_latency=0, step=0, bandwidth=1e9, local_bandwidth=1e9, reduce_rate=1e9)
    chunks = [block / segments] * (size * segments)
    moved, added = 2 * (size - 1) * block / 1e9, (size - 1) * block / 1e9
    assert simulate(ring_all_reduce(size, segments), chunks, machine) == pytest.approx(moved + added)
    apart = simulate(ring_all_reduce(size, segments, tuple(range(size))), chunks, machine)
    assert moved < apart < moved + added / 2


def test_ranks_without_a_core_wait_only_for_those_that_work():
    """On one core the tree's one pair of ranks at a time is not slowed by six that wait; a ring's eight all work."""
    size, nbytes = 8, 1 << 20
    roomy = Machine(latency=0, local_latency=0, step=0, local_bandwidth=1e9, reduce_rate=1e9, fence=0, cores=8)
    narrow = replace(roomy, cores=1)

    def slowdown(program):
        chunks = [nbytes / program.chunks] * program.chunks
        return simulate(program, chunks, narrow) / simulate(program, chunks, roomy)

    assert slowdown(ring_all_reduce(size)) == pytest.approx(8)
    assert 2 < slowdown(tree_all_reduce(size)) < 6


@pytest.mark.ranks(2, 3)
def test_the_probes_give_speeds_and_an_order_of_the_algorithms(world):
    plain, arena = PlainMPI(world), world.arena(64 * KIB)
    probes = Probes(world, plain, arena)
    machine = probes.machine(interleaved(world, probes.contenders(), repeats=3))
    for speed in (machine.local_bandwidth, machine.copy_rate, machine.reduce_rate):
        assert 1e6 < speed < 1e13
    assert 0 < machine.step < 1 and 0 < machine.fence < 1
    seconds = predicted(world, 256 * KIB, machine)
    assert set(seconds) == {"mpi", "ring", "tree", "halving", "shared"} and min(seconds.values()) > 0
    assert seconds["mpi"] < seconds["ring"]
    arena.free()
    plain.free()


# -- reports -------------------------------------------------------------------------------------------------


def times(**seconds: float) -> dict[str, dict[str, float]]:
    return {name: {"median": value, "best": value} for name, value in seconds.items()}


def test_targets_are_judged_by_what_was_measured():
    size = str(16 * MIB)
    result = {
        "nodes": 1,
        "all_reduce": {
            "64": times(arena=5e-6, tensor=5e-6, library=1e-6, gloo=1e-3, memcpy=1e-7),
            size: times(arena=1.0, tensor=2.0, library=3.5, gloo=14.0, memcpy=0.8),
        },
        "halves": {size: times(fp16=1.0, bf16=1.0)},
        "reduce_scatter": {size: times(arena=1.0, library=2.5)},
        "all_gather": {size: times(arena=1.0, library=1.5)},
        "algorithms": {size: times(mpi=3.0, ring=2.0, shared=1.0)},
        "predicted": {size: {"mpi": 30.0, "ring": 20.0, "shared": 10.0}},
    }
    made = report({2: result}, argparse.Namespace(tune=False))
    verdicts = {target.what.removeprefix("2 ranks: "): target.met for target in made.targets}
    assert verdicts == {
        "all_reduce in an arena, library / ours, from 256 KiB": True,
        "all_reduce in an arena, gloo / ours, from 256 KiB": False,
        "all_reduce in an arena, ours / memcpy, from 4 MiB": False,
        "all_reduce of ordinary tensors, library / ours, from 1 MiB": True,
        "all_reduce of ordinary tensors, library / ours, from 64 KiB": True,
        "all_reduce of ordinary tensors, ours - library, below 64 KiB": True,
        "fp16 in an arena, library's fp16 / ours, from 256 KiB": None,
        "bf16 in an arena, library's fp16 / ours, from 256 KiB": None,
        "reduce_scatter in an arena, library / ours, from 256 KiB": True,
        "all_gather in an arena, library / ours, from 256 KiB": False,
    }
    assert correlation(result, size) == pytest.approx(1.0)


def test_a_missed_target_is_shown():
    facts = {"machine": "m", "cores": 2, "nodes": 1, "MPI": "x", "torch": "t", "threads": 1, "python": "p", "date": "d"}
    made = Report(
        "T", [ReportTable("t", ("a", "b"), [["x", 1234.5], ["y", None]])], [ReportTarget("speed", "≥ 3", "2.0", False)]
    )
    text = markdown(made, {2: facts | {"load": 0.0, "tuning": "built-in"}}, quick=False)
    assert "| speed | ≥ 3 | 2.0 | MISSED |" in text
    assert "| x | 1,234 |" in text and "| y | - |" in text


def test_sizes_as_people_write_them():
    assert byte_sizes("16,64Ki,4MiB,1m") == [16, 64 * KIB, 1 * MIB, 4 * MIB]
    for wrong in ("", "x", "4Q", "1.5Ki"):
        with pytest.raises(argparse.ArgumentTypeError):
            byte_sizes(wrong)
