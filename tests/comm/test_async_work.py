"""Asynchronous operations run in order while the caller computes, and raise their errors in `wait`."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from mpitrain.errors import CommunicationError, InputError


@pytest.fixture
def group(world, monkeypatch, request):
    """Yield a group of all ranks with a communication thread, which has `spare` cores (0 or 1), without debug mode."""
    spare = getattr(request, "param", 1)
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, spare_cores=spare, debug=False))
    comm = world.split(0)
    assert comm.overlaps == bool(spare)
    yield comm
    comm.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("group", [0, 1], indirect=True, ids=["no core", "a core"])
def test_wait_timeout_error_names_the_collective(group):
    x = torch.ones(4, 256)
    if group.rank == 1:
        time.sleep(0.5)
    work = group.all_reduce(x, async_op=True)
    if group.rank == 0:
        with pytest.raises(CommunicationError, match=r"^all_reduce of 1024 elements on .* not complete after 0.1 s"):
            work.wait(timeout=0.1)
    work.wait(timeout=20)  # it can still complete
    assert work.done() and x.eq(2).all()
    y = torch.ones(3)
    group.all_reduce(y)
    assert y.eq(2).all()


@pytest.mark.ranks(2)
def test_asynchronous_sums_run_in_order_of_submission_while_the_caller_computes(group):
    buffers = [torch.empty(n) for n in (1, 1000, 300_000, 77, 40_000)]
    matrix = torch.full((200, 200), 0.5)
    # each operation works on the result of the one before it, so the numbers are right only in order
    for step in range(20):
        chain = torch.full((2000,), float(group.rank + step))
        works = []
        for i, buffer in enumerate(buffers):
            buffer.fill_(group.rank + i + step)
            works.append(group.all_reduce(buffer, async_op=True))
            works.append(group.all_reduce(chain, "sum" if i % 2 else "max", async_op=True))
        product = (matrix @ matrix).sum()  # while the thread communicates
        vector = torch.full((5,), float(group.rank))
        group.all_reduce(vector)  # a blocking operation neither waits for them nor disturbs them
        assert vector.eq(1).all() and product == 200 * 200 * 50
        works[-1].wait()
        assert all(work.done() for work in works)  # they complete in order
        assert all(b.eq(2 * (i + step) + 1).all() for i, b in enumerate(buffers))
        assert chain.eq(4 * (step + 1)).all()  # max, sum, max, sum, max


@pytest.mark.ranks(2)
def test_an_error_in_the_communication_thread_is_raised_by_wait(group):
    x = torch.ones(4, 256)
    wrong = group.all_reduce(torch.ones(5), algorithm="no such", async_op=True)
    right = group.all_reduce(x, async_op=True)
    right.wait()
    assert x.eq(2).all() and wrong.done()
    with pytest.raises(InputError, match="no algorithm"):
        wrong.wait()
