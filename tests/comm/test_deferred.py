"""Deferred operations are right however late a rank is, and even when their memory is written again at once."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.programs.verify import Proofs
from mpitrain.errors import CommunicationError, InputError

SLOTS, LENGTH = 3, 5000


def values(rank: int, number: int, size: int) -> torch.Tensor:
    return torch.arange(size * LENGTH, dtype=torch.float32) % 97 + 1000 * rank + number


@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_vectors_in_three_slots_are_reduced_whichever_rank_is_late(world, op):
    chance = random.Random(world.rank)
    slots = [world.arena(world.size * LENGTH) for _ in range(SLOTS)]
    pending, readers, results = [], [None] * SLOTS, {}

    def finish() -> None:
        number, out, work = pending.pop(0)
        work.wait()
        results[number] = out.clone()

    for number in range(20):
        if len(pending) == SLOTS - 1:
            finish()
        slot = number % SLOTS
        if readers[slot] is not None:
            readers[slot].release()
        time.sleep(chance.choice([0, 0, 0, 0.003]))
        slots[slot].tensor.copy_(values(world.rank, number, world.size))
        own_block = slots[slot].tensor[world.rank * LENGTH : (world.rank + 1) * LENGTH]
        out = own_block if number % 2 else torch.empty(LENGTH)  # in place, or elsewhere
        readers[slot] = world.deferred_reduce_scatter(out, slots[slot].tensor, op)
        pending.append((number, out, readers[slot]))
        if number == 7:  # other operations may run in between
            world.barrier()
    while pending:
        finish()
    for number, result in results.items():
        everyone = torch.stack([values(r, number, world.size) for r in range(world.size)])
        expected = {"sum": everyone.sum(0), "avg": everyone.mean(0), "max": everyone.amax(0)}[op]
        torch.testing.assert_close(result, expected[world.rank * LENGTH : (world.rank + 1) * LENGTH])
    for reader in readers:
        reader.release()
        assert reader.done()
    for slot in slots:
        slot.free()


@pytest.mark.ranks(2)
def test_a_wait_times_out_if_the_other_rank_does_not_start(world, monkeypatch):
    # without debug mode, in which the ranks would compare the operation at once
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, debug=False))
    comm = world.split(0)
    slot = world.arena(world.size * LENGTH)
    slot.tensor.fill_(world.rank + 1.0)
    out = torch.empty(LENGTH)
    comm.deferred_reduce_scatter(out, slot.tensor).release()
    out.zero_()
    if world.rank == 0:
        work = comm.deferred_reduce_scatter(out, slot.tensor)
        assert not work.done()
        with pytest.raises(CommunicationError, match=r"deferred reduce_scatter is not complete after 0\.2 s"):
            work.wait(timeout=0.2)
    world.barrier()
    if world.rank == 1:
        work = comm.deferred_reduce_scatter(out, slot.tensor)
    work.release()
    assert (out == 3.0).all()
    world.barrier()
    comm.free()
    slot.free()


@pytest.mark.ranks(2)
def test_memory_in_use_by_a_deferred_reduction_is_refused(world):
    slot, out = world.arena(world.size * LENGTH), torch.empty(LENGTH)
    slot.tensor.fill_(1.0)
    work = world.deferred_reduce_scatter(out, slot.tensor)
    for act in (lambda: None, work.wait):
        act()
        with pytest.raises(InputError, match="is still in progress; release it before"):
            world.deferred_reduce_scatter(out, slot.tensor)
    work.release()
    world.deferred_reduce_scatter(out, slot.tensor).release()
    assert (out == 2.0).all()
    slot.free()


@pytest.mark.ranks(2, 3, 8)
@pytest.mark.parametrize("debug", [False, True])
def test_alternating_slots_show_the_data_of_all_ranks_whichever_rank_is_late(world, debug):
    process = dataclasses.replace(world.process, debug=debug, proofs=Proofs() if debug else None)
    comm = Communicator(world._comm.Dup(), world._topology, process, "alternating")
    chance, slots = random.Random(world.rank), comm.alternating(8 * LENGTH)
    for number in range(40):
        time.sleep(chance.choice([0, 0, 0, 0.003]))
        turn = slots.turn
        slots.slots[turn][world.rank].view(torch.int64).fill_(number * world.size + world.rank)
        slots.meet()
        for rank, slot in enumerate(slots.slots[turn]):
            time.sleep(chance.choice([0, 0, 0, 0.001]))
            assert (slot.view(torch.int64) == number * world.size + rank).all()
    slots.free()
    comm.free()


@pytest.mark.ranks(1, 2)
def test_private_memory_is_left_to_the_ordinary_reduce_scatter(world):
    x = torch.zeros(world.size * LENGTH)
    assert world.deferred_reduce_scatter(torch.empty(LENGTH), x) is None
    with pytest.raises(InputError, match="reduce_scatter"):
        world.deferred_reduce_scatter(torch.empty(LENGTH + 1), x)
