"""Times and bytes of pipeline ranks, compared with the simulation of each step of the schedule."""

import random

import pytest

from mpitrain.pipe.schedule import make_schedule
from mpitrain.pipe.simulate import ROUNDS, Costs, Flow, PreparedSchedule, simulate

KINDS = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("many", [False, True])
def test_a_flow_equals_the_simulated_schedule(name, chunks, many):
    draw = random.Random(7)
    for ranks in (2, 3, 8):
        for more in (1, ranks - 1, 2 * ranks):
            count = ROUNDS * ranks + 3 * ranks * many + more if many else more
            slices = 1 if name == "zero-bubble" else draw.choice((1, 2))
            seconds = [[draw.choice((1, 1, 3)) * draw.random() for _ in range(ranks * chunks)] for _ in range(4)]
            costs = Costs(*seconds[:3], message=0.2 * draw.random())
            whole = simulate(make_schedule(name, ranks, count, chunks, slices), costs)
            flow = Flow(name, ranks, count, chunks, slices)
            near = 1e-2 if many else 1e-12
            assert (flow.shape.microbatches < flow.microbatches) == many
            assert flow.ends(costs) == pytest.approx([runs[-1].end for runs in whole.runs], rel=near)
            assert flow.peak_bytes(tuple(seconds[3])) == pytest.approx(
                PreparedSchedule(whole.schedule).peak_bytes(seconds[3]), rel=near
            )
