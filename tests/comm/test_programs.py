"""Every algorithm, proved for every small number of ranks without MPI."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.comm.algorithms.messages import (
    direct_all_to_all,
    direct_gather,
    direct_scatter,
    doubling_all_gather,
    doubling_all_reduce,
    halving_all_reduce,
    halving_reduce_scatter,
    pairwise_all_reduce,
    pairwise_reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)
from mpitrain.comm.algorithms.shared import (
    alternating_all_gather,
    deferred_reduce_scatter,
    node_copy,
    shared_all_gather,
    shared_all_reduce,
    shared_broadcast,
    shared_reduce,
    shared_reduce_scatter,
    staged_all_reduce,
    two_level_all_gather,
    two_level_all_reduce,
    two_level_reduce_scatter,
)
from mpitrain.comm.programs.program import (
    CALLER,
    NONE,
    WORK,
    Await,
    Combine,
    Copy,
    Exchange,
    Fence,
    Machine,
    Program,
    Signal,
    Span,
    chunk_bounds,
    even_bounds,
    simulate,
    tree_order,
)
from mpitrain.comm.programs.verify import ProgramError, verify

SIZES = (*range(1, 18), 24)
AT_SIZES = pytest.mark.parametrize(  # a proof takes as long as some power of the size
    "sizes", [SIZES, pytest.param((31, 32, 33), marks=pytest.mark.full)], ids=["to 24", "to 33"]
)


@AT_SIZES
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize(
    "make", [ring_all_reduce, ring_reduce_scatter, ring_all_gather, tree_all_reduce, halving_all_reduce]
)
def test_segmented_algorithms_are_correct(make, segments, sizes):
    for size in sizes:
        verify(make(size, segments))


@AT_SIZES
@pytest.mark.parametrize(
    "make",
    [
        doubling_all_reduce,
        doubling_all_gather,
        halving_reduce_scatter,
        pairwise_all_reduce,
        pairwise_reduce_scatter,
        shared_all_gather,
        direct_all_to_all,
    ],
)
def test_plain_algorithms_are_correct(make, sizes):
    for size in sizes:
        verify(make(size))


@AT_SIZES
@pytest.mark.parametrize(
    "make", [tree_reduce, tree_broadcast, shared_reduce, shared_broadcast, direct_gather, direct_scatter]
)
def test_rooted_algorithms_are_correct_for_every_root(make, sizes):
    for size in sizes:
        for root in {0, size // 2, size - 1}:
            verify(make(size, root))


@pytest.mark.parametrize("sizes", [(*range(1, 10), 16), pytest.param((33,), marks=pytest.mark.full)], ids=["16", "33"])
@pytest.mark.parametrize("tree", [False, True])
def test_shared_memory_algorithms_are_correct_and_free_of_races(tree, sizes):
    for size in sizes:
        for pieces in (1, 2, 5) if size < 9 else (2,):
            verify(shared_all_reduce(size, pieces, tree=tree))
            verify(shared_reduce_scatter(size, pieces, tree=tree))
            verify(staged_all_reduce(size, pieces, tree=tree))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), *[st.booleans()] * 2, st.randoms())
def test_two_level_is_correct_for_any_number_of_ranks_per_node(per_node, segments, direct, tree, random):
    nodes = [node for node, ranks in enumerate(per_node) for _ in range(ranks)]
    if random.random() < 0.3:
        random.shuffle(nodes)  # ranks placed round robin or worse
    verify(two_level_all_reduce(tuple(nodes), segments, direct=direct, tree=tree))
    if len(set(per_node)) == 1:
        verify(two_level_reduce_scatter(tuple(nodes), segments))
        verify(two_level_all_gather(tuple(nodes)))


def _traffic(program, rank, chunk_bytes):
    """Return the bytes that a rank sends, in how many messages, and in how many exchanges it takes part."""
    total = np.concatenate([[0], np.cumsum(chunk_bytes)])
    exchanges = [step for step in program.steps(rank) if isinstance(step, Exchange)]
    exchanges = [step for step in exchanges if int(step.to) != NONE or int(step.source) != NONE]
    sent = [step.send for step in exchanges if int(step.to) != NONE]
    assert all(span.memory == WORK for span in sent)
    return sum(int(total[int(span.hi)] - total[int(span.lo)]) for span in sent), len(sent), len(exchanges)


def test_two_level_sends_the_fewest_inter_node_bytes():
    nodes, each = (0, 0, 1, 1, 2, 2), 4096  # 2 slices of 3 parts
    for direct in (False, True):
        sent, _, _ = _traffic(two_level_all_reduce(nodes, direct=direct), 0, [each] * 6)
        assert sent == 2 * (3 - 1) * each  # 2(M-1)/M of its slice
    sent, messages, _ = _traffic(two_level_all_gather(nodes), 0, [each] * 6)
    assert sent == (3 - 1) * each and messages == 3 - 1  # its block, to every other node


def _without_a_step(program: Program, rank: int, number: int) -> Program:
    def steps(r):
        return iter([s for i, s in enumerate(program.steps(r)) if (r, i) != (rank, number)])

    return replace(program, steps=steps)


@pytest.mark.parametrize(
    "program",
    [ring_all_reduce(4), halving_all_reduce(5), tree_all_reduce(6), shared_all_reduce(3), staged_all_reduce(3, 3)],
    ids=lambda p: p.name,
)
def test_verify_refuses_a_program_without_a_needed_step(program):
    for rank in range(program.size):
        for number, step in enumerate(program.steps(rank)):
            idle = isinstance(step, Exchange) and int(step.to) < 0 and int(step.source) < 0
            empty = hasattr(step, "span") and int(step.span.lo) == int(step.span.hi)
            if not idle and not empty:
                with pytest.raises(ProgramError):
                    verify(_without_a_step(program, rank, number))


def test_verify_refuses_a_fence_missing_on_all_ranks():
    program = shared_all_reduce(3)
    bare = replace(program, steps=lambda r: iter([s for s in program.steps(r) if not isinstance(s, Fence)]))
    with pytest.raises(ProgramError):
        verify(bare)


@pytest.mark.parametrize("number", [0, -1])
def test_verify_refuses_a_program_that_is_safe_only_once(number):
    for program in (shared_all_reduce(3), shared_reduce_scatter(3), shared_all_gather(3), shared_reduce(3, 1)):
        fences = [i for i, s in enumerate(program.steps(0)) if isinstance(s, Fence)]
        left_out = fences[number]
        bare = replace(
            program, steps=lambda r, p=program, i=left_out: iter([s for j, s in enumerate(p.steps(r)) if j != i])
        )
        with pytest.raises(ProgramError):
            verify(bare)


@pytest.mark.parametrize("make", [deferred_reduce_scatter, alternating_all_gather, node_copy])
def test_split_phase_programs_are_correct_and_need_each_step(make):
    for size in (*range(1, 10), 16):
        verify(make(size))
    program = make(3)
    for number, step in enumerate(program.steps(1)):
        if isinstance(step, Copy) and step.into == Span(1, 2, CALLER):
            continue  # what it has brought itself it need not look at
        with pytest.raises(ProgramError):
            verify(_without_a_step(program, 1, number))
        bare = replace(program, steps=lambda r, i=number: iter([s for j, s in enumerate(program.steps(r)) if j != i]))
        with pytest.raises(ProgramError):
            verify(bare)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (replace(alternating_all_gather(2), vectors=1), "nobody waits"),  # filled again while others still read
        (replace(node_copy(2), meets_between=False), "nobody waits"),
        (replace(shared_all_reduce(2), steps=lambda r: iter([Signal("a"), Signal("a")])), "twice in a run"),
        (replace(shared_all_reduce(2), steps=lambda r: iter([Await("a")])), "deadlock"),
    ],
    ids=["one slot", "no meeting between", "signal given twice", "no signal"],
)
def test_verify_refuses_insufficient_synchronization(program, reason):
    with pytest.raises(ProgramError, match=reason):
        verify(program)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), st.randoms())
def test_deferred_reductions_complete_in_any_order_of_wait_and_release(size, vectors, random):
    program, runs = replace(deferred_reduce_scatter(size), vectors=vectors), 2 * vectors + 1

    def order(rank):
        """Return a random legal order: phases in the order of runs, and a run released before its vector is reused."""
        done, came = [0, 0, 0], []
        while done[2] < runs:
            legal = [p for p in range(3) if done[p] < (runs if p == 0 else done[p - 1])]
            phase = random.choice([p for p in legal if p or done[0] < done[2] + vectors])
            came.append((done[phase], phase))
            done[phase] += 1
        return came

    verify(program, order)
    too_early = [(run, 0) for run in range(vectors + 1)]  # fills a vector that was not released
    with pytest.raises(ProgramError, match="nobody waits"):
        verify(program, lambda rank: [(0, 0), (0, 1), *too_early[1:]])


def test_verify_refuses_a_contribution_added_twice():
    program = shared_all_reduce(2)

    def steps(rank):
        for step in program.steps(rank):
            yield replace(step, parts=(*step.parts, step.parts[0])) if isinstance(step, Combine) else step

    with pytest.raises(ProgramError, match="twice"):
        verify(replace(program, steps=steps))


def test_verify_detects_the_deadlock_of_all_ranks_sending_first():
    program = ring_all_gather(3)

    def steps(rank):
        for step in program.steps(rank):
            yield replace(step, source=-1)
            yield replace(step, to=-1)

    with pytest.raises(ProgramError, match="deadlock"):
        verify(replace(program, steps=steps))


@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_ring_all_reduce_sends_the_theoretical_minimum(size):
    each = 4096
    sent, messages, exchanges = _traffic(ring_all_reduce(size), 0, [each] * size)
    assert sent == 2 * (size - 1) * each  # 2(N-1)/N of N * each
    assert exchanges == messages == 2 * (size - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 33), st.integers(0, 5000), st.integers(1, 4))
def test_uneven_chunks_send_as_many_bytes_as_even_ones(size, numel, segments):
    program = ring_all_reduce(size, segments)
    bounds = chunk_bounds(even_bounds(numel, size), segments)
    sizes = np.diff(bounds)
    assert bounds[-1] == numel and len(sizes) == program.chunks and (sizes >= 0).all()
    sent = sum(_traffic(program, rank, list(sizes))[0] for rank in range(size))
    assert sent == 2 * (size - 1) * numel


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 32))
def test_even_bounds_cover_all_elements_once_and_nearly_evenly(numel, blocks, multiple):
    bounds = even_bounds(numel, blocks, multiple)
    assert bounds[0] == 0 and bounds[-1] == numel and bounds == sorted(bounds)
    assert all(b % multiple == 0 for b in bounds[:-1])
    sizes = np.diff(bounds)
    assert sizes.max() - sizes.min() < 2 * multiple


def test_tree_order_combines_powers_of_two_first():
    text = tree_order([str(i) for i in range(7)], lambda a, b: f"({a}+{b})")
    assert text == "(((0+1)+(2+3))+((4+5)+6))"


def test_simulation_of_4096_ranks_orders_the_algorithms_as_measured():
    nodes = tuple(rank // 64 for rank in range(4096))

    def seconds(program, nbytes):
        return simulate(program, [nbytes / program.chunks] * program.chunks, Machine())

    small, large = 1024, 64 << 20
    assert seconds(tree_all_reduce(4096, 1, nodes), small) < seconds(ring_all_reduce(4096, 1, nodes), small)
    assert seconds(halving_all_reduce(4096, 1, nodes), large) < seconds(tree_all_reduce(4096, 1, nodes), large)


def test_simulated_time_of_a_ring_is_the_textbook_formula():
    size, nbytes = 8, 8 << 20
    machine = Machine(step=0.0, cores=64, memory_rate=1e15)
    block = nbytes / size
    each = machine.local_latency + block / machine.local_bandwidth
    formula = 2 * (size - 1) * each + (size - 1) * block / machine.reduce_rate
    assert simulate(ring_all_reduce(size), [block] * size, machine) == pytest.approx(formula, rel=1e-9)
