"""Batch norms over all ranks equal those of torch over the whole batch, for any division of it."""

from __future__ import annotations

import pytest
import torch

from mpitrain.layers.sync_batchnorm import SyncBatchNorm

FEATURES = 6


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shape", [(FEATURES,), (FEATURES, 5), (FEATURES, 5, 5)], ids=str)
@pytest.mark.parametrize(("mean", "precise"), [(0.0, 1e-6), (1000.0, 1e-3)])
def test_divided_batches_are_normalized_as_the_whole_batch(world, shape, mean, precise):
    torch.manual_seed(0)
    sizes = [4 + rank for rank in range(world.size - 1)] + [0]  # the last rank has no sample
    x = torch.randn(sum(sizes), *shape) + mean
    grad = torch.randn_like(x)
    kind = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}[len(shape)]
    whole = kind(FEATURES)
    torch.nn.init.normal_(whole.weight)
    torch.nn.init.normal_(whole.bias)
    layer = SyncBatchNorm.convert(kind(FEATURES), world)
    layer.load_state_dict(whole.state_dict())
    whole_x = x.double().requires_grad_()
    expected = whole.double()(whole_x)
    expected.backward(grad.double())
    begin = sum(sizes[: world.rank])
    mine = slice(begin, begin + sizes[world.rank])
    part_x = x[mine].clone().requires_grad_()
    output = layer(part_x)
    output.backward(grad[mine])

    def close(one, other):
        other = other.detach()
        largest = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=precise, atol=precise * largest)

    close(output.detach(), expected[mine])
    close(part_x.grad, whole_x.grad[mine])
    for name in ("weight", "bias"):
        gradient = getattr(layer, name).grad
        world.all_reduce(gradient)
        close(gradient, getattr(whole, name).grad)
    close(layer.running_mean, whole.running_mean)
    close(layer.running_var, whole.running_var)
