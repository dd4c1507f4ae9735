"""Checks of collectives, and the tuning by which later jobs choose algorithms."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm
from support import PATIENCE, clean_environment

from benchmarks.runner.report import rank_correlation
from mpitrain.comm import init
from mpitrain.comm.selection import ALL_REDUCE, Setting, algorithm_by_rules
from mpitrain.comm.tuning import Tuning, describe_rules, load_tuning, rules_from, rules_key, save_tuning, table_path
from mpitrain.measuring.check import _all_reduce, check_case
from mpitrain.measuring.self_start import byte_sizes
from mpitrain.speeds.timing import Contender, durations, measure_in_turns

KIB, MIB = 1 << 10, 1 << 20


# -- the commands --------------------------------------------------------------------------------------------


def test_check_reports_whether_each_collective_works():
    done = warm.command("doctor", "--check", "--ranks", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert "2 ranks" in first and last == "all 11 work"
    assert {tuple(line.split("  ")[1:2]) for line in lines} >= {("all_reduce",), ("all_to_all",), ("barrier",)}
    assert all(" ok" in line for line in lines), done.stdout


def test_a_wrong_collective_is_named_with_the_wrong_element():
    world = init()
    right = check_case(world, _all_reduce, ALL_REDUCE)
    assert right == (True, "ok (mpi, ring, tree, halving, shared, staged, two_level)")

    def one_bit_off(world, elements, dtype, algorithm):
        got, expected = _all_reduce(world, elements, dtype, algorithm)
        got[-1] += elements == 1001
        return got, expected

    wrong = check_case(world, one_bit_off, ALL_REDUCE)
    message = "failed: rank 0, algorithm auto, 1,001 x float32: element 1000 is 13.0 instead of 12.0"
    assert wrong == (False, message)


def test_tuning_writes_a_table_that_later_jobs_use(tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = warm.command("doctor", "--tune", "--quick", "--ranks", 2, "--sizes", "4Ki", **cache)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (tmp_path / "cache" / "mpitrain").glob("tuning-*.json")
    assert str(path) in done.stdout
    written = Tuning.from_json(path.read_text())
    assert {key.rpartition("/")[2] for key in written.measured} == {"2"}
    operations = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
    places = {key.rpartition("/")[0].removesuffix(" oversubscribed") for key in written.measured}
    assert places == {f"{operation} {place}" for operation in operations for place in ("node arena", "node")}
    doctor = warm.job(2, [sys.executable, "-m", "mpitrain.doctor"], **cache)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    lines = [line for line in doctor.stdout.splitlines() if " algorithms " in line]
    assert len(lines) == 2 and all("(measured " in line for line in lines)
    rules = [rules for key, rules in written.measured.items() if key.startswith("all_reduce")]
    assert len(rules) == 2 and all(any(describe_rules(rule) in line for line in lines) for rule in rules)


def test_a_job_over_its_time_limit_is_ended_completely(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _SLEEP, str(tmp_path / "pid")],
        capture_output=True, text=True, timeout=60, env=clean_environment(),
    )  # fmt: skip
    assert "not finished after" in done.stderr and done.stdout.split()[-1] == "1", done.stdout + done.stderr
    place = Path("/proc") / (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 10 * PATIENCE
    while place.exists() and time.monotonic() < deadline:  # mpirun may leave a moment before its ranks
        time.sleep(0.05)
    assert not place.exists()


_SLEEP = """
import os, sys
from mpitrain.measuring.self_start import start
code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
for seconds in (2.5, 40):  # the longer one where a busy machine has not started it by then
    ended = start(["-c", code, sys.argv[1]], 1, seconds)
    if os.path.exists(sys.argv[1]):
        break
