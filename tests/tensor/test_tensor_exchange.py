"""Exchange of activations: growing sizes, every dtype, ranks without shared memory, and ranks that differ."""

import pytest
import torch

from mpitrain.errors import CommunicationError
from mpitrain.tensor import Axis


@pytest.fixture(params=["shared", "messages"])
def axis(request, world):
    tensor_axis = Axis(world)
    if request.param == "messages":
        tensor_axis.free()  # as on an axis that spans nodes
    yield tensor_axis
    tensor_axis.free()


def make_tensor(rank, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.ranks(2, 3, 4)
def test_results_are_right_as_tensors_change_and_grow(axis):
    everyones = range(axis.size)
    results = []
    for elements in (3, 70_000, 300_000, 5, 600_000, 70_000, 0):
        mine = make_tensor(axis.rank, elements, 2)
        whole, lengths = axis.all_gather(make_tensor(axis.rank, axis.rank + 1, elements), 0)
        results.append((axis.all_reduce(mine), sum(make_tensor(r, elements, 2) for r in everyones)))
        results.append((whole, torch.cat([make_tensor(r, r + 1, elements) for r in everyones])))
        results.append((axis.reduce_scatter(mine, 1), axis.own(sum(make_tensor(r, elements, 2) for r in everyones), 1)))
        assert lengths == [r + 1 for r in everyones]
    for result, expected in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_of_16_bit_numbers_are_rounded_once(axis, dtype):
    for elements in (100, 40_000):
        expected = sum(make_tensor(r, elements, dtype=dtype).double() for r in range(axis.size)).to(dtype)
        result = axis.all_reduce(make_tensor(axis.rank, elements, dtype=dtype))
        assert result.dtype == dtype
        off = (result.double() - expected.double()).abs()
        assert off.max() <= torch.finfo(dtype).eps * 8
        # fp32 sums rounded once are nearly always the exact sum rounded once
        assert (off == 0).double().mean() > (0.98 if dtype != torch.float64 else 0.7)


@pytest.mark.ranks(2, 3, 4)
def test_noncontiguous_tensors_are_exchanged(axis):
    x = make_tensor(axis.rank, 6, 4).t()
    torch.testing.assert_close(axis.all_reduce(x), sum(make_tensor(r, 6, 4) for r in range(axis.size)).t())
    torch.testing.assert_close(
        axis.all_gather(x, 1)[0], torch.cat([make_tensor(r, 6, 4).t() for r in range(axis.size)], 1)
    )


@pytest.mark.ranks(2, 3)
def test_different_samples_on_ranks_raise_an_error(world):
    axis = Axis(world)
    with pytest.raises(
        CommunicationError, match=r"rank 1 passes 20 elements of float32 for all-reduce, but rank 0 passes 16 "
    ):
        axis.all_reduce(torch.zeros(16 if axis.rank == 0 else 20))
    with pytest.raises(
        CommunicationError,
        match="rank 1 passes 16 elements of float32 for all-gather, but rank 0 passes 16 elements of float32 for all-",
    ):
        axis.all_reduce(torch.zeros(16)) if axis.rank != 1 else axis.all_gather(torch.zeros(16), 0)
    with pytest.raises(CommunicationError, match="for all-reduce, but rank 0"):
        axis.all_reduce(torch.zeros(1 << (20 if axis.rank == 1 else 2)))
    with pytest.raises(
        CommunicationError, match="rank 1 passes 2 elements of float32 for all-reduce number 8, but rank 0"
    ):
        axis.all_reduce(torch.zeros(2), 7 + min(axis.rank, 1))  # as large, but of another layer
    torch.testing.assert_close(axis.all_reduce(torch.ones(3)), torch.full((3,), float(axis.size)))  # and it goes on
    axis.free()
