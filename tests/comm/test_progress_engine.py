"""Started operations complete whatever their ranks wait for next, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref

import pytest
import torch

from mpitrain.comm.runtime.progress import ProgressEngine
from mpitrain.errors import CommunicationError

LONG = 1_000_000  # elements: no MPI library sends so long a message before its receive is posted
LIMIT = 20.0  # seconds


@pytest.fixture
def pair(world, monkeypatch, request):
    """Yield two groups of all ranks; `param`: 1 where background operations have a spare core, else 0."""
    spare = getattr(request, "param", 0)
    progress = ProgressEngine(lambda: world.process.watchdog.records)  # without the receives that other tests gave up
    process = dataclasses.replace(world.process, spare_cores=spare, debug=False, progress=progress)
    monkeypatch.setattr(world, "process", process)
    groups = world.split(0), world.split(0)
    yield groups
    for group in groups:
        group.free()
    progress.stop()


def full(value: float, numel: int = LONG) -> torch.Tensor:
    return torch.full((numel,), float(value))


@pytest.mark.ranks(2, 3)
def test_ranks_that_all_send_before_they_receive_complete(pair):
    next_rank, previous_rank = (pair[0].rank + 1) % pair[0].size, (pair[0].rank - 1) % pair[0].size
    for receiving in ([0], [1], [0, 1], [1, 0]):  # from one group each, from both, and not in the order of sending
        sent = [pair[number].isend(full(number + next_rank), next_rank, 3) for number in sorted(receiving)]
        places = [full(-1) for _ in receiving]
        received = [pair[number].irecv(y, previous_rank, 3) for number, y in zip(receiving, places, strict=True)]
        for work in [*sent, *received]:
            work.wait(LIMIT)
        assert all(y.eq(number + pair[0].rank).all() for number, y in zip(receiving, places, strict=True))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wait", ["all_reduce", "barrier", "split", "async", "send"])
def test_a_receive_completes_while_its_rank_waits_in_another_operation(pair, wait):
    for group in pair:
        for other in pair:
            y, x = full(-1), full(7)
            if group.rank == 1:
                received = group.irecv(y, 0)
            elif group.rank == 0:
                group.send(x, 1)  # ends when rank 1, which is in the operation below, has received
            if wait == "all_reduce":
                total = full(1, 50_000)
                other.all_reduce(total)
                assert total.eq(other.size).all()
            elif wait == "barrier":
                other.barrier()
            elif wait == "split":
                other.split(None)
            elif wait == "async":
                total = full(1, 5)
                other.all_reduce(total, async_op=True).wait(LIMIT if other is group else None)
                assert total.eq(other.size).all()
            elif other.rank == 0:
                other.send(full(2), 1, tag=5)
            elif other.rank == 1:
                other.recv(full(0), 0, tag=5)
            if group.rank == 1:
                received.wait(LIMIT)
                assert y.eq(7).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("pair", [0, 1], indirect=True, ids=["no core", "a core"])
def test_operations_of_two_groups_complete_in_any_order_of_waits(pair):
    first, second = pair
    for _ in range(3):
        x, y = full(first.rank, 1000), full(1, 1000)
        work = second.all_reduce(x, async_op=True)
        for act in (first.barrier, work.wait) if first.rank == 0 else (work.wait, first.barrier):
            act()
        works = [first.all_reduce(y, async_op=True), second.all_reduce(x, "max", async_op=True)]
        for work in works if first.rank == 0 else reversed(works):
            work.wait()
        assert x.eq(sum(range(first.size))).all() and y.eq(first.size).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pair", [1], indirect=True, ids=["a core"])
def test_idle_threads_end(pair):
    group, _ = pair
    others = set(threading.enumerate())
    received = group.irecv(full(0), 1 - group.rank)
    group.isend(full(1), 1 - group.rank).wait(LIMIT)
    received.wait(LIMIT)
    group.all_reduce(full(1), async_op=True).wait()
    assert {"mpitrain-progress", "mpitrain-comm"} <= {thread.name for thread in set(threading.enumerate()) - others}
    deadline = time.monotonic() + LIMIT
    while any(thread.name.startswith("mpitrain-") for thread in set(threading.enumerate()) - others):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("header", [True, False])
def test_a_receive_of_a_freed_group_raises(world, header):
    group = world.split(0)
    received = group.irecv(full(0), 1 - group.rank, header=header)
    group.free()
    with pytest.raises(CommunicationError, match="was freed before receive from rank"):
        received.wait(LIMIT)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("pair", [0, 1], indirect=True, ids=["no core", "a core"])
def test_operations_release_their_tensors_when_the_handle_is_dropped(pair):
    group, _ = pair
    in_flight = group.process.progress.in_flight
    before = set(in_flight)  # of receives in other tests, to which nobody sends
    gc.collect()
    gc.disable()
    try:
        for name, act in every_operation(group).items():
            tensors = [full(1, 3000 * group.size), full(0, 3000)]
            alive = [weakref.ref(tensor) for tensor in tensors]
            act(*tensors)
            del tensors
            assert [reference() for reference in alive] == [None, None], name
    finally:
        gc.enable()
    assert in_flight == before


def every_operation(group):
    """Return, by name, a call (long, short) of each operation: blocking, in the background and prepared."""
    next_rank, previous_rank = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def both(name, call):
        def blocking(long, short):
            call(long, short)

        def background(long, short):
            call(long, short, async_op=True).wait()

        return {name: blocking, f"{name} async": background}

    def messages(long, short):
        received = group.irecv(short, previous_rank)
        sent = group.isend(long[:3000], next_rank)
        sent.wait()
        received.wait()

    def polled(long, short):
        received, sent = group.irecv(short, previous_rank), group.isend(long[:3000], next_rank)
        while not (received.done() and sent.done()):
            pass

    def wrong(long, short):
        received, sent = group.irecv(short[:7], previous_rank), group.isend(short, next_rank)
        sent.wait()
        try:
            received.wait()
        except CommunicationError as error:
            assert "a message of 12000 bytes arrived" in str(error)
        else:
            pytest.fail("a message of another length is taken")

    def blocking_messages(long, short):
        if group.rank == 0:
            group.send(short, next_rank)
        group.recv(short, previous_rank)
        if group.rank:
            group.send(short, next_rank)

    calls = {"messages": messages, "polled": polled, "send": blocking_messages, "wrong": wrong}
    calls |= both("all_reduce", lambda long, short, **how: group.all_reduce(long, **how))
    calls |= both("reduce", lambda long, short, **how: group.reduce(long, 0, **how))
    calls |= both("broadcast", lambda long, short, **how: group.broadcast(long, 0, **how))
    calls |= both("reduce_scatter", lambda long, short, **how: group.reduce_scatter(short, long, **how))
    calls |= both("all_gather", lambda long, short, **how: group.all_gather(long, short, **how))
    calls |= both("gather", lambda long, short, **how: group.gather(long, short, 0, **how))
    calls |= both("scatter", lambda long, short, **how: group.scatter(short, long, 0, **how))
    calls |= both("all_to_all", lambda long, short, **how: group.all_to_all(long, long.clone(), **how))
    return calls
