"""`DistributedDataParallel`: the behaviour that users of torch's class of that name rely on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mpitrain as mt
from mpitrain.errors import CommunicationError, InputError
from mpitrain.shard import ddp

MANY = pytest.mark.ranks(1, 2, 3)


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))


def samples(world, each=4):
    """Return this rank's inputs and those of all ranks."""
    x = torch.randn(each * world.size, 6, generator=torch.Generator().manual_seed(1))
    return x[each * world.rank : each * (world.rank + 1)], x


def same_gradients(model, whole, rtol=1e-5):
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=rtol, atol=1e-6)


@MANY
@pytest.mark.parametrize("bucket_mb", [25, 1e-5])
@pytest.mark.parametrize("static_graph", [False, True])
def test_gradients_match_the_whole_batch(world, bucket_mb, static_graph, device):
    mine, everybody = samples(world)
    mine = mine.to(device)
    model = mt.DistributedDataParallel(net().to(device), world, bucket_mb=bucket_mb, static_graph=static_graph)
    whole = net()
    for _ in range(3):  # buckets may be laid out anew after the first
        for module, x in ((model, mine), (whole, everybody)):
            module.zero_grad()
            module(x).square().mean().backward()
        same_gradients(model, whole)


class Result:
    """Output of a class that torch does not know, with a tensor in it."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Returning(nn.Module):
    """Module that returns its result in another form."""

    def __init__(self, form) -> None:
        super().__init__()
        self.net, self.form = net(), form

    def forward(self, x):
        return self.form(self.net(x))


@MANY
@pytest.mark.parametrize(
    ("form", "result_of"), [(lambda y: {"a": [y]}, lambda out: out["a"][0]), (Result, lambda out: out.y)]
)
def test_gradients_of_small_parameters_arrive_without_hooks_on_them(world, form, result_of):
    mine, everybody = samples(world)
    model, whole = mt.DistributedDataParallel(Returning(form), world), net()
    hooked = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    assert world.overlaps or len(hooked) == 1
    for _ in range(2):
        model.zero_grad()
        whole.zero_grad()
        result_of(model(mine)).square().mean().backward()
        whole(everybody).square().mean().backward()
        same_gradients(model, whole)


@MANY
def test_a_derivative_by_the_input_reduces_nothing(world):
    mine, everybody = samples(world)
    model, whole = mt.DistributedDataParallel(net(), world), net()
    for module, x in ((model, mine), (whole, everybody)):
        x.requires_grad_()
        y = module(x).square().mean(1)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert module is whole or model.reducer.passes == 0
        (y.mean() + slope.square().mean()).backward()
    assert model.reducer.passes == 1
    same_gradients(model, whole)


@MANY
def test_parameters_and_buffers_start_from_rank_0(world):
    torch.manual_seed(world.rank)
    model = mt.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), world)
    model.module[1].running_mean.fill_(world.rank)
    model(torch.randn(4, 3)).sum().backward()
    torch.manual_seed(0)
    assert torch.equal(model.module[0].weight, nn.Linear(3, 3).weight)
    mean = model.module[1].running_mean.clone()
    world.broadcast(mean, 0)
    if world.rank:  # rank 0's buffers as they were before the pass, then its own statistics
        assert float(model.module[1].running_mean.abs().max()) < 1


@MANY
def test_small_tensors_are_broadcast_together_and_keep_their_layout(world):
    def values(seed):
        torch.manual_seed(seed)
        flat = torch.randn(6)
        return [torch.randn(3), torch.randn(4, 5).T, torch.tensor(seed), torch.empty(0), flat[::2], flat[1::2]]

    mine, source = [*values(world.rank), torch.full((1 << 18,), world.rank)], world.size - 1
    expected = [*values(source), torch.full((1 << 18,), source)]
    strides, calls, broadcast = [tensor.stride() for tensor in mine], [], world.broadcast
    world.broadcast = lambda flat, root: calls.append(flat.numel()) or broadcast(flat, root)
    try:
        ddp.broadcast_tensors(mine, world, source)
    finally:
        del world.broadcast
    assert calls == [1, 29, 1 << 18] and [tensor.stride() for tensor in mine] == strides
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@MANY
@pytest.mark.parametrize("static_graph", [False, True])
def test_no_sync_accumulates_and_the_next_backward_reduces_all(world, static_graph):
    mine, everybody = samples(world)
    model, whole = mt.DistributedDataParallel(net(), world, static_graph=static_graph), net()
    for _ in range(2):
        model.zero_grad()
        whole.zero_grad()
        with model.no_sync():
            model(mine).square().mean().backward()
            model(mine + 1).square().mean().backward()
        model(mine + 2).square().mean().backward()
        for shift in range(3):
            whole(everybody + shift).square().mean().backward()
        same_gradients(model, whole)


class Named(nn.Linear):
    """Module with attributes and methods that its users access through the wrapper."""

    limit = 7

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.config = {"width": 6}
        self.register_buffer("seen", torch.zeros(()))

    def generate(self, x):
        self.seen += 1
        return self(x).relu()


@pytest.mark.ranks(1, 2)
def test_module_attributes_and_methods_are_accessible(world):
    module = Named()
    model = mt.DistributedDataParallel(module, world)
    assert (
        model.config is module.config and model.limit == 7 and model.in_features == 6 and model.weight is module.weight
    )
    assert model.generate(torch.ones(2, 6)).shape == (2, 1) and model.seen == 1
    assert hasattr(model, "config") and not hasattr(model, "nothing")
    with pytest.raises(AttributeError, match="'Named' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018
    assert [name for name, _ in model.named_parameters()] == ["module.weight", "module.bias"]
    model.comm.barrier()  # its own attributes come first
    del model._modules["module"]
    with pytest.raises(AttributeError, match="'DistributedDataParallel' object has no attribute 'module'"):
        model.module  # noqa: B018


class Branches(nn.Module):
    """Module of several branches, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, x, which):
        return self.branches[which](x)


