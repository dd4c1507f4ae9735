"""A group's resources are released: all of them by `free`, and the safe ones by garbage collection."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
import weakref

import pytest
import torch
import warm
from support import ROOT, job, launcher, next_handle

import mpitrain.comm.runtime.work as work_module
from mpitrain.errors import InputError


def run_all_operations(comm) -> None:
    """Run every kind of operation, so that each MPI communicator of the group is in use."""
    x = torch.ones(3000)
    for algorithm in ("auto", "mpi", "ring", "shared"):
        comm.all_reduce(x, "max", algorithm=algorithm)
    comm.all_reduce(x, "max", async_op=True).wait()
    received = comm.irecv(torch.empty(3), (comm.rank - 1) % comm.size)
    comm.send(torch.ones(3), (comm.rank + 1) % comm.size)
    received.wait()
    if comm.size > 1:
        arena = comm.arena(16 * comm.size)
        work = comm.deferred_reduce_scatter(torch.empty(16), arena.tensor)
        if work is not None:
            work.release()
        arena.free()


@pytest.fixture
def threaded_world(world, monkeypatch):
    """Yield the world, set up so that each group has a thread."""
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, spare_cores=1))
    return world


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("make", ["split", "subgroup"])
def test_a_freed_group_leaves_nothing_in_mpi(threaded_world, make):
    world, numbers = threaded_world, set()
    for number in range(40):
        group = world.split(0) if make == "split" else world.subgroup(range(world.size))
        if number % 20 == 0:
            run_all_operations(group)
        group.free()
        if number % 2 == 0:
            numbers.add(next_handle(world))
    assert len(numbers) < 15, sorted(numbers)
    group.free()  # once more does nothing
    with pytest.raises(InputError, match="was freed; make another"):
        group.all_reduce(torch.ones(3))


def communication_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpitrain-comm"]


def wait_for_threads_to_end() -> bool:
    deadline = time.monotonic() + 20
    while communication_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not communication_threads()


@pytest.mark.ranks(2, 3)
def test_a_dropped_group_ends_its_thread_without_blocking_other_ranks(threaded_world, monkeypatch):
    """The ranks drop their groups at different times and in different orders."""
    world = threaded_world
    watchdog = world.process.watchdog
    assert wait_for_threads_to_end()
    monkeypatch.setattr(work_module, "_IDLE_SECONDS", 5.0)  # so that all threads are seen on a slow machine
    gc.collect()
    records = len(watchdog.records)
    groups = [world.split(0) for _ in range(4)]
    works = [group.all_reduce(torch.ones(5), async_op=True) for group in groups]
    ends = [weakref.ref(group) for group in groups]
    for work in works:
        work.wait()
    assert len(communication_threads()) == 4 and len(watchdog.records) > records
    del work, works
    if world.rank == 0:
        groups.clear()
    run_all_operations(world)
    for _ in range(len(groups)):
        groups.pop(world.rank % len(groups))
    gc.collect()
    assert [end() for end in ends] == [None] * 4 and len(watchdog.records) == records
    assert wait_for_threads_to_end()
    run_all_operations(world)
    group = world.split(0)
    run_all_operations(group)
    group.free()


JOB_WITH_DEAD_RANK = """
import os
import signal

import torch
from support import next_handle

import mpitrain as mt
from mpitrain.comm.faults import ulfm

world = ulfm.begin(mt.init(timeout=30))
groups = [world.split(0), world.subgroup(range(world.size))]
for comm in (world, *groups):
    comm.all_reduce(torch.ones(200_000), algorithm="shared")
    comm.all_reduce(torch.ones(3), async_op=True).wait()
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        world.barrier()
except Exception as error:
    assert ulfm.ranks_died(world, error)
    groups[world.rank].free()  # not the same on both
survivors, loss = ulfm.shrink(world)
assert loss.lost == (2,)
for comm in (*groups, world):
    comm.free()
numbers = set()
for _ in range(20):
    group = survivors.split(0)
    group.all_reduce(torch.ones(200_000), algorithm="shared")
    group.free()
    numbers.add(next_handle(survivors))
assert len(numbers) < 8, sorted(numbers)
survivors.barrier()
print("went on", flush=True)
ulfm.leave(survivors, 0)
"""


@pytest.mark.skipif(not launcher(1)[0].endswith("mpirun"), reason="only Open MPI goes on without ranks")
def test_groups_with_dead_ranks_are_freed_by_each_rank_independently(tmp_path):
    (tmp_path / "dying.py").write_text(JOB_WITH_DEAD_RANK)
    mpirun, *command = warm.shared().launched(3, [sys.executable, str(tmp_path / "dying.py")])
    path = f"{ROOT}:{ROOT / 'tests'}"
    result = job(
        0,
        [mpirun, "--with-ft", "ulfm", *command],
        PYTHONPATH=path,
        MPITRAIN_SPARE_CORES="1",
        OMPI_MCA_mpi_yield_when_idle="1",
    )
    assert result.stdout.count("went on") == 2, result.stdout + result.stderr
