"""Repeated operations take a shorter path, with the same results."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch

from mpitrain.comm.job.traffic import Record, RecordedOperation
from mpitrain.comm.memory.buffers import as_tensor
from mpitrain.comm.runtime.agreement import NBYTES, STEP, Register, make_repeated_call
from mpitrain.errors import CommunicationError, InputError

MANY = pytest.mark.ranks(2, 3)


@pytest.fixture
def plain(world, monkeypatch):
    """Yield a communicator of all ranks without debug mode and without prepared calls."""
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, debug=False))
    comm = world.split(0)
    yield comm
    comm.free()


def ready(comm, name: str) -> int:
    """Return the number of prepared calls of the operation `name`, which take the shorter path."""
    return sum(key[0] == name for key in comm.ready if isinstance(key, tuple))


@MANY
@pytest.mark.parametrize(
    "convert",
    [lambda x: x, torch.Tensor.numpy, lambda x: torch.nn.Parameter(x, requires_grad=False)],
    ids=["tensor", "array", "parameter"],
)
def test_repeated_operations_are_correct(plain, convert):
    size, rank = plain.size, plain.rank
    whole, other, block = torch.zeros(6 * size), torch.zeros(6 * size), torch.zeros(6)
    w, o, b = map(convert, (whole, other, block))
    each = (rank + 1.0, size * (size + 1) / 2)
    for number in range(1, 5):
        whole.fill_(number * each[0])
        plain.all_reduce(w)
        assert (whole == number * each[1]).all()
        whole.fill_(number * each[0])
        plain.reduce(w, 1)
        assert (whole == number * each[rank == 1]).all()
        plain.broadcast(w, 1)
        assert (whole == number * each[1]).all()
        whole.fill_(number * each[0])
        plain.reduce_scatter(b, w)
        assert (block == number * each[1]).all()
        block.fill_(number * rank)
        plain.all_gather(o, b)
        assert other.view(size, 6)[:, 0].tolist() == [number * r for r in range(size)]
        other.zero_()
        plain.gather(o if rank == 1 else None, b, 1)
        assert other.view(size, 6)[:, 0].tolist() == [number * r * (rank == 1) for r in range(size)]
        plain.scatter(b, o if rank == 1 else None, 1)
        assert (block == number * rank).all()
        whole.copy_(torch.arange(size).repeat_interleave(6) + 10 * number * rank)
        plain.all_to_all(o, w)
        assert other.view(size, 6)[:, 0].tolist() == [10 * number * r + rank for r in range(size)]
        plain.barrier()
    names = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
    assert [ready(plain, name) for name in names] == [1] * len(names) and "barrier" in plain.ready


@MANY
def test_other_tensors_at_the_same_address_are_checked_again(plain):
    x = torch.ones(4, 4)
    for _ in range(2):
        plain.all_reduce(x)
    with pytest.raises(InputError, match="is not contiguous"):
        plain.all_reduce(x.t())
    plain.all_reduce(x.view(torch.int32), "max")
    plain.all_reduce(x[:2])
    assert x[0, 0] == plain.size**3 and x[3, 3] == plain.size**2
    out = torch.zeros(16 // plain.size)
    whole = x.view(-1)[: out.numel() * plain.size]
    for _ in range(2):
        plain.reduce_scatter(out, whole)
    with pytest.raises(InputError, match="reduce_scatter: out has"):
        plain.reduce_scatter(out[:-1], whole)
    with pytest.raises(InputError, match="make them the same"):
        plain.reduce_scatter(out.view(torch.int32), whole)
    with pytest.raises(InputError, match="no rank 9"):
        plain.broadcast(x, 9)
    with pytest.raises(InputError, match="to_dense"):
        plain.all_reduce(x.to_sparse())


@MANY
def test_lazily_conjugated_tensors_are_refused_in_repeated_operations(plain):
    z = torch.ones(1, dtype=torch.complex64)
    for _ in range(3):
        plain.all_reduce(z)
        plain.all_reduce(z.imag)
    for lazy in (z.conj(), z.conj().imag):
        assert lazy.data_ptr() in (z.data_ptr(), z.imag.data_ptr())
        with pytest.raises(InputError, match="lazily conjugated"):
            as_tensor(lazy)
        with pytest.raises(InputError, match="lazily conjugated"):
            plain.all_reduce(lazy)
    assert ready(plain, "all_reduce") == 1  # the imaginary part that is not negated


@MANY
def test_blocks_of_one_element_take_the_shorter_path_unless_they_are_negated(plain):
    size, rank = plain.size, plain.rank
    parts = torch.view_as_real(torch.zeros(2 * size, dtype=torch.complex64)).view(-1)
    pairs = torch.view_as_complex(parts.view(-1, 2))
    whole, block = parts[1 : size + 1], parts[2 * size + 1 : 2 * size + 2]  # the block is an imaginary part
    for number in range(3):
        whole[rank] = rank + number
        plain.all_gather(whole, whole[rank : rank + 1])
        assert whole.tolist() == [r + number for r in range(size)]
        plain.reduce_scatter(block, whole)
        assert block.item() == size * (rank + number)
        plain.broadcast(block, 1)
        plain.reduce(block, 1)
        plain.gather(whole if rank == 1 else None, block, 1)
        plain.scatter(block, whole if rank == 1 else None, 1)
        plain.all_gather(whole, block)
    assert [ready(plain, name) for name in ("all_gather", "reduce_scatter", "gather")] == [2, 1, 1]
    negated = pairs[size : size + 1].conj().imag
    assert negated.is_neg() and negated.data_ptr() == block.data_ptr()
    for call in (
        lambda: plain.reduce_scatter(negated, whole),
        lambda: plain.broadcast(negated, 1),
        lambda: plain.reduce(negated, 1),
        lambda: plain.gather(whole if rank == 1 else None, negated, 1),
        lambda: plain.scatter(negated, whole if rank == 1 else None, 1),
        lambda: plain.all_gather(whole, negated),
    ):
        with pytest.raises(InputError, match="lazily conjugated"):
            call()


@MANY
def test_prepared_calls_are_dropped_when_arenas_change(plain):
    x = torch.ones(3)
    for _ in range(2):
        plain.all_reduce(x)
    assert ready(plain, "all_reduce") == 1
    arena = plain.arena(10)
    assert ready(plain, "all_reduce") == 0
    for _ in range(2):
        plain.all_reduce(x)
    arena.free()
    assert ready(plain, "all_reduce") == 0
    plain.all_reduce(x)
    assert (x == plain.size**5).all()


@MANY
def test_prepared_calls_are_dropped_with_the_tensor(plain):
    for _ in range(5):
        x = torch.ones(1 << 18)
        plain.all_reduce(x)
        plain.all_reduce(x)
        del x
    assert ready(plain, "all_reduce") == 0


@MANY
def test_earlier_operations_complete_before_a_repeated_one(plain):
    x, y = torch.ones(3), torch.ones(2)
    for _ in range(3):
        plain.all_reduce(x)
        work = plain.all_reduce(y, async_op=True)
        plain.barrier()
        plain.all_reduce(x)
        work.wait()
        y /= plain.size
        x /= plain.size**2
    assert (x == 1).all() and (y == 1).all()


@MANY
def test_a_freed_communicator_is_refused_in_repeated_operations(world, plain):
    group = plain.split(0)
    x = torch.ones(3)
    for _ in range(3):
        group.all_reduce(x)
        group.barrier()
    group.free()
    for call in (lambda: group.all_reduce(x), group.barrier):
        with pytest.raises(InputError, match="was freed"):
            call()


@MANY
def test_debug_mode_compares_repeated_operations(world):
    x = torch.ones(3)
    for _ in range(3):
        world.all_reduce(x)
    assert not world.ready


@MANY
def test_persistent_calls_are_correct_and_take_the_shorter_path(plain):
    size, rank = plain.size, plain.rank
    whole, other, block = torch.zeros(6 * size), torch.zeros(6 * size), torch.zeros(6)
    at_root = rank == 1
    calls = {
        "all_reduce": plain.all_reduce_init(whole.numpy()),
        "reduce": plain.reduce_init(whole, 1),
        "broadcast": plain.broadcast_init(whole, 1),
        "reduce_scatter": plain.reduce_scatter_init(block, whole),
        "all_gather": plain.all_gather_init(other, block),
        "gather": plain.gather_init(other if at_root else None, block, 1),
        "scatter": plain.scatter_init(block, other if at_root else None, 1),
        "all_to_all": plain.all_to_all_init(other, whole),
    }
    total = size * (size + 1) / 2
    for number in range(1, 5):
        whole.fill_(number * (rank + 1.0))
        calls["all_reduce"]()
        assert (whole == number * total).all()
        whole.fill_(number * (rank + 1.0))
        calls["reduce"]()
        assert (whole == number * (total if at_root else rank + 1.0)).all()
        calls["broadcast"]()
        assert (whole == number * total).all()
        whole.fill_(number * (rank + 1.0))
        calls["reduce_scatter"]()
        assert (block == number * total).all()
        block.fill_(number * rank)
        calls["all_gather"]()
        assert other.view(size, 6)[:, 0].tolist() == [number * r for r in range(size)]
        other.zero_()
        calls["gather"]()
        assert other.view(size, 6)[:, 0].tolist() == [number * r * at_root for r in range(size)]
        calls["scatter"]()
        assert (block == number * rank).all()
        whole.copy_(torch.arange(size).repeat_interleave(6) + 10 * number * rank)
        calls["all_to_all"]()
        assert other.view(size, 6)[:, 0].tolist() == [10 * number * r + rank for r in range(size)]
        if number == 2:  # what was prepared is checked again
            plain.arena(16).free()
        assert {is_prepared(call) for call in calls.values()} == {number != 2}


def is_prepared(call) -> bool:
    """Return True if a persistent call takes the shorter path."""
    return getattr(call.__call__, "__qualname__", "").startswith("make_repeated_call")


@MANY
def test_a_dropped_persistent_call_drops_its_tensors(plain):
    for calls in range(3):
        x = torch.ones(1 << 18)
        storage, call = weakref.ref(x.untyped_storage()), plain.all_reduce_init(x)
        for _ in range(calls):
            call()
        del x, call
        assert storage() is None


@MANY
def test_persistent_calls_are_refused_as_the_operations_are(plain):
    x = torch.ones(4, 4)
    with pytest.raises(InputError, match="is not contiguous"):
        plain.all_reduce_init(x.t())
    with pytest.raises(InputError, match="not asynchronous"):
        plain.all_reduce_init(x, async_op=True)
    with pytest.raises(InputError, match=f"there is no rank {plain.size} in"):
        plain.broadcast_init(x, plain.size)
    comm = plain.split(0)
    call = comm.all_reduce_init(x)
    for _ in range(2):
        call()
    assert x[0, 0] == plain.size**2
    comm.free()
    with pytest.raises(InputError, match="was freed"):
        call()


@pytest.fixture
def repeated():
    """Yield a function that makes a repeated operation of one of two ranks, which appends the rank to `performed`."""
    memory = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
    registers = [Register([0, 1], rank, lambda r: memory[r].ctypes.data, ()) for rank in range(2)]
    records = [Record("test") for _ in range(2)]

    def repeated(rank, description, performed, *, synchronizing=True, signed=1):
        signature = registers[rank].signature(description, meets=False, synchronizing=synchronizing)
        calls, operation = [signature, lambda: performed.append(rank)], RecordedOperation(description)
        return make_repeated_call(records[rank], operation, calls, (), lambda: None, signed)

    repeated.registers = registers
    yield repeated
    memory.clear()  # it had to exist so far, because registers do not keep it alive


def test_a_rank_may_be_ahead_unless_the_operation_synchronizes(repeated):
    performed = []
    ahead, behind = (repeated(rank, "gather", performed, synchronizing=False) for rank in range(2))
    for _ in range(3):
        ahead()
    behind()
    behind()
    assert performed == [0, 0, 0, 1, 1]
    with pytest.raises(CommunicationError, match="rank 0: gather; rank 1: scatter"):
        repeated(1, "scatter", performed, synchronizing=False)()
    repeated(0, "sum", performed)()
    repeated(0, "max", performed)()
    with pytest.raises(CommunicationError, match="rank 0 has already begun max"):
        repeated(1, "sum", performed)()
    assert performed == [0, 0, 0, 1, 1, 0, 0]


def test_persistent_calls_of_the_library_sign_one_in_sixteen_operations(repeated):
    performed = []
    first, same, other = (
        repeated(rank, description, performed, signed=16) for rank, description in ((0, "sum"), (1, "sum"), (1, "max"))
    )
    for _ in range(20):
        first()
    assert repeated.registers[0].own_word[0] // STEP == 16
    for _ in range(20):
        same()
    for _ in range(20):
        first()
    with pytest.raises(CommunicationError, match="rank 0: sum; rank 1: max"):
        for _ in range(20):
            other()
    assert [performed.count(rank) for rank in range(2)] == [40, 20 + 11]  # operation 32 is signed
