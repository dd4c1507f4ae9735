"""The slow link between two nodes has the bandwidth and delay it claims; measurements across sites rely on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

PING = Path(__file__).with_name("ping.py")
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(120)]


def test_a_link_has_the_configured_latency_and_bandwidth(linked_hosts):
    result = linked_hosts.run([sys.executable, PING], (1, 1), timeout=60)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert 2 * 0.010 <= measured["round_trip"] < 0.030, measured
    # never more than the cable carries without headers; close to that once TCP has found its speed
    most = 1e9 / 8 * 1448 / 1514
    assert 0.8 * most < max(measured["bytes_per_second"]) < 1.01 * most, measured
    linked_hosts.cut(2)
    assert not linked_hosts.reaches(1, 2)
    linked_hosts.clear()  # returns when they reach each other again
