"""Every operation of torch.distributed over this backend, compared with one process."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from mpitrain.errors import InputError

RANKS = pytest.mark.ranks(2, 3)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
)
MOVED = (*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)


def value(rank: int, dtype: torch.dtype, shape=(3, 5)) -> torch.Tensor:
    numbers = (torch.arange(torch.Size(shape).numel()).reshape(shape) * (rank + 2)) % 7 + rank
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True where both have the same bits; types such as fp8 do not define equality."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())
    )


@RANKS
def test_all_reduce_reduces_every_type_by_every_operation(group, world):
    op = group.ReduceOp
    operations = {
        op.SUM: lambda x: x.sum(0),
        op.PRODUCT: lambda x: x.prod(0),
        op.MIN: lambda x: x.amin(0),
        op.MAX: lambda x: x.amax(0),
    }
    for dtype in DTYPES:
        everyone = torch.stack([value(r, dtype) for r in range(world.size)])
        for kind, expected in operations.items():
            x = value(world.rank, dtype)
            group.all_reduce(x, kind)
            assert torch.equal(x, expected(everyone.double()).to(dtype)), (dtype, kind)


@RANKS
def test_averages_scaled_sums_and_bit_operations(group, world):
    op = group.ReduceOp
    x = value(world.rank, torch.float32)
    everyone = torch.stack([value(r, torch.float32) for r in range(world.size)])
    group.all_reduce(x, op.AVG)
    torch.testing.assert_close(x, everyone.mean(0))
    from torch._C._distributed_c10d import _make_nccl_premul_sum

    x = value(world.rank, torch.float32)
    group.all_reduce(x, _make_nccl_premul_sum(0.5))
    torch.testing.assert_close(x, everyone.sum(0) / 2)
    for dtype in (torch.int32, torch.uint8, torch.bool):
        for kind, join in ((op.BAND, torch.bitwise_and), (op.BOR, torch.bitwise_or), (op.BXOR, torch.bitwise_xor)):
            x = value(world.rank, dtype)
            expected = value(0, dtype)
            for r in range(1, world.size):
                expected = join(expected, value(r, dtype))
            group.all_reduce(x, kind)
            assert torch.equal(x, expected)
    with pytest.raises(ValueError, match="integer type"):
        group.all_reduce(torch.ones(2), op.BXOR)
    with pytest.raises(ValueError, match="can be sent but not reduced; convert to float32"):
        group.all_reduce(torch.ones(2).to(torch.float8_e5m2))


@RANKS
def test_integer_averages_round_toward_zero_and_invalid_operations_raise_in_the_call(group, world):
    op, size = group.ReduceOp, world.size
    for dtype in (torch.int64, torch.int8):
        mine = torch.tensor([-7, -1, 0, 1, 7], dtype=dtype) + world.rank
        total = torch.tensor([-7, -1, 0, 1, 7], dtype=dtype) * size + size * (size - 1) // 2
        expected = torch.div(total, size, rounding_mode="trunc")
        x = mine.clone()
        group.all_reduce(x, op.AVG)
        assert torch.equal(x, expected)
        out, blocks = torch.empty_like(mine), mine.repeat(size)
        group.reduce_scatter_tensor(out, blocks, op.AVG)
        assert torch.equal(out, expected)
    sparse = torch.eye(2, dtype=torch.int64).mul(-3 - world.rank).to_sparse()
    group.all_reduce(sparse, op.AVG)
    total = -3 * size - size * (size - 1) // 2
    assert torch.equal(sparse.to_dense(), torch.eye(2, dtype=torch.int64) * -(-total // size))
    with pytest.raises(ValueError, match="op avg is not defined for bool"):
        group.all_reduce(torch.tensor([True]), op.AVG, async_op=True)  # here, not in the wait
    x = torch.ones(2)
    group.all_reduce(x)  # the job goes on
    assert torch.equal(x, torch.full((2,), float(size)))


@RANKS
def test_reduce_changes_only_the_root(group, world):
    for root in range(world.size):
        for contiguous in (True, False):
            x = value(world.rank, torch.float32)
            x = x if contiguous else x.t().contiguous().t()
            group.reduce(x, root)
            total = sum(value(r, torch.float32) for r in range(world.size))
            assert torch.equal(x, total if world.rank == root else value(world.rank, torch.float32))


@RANKS
def test_every_dtype_can_be_moved(group, world):
    size, rank = world.size, world.rank
    for dtype in MOVED:
        x = value(rank, dtype)
        root = size - 1
        sent = x.clone()
        group.broadcast(sent, root)
        assert same(sent, value(root, dtype)), dtype
        listed = [torch.empty_like(x) for _ in range(size)]
        group.all_gather(listed, x)
        assert all(same(listed[r], value(r, dtype)) for r in range(size))
        whole = torch.empty((size * 3, 5), dtype=dtype)
        group.all_gather_into_tensor(whole, x)
        assert all(same(part, value(r, dtype)) for r, part in enumerate(whole.split(3)))
        gathered = [torch.empty_like(x) for _ in range(size)] if rank == root else None
        group.gather(x, gathered, dst=root)
        assert gathered is None or all(same(gathered[r], value(r, dtype)) for r in range(size))
        out = torch.empty_like(x)
        group.scatter(out, [value(10 + r, dtype) for r in range(size)] if rank == root else None, src=root)
        assert same(out, value(10 + rank, dtype))
        into = [torch.empty_like(x) for _ in range(size)]
        group.all_to_all(into, [value(size * rank + r, dtype) for r in range(size)])
        assert all(same(into[r], value(size * r + rank, dtype)) for r in range(size))


@RANKS
def test_noncontiguous_tensors_are_communicated(group, world):
    size, rank = world.size, world.rank
    columns = torch.zeros(4, 6)[:, ::2]
    columns += rank + 1
    group.all_reduce(columns)
    assert (columns == size * (size + 1) / 2).all()
    outs = list(torch.zeros(3, size).unbind(1))
    group.all_gather(outs, torch.full((3, 2), float(rank))[:, 0])
    assert [int(out[0]) for out in outs] == list(range(size))
    sliced = torch.zeros(4, 2)
    group.broadcast(sliced[:, 1], 0) if rank else group.broadcast(torch.arange(8.0).view(4, 2)[:, 1], 0)
    if rank:
        assert torch.equal(sliced, torch.tensor([[0, 1], [0, 3], [0, 5], [0, 7]], dtype=torch.float32))
    image = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)
    group.all_reduce(image)
    assert (image == size * (size - 1) / 2).all()


@RANKS
def test_reduce_scatter_in_all_its_forms(group, world):
    size, rank = world.size, world.rank

    def block(r, b, length=4):
        return torch.arange(length, dtype=torch.float32) * (b + 1) + r

    def expected(b, length=4):
        return sum(block(r, b, length) for r in range(size))

    out = torch.empty(4)
    group.reduce_scatter(out, [block(rank, b) for b in range(size)])
    assert torch.equal(out, expected(rank))
    group.reduce_scatter_tensor(out, torch.cat([block(rank, b) for b in range(size)]), op=group.ReduceOp.AVG)
    torch.testing.assert_close(out, expected(rank) / size)
    uneven = torch.empty(rank + 1)  # blocks of different lengths
    group.reduce_scatter(uneven, [block(rank, b, b + 1) for b in range(size)])
    assert torch.equal(uneven, expected(rank, rank + 1))
    whole = torch.cat([block(rank, b) for b in range(size)])
    group.reduce_scatter_tensor(whole[rank * 4 : rank * 4 + 4], whole)  # the output is part of the input
    assert torch.equal(whole[rank * 4 : rank * 4 + 4], expected(rank))


@RANKS
def test_all_gather_and_all_to_all_of_different_sizes(group, world):
    size, rank = world.size, world.rank
    outs = [torch.empty(r + 1, 2) for r in range(size)]
    group.all_gather(outs, torch.full((rank + 1, 2), float(rank)))
    assert all((out == r).all() for r, out in enumerate(outs))
    rows_out, rows_in = [r + rank for r in range(size)], [rank + r for r in range(size)]
    sent = torch.cat([torch.full((rows_in[r], 3), float(10 * rank + r)) for r in range(size)])
    out = torch.empty(sum(rows_out), 3)
    group.all_to_all_single(out, sent, rows_out, rows_in)
    assert torch.equal(out[:, 0], torch.cat([torch.full((rows_out[r],), float(10 * r + rank)) for r in range(size)]))
    even = torch.arange(size * 2) + 100 * rank
    out = torch.empty_like(even)
    group.all_to_all_single(out, even)
    assert torch.equal(out, torch.cat([torch.arange(2) + 2 * rank + 100 * r for r in range(size)]))
    with pytest.raises(ValueError, match=f"not a multiple of {size} ranks"):
        group.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1))


@RANKS
def test_coalesced_operations(group, world):
    size, rank = world.size, world.rank
    from torch.distributed.distributed_c10d import _coalescing_manager

    xs = [torch.full((n,), float(rank)) for n in (1, 4, 9)]
    with _coalescing_manager():
        for x in xs:
            group.all_reduce(x)
    assert all((x == size * (size - 1) / 2).all() for x in xs)
    outs = [torch.empty(size * n) for n in (2, 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for out in outs:
            group.all_gather_into_tensor(out, torch.full((out.numel() // size,), float(rank)))
    manager.wait()
    assert all(torch.equal(out.view(size, -1)[:, 0], torch.arange(size).float()) for out in outs)
    pg = group.group.WORLD
    pg._start_coalescing(torch.device("cpu"))
    y = torch.full((3,), float(rank))
    group.all_reduce(y, async_op=True)
    pg._end_coalescing(torch.device("cpu")).wait()
    assert (y == size * (size - 1) / 2).all()


@RANKS
def test_messages_in_both_directions_and_from_any_rank(group, world):
    size, rank = world.size, world.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    got, sent = torch.empty(2, 3), torch.full((3, 2), float(rank)).t()
    works = group.batch_isend_irecv([group.P2POp(group.irecv, got, left), group.P2POp(group.isend, sent, right)])
    for work in works:
        work.wait()
    assert (got == left).all()
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            x = torch.empty(1)
            source = group.recv(x)
            assert x == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        group.isend(torch.tensor([float(rank)]), 0)  # nobody keeps the handle
    group.barrier()
    if rank < 2:  # tags keep messages apart
        a, b = torch.tensor([1.0]), torch.tensor([2.0])
        if rank == 0:
            group.isend(a, 1, tag=5).wait()
            group.isend(b, 1, tag=6).wait()
        else:
            group.recv(b, 0, tag=6)
            group.recv(a, 0, tag=5)
            assert (a, b) == (1, 2)


@RANKS
def test_message_of_wrong_size_reports_both_sizes_and_changes_nothing_else(group, world):
    around = torch.zeros(300_200)
    for sent, expected in ((3, 5), (5, 3), (1000, 300_000), (300_000, 1000), (0, 4), (4, 4)):
        if world.rank == 0:
            group.send(torch.ones(sent), 1)
        elif world.rank == 1:
            around.zero_()
            into = around[100 : 100 + expected]
            if sent == expected:
                group.recv(into, 0)  # the ranks are still together
                assert into.eq(1).all()
            else:
                with pytest.raises(RuntimeError, match=f"of {4 * sent} bytes .* but rank 1 expects {4 * expected};"):
                    group.recv(into, 0)
            assert around[:100].eq(0).all() and around[100 + expected :].eq(0).all()


@RANKS
def test_asynchronous_operations_and_messages_may_interleave(group, world):
    x = torch.full((1 << 20,), 1.0)  # too large to be sent before it is received
    work = group.all_reduce(torch.ones(4), async_op=True)
    if world.rank == 0:
        group.send(x, 1)
        work.wait()
    elif world.rank == 1:
        work.wait()
        group.recv(x, 0)
    else:
        work.wait()


@RANKS
def test_futures_run_their_callbacks(group, world):
    x = torch.full((4,), float(world.rank))
    total = world.size * (world.size - 1) / 2
    work = group.all_reduce(x, async_op=True)
    twice = work.get_future().then(lambda future: future.value()[0] * 2)
    nested = twice.then(lambda future: group.all_reduce(future.value(), async_op=True).get_future().wait()[0])
    assert (nested.wait() == 2 * total * world.size).all()
    assert (x == total).all()
    assert work.is_completed()
    late = work.get_future()  # asked for when all is over
    assert late.done() and (late.value()[0] == total).all()
    polled = group.all_reduce(torch.ones(2), async_op=True)
    while not polled.is_completed():  # completes although nobody waits
        pass


@RANKS
def test_objects_are_communicated(group, world):
    everyone = [None] * world.size
    group.all_gather_object(everyone, {"rank": world.rank, "text": "x" * world.rank})
    assert everyone == [{"rank": r, "text": "x" * r} for r in range(world.size)]
    objects = [("a", 1), None] if world.rank == 0 else [None, None]
    group.broadcast_object_list(objects, 0)
    assert objects == [("a", 1), None]
    mine = [None]
    group.scatter_object_list(mine, list(range(world.size)) if world.rank == 0 else None, 0)
    assert mine == [world.rank]


@RANKS
def test_sparse_gradients_are_summed(group, world):
    rows = torch.tensor([[0, world.rank]])
    x = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (5, 3))
    group.all_reduce(x)
    expected = torch.zeros(5, 3)
    for r in range(world.size):
        expected.index_add_(0, torch.tensor([0, r]), torch.ones(2, 3))
    assert torch.equal(x.to_dense(), expected)


@RANKS
def test_barriers_time_out_and_name_missing_ranks(group, world):
    group.barrier()
    late = group.new_group()
    if world.rank:
        with pytest.raises(RuntimeError, match="Timed out waiting 200ms"):
            group.barrier(late, timeout=timedelta(seconds=0.2))
    group.monitored_barrier(timeout=timedelta(seconds=20))
    if world.rank == 0:
        names = ", ".join(map(str, range(1, world.size)))
        with pytest.raises(RuntimeError, match=f"{names} failed to pass monitoredBarrier in 200 ms"):
            group.monitored_barrier(late, timeout=timedelta(seconds=0.2), wait_all_ranks=True)
    work = group.irecv(torch.empty(1), (world.rank + 1) % world.size, tag=77)
    with pytest.raises(RuntimeError, match=r"receive from rank .* timeout after 0\.1 s"):
        work.wait(timedelta(seconds=0.1))
    group.barrier()  # nobody sends before all have waited in vain
    group.send(torch.ones(1), (world.rank - 1) % world.size, tag=77)
    work.wait()


@RANKS
def test_short_timeout_raises_in_wait(group, world):
    short = group.new_group(timeout=timedelta(seconds=0.5))
    x = torch.ones(3)
    late = r"all_reduce of group .* timeout after 0\.5 s; check that every rank calls it"
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=late):
            group.all_reduce(x, group=short)
        work = group.all_reduce(y := torch.ones(2), group=short, async_op=True)
        with pytest.raises(RuntimeError, match=late):
            work.wait()
    group.barrier()
    if world.rank:
        for z in (x, y := torch.ones(2)):
            group.all_reduce(z, group=short, async_op=True).wait(timedelta(seconds=30))
    else:
        work.wait(timedelta(seconds=30))  # what was given up goes on, and completes once everybody has come
    assert x.tolist() == [world.size] * 3 and y.tolist() == [world.size] * 2


@RANKS
def test_group_memory_is_reused_after_its_tensors_are_deleted(group, world):
    backend = group.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    x = backend.allocate_tensor(5000, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (x.shape, x.dtype) == ((5000,), torch.bfloat16)
    view, address = x[10:20].fill_(1), x.data_ptr()
    del x
    other = backend.allocate_tensor(5000, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert other.data_ptr() != address  # the view needs it
    other.fill_(world.rank)
    group.all_reduce(other)
    assert view.tolist() == [1] * 10 and other.unique().tolist() == [sum(range(world.size))]
    del view
    assert backend.allocate_tensor(4990, dtype=torch.bfloat16, device=torch.device("cpu")).data_ptr() == address


@RANKS
def test_invalid_calls_suggest_the_fix(group, world):
    with pytest.raises(ValueError, match=f"1 output tensors for {world.size} ranks; give one for each"):
        group.all_gather([torch.empty(2)], torch.empty(2))
    with pytest.raises(ValueError, match=r"one block per rank"):
        group.all_gather_into_tensor(torch.empty(world.size * 3), torch.empty(2))
    with pytest.raises(RuntimeError, match="does not support merge_remote_group; start all ranks with one mpirun"):
        group.group.WORLD.merge_remote_group(None, 2)
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.split_group"):
        group.group.WORLD.split_group([0])


class Float8(torch.Tensor):
    """An 8-bit tensor with its scale, built like torchao's."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)

    def __init__(self, data, scale):
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError(f"{function} of a Float8")


