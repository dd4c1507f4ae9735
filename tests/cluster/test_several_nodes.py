"""The communication layer on three nodes: network namespaces with their own host names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(300)]


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 3, 1)], ids=["2 ranks each", "1, 3 and 1 ranks"])
def test_every_operation_is_correct_across_three_nodes(hosts, forked, ranks):
    result = hosts.run(forked.replace_python([sys.executable, HERE / "operations_across_nodes.py"]), ranks, timeout=240)
    assert result.returncode == 0, result.stderr
    assert f"{sum(ranks)} ranks on 3 nodes agree; 16 MiB by two_level" in result.stdout


def test_two_level_sums_send_the_minimum_between_nodes(hosts, forked):
    result = hosts.run(forked.replace_python([sys.executable, HERE / "two_level.py"]), timeout=240)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["nodes"] == 3 and "gloo / two_level arena" in measured
    sent = measured["sent"]  # vectors, counted by the network
    fewest, of_a_ring = 2 * 2 / 3, 2 * 5 / 6  # over 3 nodes, and over their 6 ranks
    for kind in ("two_level arena", "two_level plain"):
        assert fewest <= sent[kind] < 1.05 * fewest, sent
    assert sent["ring"] >= of_a_ring, sent


def test_collectives_between_hosts_are_timed_beside_plain_sockets(hosts, tmp_path):
    command = [sys.executable, "-m", "benchmarks", "collectives", "--quick", "--sizes", "1Mi", "--out", tmp_path]
    result = hosts.run(command, timeout=240)
    assert result.returncode == 0, result.stderr
    [measured] = json.loads((tmp_path / "BENCH-collectives.json").read_text())["results"].values()
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        [times] = measured[name].values()
        assert {"arena", "tensor", "tcp"} <= set(times) and all(0 < of["best"] < 60 for of in times.values())
