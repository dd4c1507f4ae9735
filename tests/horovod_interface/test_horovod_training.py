"""DistributedOptimizer, SyncBatchNorm and elastic state: the same training as one process on the whole batch."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

ROWS = 12  # divisible by 1, 2 and 3 ranks
TRAINED = pytest.mark.ranks(1, 2, 3)


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1)).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=generator)
    return x, x.sum(1, keepdim=True)


def losses(model, step, rank=0, size=1, parts=1):
    """Yield the mean losses of this rank's equal parts of a batch."""
    x, y = (t[rank::size] for t in batch(step))
    for a, b in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        yield (model(a) - b).square().mean()


def train_alone(steps=4, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, **options)
    for step in range(steps):
        optimizer.zero_grad()
        next(losses(model, step)).backward()
        optimizer.step()
    return model


def same(model, other, **tolerance):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 1e-12, "atol": 1e-13} | tolerance))


@TRAINED
@pytest.mark.parametrize("form", ["plain", "names", "groups", "lists", "predivide", "sum", "parts", "fp16"])
def test_training_equals_one_process(hvd, form):
    model, rank, size = net(), hvd.rank(), hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    options = {
        "names": {"named_parameters": model.named_parameters()},
        "groups": {"groups": 2},
        "lists": {"groups": [list(model[0].parameters()), list(model[3].parameters())]},
        "predivide": {"gradient_predivide_factor": 2.0},
        "sum": {"op": hvd.Sum},
        "parts": {"backward_passes_per_step": 2},
        "fp16": {"compression": hvd.Compression.fp16},
    }.get(form, {})
    optimizer = hvd.DistributedOptimizer(optimizer, **options)
    parts = 2 if form == "parts" else 1
    for step in range(4):
        optimizer.zero_grad()
        for loss in losses(model, step, rank, size, parts):
            (loss / (size if form == "sum" else parts)).backward()
        optimizer.step()
    assert isinstance(optimizer, torch.optim.SGD)
    same(model, train_alone(), **({"rtol": 0.02, "atol": 1e-3} if form == "fp16" and size > 1 else {}))


@TRAINED
def test_parameters_without_a_gradient_on_some_ranks(hvd):
    branches = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    hvd.broadcast_parameters(branches.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(branches.parameters(), lr=1.0), branches.named_parameters())
    before = [p.detach().clone() for p in branches.parameters()]
    branches[hvd.rank() % 2](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    users = [len(range(which, hvd.size(), 2)) for which in (0, 1)]
    for (p, old), count in zip(
        zip(branches.parameters(), before, strict=True), [users[0]] * 2 + [users[1]] * 2, strict=True
    ):
        torch.testing.assert_close(old - p, torch.full_like(p, count / hvd.size()))


@pytest.mark.ranks(2, 3)
def test_clipping_between_synchronize_and_step(hvd):
    model, rank, size = net(), hvd.rank(), hvd.size()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    next(losses(model, 0, rank, size)).backward()
    with pytest.raises(AssertionError, match="pending"):
        optimizer.zero_grad()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    alone = net()
    next(losses(alone, 0)).backward()
    nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.optim.Adam(alone.parameters()).step()
    same(model, alone)
    next(losses(model, 1, rank, size)).backward()
    with pytest.raises(ValueError, match="increase backward_passes_per_step"):
        next(losses(model, 1, rank, size)).backward()
    optimizer.synchronize()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(hvd, as_dense):
    torch.manual_seed(0)
    table = nn.Embedding(8, 2, sparse=True)
    whole = copy.deepcopy(table)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), sparse_as_dense=as_dense)
    rows = torch.tensor([[1, 2, 2], [2, 5, 7], [0, 1, 1]])[: hvd.size()]
    table(rows[hvd.rank()]).square().sum().backward()
    optimizer.step()
    assert table.weight.grad.is_sparse
    (whole(rows).square().sum() / hvd.size()).backward()
    torch.testing.assert_close(table.weight, whole.weight - 0.1 * whole.weight.grad.to_dense())


