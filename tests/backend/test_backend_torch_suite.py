"""PyTorch's own tests of torch.distributed pass over this backend. tests/backend/torch_suite.py prints the table."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from torch_suite import AGAIN, suite, table

ENOUGH = {2: 90, 3: 115, 4: 120}  # tests that run at least; fewer mean that the suite skips what it should not


@pytest.mark.campaign
@pytest.mark.timeout(400)
@pytest.mark.skipif(find_spec("expecttest") is None, reason="PyTorch's tests need the package expecttest")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_tests_that_ship_with_torch_pass(ranks):
    settled: list[str] = []
    ran = 0
    for name in ("mpitrain", "gloo", "mpi"):
        outcomes = suite(ranks, name, without=settled)
        print(table(ranks, name, outcomes))
        assert not [outcome for outcome in outcomes if outcome.kind == "failed"]
        ran += sum(outcome.kind == "passed" for outcome in outcomes)
        settled += [o.name for o in outcomes if o.kind != "skipped" or not AGAIN.search(o.reason)]
    assert ran >= ENOUGH[ranks]
