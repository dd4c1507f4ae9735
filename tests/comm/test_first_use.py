"""Algorithms for ordinary tensors are measured when an operation is first used, and later starts use the result."""

from __future__ import annotations

import pytest
import torch

from mpitrain.comm.collectives import first_use
from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.collectives.first_use import MEASURED_FROM, TunedOperation, candidates
from mpitrain.comm.job.topology import this_machine
from mpitrain.comm.programs.program import Program
from mpitrain.comm.selection import TABLES
from mpitrain.comm.tuning import Tuning, load_tuning, rules_key, table_path

NUMEL = MEASURED_FROM  # four times as many bytes


@pytest.fixture
def start(world, folder, monkeypatch):
    """Return a function that makes a communicator as a job without debug mode would, with tables in `folder`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(first_use, "SIZES", (MEASURED_FROM,))

    def start(**_):
        comm = world.split(0)
        comm.binder.proofs, comm.binder.tuning = None, load_tuning(this_machine())
        return comm

    return start


def prefer(monkeypatch, favourite):
    """Replace the times of a measurement: `favourite` is the fastest. Returns the list of measured algorithms."""
    measured = []

    def times(self, binder, nbytes, names, arguments):
        measured.append((self.name, *names))
        return {name: 1.0 if name == favourite else 2.0 for name in names}

    monkeypatch.setattr(TunedOperation, "_times", times)
    return measured


@pytest.mark.ranks(2, 3)
def test_the_first_use_measures_and_the_next_start_reads_the_result(world, start, monkeypatch):
    ran: list[Program] = []
    plan = Binder.plan
    monkeypatch.setattr(Binder, "plan", lambda self, program, *more: ran.append(program) or plan(self, program, *more))
    measured = prefer(monkeypatch, "tree")
    for number in range(2):
        comm, x = start(), torch.full((NUMEL,), float(world.rank))
        comm.broadcast(torch.zeros(MEASURED_FROM // 4 - 1), 1)
        assert len(measured) == number  # nothing is measured for small vectors
        for _ in range(2):
            comm.broadcast(x, 1)
        assert len(measured) == 1 and x.eq(1).all()
        assert ran[-1].name.startswith("tree")
        comm.free()
        world.barrier()
    place = "node oversubscribed" if world.process.spare_cores < 0 else "node"
    assert load_tuning(this_machine()).is_measured("broadcast", place, world.size)


@pytest.mark.ranks(2, 3)
def test_measuring_leaves_the_results_as_they_are(world, start):
    comm, size = start(), world.size
    x, whole, block = torch.full((NUMEL,), 1.0 + world.rank), torch.zeros(NUMEL * size), torch.ones(NUMEL)
    total = size * (size + 1) / 2
    comm.all_reduce(x)
    assert x.eq(total).all()
    comm.all_gather(whole, torch.full((NUMEL,), float(world.rank)))
    assert whole.view(size, -1).eq(torch.arange(size).view(-1, 1)).all()
    comm.reduce_scatter(block, whole, "avg")
    assert block.eq(world.rank).all()
    comm.reduce(block, 0)
    assert block.eq(sum(range(size)) if world.rank == 0 else world.rank).all()
    rules = world.all_gather_object({key: list(rules) for key, rules in comm.binder.tuning.measured.items()})
    assert len(rules[0]) == 4 and all(theirs == rules[0] for theirs in rules)
    comm.free()


@pytest.mark.ranks(2, 3)
def test_debug_mode_reproducible_sums_and_arenas_measure_nothing(world, start, monkeypatch):
    measured = prefer(monkeypatch, "mpi")
    comm, arena = start(), world.arena(NUMEL)
    comm.all_reduce(torch.zeros(NUMEL), reproducible=True)
    comm.all_reduce(torch.zeros(NUMEL), algorithm="ring")
    comm.all_reduce(arena.tensor)
    world.all_reduce(torch.zeros(NUMEL))
    assert not measured
    arena.free()
    comm.free()


@pytest.mark.ranks(2, 3)
def test_a_damaged_table_and_an_unwritable_home_do_not_stop_the_job(world, start, folder, monkeypatch):
    path = table_path(this_machine())
    if world.rank == 0:
        path.parent.mkdir()
        path.write_text("{")
    world.barrier()
    with pytest.warns(RuntimeWarning, match=str(path)):
        comm = start()
    x = torch.ones(NUMEL)
    comm.all_reduce(x)
    world.barrier()
    assert x.eq(world.size).all() and load_tuning(this_machine()).measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file, in which there can be no folder
    comm.broadcast(x, 0)
    assert x.eq(world.size).all()
    comm.free()


@pytest.mark.ranks(2, 3)
def test_algorithms_that_replace_each_other_give_the_same_bits(world):
    generator = torch.Generator().manual_seed(world.rank)
    place = "node oversubscribed" if world.process.spare_cores < 0 else "node"
    for numel in (1, 1001, 100_003):
        values = torch.randn(numel, generator=generator)
        for _, own, others in candidates("all_reduce", place, world.size):
            expected = values.clone()
            world.all_reduce(expected, algorithm=own)
            for name in [name for name in others if name != "two_level"]:
                x = values.clone()
                world.all_reduce(x, algorithm=name)
                assert x.equal(expected), name


def test_only_algorithms_with_the_same_order_replace_each_other_in_sums():
    for ranks in (3, 4, 8):
        for operation in ("all_reduce", "reduce_scatter", "reduce"):
            rules = Tuning().rules(operation, "node", ranks)
            found = candidates(operation, "node", ranks)
            assert [(limit, own) for limit, own, _ in found] == list(rules)
            assert {name for *_, others in found for name in others} <= {"shared", "staged"}
    assert candidates("broadcast", "node", 8)[-1][2] == tuple(TABLES["broadcast"])
    assert [limit for limit, *_ in candidates("all_reduce", "node", 2)] == [MEASURED_FROM, 1 << 62]
    assert rules_key("all_reduce", "node", 2) not in Tuning().measured
