"""Tensors on a device over this backend: work queued before and after an operation stays in order.

The simulated accelerator runs nothing until something waits for it, so that an event too few gives wrong numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from test_backend_training import gradients_are_views, half_precision_hook, plain

pytestmark = pytest.mark.ranks(2)
on_device = pytest.mark.parametrize("device", ["pretend"], indirect=True)
in_thread = pytest.mark.parametrize("threaded", [False, True], ids=["caller", "thread"])


@pytest.fixture
def group_of(world, monkeypatch, request) -> Callable[[bool], object]:
    """Yield a function that initializes torch.distributed, with or without a communication thread."""

    def make(threaded: bool) -> object:
        monkeypatch.setattr(type(world), "overlaps", threaded)
        return request.getfixturevalue("group")

    return make


@on_device
@in_thread
def test_operations_keep_their_order_on_the_stream(world, device, group_of, threaded):
    group = group_of(threaded)
    total = sum(range(1, world.size + 1))
    x = torch.full((1000, 3), float(world.rank), device=device)
    x += 1  # not computed when the operation is issued
    work = group.all_reduce(x, async_op=True)
    beside = torch.Stream(device=device)
    with beside:
        work.wait()
        y = (x * 2).cpu()  # nobody but the work orders this stream
    assert (y == 2 * total).all()
    column = x.add_(1)[:, 0]  # not contiguous: reduced beside, and copied
    [z] = group.all_reduce(column, async_op=True).get_future().then(lambda done: [done.value()[0] * 2]).wait()
    assert (z.cpu() == 2 * world.size * (total + 1)).all()
    columns = [torch.empty(5, 2, device=device)[:, 0] for _ in range(world.size)]
    work = group.all_gather(columns, torch.full((5,), float(world.rank), device=device) + 1, async_op=True)
    work.wait()
    assert [column.tolist() for column in columns] == [[rank + 1.0] * 5 for rank in range(world.size)]
    outs = [torch.zeros(4, device=device) for _ in range(world.size)] if world.rank == 0 else None
    mine = torch.ones(4, device=device) + world.rank
    work = group.gather(mine, outs, dst=0, async_op=True)  # elsewhere there is no output to tell the device by
    work.wait()
    assert world.rank or [int(out[0]) for out in outs] == list(range(1, world.size + 1))


@on_device
def test_messages_keep_their_order_on_the_stream(world, device, group):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    x, got = torch.ones(4, device=device) + world.rank, torch.zeros(4, 2, device=device)[:, 0]
    works = group.batch_isend_irecv([group.P2POp(group.isend, x, right), group.P2POp(group.irecv, got, left)])
    beside = torch.Stream(device=device)
    while not all(work.is_completed() for work in works):  # what arrives lands on this thread's current stream
        time.sleep(1e-3)
    with beside:
        for work in works:
            work.wait()
        assert (got * 2).tolist() == [2 * (left + 1)] * 4
    everyone: list[object] = [None] * world.size
    group.all_gather_object(everyone, world.rank)
    assert everyone == list(range(world.size))


@on_device
@in_thread
def test_memory_is_not_reused_during_an_operation(world, device, group_of, threaded):
    group = group_of(threaded)
    x, results = torch.ones(64, device=device), [torch.zeros(64, 2, device=device) for _ in range(world.size)]
    work = group.all_gather([result[:, 0] for result in results], x, async_op=True)
    while not work.is_completed():
        time.sleep(1e-3)
    del work, results, x  # the device has not copied everything into them yet
    others = [torch.full((64, 2), 7.0, device=device) for _ in range(world.size + 1)]
    torch.accelerator.synchronize()
    assert all((other.cpu() == 7).all() for other in others)


@on_device
@in_thread
@pytest.mark.parametrize("run", [plain, gradients_are_views, half_precision_hook], ids=lambda run: run.__name__)
def test_training_on_a_device_matches_the_cpu(world, device, group_of, threaded, run):
    group_of(threaded)
    expected, result = run(world.rank), run(world.rank, device=device)
    assert list(result) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result[name].cpu(), value, rtol=1e-5, atol=2e-6, msg=name)
