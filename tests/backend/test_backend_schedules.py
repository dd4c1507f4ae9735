"""Every schedule of torch.distributed.pipelining runs over this backend, which keeps no tensor that it has sent."""

from __future__ import annotations

import copy

import legal_programs
import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

WIDTH = 128
ROWS = 64  # of a microbatch: 32 KiB, which MPI sends only when it is received

ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
LOOPS = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
VEES = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # rank r has stages r and 2 * size - 1 - r


class Layer(nn.Module):
    """One stage of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus two linear maps of it with a tanh between them."""
        return x + self.second(torch.tanh(self.first(x)))


def stages_of(name: str, rank: int, size: int) -> list[int]:
    """Return the numbers of the stages that a rank has under a schedule."""
    if name in ONE_STAGE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if name in VEES else [rank, rank + size]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", [*ONE_STAGE, *LOOPS, *VEES])
def test_pipeline_schedules_match_one_process(group, world, name):
    from torch.testing._internal.common_utils import check_leaked_tensors

    size, own_stages = world.size, stages_of(name, world.rank, world.size)
    number, microbatches = len(own_stages) * size, 3 * size if name == "ScheduleDualPipeV" else 2 * size
    torch.manual_seed(4)
    layers = [Layer() for _ in range(number)]
    mine = [copy.deepcopy(layers[stage]) for stage in own_stages]
    x, target = torch.randn(2, microbatches * ROWS, WIDTH)
    loss = nn.MSELoss(reduction="sum")
    total = loss(nn.Sequential(*layers)(x), target)
    total.backward()

    cpu = torch.device("cpu")
    stages = [PipelineStage(layer, stage, number, cpu) for layer, stage in zip(mine, own_stages, strict=True)]
    schedule_class = getattr(schedules, name)
    schedule = schedule_class(stages[0] if name in ONE_STAGE else stages, microbatches, loss_fn=loss, scale_grads=False)
    losses: list[torch.Tensor] = []
    last = number - 1 in own_stages
    with check_leaked_tensors() as leaked:
        for _ in range(2):
            for layer in mine:
                layer.zero_grad()
            losses.clear()
            schedule.step(*([x] if 0 in own_stages else []), **({"target": target, "losses": losses} if last else {}))
    assert not leaked
    for layer, stage in zip(mine, own_stages, strict=True):
        for got, expected in zip(layer.parameters(), layers[stage].parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-4)
    if last:
        torch.testing.assert_close(torch.stack(losses).sum(), total.detach(), rtol=1e-5, atol=0.0)


@pytest.mark.ranks(2, 3)
def test_a_batch_of_sends_and_receives_completes_in_any_order(group, world):
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for order in ((0, 1), (1, 0)):
        x, y = torch.full((1_000_000,), float(world.rank)), torch.empty(1_000_000)
        operations = [group.P2POp(group.isend, x, after), group.P2POp(group.irecv, y, before)]
        for work in group.batch_isend_irecv([operations[i] for i in order]):
            work.wait()
        assert y.eq(before).all()


@pytest.mark.ranks(2, 3)
def test_a_rank_can_send_to_itself(group, world):
    x, y = torch.full((1_000_000,), float(world.rank)), torch.empty(1_000_000)
    operations = [group.P2POp(group.isend, x, world.rank), group.P2POp(group.irecv, y, world.rank)]
    for work in group.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(x, y)


@pytest.mark.ranks(2, 3)
def test_operations_complete_in_any_order_of_waiting(group, world):
    other = group.new_group(list(range(world.size)))
    y = torch.empty(1_000_000)
    x, total = torch.full((1_000_000,), 7.0), torch.full((1000,), 1.0)
    work = group.all_reduce(total, group=other, async_op=True)
    received = group.irecv(y, 0) if world.rank == 1 else None
    if world.rank == 0:
        group.send(x, 1)
        group.barrier()
        work.wait()
    else:
        work.wait()
        group.barrier()
    if received is not None:
        received.wait()
        assert y.eq(7).all()
    assert total.eq(world.size).all()


@pytest.mark.ranks(2, 3, 4)
def test_programs_of_messages_and_collectives_in_several_groups_complete(group, world):
    run_programs(world, range(100, 102))


@pytest.mark.campaign
@pytest.mark.ranks(2, 3, 4)
def test_many_programs_of_messages_and_collectives_in_several_groups_complete(group, world):
    run_programs(world, range(102, 125))


def run_programs(world, seeds: range) -> None:
    for seed in seeds:
        program = legal_programs.generate(seed, world.size)
        try:
            legal_programs.perform(program, legal_programs.TorchExecutor(program.groups))
        except BaseException as error:
            error.add_note(f"in the program of seed {seed}, rank {world.rank}")
            raise
