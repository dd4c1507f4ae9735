"""Device work queued before and after an operation stays in order, for each way of carrying device memory.

The simulated accelerator runs nothing until something waits for it, so that a missing wait gives wrong numbers.
`tests/test_synchronizations.py` takes each wait away in turn, and expects a test to fail.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from ways import WAYS

from mpitrain.comm import compression
from mpitrain.errors import InputError

pytestmark = pytest.mark.ranks(2)
on_device = pytest.mark.parametrize("way", WAYS, indirect=True)
MANY = 700_000  # elements: more pieces than there are slots


def unfinished(value: float, numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that the device has not computed yet."""
    x = torch.full((numel,), value, dtype=dtype, device=device)
    return x.mul_(2).sub_(value)


def new_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("numel", [5, MANY])
def test_an_operation_keeps_its_place_in_stream_order(comm, device, dtype, numel):
    for op, expected in (("sum", 3.0), ("avg", 1.5)):
        x = unfinished(comm.rank + 1.0, numel, device, dtype)
        comm.all_reduce(x, op)
        y = x * 2  # ordered by neither the operation nor the copy to the host
        x.fill_(-1.0)
        assert (y.cpu() == 2 * expected).all()
    out = unfinished(7.0, numel, device, dtype)
    before = out.clone()  # this copy must read the old values
    comm.broadcast(out, 1)
    assert (before.cpu() == 7).all() and (out.cpu() == 7).all()


@on_device
def test_results_overwrite_memory_only_after_earlier_reads(comm, device):
    out, x = unfinished(7.0, 2 * MANY, device), unfinished(comm.rank + 1.0, MANY, device)
    before = out.clone()
    comm.all_gather(out, x)
    x.fill_(-1.0)
    after = out * 1
    assert (before.cpu() == 7).all()
    assert after.cpu().view(2, MANY).eq(torch.tensor([[1.0], [2.0]])).all()
    block = unfinished(7.0, MANY, device)
    before = block.clone()
    comm.reduce_scatter(block, out)
    out.fill_(-1.0)
    assert (before.cpu() == 7).all() and (block.cpu() == 2 * (comm.rank + 1)).all()


@on_device
def test_consecutive_operations_do_not_interfere(comm, device):
    x = unfinished(comm.rank + 1.0, MANY, device)
    for _ in range(3):
        comm.all_reduce(x)
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
    works[-1].wait()
    small = [unfinished(comm.rank + i, 3, device) for i in range(8)]
    for y in small:
        comm.all_reduce(y)
    assert (x.cpu() == 3 * 2**5).all()
    assert [y[0].item() for y in small] == [2 * i + 1 for i in range(8)]


@on_device
def test_a_background_operation_keeps_its_place_in_stream_order(comm, device):
    one, other = new_stream(device), new_stream(device)
    with one:
        x = unfinished(comm.rank + 1.0, MANY, device)
        work = comm.all_reduce(x, async_op=True)
    with other:
        work.wait()
        y = x * 2
        assert (y.cpu() == 6).all()
    assert work.done()


@on_device
def test_memory_is_not_reused_while_an_operation_may_access_it(comm, device):
    x = unfinished(comm.rank + 1.0, MANY, device)
    work = comm.all_reduce(x, async_op=True)
    while not (work.done() or work.complete):  # all of it is queued on the device, which has not run it
        time.sleep(1e-3)
    del work, x
    others = [torch.full((MANY,), 7.0, device=device) for _ in range(3)]
    torch.accelerator.synchronize()
    assert all((other.cpu() == 7).all() for other in others)


@pytest.mark.parametrize("way", ["cpu", *WAYS], indirect=True)
def test_messages_keep_their_place_in_stream_order(comm, device):
    other = 1 - comm.rank
    x = unfinished(comm.rank + 1.0, MANY, device)
    with new_stream(device) if device.type != "cpu" else nullcontext():  # another stream than the one that waits
        y = unfinished(7.0, MANY, device)
        before = y.clone()
        arriving = comm.irecv(y, other)
    comm.isend(x, other).wait()  # on both ranks, before they wait for the receive
    arriving.wait()
    after = y * 2
    assert (after.cpu() == 2 * (other + 1)).all() and (before.cpu() == 7).all()


@on_device
def test_a_device_arena_is_used_in_stream_order(comm, device):
    arena = comm.arena(MANY, torch.float32, device)
    for _ in range(2):
        arena.tensor.fill_(comm.rank + 1.0)
        arena.tensor.mul_(2)
        comm.all_reduce(arena.tensor)
        y = arena.tensor * 2
        arena.tensor.fill_(-1.0)
        assert (y.cpu() == 12).all()
        comm.barrier()
    half = arena.tensor[: MANY // 2]
    arena.tensor.fill_(comm.rank + 1.0)
    out = torch.empty(MANY // 2, device=device)
    comm.reduce_scatter(out, arena.tensor)
    half.fill_(-1.0)
    assert (out.cpu() == 3).all()
    arena.free()


@pytest.mark.simulated
@pytest.mark.parametrize("way", ["staged"], indirect=True)
def test_arrays_of_other_libraries_are_accepted_and_other_devices_refused(comm, device):
    class Array:  # like the arrays of JAX and others
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: object) -> object:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.tensor.__dlpack_device__()

    x = unfinished(comm.rank + 1.0, 5, device)
    comm.all_reduce(Array(x))
    assert (x.cpu() == 3).all()
    elsewhere = torch.ones(5, device=torch.device(device.type, 1 - device.index))
    with pytest.raises(InputError, match=rf"a tensor is on .*:{1 - device.index}, but rank {comm.rank} .*move it to"):
        comm.all_reduce(elsewhere)
    with pytest.raises(InputError, match="move them to one device"):
        comm.all_gather(torch.empty(10), x)


@pytest.mark.parametrize("way", ["staged"], indirect=True)
@pytest.mark.parametrize(
    "make",
    [compression.FP16, lambda: compression.TopK(0.5), lambda: compression.PowerSGD(rank=2)],
    ids=["fp16", "topk", "powersgd"],
)
def test_compressed_sums_equal_those_on_the_cpu(comm, world, device, make):
    here, there = make(), make()
    for step in range(2):  # the second step adds the error of the first
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        x = torch.randn(64, 48, generator=generator)
        y = x.to(device).mul_(2).div_(2)
        world.all_reduce(x, "avg", compression=here)
        comm.all_reduce(y, "avg", compression=there)
        torch.testing.assert_close((y * 1).cpu(), x, rtol=1e-5, atol=1e-6)
