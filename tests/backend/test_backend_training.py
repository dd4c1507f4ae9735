"""PyTorch's own data parallelism over this backend trains as it does over gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch import nn

STEPS = 3
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.norm(self.embedding(x)))))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(11, (4,), generator=source), torch.randint(3, (4,), generator=source)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> None:
    device = next(model.parameters()).device
    for step in range(steps):
        x, y = (part.to(device) for part in batch(rank, step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): tensor.detach().clone() for name, tensor in model.state_dict().items()}


def ddp(rank: int, device: torch.device = CPU, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)  # DDP makes the ranks equal
    model = nn.parallel.DistributedDataParallel(Net().to(device), **{"bucket_cap_mb": 0.0005} | options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(rank: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    model, optimizer = ddp(rank, device)
    train(model, optimizer, rank)
    return values(model)


def gradients_are_views(rank: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    model, optimizer = ddp(rank, device, gradient_as_bucket_view=True, static_graph=True)
    train(model, optimizer, rank)
    return values(model)


def half_precision_hook(rank: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model, optimizer = ddp(rank, device)
    model.register_comm_hook(None, fp16_compress_hook)
    train(model, optimizer, rank)
    return values(model)


def power_sgd(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model, optimizer = ddp(rank, bucket_cap_mb=25)  # with several buckets gloo mixes its own messages up and aborts
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, optimizer, rank, 5)
    return values(model)


def sparse_gradients(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 3)))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return values(model)


def zero_redundancy(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _ = ddp(rank)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, optimizer, rank)
    return values(model)


def uneven_batches(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.algorithms.join import Join

    model, optimizer = ddp(rank)
    with Join([model]):
        train(model, optimizer, rank, STEPS + rank)
    return values(model)


def fully_sharded(rank: int, **options) -> dict[str, torch.Tensor]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)
    model = Net()
    for part in (model.hidden, model.out):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in values(model).items()}


def fully_sharded_mixed_precision(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_sharded(rank, mp_policy=policy, reshard_after_forward=False)


def first_fsdp(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(7)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})


RUNS = (
    plain,
    gradients_are_views,
    half_precision_hook,
    power_sgd,
    sparse_gradients,
    zero_redundancy,
    uneven_batches,
    fully_sharded,
    fully_sharded_mixed_precision,
    first_fsdp,
)


@pytest.fixture(scope="module")
def over_gloo(world, tmp_path_factory) -> Iterator[dict[Callable, dict[str, torch.Tensor]]]:
    """Results of the runs over one group of gloo; the threads of each further one would take time from later tests."""
    import torch.distributed as dist

    meeting = world.broadcast_object(str(tmp_path_factory.mktemp("gloo") / "meeting"))
    where = {"init_method": f"file://{meeting}", "rank": world.rank, "world_size": world.size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    group = dist.group.WORLD  # gloo aborts the process when a thread of the group is the last to let go of it
    results = {run: run(world.rank) for run in RUNS}
    world.barrier()
    dist.destroy_process_group()
    yield results
    del group


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_training_matches_gloo(world, over_gloo, run: Callable[[int], dict[str, torch.Tensor]]):
    import torch.distributed as dist

    import mpitrain.backend  # noqa: F401

    dist.init_process_group("mpitrain", timeout=timedelta(seconds=60))
    try:
        theirs, ours = over_gloo[run], run(world.rank)
    finally:
        world.barrier()
        dist.destroy_process_group()
    assert list(theirs) == list(ours)
    loose = run in (half_precision_hook, power_sgd, fully_sharded_mixed_precision) and world.size > 2
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=1e-3 if loose else 1e-5, atol=1e-3 if loose else 1e-6, msg=name
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("run", [plain, power_sgd, sparse_gradients, fully_sharded], ids=lambda run: run.__name__)
def test_communication_thread_does_not_change_results(world, monkeypatch, run):
    import torch.distributed as dist

    import mpitrain.backend  # noqa: F401

    results = []
    for threaded in (False, True):  # as if there were a core to spare
        monkeypatch.setattr(type(world), "overlaps", threaded)
        dist.init_process_group("mpitrain", timeout=timedelta(seconds=60))
        results.append(run(world.rank))
        dist.destroy_process_group()
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name
