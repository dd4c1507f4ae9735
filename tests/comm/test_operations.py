"""Every operation with data of every type, size and place, compared with one process."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest
import torch
from reference import DTYPES, assert_equal, expected_reduction, is_defined, values

import mpitrain
from mpitrain.comm.memory import buffers
from mpitrain.comm.runtime.executor import OPERATIONS
from mpitrain.errors import InputError

ALL = pytest.mark.ranks(1, 2, 3, 8)
MANY = pytest.mark.ranks(2, 3)
NUMELS = (0, 1, 3, 1001)


def _algorithms(world, *names):
    shared = ("shared",) if world.num_nodes == 1 else ()
    return ("auto", "mpi", *names, *shared)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=ALL if dtype == torch.float32 else MANY) for dtype in DTYPES],
    ids=lambda d: str(d)[6:],
)
def test_all_reduce_of_every_type_and_operation(comm, device, dtype):
    for numel in NUMELS:
        for op in OPERATIONS:
            if not is_defined(op, dtype):
                continue
            expected = expected_reduction(op, [values(numel, dtype, r) for r in range(comm.size)])
            x = values(numel, dtype, comm.rank).to(device)
            comm.all_reduce(x, op)
            assert_equal(x, expected, comm.size)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in arena"])
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=ALL),
        *(pytest.param(dtype, marks=pytest.mark.ranks(2, 3)) for dtype in (torch.bfloat16, torch.int32)),
    ],
    ids=lambda d: str(d)[6:],
)
def test_all_reduce_by_every_algorithm(comm, device, dtype, inside):
    arena = comm.arena(300_001, dtype, device)
    long = "avg" if is_defined("avg", dtype) else "sum"  # one is enough: how vectors are cut depends on no operation
    for numel in (1, 7, 1001, 300_001):
        for op in ("sum", "max", "avg") if numel < 300_001 else (long,):
            if not is_defined(op, dtype):
                continue
            expected = expected_reduction(op, [values(numel, dtype, r) for r in range(comm.size)])
            for algorithm in _algorithms(comm, "ring", "tree", "halving", "two_level"):
                x = values(numel, dtype, comm.rank).to(device)
                x = arena.view(0, (numel,)).copy_(x) if inside else x
                comm.all_reduce(x, op, algorithm)
                assert_equal(x, expected, comm.size)
    arena.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8], ids=lambda d: str(d)[6:])
def test_sums_of_small_integers_wrap_as_in_torch_with_every_algorithm(comm, device, dtype):
    limits, numel = torch.iinfo(dtype), 301 * comm.size
    contributions = [
        torch.randint(limits.min, limits.max + 1, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(comm.size)
    ]
    local_values = contributions[comm.rank]
    total = torch.stack(contributions).sum(0, dtype=dtype)
    assert not torch.equal(total.long(), torch.stack(contributions).sum(0)), "nothing wraps"
    average = torch.div(total, comm.size, rounding_mode="trunc")
    arena = comm.arena(numel, dtype, device)
    for (op, expected), inside in product((("sum", total), ("avg", average)), (False, True)):
        x = arena.view(0, (numel,)) if inside else torch.empty(numel, dtype=dtype, device=device)
        for algorithm in _algorithms(comm, "ring", "tree", "halving", "two_level"):
            comm.all_reduce(x.copy_(local_values), op, algorithm)
            assert_equal(x, expected)
        for algorithm in ("auto", "mpi", "tree"):
            comm.reduce(x.copy_(local_values), 1, op, algorithm)
            assert_equal(x, expected if comm.rank == 1 else local_values)
        for algorithm in ("auto", "mpi", "ring", "halving", "pairwise", "two_level"):
            out = torch.empty(301, dtype=dtype, device=device)
            comm.reduce_scatter(out, x.copy_(local_values), op, algorithm)
            assert_equal(out, expected.chunk(comm.size)[comm.rank])
    arena.free()


@pytest.mark.ranks(1, 2, 3)
def test_integer_averages_are_rounded_toward_zero(comm, device):
    for dtype in (torch.int64, torch.int32):
        large = [2**60 + 1, -(2**60) - 1] if dtype == torch.int64 else []  # a float would not hold them
        whole = torch.tensor([-7, -2, -1, 0, 1, 2, 7, *large], dtype=dtype)
        x = (whole + comm.rank).to(device)
        comm.all_reduce(x, "avg")
        total = whole * comm.size + sum(range(comm.size))
        assert_equal(x, torch.div(total, comm.size, rounding_mode="trunc"))


@MANY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_reproducible_sums_have_the_same_bits_with_every_algorithm(comm, device, dtype):
    arena = comm.arena(70_001, dtype, device)
    for op in ("sum", "avg"):
        results = []
        for algorithm in _algorithms(comm, "ring", "tree", "halving", "two_level"):
            for inside in (False, True):
                x = values(70_001, dtype, comm.rank).to(device)
                x = arena.view(0, (70_001,)).copy_(x) if inside else x
                comm.all_reduce(x, op, algorithm, reproducible=True)
                results.append(x.clone())
        assert all(torch.equal(results[0], other) for other in results)
        whole = torch.cat([results[0], results[0].new_zeros(-70_001 % comm.size)])
        block = torch.empty(whole.numel() // comm.size, dtype=dtype, device=device)
        contribution = torch.cat(
            [values(70_001, dtype, comm.rank).to(device), results[0].new_zeros(-70_001 % comm.size)]
        )
        comm.reduce_scatter(block, contribution, op, reproducible=True)
        assert torch.equal(block, whole.chunk(comm.size)[comm.rank])
    arena.free()


@pytest.mark.ranks(4, 8)
def test_reproducible_sums_continue_the_tree_of_sums_within_a_rank(world):
    leaves = [values(5000, torch.float32, leaf) for leaf in range(8)]
    level = leaves
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    each = 8 // world.size
    own_sums = leaves[world.rank * each : (world.rank + 1) * each]
    while len(own_sums) > 1:
        own_sums = [a + b for a, b in zip(own_sums[::2], own_sums[1::2], strict=True)]
    x = own_sums[0].clone()
    world.all_reduce(x, reproducible=True)
    assert torch.equal(x, level[0])


@ALL
def test_reduce_changes_only_the_root(comm, device):
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
        arena = comm.arena(5000, dtype, device)
        for numel in (1, 5000):
            for root in {0, comm.size - 1}:
                for algorithm in ("auto", "mpi", "tree", "shared"):
                    x = arena.view(0, (numel,)).copy_(values(numel, dtype, comm.rank))
                    if algorithm == "shared" and (comm.size == 1 or comm.num_nodes > 1):
                        continue
                    comm.reduce(x, root, "sum", algorithm)
                    all_values = [values(numel, dtype, r) for r in range(comm.size)]
                    expected = expected_reduction("sum", all_values) if comm.rank == root else all_values[comm.rank]
                    assert_equal(x, expected, comm.size)
        arena.free()


@ALL
def test_broadcast_by_every_algorithm(comm, device):
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        arena = comm.arena(5000, dtype, device)
        for numel in (0, 1, 5000):
            for root in {0, comm.size // 2, comm.size - 1}:
                for algorithm in ("auto", "mpi", "tree", "shared"):
                    if algorithm == "shared" and (comm.size == 1 or comm.num_nodes > 1):
                        continue
                    x = arena.view(0, (numel,)).copy_(values(numel, dtype, comm.rank))
                    comm.broadcast(x, root, algorithm)
                    assert_equal(x, values(numel, dtype, root))
        arena.free()


@ALL
def test_all_gather_and_reduce_scatter_by_every_algorithm(comm, device):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        arena = comm.arena(4001 * comm.size, dtype, device)
        for each in (0, 1, 4001):
            for algorithm in _algorithms(comm, "ring", "halving", "two_level"):
                if algorithm == "shared" and (comm.size == 1 or each == 0):
                    continue
                all_values = torch.cat([values(each, dtype, r) for r in range(comm.size)])
                x = arena.view(0, (each,)).copy_(values(each, dtype, comm.rank))
                out = torch.empty(each * comm.size, dtype=dtype, device=device)
                comm.all_gather(out, x, algorithm)
                assert_equal(out, all_values)

                whole = arena.view(0, (each * comm.size,)).zero_()  # in place: x is a part of out
                own_block = whole[each * comm.rank : each * (comm.rank + 1)].copy_(values(each, dtype, comm.rank))
                comm.all_gather(whole, own_block, algorithm)
                assert_equal(whole, all_values)

                contributions = [values(each * comm.size, dtype, r) for r in range(comm.size)]
                expected = expected_reduction("sum", contributions)[each * comm.rank : each * (comm.rank + 1)]
                x = arena.view(0, (each * comm.size,)).copy_(contributions[comm.rank])
                out = torch.empty(each, dtype=dtype, device=device)
                comm.reduce_scatter(out, x, "sum", algorithm)
                assert_equal(out, expected, comm.size)
                assert_equal(x, contributions[comm.rank])  # untouched
                own_block = x[each * comm.rank : each * (comm.rank + 1)]
                comm.reduce_scatter(own_block, x, "sum", algorithm)
                assert_equal(own_block, expected, comm.size)
        arena.free()


@ALL
def test_uneven_blocks(comm, device):
    counts = [(7 * r + 3) % 5 for r in range(comm.size)]  # some ranks have none
    first = sum(counts[: comm.rank])
    for algorithm in ("auto", "mpi", "ring", "halving"):
        out = torch.empty(sum(counts), device=device)
        x = values(counts[comm.rank], torch.float32, comm.rank).to(device)
        comm.all_gather(out, x, algorithm, counts=counts)
        assert_equal(out, torch.cat([values(n, torch.float32, r) for r, n in enumerate(counts)]))
        contributions = [values(sum(counts), torch.float32, r) for r in range(comm.size)]
        out = torch.empty(counts[comm.rank], device=device)
        comm.reduce_scatter(out, contributions[comm.rank].to(device), "sum", algorithm, counts=counts)
        assert_equal(out, expected_reduction("sum", contributions)[first : first + counts[comm.rank]], comm.size)

    table = [[(3 * a + 5 * b) % 4 for b in range(comm.size)] for a in range(comm.size)]  # elements that a sends to b
    sent, received = table[comm.rank], [row[comm.rank] for row in table]
    x = values(sum(sent), torch.int64, comm.rank).to(device)
    out = torch.empty(sum(received), dtype=torch.int64, device=device)
    comm.all_to_all(out, x, in_counts=sent, out_counts=received)
    blocks = [values(sum(row), torch.int64, r).split(row)[comm.rank] for r, row in enumerate(table)]
    assert_equal(out, torch.cat(blocks))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in arena"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=lambda d: str(d)[6:])
def test_very_uneven_blocks_are_reduced_and_gathered(comm, device, dtype, inside):
    large = 65537  # elements: such a block is cut into chunks, most of which are empty in a small one
    arena = comm.arena(large * comm.size, dtype, device)
    for small in (0, 1, 5):
        for odd in range(comm.size):
            counts = [small if rank == odd else large for rank in range(comm.size)]
            first, numel, length = sum(counts[: comm.rank]), sum(counts), counts[comm.rank]
            contributions = [values(numel, dtype, rank) for rank in range(comm.size)]
            x = arena.view(0, (numel,)) if inside else torch.empty(numel, dtype=dtype, device=device)
            x.copy_(contributions[comm.rank])
            algorithms = (
                _algorithms(comm, "ring", "halving", "pairwise", "two_level") if inside and small else ("auto",)
            )
            for op, algorithm in product(("sum", "avg"), algorithms):
                out = torch.empty(length, dtype=dtype, device=device)
                comm.reduce_scatter(out, x, op, algorithm, counts=counts)
                assert_equal(out, expected_reduction(op, contributions)[first : first + length], comm.size)
            x[first : first + length].copy_(values(length, dtype, comm.rank))
            comm.all_gather(x, x[first : first + length], counts=counts)
            assert_equal(x, torch.cat([values(n, dtype, rank) for rank, n in enumerate(counts)]))
    arena.free()


@ALL
def test_gather_scatter_and_all_to_all(comm, device):
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        for each in (0, 1, 501):
            whole = torch.cat([values(each, dtype, r) for r in range(comm.size)])
            for root in {0, comm.size - 1}:
                at_root = comm.rank == root
                out = torch.empty(each * comm.size, dtype=dtype, device=device) if at_root else None
                comm.gather(out, values(each, dtype, comm.rank).to(device), root)
                if out is not None:
                    assert_equal(out, whole)
                block = torch.empty(each, dtype=dtype, device=device)
                comm.scatter(block, whole.to(device) if at_root else None, root)
                assert_equal(block, values(each, dtype, comm.rank))
            x = values(each * comm.size, dtype, comm.rank).to(device)
            out = torch.empty_like(x)
            comm.all_to_all(out, x)
            blocks = [values(each * comm.size, dtype, r).chunk(comm.size)[comm.rank] for r in range(comm.size)]
            assert_equal(out, torch.cat(blocks) if each else torch.empty(0, dtype=dtype))


@MANY
@pytest.mark.parametrize("numel", [1, 1000, 100_000])
def test_all_gather_in_place_on_some_ranks_only(comm, device, numel):
    for counts in (None, [numel + rank for rank in range(comm.size)]):
        blocks = counts or [numel] * comm.size
        out, first = torch.zeros(sum(blocks), device=device), sum(blocks[: comm.rank])
        own_block = torch.full((blocks[comm.rank],), comm.rank + 1.0, device=device)
        if comm.rank != 1:
            own_block = out[first : first + blocks[comm.rank]].copy_(own_block)
        for _ in range(2):
            comm.all_gather(out, own_block, "mpi", counts=counts)
            assert torch.equal(out.cpu(), torch.repeat_interleave(torch.arange(comm.size) + 1.0, torch.tensor(blocks)))


@MANY
def test_data_too_long_for_one_mpi_call_is_split(world, monkeypatch):
    modules = [module for name, module in sys.modules.items() if name.startswith("mpitrain.comm.")]
    for module in modules:
        if hasattr(module, "LARGEST_COUNT"):  # 2^30 bytes or elements; here 1,000
            monkeypatch.setattr(module, "LARGEST_COUNT", 1000)
    assert len(buffers.pieces(2501)) == 3
    comm, size, rank, each = world.split(0), world.size, world.rank, 2501
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        blocks = [values(each, dtype, r) for r in range(size)]
        wholes = [values(each * size, dtype, r) for r in range(size)]
        total, own_slice = expected_reduction("sum", wholes), slice(rank * each, (rank + 1) * each)
        for algorithm in _algorithms(world, "ring", "tree", "halving", "two_level"):
            x = wholes[rank].clone()
            comm.all_reduce(x, "sum", algorithm)
            assert_equal(x, total, size)
        for algorithm in ("auto", "mpi", "tree", "shared"):
            x = wholes[rank].clone()
            comm.reduce(x, 0, "sum", algorithm)
            assert_equal(x, total if rank == 0 else wholes[rank], size)
            x = wholes[rank].clone()
            comm.broadcast(x, size - 1, algorithm)
            assert_equal(x, wholes[-1])
        x, out = torch.empty(each, dtype=dtype), torch.empty(each * size, dtype=dtype)
        for algorithm in _algorithms(world, "ring", "halving", "two_level"):
            comm.reduce_scatter(x, wholes[rank], "sum", algorithm)
            assert_equal(x, total[own_slice], size)
        for algorithm in _algorithms(world, "ring", "halving"):
            comm.all_gather(out, blocks[rank], algorithm)
            assert_equal(out, torch.cat(blocks))
        out = torch.empty(each * size, dtype=dtype)
        comm.gather(out if rank == 0 else None, blocks[rank], 0)
        if rank == 0:
            assert_equal(out, torch.cat(blocks))
        comm.scatter(x, wholes[0] if rank == 0 else None, 0)
        assert_equal(x, wholes[0][own_slice])
        comm.all_to_all(out, wholes[rank])
        assert_equal(out, torch.cat([whole[own_slice] for whole in wholes]))
        work = comm.irecv(x, (rank - 1) % size)
        comm.send(blocks[rank], (rank + 1) % size)
        work.wait()
        assert_equal(x, blocks[rank - 1])
    comm.free()


@MANY
def test_messages_without_header_match_only_each_other(comm, device):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    expected = [torch.arange(n, dtype=torch.float32) + 100 * i for i, n in enumerate((3, 0, 70_000, 3))]
    received = [torch.empty(len(x), device=device) for x in expected]
    kinds = [True, False, False, False]  # whether there is a header; all under one tag
    works = [comm.irecv(y, left, 1, header=kind) for y, kind in reversed(list(zip(received, kinds, strict=True))[2:])]
    works += [comm.irecv(y, left, 1, header=kind) for y, kind in zip(received[:2], kinds, strict=False)]
    works += [comm.isend((expected[i] + comm.rank).to(device), right, 1, header=kinds[i]) for i in (0, 1, 3, 2)]
    for work in works:
        work.wait(timeout=30)
    for y, x in zip(received, expected, strict=True):
        assert_equal(y, x + left)
    with pytest.raises(InputError, match="tag 16 is out of range; use one from 0 to 15"):
        comm.isend(received[0], right, 16, header=False)
    with pytest.raises(InputError, match="there is no rank"):
        comm.irecv(received[0], mpitrain.ANY_SOURCE, header=False)


@MANY
def test_messages_arrive_where_they_are_sent(comm, device):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = torch.arange(10.0, device=device) + comm.rank, torch.empty(10, device=device)
    empty = torch.empty(0, device=device)
    works = [
        comm.isend(x, right, tag=5),
        comm.irecv(y, left, tag=5),
        comm.isend(empty, right),
        comm.irecv(empty, left),
    ]
    for work in works:
        work.wait(timeout=30)
        assert work.done()
    assert_equal(y, torch.arange(10.0) + left)
    if comm.rank == 0:
        for _ in range(comm.size - 1):
            received = np.zeros(1, dtype=np.int64)
            comm.recv(received, mpitrain.ANY_SOURCE)
            assert 0 < received[0] < comm.size
    else:
        comm.send(np.array([comm.rank]), 0)


@MANY
def test_asynchronous_operations_complete_in_the_order_of_submission(comm, device):
    tensors = [torch.full((1000 * (i + 1),), float(comm.rank + i), device=device) for i in range(6)]
    works = [comm.all_reduce(t, async_op=True) for t in tensors]
    works.append(comm.barrier(async_op=True))
    comm.all_reduce(torch.ones(3, device=device))  # a blocking one in between
    works[-1].wait()
    for i, (work, t) in enumerate(zip(works, tensors, strict=False)):
        work.wait(timeout=30)
        assert t.eq(sum(r + i for r in range(comm.size))).all() and work.done()


@MANY
def test_groups_reduce_independently(world):
    half = world.split(world.rank % 2, key=-world.rank)
    x = torch.tensor([float(world.rank)])
    half.all_reduce(x)
    members = [r for r in range(world.size) if r % 2 == world.rank % 2]
    assert x.item() == sum(members) and half.world_ranks == tuple(reversed(members))
    half.free()

    outer = world.subgroup([world.size - 1, 0])
    assert (outer is None) == (world.rank not in (0, world.size - 1))
    if outer is not None:
        x = torch.tensor([float(world.rank)])
        outer.broadcast(x, 0)
        assert x.item() == world.size - 1
        outer.free()
    assert (world.split(None if world.rank == 0 else 7) is None) == (world.rank == 0)


@MANY
def test_a_group_sums_in_an_arena_of_the_whole_world(world):
    arena = world.arena(50_000)
    pair = world.split(world.rank // 2)
    arena.tensor.fill_(world.rank + 1.0)
    pair.all_reduce(arena.tensor, algorithm="shared")
    assert arena.tensor.eq(sum(r + 1 for r in pair.world_ranks)).all()
    pair.free()
    arena.free()


@ALL
def test_numpy_arrays_and_read_only_inputs(world):
    x = np.arange(5, dtype=np.float64) + world.rank
    world.all_reduce(x, "max")
    assert (x == np.arange(5) + world.size - 1).all()
    frozen = np.arange(3)
    frozen.flags.writeable = False
    out = np.empty(3 * world.size, dtype=frozen.dtype)
    world.all_gather(out, frozen)
    assert (out == np.tile(np.arange(3), world.size)).all()
    with pytest.raises(InputError, match="read-only"):
        world.all_reduce(frozen)


class ForeignArray:
    """An array of another library, with the protocols by which arrays are exchanged."""

    def __init__(self, array: object, versions: bool = True) -> None:
        self.array, self.versions = array, versions

    def __dlpack__(self, **options: object) -> object:
        if "max_version" in options and not self.versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class ForeignDeviceArray(ForeignArray):
    """An array like CuPy's, with both protocols; torch can use the first one only with CUDA."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        place = self.array.data_ptr(), False
        return {"shape": tuple(self.array.shape), "typestr": "<f4", "data": place, "version": 3, "stream": 1}


