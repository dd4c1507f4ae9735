"""The program predicted from a setting, without ranks, is the one that the operation then runs."""

from __future__ import annotations

import pytest
import torch

from mpitrain.comm.collectives.binding import Binder
from mpitrain.comm.programs.program import Program
from mpitrain.comm.selection import Setting, select_program
from mpitrain.comm.tuning import Tuning
from mpitrain.errors import InputError

KIB = 1 << 10


def calls(comm, x):
    """Return a call of each operation that has a table of algorithms; `x` has one block for each rank."""
    own_block = x[: x.numel() // comm.size]
    return {
        "all_reduce": lambda: comm.all_reduce(x),
        "reduce": lambda: comm.reduce(x, 1),
        "broadcast": lambda: comm.broadcast(x, 1),
        "reduce_scatter": lambda: comm.reduce_scatter(own_block, x),
        "all_gather": lambda: comm.all_gather(x, x[comm.rank * own_block.numel() :][: own_block.numel()]),
    }


@pytest.mark.ranks(2, 3)
def test_the_predicted_program_is_the_one_that_runs(world, monkeypatch):
    dtype = torch.float32
    ran: list[Program] = []
    bind = Binder.plan
    monkeypatch.setattr(Binder, "plan", lambda self, program, *more: ran.append(program) or bind(self, program, *more))
    comm = world.split(0)
    comm.binder.tuning = Tuning()
    reachable = comm.binder.neighbours() is not None
    for kib in (4, 40, 150, 700, 9000):
        numel = kib * KIB // dtype.itemsize * comm.size
        arena = comm.arena(numel, dtype)
        for x, memory in ((arena.tensor, "arena"), (torch.zeros(numel, dtype=dtype), "private")):
            nbytes = numel * dtype.itemsize
            where = "reachable" if memory == "private" and reachable else memory
            crowded, block = comm.binder.oversubscribed, nbytes // comm.size
            for operation, call in calls(comm, x).items():
                root = 1 if operation in ("reduce", "broadcast") else 0
                setting = Setting(nbytes, numel, comm.nodes, where, crowded, root=root, block=block)
                name, program = select_program(operation, setting)
                ran.clear()
                call()
                actual = [(p.name, p.blocks, p.segments, p.slots) for p in ran]
                expected = [] if program is None else [(program.name, program.blocks, program.segments, program.slots)]
                assert actual == expected, f"{operation} of {nbytes} bytes, {where}: {name}"
        arena.free()
    comm.free()


def test_fallback_algorithms_across_nodes_and_for_reproducible_sums():
    nodes = (0, 0, 1, 1)
    assert select_program("all_reduce", Setting(1 << 20, 1 << 18, nodes, "arena"))[0] == "two_level"
    assert select_program("all_reduce", Setting(1 << 10, 1 << 8, nodes, "arena")) == ("mpi", None)
    summed = Setting(1 << 20, 1 << 18, nodes, "private", reproducible=True, block=1 << 18)
    for operation, stand_in in (("all_reduce", ""), ("reduce_scatter", "pairwise")):
        name, program = select_program(operation, summed)
        assert program is not None and program.name.startswith("pairwise") and stand_in in name
    with pytest.raises(InputError, match="needs all ranks on one node; use two_level or auto"):
        select_program("all_reduce", summed, algorithm="shared")
    with pytest.raises(InputError, match="no table of algorithms; use all_reduce, "):
        select_program("scatter", summed)
