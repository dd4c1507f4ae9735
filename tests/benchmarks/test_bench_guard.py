"""The guard of speed: no ratio to a peer is a third worse than recorded for this kind of machine."""

from __future__ import annotations

import guarding
import pytest


@pytest.mark.campaign
@pytest.mark.timeout(1300)
def test_no_ratio_to_a_peer_is_a_third_worse_than_recorded():
    first = guarding.measure()
    expected = guarding.recorded(first.kind)
    print(f"{first.kind}\n{guarding.lines(expected, first.rounds)}")
    if not expected:
        pytest.skip(f"nothing is recorded for {first.kind}; on an idle machine: {guarding.RECORD}")
    worse = guarding.too_large(expected, first.rounds)
    if not worse:
        return
    again = guarding.measure(worse)
    print(f"again:\n{guarding.lines(expected, again.rounds)}")
    certain, unsteady = guarding.slower(expected, [first.rounds, again.rounds])
    others = max(first.others, again.others)
    if others > guarding.BUSY:
        pytest.skip(f"other programs used {others:.0%} of the cores; slower than recorded: {certain + unsteady}")
    assert not certain, f"slower than recorded:\n{guarding.lines(expected, {n: again.rounds[n] for n in certain})}"
    if unsteady:
        pytest.skip(f"slower than recorded, but the rounds disagree: {unsteady}")


def test_a_ratio_that_is_steadily_a_third_larger_in_both_runs_is_slower():
    expected = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "small": 0.05}
    first = {
        "a": [1.4] * 5,
        "b": [1.4] * 5,
        "c": [1.0, 1.2, 1.5, 1.6, 1.7],
        "d": [1.3] * 5,
        "small": [0.2] * 5,
        "new": [9.0] * 5,
    }
    assert guarding.too_large(expected, first) == ["a", "b", "c"]
    again = {"a": [1.2, 1.4, 1.4, 1.4, 1.5], "b": [1.3] * 5, "c": [1.0, 1.2, 1.5, 1.6, 1.7]}
    assert guarding.slower(expected, [first, again]) == (["a"], ["c"])


def test_a_recorded_machine_has_every_ratio_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(guarding, "RECORDED", tmp_path / "ratios.json")
    assert guarding.recorded("x") == {}
    guarding.record([guarding.Run("x", {"a": [1.0, 2.0, 3.0]}, 0.0), guarding.Run("x", {"a": [2.5] * 3}, 0.0)])
    guarding.record([guarding.Run("y", {"a": [4.0]}, 0.0)])
    assert guarding.recorded("x") == {"a": 2.5} and guarding.recorded("y") == {"a": 4.0}
