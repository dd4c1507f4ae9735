"""The checkpoint interval, compared with published values, the exact optimum and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitrain.trainer.saving import daly, steps_between, young

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_interval_matches_the_examples_of_daly(mtbf, minutes):
    assert daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, rel=0.01)  # his figures 3, 4 and 5


def cost(save, mtbf, interval):
    """Return the mean time per second of training, by Daly's exponential model with instant restarts."""
    return mtbf * np.expm1((interval + save) / mtbf) / interval


def best_interval(save, mtbf):
    """Return the interval at which d`cost` is 0: (1 - x) exp(x) = exp(-save / mtbf) for x = interval / mtbf."""
    low, high = 0.0, 1.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if (1 - x) * math.exp(x) > math.exp(-save / mtbf) else (low, x)
    return mtbf * low


@pytest.mark.parametrize("save", [0.01, 2.0, 5 * MINUTE, HOUR])
@pytest.mark.parametrize("mtbf", [2 * HOUR, DAY, 180 * DAY])
def test_no_interval_costs_less_than_that_of_daly(save, mtbf):
    exact, much = best_interval(save, mtbf), save > mtbf / 10
    least = cost(save, mtbf, np.geomspace(1e-3, 10 * mtbf, 100_000)).min()
    assert cost(save, mtbf, exact) == pytest.approx(least, rel=1e-7)
    assert daly(save, mtbf) == pytest.approx(exact, rel=6e-3 if much else 1e-4)
    assert cost(save, mtbf, daly(save, mtbf)) == pytest.approx(least, rel=2e-5 if much else 1e-7)
    assert abs(young(save, mtbf) / exact - 1) < 0.65 * math.sqrt(save / mtbf)  # sqrt(2) / 3 is the next term's factor


def test_interval_at_the_limits():
    assert daly(1e-6, DAY) == pytest.approx(young(1e-6, DAY), rel=1e-4)
    assert daly(2 * HOUR, HOUR) == daly(9 * HOUR, HOUR) == HOUR  # where saving takes longer than work lasts
    assert daly(2 * HOUR * (1 - 1e-9), HOUR) == pytest.approx(2 * HOUR * (1 + 1 / 3 + 1 / 9) - 2 * HOUR)


def test_steps_between_saves():
    assert steps_between(2.0, 0.5, DAY) == round(daly(2.0, DAY) / 0.5)
    assert steps_between(2.0, 0.5, DAY, least_seconds=1000.2) == 2001
    assert steps_between(2.0, 1e6, DAY) == steps_between(0.0, 1.0, DAY) == 1