@MANY
def test_unused_parameters_count_as_zero_or_get_no_gradient(world):
    model = mt.DistributedDataParallel(Branches(), world, find_unused_parameters=True)
    x = torch.ones(2, 6)
    which = world.rank % 2
    model(x, which).sum().backward()
    share = len([r for r in range(world.size) if r % 2 == 0]) / world.size
    torch.testing.assert_close(model.module.branches[0].weight.grad, torch.full((1, 6), 2 * share))
    assert model.module.branches[2].weight.grad is None
    if world.size > 1:
        torch.testing.assert_close(model.module.branches[1].weight.grad, torch.full((1, 6), 2 * (1 - share)))


@MANY
def test_unused_parameters_raise_an_error_without_the_flag(world):
    model = mt.DistributedDataParallel(Branches(), world)
    with pytest.raises(CommunicationError, match=r"4 parameters.*branches\.1\.weight.*find_unused_parameters"):
        model(torch.ones(2, 6), 0).sum().backward()


@MANY
def test_a_static_graph_learns_which_parameters_are_unused(world):
    model = mt.DistributedDataParallel(Branches(), world, static_graph=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 6) * (world.rank + 1), 1).sum().backward()
        average = 2 * sum(r + 1 for r in range(world.size)) / world.size
        torch.testing.assert_close(model.module.branches[1].weight.grad, torch.full((1, 6), average))
        assert model.module.branches[0].weight.grad is None
    with pytest.raises(
        CommunicationError, match=r"branches\.1\.weight.*static_graph=True requires the same in every pass"
    ):
        model(torch.ones(2, 6), 0).sum().backward()