@pytest.mark.ranks(2)
def test_adasum_of_orthogonal_parallel_and_zero_gradients(hvd):
    second = hvd.rank() == 1
    orthogonal = torch.tensor([0.0, 3.0]) if second else torch.tensor([2.0, 0.0])
    assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [2.0, 3.0]
    assert hvd.allreduce(torch.tensor([4.0, 2.0]), op=hvd.Adasum).tolist() == [4.0, 2.0]
    assert hvd.allreduce(torch.tensor([1.0 * second]), op=hvd.Adasum).tolist() == [1.0]
    a, b = (torch.randn(7, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected = (1 - a.dot(b) / (2 * a.dot(a))) * a + (1 - a.dot(b) / (2 * b.dot(b))) * b
    torch.testing.assert_close(hvd.allreduce(b if second else a, op=hvd.Adasum), expected)
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    (weight * orthogonal).sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0, -1.5]


@pytest.mark.ranks(3)
def test_adasum_needs_a_power_of_two(hvd):
    with pytest.raises(NotImplementedError, match="power of two"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)


@TRAINED
def test_state_of_an_optimizer_reaches_ranks_that_have_none(hvd):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + hvd.rank()), betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if hvd.rank() == 0:
        next(losses(model, 0)).backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict())
    for state in states:
        assert state["param_groups"] == states[0]["param_groups"] and len(state["state"]) == 6
        for number, values in state["state"].items():
            assert all(torch.equal(value, states[0]["state"][number][name]) for name, value in values.items())
    optimizer.zero_grad()
    next(losses(model, 1, hvd.rank(), hvd.size())).backward()
    optimizer.step()
    scheduler.step()
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.01)


@pytest.mark.parametrize("wrong", ["twice", "lacking", "pairs", "groups", "passes", "predivide"])
@pytest.mark.ranks(2)
def test_arguments_of_the_optimizer_that_do_not_fit(hvd, wrong):
    model = net()
    names = list(model.named_parameters())
    arguments = {
        "twice": {"named_parameters": [("w", p) for _, p in names]},
        "lacking": {"named_parameters": names[1:]},
        "pairs": {"named_parameters": [p for _, p in names]},
        "groups": {"groups": [[names[0][1]], [names[0][1]]]},
        "passes": {"backward_passes_per_step": 0},
        "predivide": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
    }[wrong]
    with pytest.raises(ValueError):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


@TRAINED
def test_batch_norm_over_all_ranks(hvd):
    whole, norm = nn.BatchNorm1d(4).double(), hvd.SyncBatchNorm(4).double()
    x, _ = batch(0)
    torch.testing.assert_close(norm(x[hvd.rank() :: hvd.size()]), whole(x)[hvd.rank() :: hvd.size()])
    torch.testing.assert_close(norm.running_var, whole.running_var)


@TRAINED
def test_elastic_state_returns_to_the_last_commit_and_follows_rank_0(hvd):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=hvd.rank(), seen=[])
    calls = []
    state.register_reset_callbacks([lambda: calls.append(state.step)])

    @hvd.elastic.run
    def train(state):
        assert state.step == (0 if not calls else 1)
        next(losses(model, 0)).backward()
        optimizer.step()
        if not calls:
            state.step = 1
            state.commit()
            raise hvd.elastic.HostsUpdatedInterrupt
        state.step = 5
        state.restore()
        return state.step

    assert train(state) == 1 and calls == [1]
    sampler.record_batch(0, 1)
    sampler.reset()
    chosen = list(itertools.chain(*hvd.allgather_object(list(sampler))))
    assert set(chosen) == set(range(hvd.size(), 10)) and len(chosen) == len(sampler) * hvd.size()


SURVIVORS = """
import os, signal, torch
import mpitrain.horovod.torch as hvd
hvd.init()
first = hvd.rank()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())

@hvd.elastic.run
def train(state):
    while state.step < 8:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        if state.step == 4 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, step=0)
sizes = []
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
train(state)
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[0], weights[1])
print("END", first, hvd.rank(), state.step, sizes, flush=True)
"""


@pytest.mark.serial
def test_training_continues_after_the_death_of_rank_0(tmp_path: Path):
    import subprocess
    import sys

    from support import clean_environment, launcher

    script = tmp_path / "train.py"
    script.write_text(SURVIVORS)
    ended = subprocess.run(
        [*launcher(3), "--with-ft", "ulfm", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean_environment(),
    )
    lines = sorted(line.strip() for line in ended.stdout.splitlines() if "END" in line)
    assert lines == ["END 1 0 8 [2]", "END 2 1 8 [2]"], ended.stdout + ended.stderr
    assert "ranks (0,) died" in ended.stderr
