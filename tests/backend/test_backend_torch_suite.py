"""PyTorch's own tests of torch.distributed pass over this backend. tests/backend/torch_suite.py prints the table."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from torch_suite import AGAIN, HERE, NOT_OURS, PEER, suite, table

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need the package expecttest"),
]
ENOUGH = {2: 90, 4: 120}  # tests that run at least; fewer mean that the suite skips what it should not


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])  # at 3 the next test runs them
def test_the_tests_that_ship_with_torch_pass(ranks):
    settled: list[str] = []
    ran = 0
    for name in ("mpitrain", "mpi"):
        outcomes = suite(ranks, name, without=settled)
        print(table(ranks, name, outcomes))
        assert not [outcome for outcome in outcomes if outcome.kind == "failed"]
        ran += sum(outcome.kind == "passed" for outcome in outcomes)
        settled += [o.name for o in outcomes if o.kind != "skipped" or not AGAIN.search(o.reason)]
    assert ran >= ENOUGH[ranks]


def test_comparison_command_runs_every_listed_backend():
    choice = ["--sizes", "2", "--as", "mpitrain", "peer", "--only", "test_all_reduce_product$"]
    command = [sys.executable, str(HERE), *choice]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.findall(r"ranks as (\w+): 1 run, 1 passed", run.stdout) == ["mpitrain", "peer"]


def test_tests_that_pass_over_gloo_also_pass_over_mpitrain():
    passed: dict[str, set[str]] = {}
    for name in (PEER, "mpitrain", "gloo"):  # gloo itself; ours by its own name, known to the tests; ours as "gloo"
        outcomes = suite(3, name)
        print(table(3, name, outcomes))
        passed[name] = {outcome.name for outcome in outcomes if outcome.kind == "passed"}
        assert name == PEER or not [outcome for outcome in outcomes if outcome.kind == "failed"]
    assert len(passed[PEER]) > 100
    assert passed[PEER] <= passed["mpitrain"]
    assert passed[PEER] - set(NOT_OURS) <= passed["gloo"]
