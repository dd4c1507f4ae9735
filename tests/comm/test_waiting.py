"""Waits of ranks that share their cores."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from mpitrain.comm.runtime import waiting
from mpitrain.comm.runtime.progress import ProgressEngine

LARGE, SMALL = 1 << 18, 1000  # elements: 1 MiB, from which waits for messages nap, and less

OPERATIONS = {  # name: elements, call that sums x over the group
    "ring": (LARGE, lambda group, x: group.all_reduce(x, "sum", "ring")),
    "in an arena": (SMALL, lambda group, x: group.all_reduce(x, "sum", "shared")),
    "a short ring": (SMALL, lambda group, x: group.all_reduce(x, "sum", "ring")),
}


@pytest.fixture
def naps(monkeypatch):
    """List of the naps of this rank, in seconds."""
    lengths = []
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda s: (lengths.append(s), time.sleep(s)))
    monkeypatch.setattr(waiting, "time", clock)
    return lengths


@pytest.fixture
def make_group(world, monkeypatch):
    """Function that returns a group of all ranks, which believe that they have that many cores to spare."""
    groups, engines = [], []

    def make(spare):
        engines.append(ProgressEngine(lambda: world.process.watchdog.records, naps=spare < 0))
        process = dataclasses.replace(world.process, spare_cores=spare, progress=engines[-1], debug=False)
        monkeypatch.setattr(world, "process", process)
        groups.append(world.split(0))
        return groups[-1]

    yield make
    for group in groups:
        group.free()
    for engine in engines:
        engine.stop()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("spare", [-1, 0])
def test_a_rank_that_shares_its_core_naps_at_fences_and_in_long_messages(make_group, naps, name, spare):
    group, (numel, call) = make_group(spare), OPERATIONS[name]
    x = group.arena(numel).tensor if name == "in an arena" else torch.empty(numel)
    call(group, x.zero_())  # the first call prepares the operation, for which ranks wait in MPI
    naps.clear()
    group.barrier()
    if group.rank == 0:
        time.sleep(0.05)
    call(group, x.fill_(group.rank))
    assert x.eq(sum(range(group.size))).all()
    assert group.rank == 0 or bool(naps) == (spare < 0 and name != "a short ring")
    assert all(waiting._NAPS[0] <= nap <= waiting._NAPS[1] for nap in naps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spare", [-1, 0])
def test_a_rank_that_shares_its_core_naps_until_a_message_arrives(make_group, naps, spare):
    group, x = make_group(spare), torch.zeros(3)
    group.barrier()
    if group.rank == 0:
        time.sleep(0.05)
        group.isend(x + 7, 1, header=False).wait()
    else:
        group.irecv(x, 0, header=False).wait()
        assert x.eq(7).all() and bool(naps) == (spare < 0)
