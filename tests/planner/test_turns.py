"""Schedules on shared cores: full speed with enough cores, and no work lost with too few."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.pipe.schedule import Backward, Forward, Schedule, ScheduleError, make_schedule
from mpitrain.pipe.simulate import Costs, PreparedSchedule, simulate

CASES = [
    ("gpipe", 3, 4, 1),
    ("1f1b", 4, 5, 1),
    ("interleaved", 2, 6, 2),
    ("zero-bubble", 3, 7, 1),
    ("zero-bubble", 2, 5, 2),
]


def ends_of(schedule: Schedule, *on: Any) -> list[float]:
    return PreparedSchedule(schedule).ends_on_shared_cores(*on)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_enough_cores_give_full_speed(case: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*case)
    stages = range(schedule.stages)
    costs = Costs(
        [1.0 + s for s in stages], [0.5 + s / 2 for s in stages], [0.25 * (1 + s) for s in stages], message=0.125
    )
    expected = [runs[-1].end for runs in simulate(schedule, costs).runs]
    ends = ends_of(schedule, costs, [0] * schedule.ranks, schedule.ranks, lambda stage, to: 0.125)
    assert ends == pytest.approx(expected)


def test_one_core_runs_ranks_one_after_the_other() -> None:
    schedule = make_schedule("1f1b", 4, 6, 1)
    ends = ends_of(schedule, Costs(1.0, 1.0, 1.0), [0] * 4, 1.0, lambda stage, to: 0.0)
    assert max(ends) == pytest.approx(4 * 6 * 3.0)  # the core is never idle


def test_nodes_do_not_share_cores() -> None:
    schedule = make_schedule("gpipe", 2, 2, 1)
    costs = Costs(1.0, 1.0, 0.0)
    two_nodes = ends_of(schedule, costs, [0, 1], 1.0, lambda stage, to: 0.5)
    assert max(two_nodes) == pytest.approx(max(r[-1].end for r in simulate(schedule, Costs(1.0, 1.0, 0.0, 0.5)).runs))
    one_node = ends_of(schedule, costs, [0, 0], 1.0, lambda stage, to: 0.5)
    assert max(one_node) > max(two_nodes)


def test_a_rank_that_waits_for_ever_is_named() -> None:
    steps = ((Backward(0, 0), Forward(0, 0)), (Forward(1, 0), Backward(1, 0)))
    with pytest.raises(ScheduleError, match="rank 0 waits forever"):
        ends_of(Schedule("odd", 2, 1, (0, 1), steps), Costs(), [0, 0], 2.0, lambda stage, to: 0.0)
