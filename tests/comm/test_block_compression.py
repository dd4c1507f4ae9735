"""Compression to blocks of 8-bit and 4-bit integers: error bounds, bytes, and the levels of nodes and ranks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from comm.test_compression import gradient, is_same_on_all_ranks

from mpitrain.comm import Communicator
from mpitrain.comm.compression import Int4, Int8, TopK
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology
from mpitrain.errors import InputError

ALL, MANY = pytest.mark.ranks(1, 2, 3, 4), pytest.mark.ranks(2, 3, 4)
SIZES = (0, 1, 7, 256, 1000, 70_001)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_kind = pytest.mark.parametrize("kind", [Int8, Int4])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def half_scales(kind, x: torch.Tensor, parts: int = 1, block: int = 256) -> torch.Tensor:
    """Return half the scale of each element's block, if each part of x begins a new block."""
    result, length = torch.zeros(x.numel()), -(-x.numel() // parts)
    for lo in range(0, x.numel(), length or 1):
        for at in range(lo, min(lo + length, x.numel()), block):
            end = min(at + block, lo + length, x.numel())
            result[at:end] = x[at:end].abs().max().float() / kind.most / 2
    return result


def tolerance(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """Return the error of rounding the result to its dtype, and of fp32 arithmetic."""
    return values.abs().float() * max(torch.finfo(dtype).eps / 2, 1e-6) + 1e-6


@ALL
@every_kind
@every_dtype
def test_a_gathered_element_is_wrong_by_at_most_half_the_scale_of_its_block(world, kind, dtype):
    compressed = kind()
    for numel in SIZES:
        all_ranks = [gradient(numel, r, dtype=dtype) * 10.0 ** (r - 1) for r in range(world.size)]
        out = torch.full((world.size * numel,), math.nan, dtype=dtype)
        work = world.all_gather(out, all_ranks[world.rank], async_op=numel == 7, compression=compressed)
        if work is not None:
            work.wait()
        for x, got in zip(all_ranks, out.split(numel or 1), strict=False):
            wrong = (got.double() - x.double()).abs()
            assert (wrong <= half_scales(kind, x) + tolerance(dtype, x)).all()
            assert world.size == 1 or numel < 7 or wrong.max() > 0.5 * half_scales(kind, x).max()  # it is rounded
            assert world.size > 1 or torch.equal(got, x)
        assert is_same_on_all_ranks(world, out)


def assert_sum(kind, x: torch.Tensor, everyone: list[torch.Tensor], parts: int, op: str) -> None:
    """Check a sum or average of the ranks' vectors against the bound of two roundings."""
    exact = sum(v.double() for v in everyone)
    bound = sum(half_scales(kind, v, parts) for v in everyone)
    if op == "avg":
        exact, bound = exact / len(everyone), bound / len(everyone)
    numel = x.numel()
    largest = half_scales(kind, exact.abs().float() + bound, parts)  # what the scale of the sum can be
    wrong = (x.double() - exact).abs()
    assert (wrong <= bound + largest + tolerance(x.dtype, exact)).all()
    if numel > 256:
        assert wrong.max() > 0.2 * bound.max()


@MANY
@every_kind
@pytest.mark.parametrize("op", ["sum", "avg"])
@every_dtype
def test_a_sum_is_wrong_by_at_most_its_two_roundings(world, kind, op, dtype):
    for error_feedback in (False, True):
        compressed = kind(error_feedback=error_feedback)
        for numel in SIZES:
            everyone = [gradient(numel, r, dtype=dtype) for r in range(world.size)]
            x = everyone[world.rank].clone()
            world.all_reduce(x, op, compression=compressed)
            assert is_same_on_all_ranks(world, x)
            assert_sum(kind, x, everyone, world.size, op)


@MANY
@every_kind
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_others_are_not(world, kind, bad):
    compressed = kind(error_feedback=True)
    numel = 1024 * world.size
    for _ in range(2):
        x = gradient(numel, world.rank)
        if world.rank == world.size - 1:
            x[300] = bad
        x[512:768] = 0.0
        world.all_reduce(x, compression=compressed.bucket("b"))
        assert x[256:512].isnan().all() and x[:256].isfinite().all() and x[768:].isfinite().all()
        assert x[512:768].eq(0).all()  # a block of zeros stays zero
        assert all(error.isfinite().all() for error in compressed.state_dict().values())
    out = torch.empty(numel * world.size)
    x = gradient(numel, world.rank)
    x[300] = bad
    x[512:768] = 1e-45  # its reciprocal overflows
    world.all_gather(out, x, compression=compressed)
    for theirs in out.split(numel):
        assert theirs[256:512].isnan().all() and theirs[512:768].eq(0).all()
        assert theirs[:256].isfinite().all() and theirs[768:].isfinite().all()


@MANY
@every_kind
def test_the_error_memory_is_what_the_sums_missed(world, kind):
    compressed, numel = kind(error_feedback=True), 900 * world.size
    missing = []
    for op, factor in (("sum", 1), ("avg", world.size)):
        compressed.reset()
        total, whole = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for step in range(20):
            x = gradient(numel, world.rank, step)
            whole += sum(gradient(numel, r, step).double() for r in range(world.size))
            world.all_reduce(x, op, compression=compressed.bucket("b"))
            total += x.double() * factor
            missing.append((total - whole).norm() / whole.norm())
        error = compressed.state_dict()["b/error"].double()
        world.all_reduce(error)
        left = error.view(world.size, 1024)[:, :900].reshape(-1)  # each part is padded to whole blocks
        torch.testing.assert_close(total + left, whole, rtol=1e-5, atol=1e-3)
        assert missing[-1] < 0.5 * missing[0]  # what is missing does not grow with the steps


def on_two_nodes(world, monkeypatch, nodes=(0, 0, 1, 1)) -> Communicator:
    """Return a communicator that takes the ranks for those of two nodes."""
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, debug=False))
    topology = Topology(world.rank, nodes, world.world_ranks)
    return Communicator(MPI.Intracomm(world._comm.Dup()), topology, world.process, "axis")


