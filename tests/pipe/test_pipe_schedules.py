"""Schedules, tested without MPI: proofs, closed forms, and detection of wrong schedules."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from mpitrain.errors import InputError
from mpitrain.pipe.schedule import (
    Backward,
    BackwardWeight,
    PipelineProgram,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    gpipe,
    in_slices,
    interleaved,
    make_schedule,
    one_f_one_b,
    terapipe,
    zb_h1,
    zb_v,
)
from mpitrain.pipe.simulate import Costs, PreparedSchedule, forward_only, simulate, verify, with_messages

KINDS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved 2": lambda p, m: interleaved(p, m, 2),
    "interleaved 3": lambda p, m: interleaved(p, m, 3),
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "terapipe 3": lambda p, m: terapipe(p, m, 3),
    "1f1b, 2 slices": lambda p, m: in_slices(one_f_one_b(p, m), 2),
    "interleaved 2, 2 slices": lambda p, m: in_slices(interleaved(p, m, 2), 2),
}


def uneven(stages: int, seed: int) -> Costs:
    draw = random.Random(seed)
    forward, first, second = ([draw.uniform(0.1, 5) for _ in range(stages)] for _ in range(3))
    return Costs(forward, first, second, message=draw.uniform(0, 3))


def idle_of(schedule: Schedule) -> Fraction:
    """Return the idle fraction with F = I = W = 1, where all times are whole numbers."""
    result = simulate(schedule)
    whole = int(result.makespan) * schedule.ranks
    return Fraction(whole - int(result.busy), whole)


def shapes(microbatches: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Yield numbers of ranks and of microbatches: those in `microbatches` and some others."""
    for p in range(1, 17):
        for m in range(1, 65):
            if m in microbatches or (p <= 5 and m <= 7) or m == (11 * p) % 17 + 1:
                yield p, m


def prove(make: Callable[[int, int], Schedule], microbatches: Collection[int] = ()) -> None:
    for p, m in shapes(microbatches):
        schedule = make(p, m)
        verify(with_messages(schedule))
        verify(with_messages(schedule, uneven(schedule.stages, seed=p * 100 + m)))
        verify(with_messages(forward_only(schedule)), training=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_complete_ordered_and_free_of_deadlock(kind):
    prove(KINDS[kind])


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_schedules_are_valid_for_up_to_16_ranks_and_64_microbatches(kind, full):
    some = {1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64}
    prove(KINDS[kind], range(1, 65) if full else some)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8, 16])
def test_idle_fractions_equal_the_closed_forms(p):
    for m in (1, 2, 5, p, 2 * p, 2 * p + 1, 4 * p, 32, 64):
        assert idle_of(gpipe(p, m)) == idle_of(one_f_one_b(p, m)) == Fraction(p - 1, m + p - 1)
        if m % p == 0:
            for v in (2, 4):
                assert idle_of(interleaved(p, m, v)) == Fraction(p - 1, v * m + p - 1)
        if m >= p:
            assert idle_of(zb_h1(p, m)) == Fraction(p - 1, 3 * m + p - 1)
        if m >= 2 * p - 1:
            assert idle_of(zb_v(p, m)) == Fraction(p - 1, 6 * m + p - 1)


def test_slices_reduce_idle_time_and_not_increase_memory():
    for p, m in ((2, 1), (4, 8), (8, 32)):
        for slices in (2, 4):
            for make in (gpipe, one_f_one_b):
                sliced = in_slices(make(p, m), slices)
                assert idle_of(sliced) == Fraction(p - 1, m * slices + p - 1)
                assert simulate(sliced).in_flight == simulate(make(p, m)).in_flight


