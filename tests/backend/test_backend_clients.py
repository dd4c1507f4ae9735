"""Users of torch.distributed work over this backend: groups, meshes, DTensor, pipelines, checkpoints."""

from __future__ import annotations

import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support import next_handle, one_line
from torch import nn
from warm import job

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.ranks(2, 3)
def test_groups_of_some_ranks_communicate(group, world):
    size, rank = world.size, world.rank
    every = [group.new_group([r, (r + 1) % size]) for r in range(size if size > 2 else 1)]  # overlapping ones
    for r, pair in enumerate(every):
        if rank in (r, (r + 1) % size):
            x = torch.tensor([float(rank)])
            group.all_reduce(x, group=pair)
            assert x == r + (r + 1) % size
        else:
            assert group.get_rank(pair) == -1
    backward = group.new_group(list(range(size))[::-1], sort_ranks=False)
    assert group.get_group_rank(backward, rank) == size - 1 - rank
    out = torch.empty(size)
    group.all_gather_into_tensor(out, torch.tensor([float(rank)]), group=backward)
    assert out.tolist() == list(range(size))[::-1]
    by_members_alone = group.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if by_members_alone is not None:
        group.barrier(by_members_alone)
    assert type(group.new_group(backend="gloo")).__name__ == "MPIProcessGroup"  # the store could connect no other
    halves = group.split_group(split_ranks=[[0], list(range(1, size))])
    assert halves.size() == (1 if rank == 0 else size - 1)
    x = torch.ones(1)
    group.all_reduce(x, group=halves)
    assert x == halves.size()


@pytest.mark.ranks(2, 3)
def test_destroyed_groups_can_be_made_again(group, world):
    from mpitrain.backend.process_group import get_registry

    communicators = get_registry().communicators
    before = len(communicators.get((0, 1), []))
    for _ in range(3):
        pair = group.new_group([0, 1])
        if world.rank < 2:
            x = torch.ones(3)
            group.all_reduce(x, group=pair)
            assert (x == 2).all()
            group.destroy_process_group(pair)
        group.destroy_process_group()
        group.init_process_group("mpitrain", timeout=timedelta(seconds=60))
        x = torch.ones(1)
        group.all_reduce(x)
        assert x == world.size
    if world.rank < 2 < world.size:  # the communicator is used again
        assert len(communicators[(0, 1)]) == max(before, 1)
    numbers = set()
    for _ in range(30):  # also after messages, and more of them at once than are kept
        groups = [group.new_group(list(range(world.size))) for _ in range(2)]
        for each in groups:
            if world.rank == 0:
                group.send(x, 1, group=each)
            elif world.rank == 1:
                group.recv(x, 0, group=each)
        numbers.add(next_handle(world))
        for each in groups:
            group.destroy_process_group(each)
    assert len(numbers) < 10, sorted(numbers)
    many = [group.new_group(list(range(world.size))) for _ in range(24)]
    for each in many:
        group.destroy_process_group(each)
    group.new_group(list(range(world.size)))
    assert len(get_registry().surpluses) <= 18 < 24 <= len([comm for comms in communicators.values() for comm in comms])
    # rank 0 destroys a group that rank 1 keeps: they agree on another communicator
    half_destroyed = group.new_group([0, 1])
    if world.rank == 0:
        group.destroy_process_group(half_destroyed)
    again = group.new_group([0, 1])
    if world.rank < 2:
        x = torch.ones(1)
        group.all_reduce(x, group=again)
        assert x == 2


@pytest.mark.ranks(4)
def test_device_mesh_and_tensor_parallel_layers_work(group, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(24.0).view(4, 6)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(tensor.redistribute(mesh, [Replicate(), Replicate()]).to_local(), whole)
    assert torch.equal(tensor.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), whole)
    assert isinstance(tensor @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)]), DTensor)

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(5, 6)
    expected = model(x).detach()
    expected_gradient = torch.autograd.grad(model(x).square().mean(), model[0].weight)[0]
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    torch.testing.assert_close(model(x), expected)
    model(x).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), expected_gradient)


