"""CUDA tensors over this backend: passed to an MPI that reads device memory, else through the host."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.ranks(2, 4),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_collectives_and_messages_on_a_device(group, world):
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    x = torch.full((1000, 3), float(world.rank), device=device)
    group.all_reduce(x)
    x *= 2
    work = group.all_reduce(x, async_op=True)  # after the multiplication that is queued on the stream
    total = world.size * (world.size - 1)
    assert (work.get_future().wait()[0] == total * world.size).all()
    outs = [torch.empty(5, device=device) for _ in range(world.size)]
    group.all_gather(outs, torch.full((5, 2), float(world.rank), device=device)[:, 0])
    assert [int(out[0]) for out in outs] == list(range(world.size))
    got = torch.empty(4, device=device)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    operations = [
        group.P2POp(group.isend, torch.full((4,), float(world.rank), device=device), right),
        group.P2POp(group.irecv, got, left),
    ]
    for work in group.batch_isend_irecv(operations):
        work.wait()
    assert (got == left).all()


def test_training_on_a_device(group, world):
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).to(device))
    model(torch.full((3, 4), float(world.rank + 1), device=device)).sum().backward()
    mean = 3 * sum(range(1, world.size + 1)) / world.size
    torch.testing.assert_close(model.module.weight.grad, torch.full((2, 4), mean, device=device))
