"""Horovod's operations, compared with formulas."""

from __future__ import annotations

import sys

import pytest
import torch

from mpitrain.errors import InputError

pytestmark = pytest.mark.ranks(1, 2, 3)
SEVERAL = pytest.mark.ranks(2, 3)


def mine(rank, *shape, dtype=torch.float64):
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def everyone(hvd, *shape, dtype=torch.float64):
    return torch.stack([mine(rank, *shape, dtype=dtype) for rank in range(hvd.size())])


def test_ranks_and_places(hvd, world):
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (world.rank, world.size, *place(world))
    assert hvd.cross_size() == len({*world.nodes}) and hvd.is_initialized() and hvd.mpi_built()


def place(world):
    return world.local_rank, world.local_size


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float32, torch.float64])
def test_reductions_of_every_kind(hvd, dtype):
    x, all_x = mine(hvd.rank(), 5, 3, dtype=dtype), everyone(hvd, 5, 3, dtype=dtype)
    results = {op: hvd.allreduce(x, op=op) for op in (hvd.Sum, hvd.Min, hvd.Max)}
    for op, expected in ((hvd.Sum, all_x.sum(0)), (hvd.Min, all_x.amin(0)), (hvd.Max, all_x.amax(0))):
        torch.testing.assert_close(results[op], expected.to(dtype))
    small = x % 3
    torch.testing.assert_close(hvd.allreduce(small, op=hvd.Product), (all_x % 3).prod(0).to(dtype))
    mean = all_x.double().sum(0) / hvd.size()
    torch.testing.assert_close(hvd.allreduce(x), (mean if dtype.is_floating_point else mean.trunc()).to(dtype))
    torch.testing.assert_close(hvd.allreduce(x, average=False), all_x.sum(0).to(dtype))


@pytest.mark.parametrize("in_place", [False, True])
def test_grouped_tensors_of_several_dtypes_and_strides(hvd, in_place):
    def tensors(rank):
        return [mine(rank, 4), mine(rank, 3, 2).t(), mine(rank, 70_000, dtype=torch.float32), mine(rank)]

    xs, before = tensors(hvd.rank()), tensors(hvd.rank())
    out = (hvd.grouped_allreduce_ if in_place else hvd.grouped_allreduce)(xs, op=hvd.Sum)
    for number, (x, y, old) in enumerate(zip(xs, out, before, strict=True)):
        assert torch.equal(y, sum(tensors(rank)[number] for rank in range(hvd.size())))
        assert torch.equal(x, y if in_place else old)