@pytest.mark.ranks(3)
def test_pipelines_pass_activations_and_gradients(group, world):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(5)
    layers = [nn.Linear(6, 6) for _ in range(world.size)]
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    loss = nn.functional.mse_loss
    loss(nn.Sequential(*layers)(x), y).backward()
    expected = layers[world.rank].weight.grad.clone()
    layers[world.rank].zero_grad()
    stage = PipelineStage(layers[world.rank], world.rank, world.size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss)
    if world.rank == 0:
        schedule.step(x)
    elif world.rank == world.size - 1:
        schedule.step(target=y)
    else:
        schedule.step()
    torch.testing.assert_close(layers[world.rank].weight.grad, expected)


@pytest.mark.ranks(2)
def test_functional_collectives_and_compiled_functions(group, world):
    import torch.distributed._functional_collectives as functional

    size, rank = world.size, world.rank
    world_group = group.group.WORLD

    def reduce_and_gather(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x + rank, "sum", world_group)
        part = functional.reduce_scatter_tensor(total.repeat(size), "sum", 0, world_group)
        return functional.all_gather_tensor(part, 0, world_group) * 2

    x = torch.arange(4.0)
    expected = (size * x + size * (size - 1) / 2).repeat(size) * size * 2
    assert torch.equal(reduce_and_gather(x), expected)
    assert torch.equal(torch.compile(reduce_and_gather, backend="eager")(x), expected)
    rows = [r + 1 for r in range(size)]
    swapped = functional.all_to_all_single(torch.ones(sum(rows)) * rank, [rank + 1] * size, rows, world_group)
    assert swapped.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]
    root = functional.broadcast(torch.tensor([float(rank)]), 1, world_group)
    assert root == 1
    if hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):  # of bucketed all-gathers in compiled code
        out = torch.empty(2 * size)
        block = torch.full((2,), float(rank))
        torch.ops._c10d_functional.all_gather_into_tensor_out(block, size, world_group.group_name, out=out)
        assert torch.ops._c10d_functional.wait_tensor(out).tolist() == [r for r in range(size) for _ in range(2)]

    @torch.compile(backend="eager")
    def in_place(x: torch.Tensor) -> torch.Tensor:
        group.all_reduce(x)
        return x + 1

    assert in_place(torch.ones(2)).tolist() == [size + 1.0] * 2


@pytest.mark.ranks(2, 3)
def test_dispatch_modes_and_profiler_see_collectives(group, world):
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import ProfilerActivity, profile

    size, rank = world.size, world.rank

    def operations() -> torch.Tensor:
        x = torch.arange(4.0) + rank
        group.all_reduce(x, op=group.ReduceOp.MAX)
        group.all_reduce(x, async_op=True).wait()
        group.broadcast(x, 1)
        everyone = torch.empty(4 * size)
        group.all_gather_into_tensor(everyone, x)
        group.reduce_scatter_tensor(x, everyone)
        rows = [torch.empty(4) for _ in range(size)]
        group.all_gather(rows, x)
        group.scatter(x, rows if rank == 0 else None, 0)
        group.gather(x, rows if rank == 0 else None, 0)
        swapped = [torch.empty(4) for _ in range(size)]
        group.all_to_all(swapped, rows)
        group.reduce(x, 0)
        if rank == 0:
            group.send(x, 1)
        elif rank == 1:
            group.recv(x, 0)
        group.barrier()
        return torch.cat([x, *swapped])

    expected = operations()
    with CommDebugMode() as debug_mode:
        assert torch.equal(operations(), expected)
    counts = {str(operation).rpartition(".")[2]: count for operation, count in debug_mode.get_comm_counts().items()}
    once = ("broadcast_", "_allgather_base_", "_reduce_scatter_base_", "allgather_", "scatter_", "gather_", "reduce_")
    assert counts == {"allreduce_": 2, "alltoall_": 1} | dict.fromkeys(once, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert torch.equal(operations(), expected)
    events = {event.key for event in profiled.key_averages()}
    names = {"allreduce_", "barrier", *once} | ({"send"} if rank == 0 else {"recv_"} if rank == 1 else set())
    assert {f"c10d::{name}" for name in names} <= events


@pytest.mark.ranks(2)
def test_store_raises_at_every_use(group, world):
    store = group.distributed_c10d._get_default_store()
    uses = (
        lambda: store.set("key", "value"),
        lambda: store.get("key"),
        lambda: store.wait(["key"]),
        lambda: store.add("key", 1),
        lambda: store.check(["key"]),
        lambda: store.num_keys(),
        lambda: store.delete_key("key"),
        lambda: store.compare_set("key", "a", "b"),
        lambda: group.ProcessGroupGloo(store, world.rank, world.size, timedelta(minutes=10)),  # what rpc begins with
    )
    for use in uses:
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="have no store that ranks share"):
            use()
        assert time.monotonic() - begun < 5