print(ended)
"""


def test_byte_sizes_may_have_units():
    assert byte_sizes("16,64Ki,4MiB,1m") == [16, 64 * KIB, 1 * MIB, 4 * MIB]
    for wrong in ("", "x", "4Q", "1.5Ki"):
        with pytest.raises(argparse.ArgumentTypeError):
            byte_sizes(wrong)


# -- statistics ----------------------------------------------------------------------------------------------


def test_rank_correlation_of_known_orders():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 3, 4, 5]) == pytest.approx(0.9)  # 1 - 6*2 / (5*24)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)  # ties share the mean rank
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))


@pytest.mark.ranks(2, 3)
def test_a_repetition_lasts_from_the_first_start_to_the_last_end(world):
    stamps = np.array([[[1.0, 4.0], [7.0, 8.0]]]) if world.rank == 0 else np.array([[[2.0, 5.0], [3.0, 6.0]]])
    assert durations(world, stamps).tolist() == [[4.0, 5.0]]


@pytest.mark.ranks(2, 3)
def test_contenders_take_turns_and_all_ranks_get_the_same_times(world):
    calls: list[str] = []
    contenders = {
        "a": Contender(lambda: calls.append("a"), lambda: calls.append("prepare"), single=True),
        "b": Contender(lambda: calls.append("b"), single=True),
    }
    times = measure_in_turns(world, contenders, repeats=4)
    assert calls == ["prepare", "a", "b"] * 6  # two rounds to warm up
    times_by_rank = world.all_gather_object([list(times["a"].all), list(times["b"].all)])
    assert all(one == times_by_rank[0] for one in times_by_rank) and len(times_by_rank[0][0]) == 4


@pytest.mark.ranks(2)
def test_a_late_begin_does_not_shorten_the_series_of_a_short_operation(world):
    calls: list[int] = []

    def call() -> None:
        if not calls:
            time.sleep(2e-3)  # as ranks that share cores begin at different times
        calls.append(1)

    times = measure_in_turns(world, {"short": Contender(call, calls.clear)}, repeats=3)
    assert len(calls) > 5 and times["short"].median < 1e-3  # by single calls, it would be 2


# -- tuning --------------------------------------------------------------------------------------------------


def test_rules_change_halfway_between_sizes_and_only_for_a_clear_gain():
    times = {
        1 * KIB: {"mpi": 1.0, "shared": 2.0},
        4 * KIB: {"mpi": 1.0, "shared": 0.98},  # within the noise: no change yet
        16 * KIB: {"mpi": 2.0, "shared": 1.0},
        64 * KIB: {"mpi": 9.0, "shared": 1.0},
    }
    rules = rules_from(times)
    assert rules[:-1] == ((8 * KIB, "mpi"),) and rules[-1][1] == "shared"
    assert describe_rules(rules) == "mpi below 8 KiB, then shared"
    table = Tuning({rules_key("all_reduce", "node", 2): rules}, "measured")
    assert [chosen(table, 2, n) for n in (0, 8 * KIB - 1, 8 * KIB, 1 << 40)] == ["mpi", "mpi"] + ["shared"] * 2


def chosen(table: Tuning, ranks: int, nbytes: int) -> str:
    return algorithm_by_rules(ALL_REDUCE, Setting(nbytes, nbytes // 4, (0,) * ranks, "private"), table)


def test_a_stored_table_is_loaded_and_extended(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_tuning("x").origin == "built-in"
    first, second = ((1 << 62, "ring"),), ((100, "mpi"), (1 << 62, "tree"))
    assert save_tuning("x", {rules_key("all_reduce", "node", 2): first}, "one") == table_path("x")
    save_tuning("x", {rules_key("all_reduce", "node", 4): second}, "two")
    table = load_tuning("x")
    assert table.origin == "two"
    assert chosen(table, 2, 5) == "ring" and chosen(table, 4, 500) == "tree"
    assert table.is_measured("all_reduce", "node", 2) and not table.is_measured("all_reduce", "node", 8)
    assert table.rules("all_reduce", "node", 8) == Tuning().rules("all_reduce", "node", 8)


@pytest.mark.parametrize("text", ["", "[]", '{"measured": {"node/2": [[5, "mpi"]]}, "origin": ""}'])
def test_an_unusable_table_is_ignored_with_a_warning(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table_path("x")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=f"the tuning table {path} is ignored .*; delete it"):
        assert load_tuning("x") == Tuning()


def test_rules_of_unregistered_algorithms_are_ignored():
    table = Tuning.from_json('{"measured": {"all_reduce node/2": [[4611686018427387904, "teleport"]]}, "origin": ""}')
    assert chosen(table, 2, 8) == chosen(Tuning(), 2, 8)


def test_a_table_of_an_earlier_version_is_read_as_all_reduce():
    text = '{"measured": {"node arena crowded/2": [[4611686018427387904, "ring"]]}, "origin": ""}'
    assert list(Tuning.from_json(text).measured) == ["all_reduce node arena oversubscribed/2"]
