"""Operations that differ between ranks raise an error before they begin, and a wait that is too long ends."""

from __future__ import annotations

import time

import pytest
import torch

import mpitrain
from mpitrain.errors import CommunicationError

MANY = pytest.mark.ranks(2, 3)


def mismatch_table(world, call) -> list[str]:
    """Return the table of the error that `call` raises on all ranks."""
    with pytest.raises(CommunicationError) as caught:
        call()
    assert caught.value.agreed
    table = str(caught.value).splitlines()
    assert len(table) == world.size + 1 and all("at test_mismatches.py:" in row for row in table[1:])
    world.barrier()  # and the ranks are still together
    return table


@MANY
def test_different_operations_shapes_types_and_arguments_are_reported(world):
    odd = world.rank == world.size - 1

    table = mismatch_table(world, lambda: world.barrier() if odd else world.all_reduce(torch.ones(3)))
    assert "different operations" in table[0] and "all_reduce of 3 float32" in table[1] and "barrier" in table[-1]

    table = mismatch_table(world, lambda: world.all_reduce(torch.ones(4 if odd else 3)))
    assert "all_reduce of 3 float32" in table[1] and "all_reduce of 4 float32" in table[-1]

    table = mismatch_table(
        world, lambda: world.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32))
    )
    assert "of 3 float32" in table[1] and "of 3 float64" in table[-1]

    table = mismatch_table(world, lambda: world.all_reduce(torch.ones(3), "max" if odd else "sum", async_op=True))
    assert "'sum'" in table[1] and "'max'" in table[-1]

    table = mismatch_table(world, lambda: world.broadcast(torch.ones(3), 1 if odd else 0))
    assert "(0, 'auto')" in table[1] and "(1, 'auto')" in table[-1]

    one, other = mpitrain.compression.TopK(0.5), mpitrain.compression.FP16()
    table = mismatch_table(world, lambda: world.all_reduce(torch.ones(3), compression=other if odd else one))
    assert "TopK(ratio=0.5" in table[1] and "FP16()" in table[-1]


@MANY
def test_differences_late_in_long_arguments_are_detected(world):
    """A signature of many blocks is longer than the part of it that is sent."""
    counts = [[1000 + (r == world.size - 1)] * world.size for r in range(world.size)]
    long = "x" * 500 + str(world.rank == world.size - 1)
    with pytest.raises(CommunicationError, match="different operations"):
        world.all_reduce(torch.ones(3), compression=mpitrain.compression.FP16().bucket(long))
    mine = counts[world.rank]
    table = mismatch_table(world, lambda: world.all_gather(torch.empty(sum(mine)), torch.empty(mine[0]), counts=mine))
    assert "different operations" in table[0]


@MANY
def test_different_offsets_in_an_arena_are_reported(world):
    arena = world.arena(1000)
    odd = world.rank == world.size - 1
    mine = arena.view(64 if odd else 0, (100,))
    for call in (
        lambda: world.all_reduce(mine),
        lambda: world.all_reduce(mine, algorithm="shared"),
        lambda: world.broadcast(mine, 0),
        lambda: world.reduce(mine, 0),
        lambda: world.all_gather(torch.empty(100 * world.size), mine),
        lambda: world.reduce_scatter(torch.empty(50), arena.view(64 if odd else 0, (50 * world.size,))),
        lambda: world.all_reduce(mine if odd else torch.ones(100)),  # in no arena at all
    ):
        table = mismatch_table(world, call)
        assert "different parts of an arena" in table[0] and "at byte 256 of an arena of 4000" in table[-1]
    mine.fill_(world.rank + 1.0)
    world.all_reduce(mine, algorithm="ring")  # by messages: the places do not matter
    assert mine.eq(sum(range(1, world.size + 1))).all()
    block = arena.view(100 * world.rank, (100,))  # a block in its own place is no mismatch
    world.all_gather(arena.view(0, (100 * world.size,)), block)
    arena.free()


@MANY
def test_wait_timeout_names_the_operation(world):
    received = torch.empty(6)
    work = world.irecv(received, (world.rank + 1) % world.size, tag=9)
    assert not work.done()
    begun = time.monotonic()
    with pytest.raises(CommunicationError, match=r"receive from rank \d is not complete after 0.2 s"):
        work.wait(timeout=0.2)
    assert 0.2 <= time.monotonic() - begun < 5
    world.barrier()  # every rank's wait has timed out
    world.send(torch.arange(6.0), (world.rank - 1) % world.size, tag=9)
    work.wait(timeout=20)  # it can still complete
    assert received.tolist() == [0, 1, 2, 3, 4, 5]