@pytest.mark.ranks(2, 3)
def test_rank_and_size_that_contradict_mpi_are_refused(world):
    import torch.distributed as dist

    import mpitrain.backend  # noqa: F401

    other = (world.rank + 1) % world.size
    for settings in ({"rank": world.rank, "world_size": world.size + 1}, {"rank": other, "world_size": world.size}):
        with pytest.raises(ValueError, match="but in MPI it is"):
            dist.init_process_group("mpitrain", **settings)
    dist.init_process_group("mpitrain", rank=world.rank, world_size=world.size)
    dist.destroy_process_group()


@pytest.mark.ranks(2, 3)
def test_debug_detail_reports_mismatched_calls(world, monkeypatch):
    import torch.distributed as dist

    import mpitrain.backend  # noqa: F401

    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()
    try:
        dist.init_process_group("mpitrain", timeout=timedelta(seconds=60))
        x = torch.ones(2, 3) if world.rank else torch.ones(3, 2)
        with pytest.raises(RuntimeError, match=r"rank 0  all_reduce #1 float32\[3, 2\]"):
            dist.all_reduce(x)
        with pytest.raises(RuntimeError, match=r"rank 1  broadcast #2 float32\[2, 3\] from 0"):
            dist.broadcast(x, 0) if world.rank else dist.all_reduce(x)
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@pytest.mark.ranks(4)
def test_a_checkpoint_of_four_ranks_loads_on_two(group, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def train(seed: int, members) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))  # 7 and 3 rows: no rank count divides them
        fully_shard(model, mesh=DeviceMesh.from_group(members, "cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        states = parts(model, optimizer)["optimizer"]["state"]
        tensors = {f"{name} {what}": value for name, state in states.items() for what, value in state.items()}
        tensors |= model.named_parameters()
        return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()}

    saved = train(1, group.group.WORLD)
    dcp.async_save(parts(*saved), checkpoint_id=folder).result()
    expected = whole(*saved)
    assert len(expected) == 4 * (1 + 3)  # each parameter with AdamW's two averages and the count of steps
    pair = group.new_group([0, 1])
    if world.rank < 2:
        loaded = train(2, pair)
        other = whole(*loaded)
        assert not any(torch.equal(other[name], t) for name, t in expected.items() if "step" not in name)
        states = parts(*loaded)
        dcp.load(states, checkpoint_id=folder, process_group=pair)
        set_state_dict(*loaded, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        for name, t in whole(*loaded).items():
            assert torch.equal(t, expected[name]), name


@pytest.mark.serial
def test_an_unchanged_script_runs_over_mpi(tmp_path, forked):
    script = [sys.executable, "-m", "mpitrain.backend", str(SCRIPTS / "for_torchrun.py")]
    result = job(2, [*script, "nccl", "--flag"], MASTER_ADDR="nowhere.invalid", MASTER_PORT="1")
    assert result.returncode == 0, result.stderr
    assert "rank 0 of 2 sum 3.0 over mpitrain with --flag" in result.stdout
    failed = job(2, [*script, "gloo", "--fail"], timeout=60)
    assert failed.returncode == 3
    assert "rank 0 of 2 sum 3.0 over mpitrain with --fail" in failed.stdout
    assert "rank 1: exited with code 3" in failed.stderr
    absent = forked.run("backend", "no_such.py", cwd=tmp_path)
    one_line(absent, "there is no script no_such.py")


@pytest.mark.serial
def test_import_does_not_start_mpi_if_the_launcher_sets_the_rank(forked):
    code = "import mpitrain.backend, os, sys; print(os.environ['RANK'], 'mpi4py' in sys.modules)"
    rank = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    alone = forked.run("-c", code, **rank)
    assert alone.stdout.split() == ["3", "False"], alone.stderr
    assert forked.run("-c", code).stdout.split() == ["0", "True"]  # no launcher: MPI is asked
    wrong = "import mpitrain.backend, torch.distributed as d; d.init_process_group('gloo')"
    refused = job(2, [sys.executable, "-c", wrong], timeout=60)
    assert refused.returncode != 0
    assert 'call init_process_group("mpitrain")' in refused.stderr


@pytest.mark.serial
def test_exit_with_an_unfinished_collective_ends_the_job(tmp_path):
    code = """if True:
        import sys, time, torch, torch.distributed as dist, mpitrain.backend
        from datetime import timedelta
        dist.init_process_group("mpitrain", timeout=timedelta(seconds=1))
        if dist.get_rank():
            time.sleep(60)
        try:
            dist.all_reduce(torch.ones(3))
        except RuntimeError as error:
            print("caught", error, flush=True)
        dist.destroy_process_group()"""
    result = job(2, [sys.executable, "-c", code], timeout=40)
    assert result.returncode != 0
    assert (
        "caught all_reduce of group 0 of ranks [0, 1]: timeout after 1 s; check that every rank calls it"
        in result.stdout
    )
    assert "mpitrain: rank 0: exited before all_reduce of group 0 of ranks [0, 1] was complete" in result.stderr


LEAVES = """
import os, signal, sys, torch, torch.distributed as dist
import mpitrain.backend
dist.init_process_group("mpitrain")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    {leaves}
{waits}  # in vain
"""


@pytest.mark.serial
@pytest.mark.parametrize(
    ("leaves", "waits"),
    [
        ("sys.exit(3)", "dist.barrier()"),
        pytest.param("raise SystemExit(0)", "dist.all_reduce(torch.ones(3))", marks=pytest.mark.campaign),
        pytest.param("sys.exit(0)", "dist.recv(torch.ones(3), 1)", marks=pytest.mark.campaign),
        pytest.param("sys.exit('enough')", "dist.new_group([0, 1, 2])", marks=pytest.mark.campaign),
        pytest.param("os._exit(3)", "dist.barrier()", marks=pytest.mark.campaign),
        pytest.param("os._exit(0)", "dist.barrier()", marks=pytest.mark.campaign),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "dist.barrier()", marks=pytest.mark.campaign),
    ],
)
def test_a_rank_that_ends_without_the_others_ends_the_job_within_seconds(tmp_path, leaves, waits):
    script = tmp_path / "script.py"
    script.write_text(LEAVES.format(leaves=leaves, waits=waits))
    begun = time.monotonic()
    result = job(3, [sys.executable, str(script)], timeout=60)
    assert result.returncode != 0 and time.monotonic() - begun < 40
    if "os." not in leaves:  # else the launcher sees it
        assert result.stderr.count("mpitrain: rank 1 has left: its Python interpreter ended") == 1
        assert re.search(r"while rank [02] waits for it at script.py:8 in <module>", result.stderr)
    if leaves == "sys.exit(3)":
        assert result.returncode == 3 and "ended with exit code 3" in result.stderr