def test_factors_before_and_after(hvd):
    whole = everyone(hvd, 6)
    out = hvd.allreduce(mine(hvd.rank(), 6), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(out, whole.sum(0) * 1.5)
    counts = hvd.allreduce(torch.tensor([5]), op=hvd.Sum, prescale_factor=0.5)
    assert counts.tolist() == [2 * hvd.size()]  # integers are rounded toward zero before the sum


def test_allgather_of_uneven_and_empty_tensors(hvd):
    pieces = [mine(rank, rank, 3) for rank in range(hvd.size())]
    assert torch.equal(hvd.allgather(pieces[hvd.rank()]), torch.cat(pieces))
    flags = hvd.grouped_allgather([pieces[hvd.rank()], torch.tensor([hvd.rank() == 0])])[1]
    assert flags.tolist() == [True] + [False] * (hvd.size() - 1)


def test_broadcast(hvd):
    for root in range(hvd.size()):
        x = mine(hvd.rank(), 3, 2).t()
        assert torch.equal(hvd.broadcast(x, root), mine(root, 3, 2).t())
        assert torch.equal(x, mine(hvd.rank(), 3, 2).t())
        assert hvd.broadcast_(x, root) is x and torch.equal(x, mine(root, 3, 2).t())


def test_alltoall_with_and_without_splits(hvd):
    rank, size = hvd.rank(), hvd.size()
    even = torch.arange(size * 2).reshape(-1, 1) + 100 * rank
    expected = torch.cat([torch.tensor([[2 * rank], [2 * rank + 1]]) + 100 * r for r in range(size)])
    assert torch.equal(hvd.alltoall(even), expected)
    splits = torch.arange(size, dtype=torch.int32)  # rank r gets r rows of each
    out, received = hvd.alltoall(torch.full((int(splits.sum()),), float(rank)), splits)
    assert received.tolist() == [rank] * size and out.tolist() == [float(r) for r in range(size) for _ in range(rank)]


@pytest.mark.parametrize("rows", [1, 7])
def test_reducescatter_of_uneven_rows(hvd, rows):
    parts = everyone(hvd, rows, 2).sum(0).tensor_split(hvd.size())
    assert torch.equal(hvd.reducescatter(mine(hvd.rank(), rows, 2), op=hvd.Sum), parts[hvd.rank()])
    both = hvd.grouped_reducescatter([mine(hvd.rank(), rows, 2)] * 2, op=hvd.Sum, prescale_factor=2.0)
    assert all(torch.equal(out, 2 * parts[hvd.rank()]) for out in both)


@SEVERAL
def test_gradients_of_operations(hvd):
    rank, size = hvd.rank(), hvd.size()

    def gradient(operation, rows=size):
        x = torch.ones(rows, 2, dtype=torch.float64, requires_grad=True)
        out = operation(x)
        (out * (1 + torch.arange(out.shape[0]).unsqueeze(1))).sum().backward()
        return x.grad[:, 0].tolist()

    weights = [1.0 + n for n in range(size)]
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)) == [size * w for w in weights]
    assert gradient(lambda x: hvd.allreduce(x)) == weights
    assert gradient(lambda x: hvd.broadcast(x, 1)) == (weights if rank == 1 else [0.0] * size)
    assert gradient(hvd.allgather, rows=1) == [rank + 1.0]
    assert gradient(hvd.alltoall) == [rank + 1.0] * size
    assert gradient(lambda x: hvd.alltoall(x, [1] + [0] * (size - 1))[0]) == [rank + 1.0] + [0.0] * (size - 1)
    assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)) == [float(size)] * size


def test_operations_may_be_submitted_and_waited_for_in_any_order(hvd):
    names = [f"tensor{number}" for number in range(6)]
    order = names[hvd.rank() :] + names[: hvd.rank()]
    handles = {name: hvd.allreduce_async(torch.tensor([float(name[-1])]), name=name, op=hvd.Sum) for name in order}
    for name in reversed(order):
        assert hvd.synchronize(handles[name]).item() == hvd.size() * float(name[-1])
    late = hvd.allreduce_async(torch.ones(1), name="late") if hvd.rank() == 0 else None
    hvd.barrier()
    late = late or hvd.allreduce_async(torch.ones(1), name="late")
    while not hvd.poll(late):
        pass
    assert hvd.synchronize(late).item() == 1.0


@SEVERAL
def test_ranks_that_disagree_get_one_line_and_go_on(hvd):
    with pytest.raises(hvd.HorovodInternalError, match=r"float32 \[1\] on cpu.*rank 1 .*float32 \[2\]"):
        hvd.allreduce(torch.ones(min(hvd.rank(), 1) + 1), name="x")
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 waits for 'allreduce.x0'; rank 1 waits for"):
        hvd.allreduce(torch.ones(1), name=f"x{hvd.rank()}")
    hvd.allreduce_async(torch.ones(1), name="twice")
    with pytest.raises(ValueError, match="still pending"):
        hvd.allreduce_async(torch.ones(1), name="twice")
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@SEVERAL
@pytest.mark.parametrize("bad", ["scalar", "splits", "root", "rows"])
def test_bad_arguments_are_value_errors_of_one_line(hvd, bad):
    calls = {
        "scalar": lambda: hvd.allgather(torch.tensor(1.0)),
        "splits": lambda: hvd.alltoall(torch.ones(2), torch.ones(hvd.size())),
        "root": lambda: hvd.broadcast(torch.ones(1), hvd.size()),
        "rows": lambda: hvd.alltoall(torch.ones(hvd.size() + 1)),
    }
    with pytest.raises(ValueError) as caught:
        calls[bad]()
    assert isinstance(caught.value, InputError) and "\n" not in str(caught.value)