class Broken:
    def __init__(self, interface: object) -> None:
        self.interface = interface

    @property
    def __cuda_array_interface__(self) -> object:
        if isinstance(self.interface, Exception):
            raise self.interface
        return self.interface


@pytest.mark.ranks(1, 2)
def test_cupy_like_arrays_are_processed_in_place(comm, device):
    x = torch.full((5,), comm.rank + 1.0, device=device)
    comm.all_reduce(ForeignDeviceArray(x))
    assert_equal(x, torch.full((5,), comm.size * (comm.size + 1) / 2))
    out = torch.empty(5 * comm.size, device=device)
    comm.all_gather(ForeignDeviceArray(out), ForeignDeviceArray(x))
    assert_equal(out, torch.full((5 * comm.size,), comm.size * (comm.size + 1) / 2))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "interface",
    [
        {},
        "text",
        RuntimeError("its library\nfailed"),
        {"shape": (3,), "typestr": "<f4", "data": (8, False), "version": 3},
    ],
    ids=["empty", "no dictionary", "raises", "no device"],
)
def test_a_broken_cuda_array_interface_raises_one_line(world, interface):
    if torch.cuda.is_available() and isinstance(interface, dict) and interface:
        pytest.skip("an address that CUDA might take")
    with pytest.raises(InputError, match="__cuda_array_interface__ of a Broken cannot be used") as refused:
        world.all_reduce(Broken(interface))
    assert "\n" not in str(refused.value)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["read-only", "pyarrow", "without versions"])
