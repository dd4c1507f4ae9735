"""Predicted seconds of collectives equal the simulated programs; shortcuts for many ranks stay close to them."""

from __future__ import annotations

import pytest

from mpitrain.comm.programs.program import Machine, simulate
from mpitrain.comm.selection import Setting, select_program
from mpitrain.parallel.places import Group
from mpitrain.planner.collectives import CollectiveTimes

LINKS = Machine()


@pytest.mark.parametrize("nodes", [(0, 0), (0, 0, 0), (0, 0, 1, 1), tuple(range(8))], ids=str)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_powers_of_two_are_simulated_exactly(operation: str, nodes: tuple[int, ...]) -> None:
    nbytes = 1 << 25
    block = nbytes // len(nodes) // 4 * 4
    setting = Setting(block * len(nodes), block * len(nodes) // 4, nodes, "arena", block=block)
    _, program = select_program(operation, setting)
    seconds = CollectiveTimes(LINKS).seconds(operation, nbytes, Group(nodes))
    if program is not None:
        assert seconds == pytest.approx(simulate(program, [nbytes / program.chunks] * program.chunks, LINKS))
    assert nbytes * (len(nodes) - 1) / len(nodes) / LINKS.bandwidth < seconds or set(nodes) == {0}
    assert seconds < 1.0


def test_times_are_interpolated_between_sizes() -> None:
    times, group = CollectiveTimes(LINKS), Group((0, 0, 1, 1))
    low, middle, high = (times.seconds("all_reduce", n << 20, group) for n in (4, 6, 8))
    assert middle == pytest.approx((low + high) / 2)


def test_concurrent_groups_share_the_link() -> None:
    one, four = (
        CollectiveTimes(LINKS).seconds("all_reduce", 1 << 26, Group(tuple(range(4)), beside)) for beside in (1, 4)
    )
    assert 3.0 < four / one < 4.2


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 1, 2), (0, 0, 1), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_any_number_of_ranks_has_a_time(operation: str, nodes: tuple[int, ...]) -> None:
    times = [CollectiveTimes(LINKS).seconds(operation, nbytes, Group(nodes), "private") for nbytes in (8, 1 << 14)]
    assert 0 < times[0] <= times[1] < 1e-3


def test_one_rank_or_no_bytes_take_no_time() -> None:
    times = CollectiveTimes(LINKS)
    assert times.seconds("all_reduce", 1 << 20, Group((0,))) == 0.0
    assert times.seconds("all_gather", 0, Group((0, 1))) == 0.0


def test_extrapolated_long_rings_equal_simulation() -> None:
    nodes = tuple(n for n in range(48) for _ in range(2))
    nbytes = 1 << 27
    setting = Setting(nbytes // 96 // 4 * 4 * 96, 1, nodes, "arena", block=nbytes // 96 // 4 * 4)
    name, program = select_program("all_reduce", setting)
    assert name == "two_level"
    assert program is not None
    whole = simulate(program, [nbytes / program.chunks] * program.chunks, LINKS)
    assert CollectiveTimes(LINKS).seconds("all_reduce", nbytes, Group(nodes)) == pytest.approx(whole, rel=0.03)


def test_a_long_message_between_nodes_takes_three_latencies() -> None:
    links = Machine(latency=1e-2, eager=1 << 16)
    times = CollectiveTimes(links)
    for nbytes, flights in ((1 << 16, 1), (1 << 17, 3)):
        assert times.message(nbytes, inside=False) == pytest.approx(flights * 1e-2 + nbytes / links.bandwidth)
        assert times.message(nbytes, inside=True) < 1e-3
    short, long = (times.seconds("all_gather", 2 * nbytes, Group((0, 1))) for nbytes in (1 << 16, 1 << 17))
    assert (short, long) == (pytest.approx(1e-2, rel=0.01), pytest.approx(3e-2, rel=0.01))