@SEVERAL
def test_process_sets_work_side_by_side(hvd):
    first, rest = hvd.add_process_set([0]), hvd.add_process_set(list(range(1, hvd.size())))
    chosen = first if hvd.rank() == 0 else rest
    assert chosen.included() and chosen.size() == len(chosen.ranks) and chosen.ranks[chosen.rank()] == hvd.rank()
    x = torch.tensor([float(hvd.rank())])
    assert hvd.allreduce(x, op=hvd.Sum, process_set=chosen).item() == sum(chosen.ranks)
    assert hvd.broadcast(x, chosen.ranks[-1], process_set=chosen).item() == chosen.ranks[-1]
    assert hvd.allgather(x, process_set=chosen).tolist() == [float(rank) for rank in chosen.ranks]
    with pytest.raises(ValueError, match="lacks rank"):
        hvd.barrier(process_set=rest if hvd.rank() == 0 else first)
    with pytest.raises(ValueError, match="exists"):
        hvd.add_process_set([0])
    assert hvd.remove_process_set(rest) and hvd.remove_process_set(first) and not hvd.remove_process_set(first)
    with pytest.raises(ValueError, match="removed"):
        hvd.barrier(process_set=chosen)


def test_joined_ranks_count_as_zeros(hvd):
    steps = 2 + hvd.rank()  # the last rank has the most
    sums = [hvd.allreduce(torch.ones(3), op=hvd.Sum)[0].item() for _ in range(steps)]
    assert hvd.join() == hvd.size() - 1
    assert sums == [sum(step < 2 + rank for rank in range(hvd.size())) for step in range(steps)]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_sparse_tensors(hvd):
    dense = mine(hvd.rank(), 6, 2) * (mine(hvd.rank() + 9, 6, 1) > 20)
    out = hvd.sparse_allreduce_async(dense.to_sparse(1), name="sparse", op=hvd.Average)()
    torch.testing.assert_close(out.to_dense(), hvd.allreduce(dense))


@SEVERAL
def test_objects_travel_without_pickle(hvd):
    value = {0: (1, 2.5), "x": {"set": {1, 2}, "tensor": torch.arange(3), "none": None}, (1, "a"): [True, b"\x00"]}
    received = hvd.broadcast_object(value if hvd.rank() == 1 else None, root_rank=1)
    assert torch.equal(received["x"]["tensor"], value["x"]["tensor"])
    received["x"]["tensor"] = value["x"]["tensor"] = None  # tensors have no truth value
    assert received == value
    values = hvd.allgather_object({"rank": hvd.rank(), "w": torch.full((hvd.rank(),), 1.0)})
    assert [(each["rank"], each["w"].numel()) for each in values] == [(rank, rank) for rank in range(hvd.size())]
    with pytest.raises(InputError, match=r"rank 1: .*never unpickles"):
        hvd.allgather_object(sys if hvd.rank() == 1 else 1)
    with pytest.raises(InputError, match=r"rank 0: .*never unpickles"):
        hvd.broadcast_object(object())


def test_it_starts_again_after_a_shutdown(hvd):
    pending = hvd.allreduce_async(torch.ones(1), name="pending") if hvd.rank() == 0 else None
    hvd.shutdown()
    assert not hvd.is_initialized() and (pending is None or not pending.is_complete)
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_a_script_imports_horovod(hvd):
    from mpitrain.horovod import as_horovod

    before = set(sys.modules)
    try:
        as_horovod()
        import horovod
        import horovod.torch
        from horovod.common.exceptions import HorovodInternalError

        assert horovod.torch is hvd and HorovodInternalError is hvd.HorovodInternalError
        with pytest.raises(InputError, match="mpirun"):
            horovod.run(print)
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