def test_read_only_arrays_of_other_libraries_are_never_written(world, kind):
    if kind == "read-only" and np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("NumPy, which stands in for JAX here, lends no read-only arrays over DLPack before 2.1")
    local_values = np.arange(3.0) + world.rank
    if kind == "pyarrow":
        array = pytest.importorskip("pyarrow").array(local_values)
    else:  # JAX's arrays are immutable and say so
        local_values.flags.writeable = kind != "read-only"
        array = ForeignArray(local_values, versions=kind == "read-only")
    out = np.empty(3 * world.size)
    world.all_gather(out, array)
    assert (out == np.concatenate([np.arange(3.0) + rank for rank in range(world.size)])).all()
    refused = pytest.raises(InputError, match="but the result goes into it; pass")
    calls = [world.all_reduce, lambda x: world.all_gather(x, np.ones(3)), lambda x: world.scatter(x, None, 0)]
    calls += [lambda x: world.reduce_scatter(x, np.ones(3 * world.size)), lambda x: world.all_to_all(x, np.ones(3))]
    for call in [*calls, lambda x: world.irecv(x, 0)]:
        with refused:
            call(array)
    if world.rank == 0:
        with refused:
            world.gather(array, np.ones(3), 0)
    assert (np.from_dlpack(array) == np.arange(3.0) + world.rank).all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.all_reduce(torch.ones(4, 4).t()), "not contiguous; pass x.contiguous"),
        (lambda w: w.all_reduce(np.ones((4, 4))[:, 1]), "not contiguous; pass numpy.ascontiguousarray"),
        (lambda w: w.all_reduce(torch.ones(3, dtype=torch.complex64).conj()), "resolve_conj"),
        (lambda w: w.all_reduce(torch.ones(3).to_sparse()), "call .to_dense"),
        (lambda w: w.all_reduce(torch.ones(3, device="meta")), "has no data to communicate"),
        (lambda w: w.all_reduce([1.0]), "a list cannot be communicated"),
        (lambda w: w.all_reduce(np.array(["a"])), "dtype <U1 cannot be communicated"),
        (lambda w: w.all_reduce(torch.ones(3), "mean"), "there is no reduction 'mean'"),
        (lambda w: w.all_reduce(torch.ones(3, dtype=torch.bool), "avg"), "convert to float32 first"),
        (lambda w: w.all_reduce(torch.ones(3, dtype=torch.complex64), "max"), "no order"),
        (lambda w: w.broadcast(torch.ones(3), 9), "there is no rank 9"),
        (lambda w: w.all_gather(torch.ones(3), torch.ones(3).double()), "make them the same"),
        (lambda w: w.all_gather(torch.ones(2 * w.size), torch.ones(3)), r"rank [01]'s block of out has 2"),
        (lambda w: w.all_gather(torch.ones(3), torch.ones(3), counts=[9] * w.size), "sum to the 3 elements of out"),
        (lambda w: w.subgroup([0, 0]), "ranks must be different"),
        (lambda w: w.arena(-1), "use 0 or more"),
    ],
)
def test_invalid_arguments_are_refused_by_name(world, call, message):
    with pytest.raises(InputError, match=message):
        call(world)
