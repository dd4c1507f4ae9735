"""How often to save: against the published figures, the exact optimum, brute force and a simulation of failures."""

from __future__ import annotations

import math
import random

import pytest
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from mpitrain.planner.restart import daly, expected_time, steps_between, young

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_dalys_own_examples_come_out(mtbf, minutes):
    assert daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, rel=0.01)  # his figures 3, 4 and 5


@pytest.mark.parametrize("save", [0.01, 2.0, 5 * MINUTE, HOUR])
@pytest.mark.parametrize("mtbf", [2 * HOUR, DAY, 180 * DAY])
def test_no_interval_costs_less_than_dalys(save, mtbf):
    def cost(logarithm):
        return expected_time(30 * DAY, save, MINUTE, mtbf, math.exp(logarithm))

    bounds = math.log(1e-3), math.log(10 * mtbf)
    best = minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    exact = mtbf * (1 + lambertw(-math.exp(-1 - save / mtbf)).real)
    assert math.exp(best.x) == pytest.approx(exact, rel=1e-2)
    assert daly(save, mtbf) == pytest.approx(exact, rel=6e-3 if save > mtbf / 10 else 1e-4)
    assert cost(math.log(daly(save, mtbf))) == pytest.approx(best.fun, rel=2e-5 if save > mtbf / 10 else 1e-8)
    assert abs(young(save, mtbf) / exact - 1) < 0.65 * math.sqrt(save / mtbf)  # sqrt(2) / 3 is the next term's factor


def test_at_the_limits():
    assert daly(1e-6, DAY) == pytest.approx(young(1e-6, DAY), rel=1e-4)
    assert daly(2 * HOUR, HOUR) == daly(9 * HOUR, HOUR) == HOUR  # where saving takes longer than work lasts
    assert daly(2 * HOUR * (1 - 1e-9), HOUR) == pytest.approx(2 * HOUR * (1 + 1 / 3 + 1 / 9) - 2 * HOUR)
    assert expected_time(DAY, 0.0, 0.0, 1e6 * DAY, MINUTE) == pytest.approx(DAY, rel=1e-6)
    assert expected_time(DAY, 0.0, 0.0, 1.0, DAY) == math.inf


def test_what_is_expected_is_what_happens_on_average():
    draw = random.Random(1)
    work, save, restart, mtbf, interval = 40 * HOUR, 0.1 * HOUR, 0.2 * HOUR, 5 * HOUR, HOUR

    def once():
        clock, fails = 0.0, draw.expovariate(1 / mtbf)
        for _ in range(round(work / interval)):
            needed = interval + save
            while fails < clock + needed:  # begun anew after a restart, in which nodes may fail as well
                clock, fails = fails, fails + draw.expovariate(1 / mtbf)
                needed = restart + interval + save
            clock += needed
        return clock

    mean = sum(once() for _ in range(2000)) / 2000
    assert mean == pytest.approx(expected_time(work, save, restart, mtbf, interval), rel=0.015)


def test_steps_between_saves():
    assert steps_between(2.0, 0.5, DAY) == round(daly(2.0, DAY) / 0.5)
    assert steps_between(2.0, 0.5, DAY, least_seconds=1000.2) == 2001
    assert steps_between(2.0, 1e6, DAY) == steps_between(0.0, 1.0, DAY) == 1