class Opaque(torch.Tensor):
    """A wrapper that does not reveal the tensors it wraps."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError(f"{function} of an Opaque")


@RANKS
def test_tensors_that_wrap_others_are_communicated_by_their_inner_tensors(group, world):
    from torch.testing._internal.two_tensor import TwoTensor

    def two(rank: int, *shape: int) -> TwoTensor:
        return TwoTensor(torch.full(shape, rank + 1.0), torch.full(shape, 10.0 * rank))

    def equal(got: TwoTensor, a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(got.a, a) and torch.equal(got.b, b)

    size, rank = world.size, world.rank
    every = [two(r, 3) for r in range(size)]
    total_a, total_b = sum(t.a for t in every), sum(t.b for t in every)
    for communicate in (group.all_reduce, lambda x: group.all_reduce(x, async_op=True).wait(), world.all_reduce):
        x = two(rank, 3)
        communicate(x)
        assert equal(x, total_a, total_b)
    world_work = world.all_reduce(x := two(rank, 3), async_op=True)
    world_work.wait()
    assert world_work.done() and equal(x, total_a, total_b)
    for communicate in (group.broadcast, world.broadcast):
        x = two(rank, 3)
        communicate(x, 1)
        assert equal(x, every[1].a, every[1].b)
    listed = [two(9, 3) for _ in range(size)]
    group.all_gather(listed, two(rank, 3))
    assert all(equal(got, expected.a, expected.b) for got, expected in zip(listed, every, strict=True))
    for communicate in (group.all_gather_into_tensor, world.all_gather):
        whole = two(9, 3 * size)
        communicate(whole, two(rank, 3))
        assert equal(whole, torch.cat([t.a for t in every]), torch.cat([t.b for t in every]))
    for communicate in (group.reduce_scatter_tensor, world.reduce_scatter):
        out = two(9, 2)
        communicate(out, two(rank, 2 * size))
        assert equal(out, total_a[:2], total_b[:2])
    for communicate in (group.all_to_all_single, world.all_to_all):
        out = two(9, size)
        communicate(out, two(rank, size))
        assert equal(out, torch.arange(size) + 1.0, torch.arange(size) * 10.0)
    if rank == 0:
        group.send(two(5, 3), 1)
        world.gather(whole, two(rank, 3), 0)
        assert equal(whole, torch.cat([t.a for t in every]), torch.cat([t.b for t in every]))
    else:
        if rank == 1:
            group.recv(x, 0)
            assert equal(x, torch.full((3,), 6.0), torch.full((3,), 50.0))
        world.gather(None, two(rank, 3), 0)

    low = Float8(torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn), torch.tensor(rank + 0.5))
    group.broadcast(low, 1)
    assert low.data8.float().eq(2).all() and low.scale == 1.5
    group.all_reduce(torch.distributed._functional_collectives.all_reduce(x := torch.ones(2), "sum", group.group.WORLD))
    for communicate in (group.all_reduce, world.all_reduce):
        with pytest.raises(ValueError if communicate is group.all_reduce else InputError) as refused:
            communicate(Opaque(torch.ones(3)))
        assert "a tensor of class Opaque has no memory of its own" in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"must wrap the same number of tensors, not Tensor .1., TwoTensor .2."):
        group.all_gather_into_tensor(torch.empty(3 * size), two(rank, 3))


@RANKS
def test_fsdp2_trains_parameters_with_all_gather_extensions(group, world):
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.two_tensor import TwoTensor

    class Gathered(TwoTensor):
        """A parameter whose halves FSDP gathers one by one."""

        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, policy):
            return (self.a, self.b), None

        def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
            return None if out is not None else (Gathered(*outputs), outputs)

    torch.manual_seed(0)
    weight, x = torch.randn(4 * world.size, 6), torch.randn(world.size, 5, 6)
    model = torch.nn.Linear(6, 4 * world.size, bias=False)
    model.weight = torch.nn.Parameter(Gathered(weight.clone(), weight.clone()))
    fully_shard(model)
    model(x[world.rank]).square().mean().backward()
    plain = torch.nn.Linear(6, 4 * world.size, bias=False)
    plain.weight = torch.nn.Parameter(weight.clone())
    torch.stack([plain(x[r]).square().mean() for r in range(world.size)]).mean().backward()
    got = model.weight.grad.to_local()
    rows = slice(4 * world.rank, 4 * world.rank + 4)
    torch.testing.assert_close(got.a if isinstance(got, TwoTensor) else got, plain.weight.grad[rows])
    whole = model.weight.full_tensor()
    assert torch.equal(whole.a, weight) and torch.equal(whole.b, weight)