@pytest.mark.ranks(4)
@every_kind
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_a_node_sums_in_full_precision_and_only_other_nodes_get_rounded_values(world, monkeypatch, kind, nodes, dtype):
    comm, compressed = on_two_nodes(world, monkeypatch, nodes), kind(error_feedback=False)
    for numel in (1, 1000, 4096, 70_001):
        everyone = [gradient(numel, r, dtype=dtype) for r in range(4)]
        of_nodes = [sum(everyone[r].float() for r in range(4) if nodes[r] == node).to(dtype) for node in (0, 1)]
        for background in (False, True):
            arena = comm.arena(numel, dtype)
            x = arena.tensor.copy_(everyone[world.rank]) if background else everyone[world.rank].clone()
            work = comm.all_reduce(x, async_op=background, compression=compressed)
            if work is not None:
                work.wait()
            assert is_same_on_all_ranks(world, x)
            half = -(-numel // 2)  # a slice for each rank of a node
            for lo in range(0, numel, half):
                assert_sum(kind, x[lo : lo + half], [v[lo : lo + half] for v in of_nodes], 2, "sum")
            arena.free()
    comm.free()


@pytest.mark.ranks(4)
def test_a_node_is_not_compressed_where_nodes_differ_in_size(world, monkeypatch):
    comm = on_two_nodes(world, monkeypatch, (0, 0, 0, 1))
    everyone = [gradient(3000, r) for r in range(4)]
    x = everyone[world.rank].clone()
    comm.all_reduce(x, compression=Int8())
    assert is_same_on_all_ranks(world, x)
    assert_sum(Int8, x, everyone, 4, "sum")
    comm.free()


@MANY
@every_kind
def test_a_rank_that_needs_only_its_block_gets_sums_that_are_rounded_once(world, kind):
    compressed, numel = kind(), 700 * world.size
    everyone = [gradient(numel, r) for r in range(world.size)]
    own = slice(700 * world.rank, 700 * (world.rank + 1))
    x = everyone[world.rank].clone()
    world.all_reduce(x, compression=dataclasses.replace(compressed.bucket("b"), whole=False))
    bound = sum(half_scales(kind, v, world.size) for v in everyone)
    assert ((x - sum(everyone)).abs() <= bound + 1e-5)[own].all()


@MANY
@every_kind
@pytest.mark.parametrize("whole", [True, False])
def test_bytes_sent_follow_the_formula(world, monkeypatch, kind, whole):
    two = world.size == 4  # in the order in which ZeRO divides its shares
    comm = on_two_nodes(world, monkeypatch, (0, 1, 0, 1)) if two else world
    numel, message = 1200 * world.size, {Int8: 256 + 4, Int4: 128 + 4}[kind]
    arena, compressed = comm.arena(numel), kind()
    comm.journal.start()
    comm.all_reduce(arena.tensor, compression=dataclasses.replace(compressed.bucket("b"), whole=whole))
    (row,) = [row for row in comm.journal.account() if row.algorithm == compressed.name]
    comm.journal.stop()
    local, count = (2, 2) if two else (1, world.size)
    between = (1 + whole) * (count - 1) * -(-(numel // local // count) // 256) * message
    inside = (1 + whole) * (local - 1) / local * numel * 4
    assert compressed.bytes_sent(comm.nodes, numel, torch.float32, whole=whole) == inside + between
    sent = torch.tensor([row.inside + row.between, row.between], dtype=torch.float64)
    world.all_reduce(sent, "avg")
    assert sent[0] == inside + between
    assert not two or sent[1] == between
    arena.free()
    if two:
        comm.free()


def test_impossible_blocks_and_gathers_are_refused():
    for block in (0, 12, -8):
        with pytest.raises(InputError, match=f"block {block} must be a positive multiple of 8"):
            Int8(block)


@MANY
def test_gathers_that_cannot_be_compressed_are_refused(world):
    out, counts = torch.zeros(2 * world.size), [1] * (world.size - 1) + [world.size + 1]
    with pytest.raises(InputError, match="compression topk is for sums; gather with int8 or int4"):
        world.all_gather(out, torch.zeros(2), compression=TopK())
    with pytest.raises(InputError, match="needs blocks of equal length"):
        world.all_gather(out, torch.zeros(counts[world.rank]), counts=counts, compression=Int8())
    with pytest.raises(InputError, match="floating-point numbers, not int32"):
        world.all_gather(out.int(), torch.zeros(2, dtype=torch.int32), compression=Int8())
