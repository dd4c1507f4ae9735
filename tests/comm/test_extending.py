"""An algorithm and a whole operation, added from outside the package as CONTRIBUTING.md shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mpitrain.comm.collectives.binding import CollectiveOperation
from mpitrain.comm.memory.buffers import as_tensor
from mpitrain.comm.programs.program import (
    NONE,
    WORK,
    Collective,
    Exchange,
    Finish,
    Goal,
    Program,
    Span,
    all_gather_of,
    all_reduce_of,
    broadcast_of,
    one_node,
    reduce_of,
    reduce_scatter_of,
)
from mpitrain.comm.programs.verify import ProgramError, verify
from mpitrain.comm.runtime.executor import Reduction
from mpitrain.comm.selection import ALL_REDUCE, TABLES, Algorithm, Algorithms
from mpitrain.errors import InputError

# -- an algorithm: all ranks send to rank 0, which adds and answers


def star_all_reduce(size, nodes):
    whole = Span(0, 1)

    def steps(rank):
        for r in range(1, size):
            yield Exchange(np.where(rank == r, 0, NONE), whole, np.where(rank == 0, r, NONE), whole, reduce=True)
        yield Finish(Span(0, np.where(rank == 0, 1, 0)))
        for r in range(1, size):
            yield Exchange(np.where(rank == 0, r, NONE), whole, np.where(rank == r, 0, NONE), whole)

    return Program("star all_reduce", size, all_reduce_of(size, 1), steps, nodes)


STAR = Algorithm(lambda setting: star_all_reduce(setting.size, setting.nodes))

# -- an operation: rank r gets the reduction of the vectors of ranks 0 to r


def chain_scan(size, nodes):
    whole = Span(0, 1)

    def steps(rank):
        for r in range(1, size):
            to, source = np.where(rank == r - 1, r, NONE), np.where(rank == r, r - 1, NONE)
            yield Exchange(to, whole, source, whole, reduce=True)
        yield Finish(whole)

    ends = Collective("scan", lambda r, b: True, lambda r: [Goal(WORK, 0, 0, range(r + 1))], reduces=True)
    return Program("chain scan", size, ends, steps, nodes)


SCAN = Algorithms("scan", {"chain": Algorithm(lambda setting: chain_scan(setting.size, setting.nodes))})


def bind_scan(binder, x, op, algorithm):
    setting = binder.setting(x)
    program = binder.program(SCAN[binder.choose(SCAN, algorithm, setting)], setting)
    reduction = Reduction.of(op, x.dtype, binder.topology.size)
    return binder.compile(program, binder.layout_in_place(program, x), reduction)


SCANNING = CollectiveOperation("scan", bind_scan, parameters=("op", "algorithm"), synchronizes=False)


def scan(comm, x, op="sum", algorithm="auto", async_op=False):
    return comm.dispatch(SCANNING.invocation((as_tensor(x),), (True,), op, algorithm), async_op)


@pytest.fixture
def star(world):
    ALL_REDUCE.register("star", STAR)
    yield "star"
    ALL_REDUCE.unregister("star")


@pytest.mark.ranks(2, 3)
def test_all_reduce_runs_a_registered_algorithm(world, star):
    verify(star_all_reduce(world.size, one_node(world.size)))
    ranks = torch.arange(world.size, dtype=torch.float32)
    for op, expected in (("sum", ranks.sum()), ("max", ranks.max()), ("avg", ranks.mean())):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.full((1001,), float(world.rank), dtype=dtype)
            world.all_reduce(x, op, algorithm=star)
            assert (x == expected.to(dtype)).all()
    x = torch.ones(5)
    world.all_reduce(x, algorithm=star, async_op=True).wait()
    world.all_reduce(x, algorithm=star, reproducible=True)  # by pairwise exchange: it makes no such promise itself
    assert (x == world.size**2).all()


@pytest.mark.ranks(2, 3)
def test_debug_mode_verifies_a_program_before_it_runs(world):
    def incomplete_all_reduce(setting):
        right = star_all_reduce(setting.size, setting.nodes)
        half = lambda rank: list(right.steps(rank))[: setting.size]  # noqa: E731
        return replace(right, name="incomplete all_reduce", steps=half)

    ALL_REDUCE.register("incomplete", Algorithm(incomplete_all_reduce))
    try:
        x = torch.full((4,), float(world.rank))
        with pytest.raises(ProgramError):
            world.all_reduce(x, algorithm="incomplete")
        assert (x == world.rank).all()
    finally:
        ALL_REDUCE.unregister("incomplete")


@pytest.mark.ranks(2, 3)
def test_user_defined_operation_runs_like_a_built_in_one(world):
    verify(chain_scan(world.size, one_node(world.size)))
    for _ in range(2):  # the second time as it was bound
        x = torch.full((7,), world.rank + 1.0)
        scan(world, x)
        assert (x == (world.rank + 1) * (world.rank + 2) / 2).all()
    work = scan(world, x, "max", async_op=True)
    work.wait()
    assert (x == (world.rank + 1) * (world.rank + 2) / 2).all()
    with pytest.raises(InputError, match=r"^scan has no algorithm 'tree'; use auto or chain$"):
        scan(world, x, algorithm="tree")


# -- algorithms of other operations, by messages straight to where they belong

WHOLE = Span(0, 1)


def from_root(size, root):
    def steps(rank):
        for t in range(1, size):
            r = (root + t) % size
            yield Exchange(np.where(rank == root, r, NONE), WHOLE, np.where(rank == r, root, NONE), WHOLE)

    return Program("from root", size, broadcast_of(size, root), steps, one_node(size))


def to_root(size, root):
    def steps(rank):
        for t in range(1, size):
            r = (root + t) % size
            yield Exchange(np.where(rank == r, root, NONE), WHOLE, np.where(rank == root, r, NONE), WHOLE, reduce=True)
        yield Finish(Span(0, np.where(rank == root, 1, 0)))

    return Program("to root", size, reduce_of(size, 1, root), steps, one_node(size))


def to_owner(size):
    def steps(rank):
        for block in range(size):
            for t in range(1, size):
                r, span = (block + t) % size, Span(block, block + 1)
                yield Exchange(np.where(rank == r, block, NONE), span, np.where(rank == block, r, NONE), span, True)
        yield Finish(Span(rank, rank + 1))

    return Program("to owner", size, reduce_scatter_of(size), steps, one_node(size), blocks=size)


def to_all(size):
    def steps(rank):
        for t in range(1, size):
            to, source = (rank + t) % size, (rank - t) % size
            yield Exchange(to, Span(rank, rank + 1), source, Span(source, source + 1))

    return Program("to all", size, all_gather_of(size), steps, one_node(size), blocks=size)


@pytest.mark.ranks(2, 3)
def test_every_operation_accepts_a_registered_algorithm(world):
    direct = {
        "broadcast": Algorithm(lambda s: from_root(s.size, s.root)),
        "reduce": Algorithm(lambda s: to_root(s.size, s.root)),
        "reduce_scatter": Algorithm(lambda s: to_owner(s.size)),
        "all_gather": Algorithm(lambda s: to_all(s.size)),
    }
    for operation, algorithm in direct.items():
        TABLES[operation].register("direct", algorithm)
    size, rank = world.size, world.rank
    x = torch.full((9,), float(rank))
    world.broadcast(x, 1, "direct")
    assert (x == 1).all()
    world.reduce(x, 1, "sum", "direct")
    assert (x == (size if rank == 1 else 1)).all()
    x, out = torch.arange(4.0 * size), torch.zeros(4)
    world.reduce_scatter(out, x, algorithm="direct")
    assert torch.equal(out, size * x.view(size, 4)[rank])
    out = torch.zeros(3 * size)
    world.all_gather(out, torch.full((3,), float(rank)), "direct")
    assert out.view(size, 3)[:, 0].tolist() == list(range(size))
    for operation in direct:
        TABLES[operation].unregister("direct")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, pytest.param(33, marks=pytest.mark.campaign)])
def test_user_defined_programs_are_correct_at_every_size(size):
    verify(star_all_reduce(size, one_node(size)))
    verify(chain_scan(size, one_node(size)))
    verify(to_owner(size))
    verify(to_all(size))
    for root in {0, size - 1}:
        verify(from_root(size, root))
        verify(to_root(size, root))


@pytest.mark.parametrize("name", ["ring", "auto"])
def test_register_refuses_a_name_in_use(name):
    with pytest.raises(InputError, match=f"all_reduce already has an algorithm '{name}'; register yours under another"):
        ALL_REDUCE.register(name, STAR)


@pytest.mark.ranks(2)
def test_unknown_algorithm_error_lists_the_known_ones(world):
    x, out = torch.ones(4), torch.ones(2)
    known = "auto, mpi, ring, tree, halving, shared, staged or two_level"
    with pytest.raises(InputError, match=f"^all_reduce has no algorithm 'star'; use {known}$"):
        world.all_reduce(x, algorithm="star")
    with pytest.raises(InputError, match=r"^reduce_scatter has no algorithm 'star'; use auto, mpi, ring, halving, "):
        world.reduce_scatter(out, x, algorithm="star")
    with pytest.raises(InputError, match=r"^broadcast has no algorithm 'star'; use auto, mpi, shared or tree$"):
        world.broadcast(x, 0, "star")