@MANY
@pytest.mark.parametrize("divide_by_all", [True, False])
def test_ranks_with_fewer_batches_join_the_steps_of_the_others(world, divide_by_all):
    model = mt.DistributedDataParallel(nn.Linear(2, 1, bias=False), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = model.module.weight.detach().clone()
    with model.join(divide_by_initial_world_size=divide_by_all):
        for _ in range(world.rank + 1):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    expected = start.clone()
    for step in range(world.size):
        training = world.size - step  # ranks that still have a batch
        expected -= 0.1 * (training / world.size if divide_by_all else 1.0)
    torch.testing.assert_close(model.module.weight.detach(), expected)


@MANY
def test_shared_and_frozen_parameters_and_several_backward_passes(world):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.b.weight = self.a.weight
            self.b.bias.requires_grad_(False)

        def forward(self, x):
            return self.b(self.a(x).relu())

    mine, everybody = samples(world)
    model, whole = mt.DistributedDataParallel(Tied(), world), Tied()
    for module, x in ((model, mine), (whole, everybody)):
        module(x).square().mean().backward()
        module(x * 2).square().mean().backward()
    # the second pass averages what the first left, which is the same everywhere already
    torch.testing.assert_close(model.module.a.weight.grad, whole.a.weight.grad, rtol=1e-5, atol=1e-6)
    assert model.module.b.bias.grad is None


@MANY
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_agrees_with_torch_and_reads_a_rank_s_part(world, max_norm, device, monkeypatch):
    mine, everybody = samples(world)
    model, whole = mt.DistributedDataParallel(net().to(device), world), net()
    read: list[int] = []
    sum_squares = ddp.sum_squares
    monkeypatch.setattr(
        ddp, "sum_squares", lambda x, into: read.append(sum(t.numel() for t in x)) or sum_squares(x, into)
    )
    for _ in range(2):  # buckets may be laid out anew after the first
        model.zero_grad()
        whole.zero_grad()
        with model.no_sync():
            model(mine.to(device)).square().mean().backward()
        model(2 * mine.to(device)).square().mean().backward()
        (whole(everybody).square().mean() + whole(2 * everybody).square().mean()).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        torch.testing.assert_close(model.clip_grad_norm_(max_norm).cpu(), expected, rtol=1e-5, atol=0)
        same_gradients(model, whole)
    numel = model.reducer.gradients.groups[0].layout.numel
    assert len(read) == 2 and max(read) <= numel / world.size + 2  # at most one more element for each of two buckets


@MANY
def test_clipping_ignores_parameters_without_a_gradient(world):
    model, whole = mt.DistributedDataParallel(Branches(), world, find_unused_parameters=True), Branches()
    x, norm = torch.ones(2, 6), nn.utils.clip_grad_norm_
    for which in (1, 2):  # the second pass leaves the gradients of the first in memory
        model.zero_grad()
        whole.zero_grad()
        model(x, which).sum().backward()
        whole(x, which).sum().backward()
        torch.testing.assert_close(model.clip_grad_norm_(0.5), norm(whole.parameters(), 0.5))
        torch.testing.assert_close(model.module.branches[which].weight.grad, whole.branches[which].weight.grad)
    model.zero_grad()
    assert float(model.clip_grad_norm_(0.5)) == 0.0


@MANY
def test_clipping_is_torch_s_where_the_norm_is_not_known(world):
    model, alone = mt.DistributedDataParallel(nn.Linear(2, 1), world), nn.Linear(2, 1)
    x, clip = torch.full((1, 2), world.rank + 1.0), nn.utils.clip_grad_norm_
    with model.no_sync():
        model(x).sum().backward()
    alone(x).sum().backward()
    torch.testing.assert_close(model.clip_grad_norm_(0.1), clip(alone.parameters(), 0.1))  # this rank's own
    same_gradients(model, alone)
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(model.clip_grad_norm_(9.0, math.inf), torch.tensor(max(1.0, (world.size + 1) / 2)))
    model.module.bias.grad = torch.tensor([3.0])  # not where it was reduced
    expected = clip(list(model.module.parameters()), 9.0)
    torch.testing.assert_close(model.clip_grad_norm_(9.0), expected)
    with model.join():  # the others do not come to rank 0's last steps
        for _ in range(world.size - world.rank):
            model.zero_grad()
            model(x).sum().backward()
            assert float(model.clip_grad_norm_(1.0)) > 0


@MANY
def test_clipping_handles_a_norm_that_is_not_finite_as_torch_does(world):
    model = mt.DistributedDataParallel(nn.Linear(2, 1), world)
    model(torch.full((1, 2), math.inf if world.rank == 0 else 1.0)).sum().backward()
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert torch.equal(model.module.bias.grad, torch.ones(1))
    assert float(model.clip_grad_norm_(1.0)) == math.inf
    assert model.module.weight.grad.isnan().all() and torch.equal(model.module.bias.grad, torch.zeros(1))


@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused(world):
    model = mt.DistributedDataParallel(nn.Embedding(4, 2, sparse=True), world)
    with pytest.raises(InputError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4", "topk", "powersgd"])
def test_compressed_gradients_train(world, name):
    mine, everybody = samples(world, each=16)
    model = mt.DistributedDataParallel(net(), world, compression=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        first = float((model(everybody) - 1).square().mean())
    for _ in range(120):
        optimizer.zero_grad()
        (model(mine) - 1).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        assert float((model(everybody) - 1).square().mean()) < 0.5 * first
    for p in model.parameters():
        other = p.detach().clone()
        world.broadcast(other, 0)
        assert torch.equal(other, p.detach())


@pytest.mark.ranks(2)
def test_several_communicators_take_turns(world):
    comms = [world, world.split(0), world.split(0)]
    mine, everybody = samples(world)
    # with compression buckets are reduced one by one even where no core is spare, and all of them at once otherwise
    model = mt.DistributedDataParallel(net(), comms, bucket_mb=1e-5, compression="fp16")
    whole, before = net(), [operations_of(comm) for comm in comms]
    for module, x in ((model, mine), (whole, everybody)):
        module(x).square().mean().backward()
    same_gradients(model, whole, rtol=2e-2)
    turns = [operations_of(comm) - n for comm, n in zip(comms, before, strict=True)]
    assert min(turns) > 0 and max(turns) - min(turns) <= 1, turns


def operations_of(comm) -> int:
    return comm._record.sequence + comm._background_record.sequence