@pytest.mark.parametrize(
    ("schedule", "peak", "idle"),
    [
        (gpipe(8, 32), 32, 0.179),
        (one_f_one_b(8, 32), 8, 0.179),
        (interleaved(8, 32, 2), 11.5, 0.099),
        (interleaved(8, 32, 4), 9.75, 0.052),
        (zb_h1(8, 32), 8, 0.068),
        (zb_v(8, 32), 8, 0.035),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else str(value),
)
def test_idle_time_and_microbatches_in_flight_match_the_literature(schedule, peak, idle):
    result = simulate(schedule)
    assert result.in_flight == peak
    assert result.idle == pytest.approx(idle, abs=5e-4)


def test_memory_counts_the_bytes_of_each_stage():
    assert PreparedSchedule(one_f_one_b(3, 5)).peak_bytes([10, 20, 40]) == [30, 40, 40]


def test_a_message_delays_the_ranks_that_wait_for_it():
    plain = gpipe(2, 1)
    assert simulate(plain, Costs(1, 1, 1)).makespan == 6
    assert simulate(plain, Costs(1, 1, 1, message=0.5)).makespan == 7


def test_a_single_microbatch_is_plain_model_parallelism():
    result = simulate(make_schedule("gpipe", 4, 1))
    assert idle_of(gpipe(4, 1)) == Fraction(3, 4)
    assert result.in_flight == 1


def changed(program: PipelineProgram, rank: int, steps: list) -> PipelineProgram:
    return replace(program, steps=tuple(tuple(steps) if r == rank else s for r, s in enumerate(program.steps)))


@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_repeated_steps_are_detected(kind):
    program = with_messages(KINDS[kind](3, 4))
    for rank, steps in enumerate(program.steps):
        for at in range(len(steps)):
            with pytest.raises(ScheduleError):
                verify(changed(program, rank, [*steps[:at], *steps[at + 1 :]]))
            with pytest.raises(ScheduleError):
                verify(changed(program, rank, [*steps[: at + 1], *steps[at:]]))


def test_deadlocked_sends_are_detected():
    """Let both ranks send before they receive: correct with buffers, a deadlock without."""
    program = with_messages(one_f_one_b(2, 3))
    first = list(program.steps[0])
    where = next(i for i, s in enumerate(first) if isinstance(s, Receive))
    before = max(i for i, s in enumerate(first) if isinstance(s, Send))
    late = [*first[:where], *first[where + 1 : before + 1], first[where], *first[before + 1 :]]
    with pytest.raises(ScheduleError, match=r"waits forever|runs before its input"):
        verify(changed(program, 0, late))


def test_a_cycle_of_waiting_steps_is_detected():
    schedule = one_f_one_b(2, 2)
    turned = replace(schedule, steps=(schedule.steps[0][::-1], schedule.steps[1]))
    with pytest.raises(ScheduleError, match="waits forever"):
        with_messages(turned)


def test_slices_out_of_order_are_detected():
    program = with_messages(terapipe(1, 1, 2))
    forward, backward = program.steps[0][:2], program.steps[0][2:]
    with pytest.raises(ScheduleError, match="later slice"):
        verify(changed(program, 0, [*forward, *backward[::-1]]))
    with pytest.raises(ScheduleError, match="earlier slice"):
        verify(changed(program, 0, [*forward[::-1], *backward]))


def test_a_step_on_the_wrong_rank_is_detected():
    program = with_messages(zb_h1(2, 2))
    steps = [BackwardWeight(0, 0) if s == BackwardWeight(1, 0) else s for s in program.steps[1]]
    with pytest.raises(ScheduleError, match="stage of another rank"):
        verify(changed(program, 1, steps))


def test_every_backward_of_a_microbatch_accumulates_in_order():
    """Check the order, so that gradients are summed as in one process."""
    for make in (gpipe, one_f_one_b, lambda p, m: interleaved(p, m, 2), zb_h1, zb_v):
        schedule = make(3, 7)
        for steps in schedule.steps:
            for stage in range(schedule.stages):
                summed = [s.microbatch for s in steps if isinstance(s, Backward | BackwardWeight) and s.stage == stage]
                assert summed == sorted(summed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "choose one of gpipe, 1f1b"),
        (("1f1b", 2, 2, 2), "parallel.chunks to 1"),
        (("zero-bubble", 2, 2, 3), "parallel.chunks to 1, 2"),
        (("gpipe", 2, 0), "at least one"),
        (("zero-bubble", 2, 2, 1, 4), "parallel.slices to 1, or parallel.schedule to gpipe"),
        (("1f1b", 2, 2, 1, 0), "0 slices"),
    ],
)
def test_impossible_schedules_are_refused_by_name(arguments, message):
    with pytest.raises(InputError, match=message):
        make_schedule(*arguments)
