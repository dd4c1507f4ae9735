"""Ranks that pass different arguments get an error, and nothing is written outside of the buffers passed."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path

import pytest
import torch
import unequal
from warm import job

from mpitrain.errors import CommunicationError

MANY = pytest.mark.ranks(2, 3)


@pytest.fixture
def plain(world, monkeypatch):
    """Yield a communicator of all ranks without debug mode, which would compare the arguments first."""
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, debug=False))
    comm = world.split(0)
    yield comm
    comm.free()


def agreed_message(world, call) -> str:
    """Return the text of the error, which all ranks must raise with the same words."""
    with pytest.raises(CommunicationError) as caught:
        call()
    texts = world.all_gather_object(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert caught.value.agreed
    return texts[0]


NUMEL = 300_000


@MANY
def test_mismatch_in_shared_memory_names_ranks_and_arguments(world, plain):
    odd, first, second = world.rank == world.size - 1, plain.arena(2 * NUMEL), plain.arena(2 * NUMEL)
    memory = torch.ones(3 * NUMEL)  # what lies behind a tensor is the caller's as well
    last, ways = world.size - 1, ("shared", "staged")  # the first call of staged allocates memory, collectively

    def reduce_staged(x, op="sum") -> None:  # "auto" follows rules measured on the machine: maybe messages
        plain.all_reduce(x, op, "staged")

    def text(call) -> str:
        message = agreed_message(world, call)
        assert message.startswith("ranks call different operations: rank") and f"rank {last}: " in message
        assert bool((memory == 1).all())
        return message

    message = text(lambda: reduce_staged(memory[: 2 * NUMEL if odd else NUMEL]))
    assert (
        "all_reduce of 300000 float32, sum" in message and f"rank {last}: all_reduce of 600000 float32, sum" in message
    )
    x = memory[:NUMEL].to(torch.int32) if odd else memory[:NUMEL]
    assert f"rank {last}: all_reduce of 300000 int32" in text(lambda: reduce_staged(x))
    assert "300000 float32, max" in text(lambda: reduce_staged(memory[:NUMEL], "max" if odd else "sum"))
    assert f"broadcast from rank {last}" in text(lambda: plain.broadcast(memory[:NUMEL], last if odd else 0, "shared"))
    assert f"reduce to rank {last}" in text(lambda: plain.reduce(memory[:NUMEL], last if odd else 0, "sum", "shared"))
    out = torch.empty(world.size * NUMEL)
    text(lambda: plain.all_gather(out, memory[:NUMEL], "shared") if odd else reduce_staged(memory[:NUMEL]))
    message = text(lambda: plain.all_reduce(memory[: 2 * NUMEL if odd else NUMEL], "sum", ways[odd]))
    assert "all_reduce of 600000 float32, sum, the first through shared memory" in message

    for arena in (first, second):
        arena.tensor.fill_(1.0)
    text(lambda: plain.all_reduce(first.tensor[: NUMEL + 64 * odd]))
    assert "of arena" in text(lambda: plain.all_reduce(first.tensor[64 * odd : NUMEL + 64 * odd]))
    text(lambda: plain.all_reduce((second if odd else first).tensor))
    text(lambda: plain.all_reduce(memory[:NUMEL] if odd else first.tensor[:NUMEL], "sum", "shared"))
    assert bool((first.tensor == 1).all()) and bool((second.tensor == 1).all())
    assert f"arena on cpu of {7 + last} float32" in agreed_message(world, lambda: plain.arena(7 + world.rank))
    x = memory[:NUMEL].clone()
    plain.all_reduce(x)  # the communicator works as before
    assert bool((x == world.size).all())
    first.free()
    second.free()


@MANY
def test_deferred_reduce_scatter_compares_its_arguments(world, plain):
    x = plain.arena(world.size * 6000)
    x.tensor.fill_(1.0)
    out, odd = torch.zeros(6000), world.rank == 0
    for numel, op in ((6000, "max" if odd else "sum"), (5000 if odd else 6000, "sum")):
        work = plain.deferred_reduce_scatter(out[:numel], x.tensor[: world.size * numel], op)
        with pytest.raises(CommunicationError, match="ranks call different operations: rank"):
            work.wait()
        work.release()
        assert bool((out == 0).all())
    plain.deferred_reduce_scatter(out, x.tensor).release()
    assert bool((out == world.size).all())
    x.free()


@MANY
def test_a_rank_that_arrives_at_another_operation_raises_before_it(world, plain):
    plain.all_reduce(torch.ones(3))
    register = plain.binder._register
    sign = {name: register.signature(name, meets=False, synchronizing=True) for name in ("this", "that", "next")}
    if world.rank == 0:
        sign["this"]()
    world.barrier()
    if world.rank:
        with pytest.raises(CommunicationError, match=rf"rank 0: this; .*rank {world.rank}: that\. Every rank must"):
            sign["that"]()
    world.barrier()
    for _ in range(3):
        sign["next"]()
        world.barrier()
    if world.rank == 0:
        sign["this"]()
        sign["next"]()  # it cannot have completed the operation before, which the others have not begun
    world.barrier()
    if world.rank:
        with pytest.raises(CommunicationError, match="rank 0 has already begun next"):
            sign["this"]()
        register.last[0] += 1 << 28
    world.barrier()
    x = torch.ones(5)
    plain.all_reduce(x)
    assert bool((x == world.size).all())


@MANY
def test_random_mismatches_never_write_outside_shared_memory(world, plain):
    cases = unequal.Cases(plain)
    for number in range(60):
        ranks = unequal.make_case(1, number, world.size, meeting=True)
        cases.prepare(ranks[world.rank])
        world.barrier()
        error = ""
        try:
            cases.perform(ranks[world.rank])
        except CommunicationError as caught:
            error = str(caught)
        world.barrier()
        outcomes = world.all_gather_object([error, cases.count_changes_outside()])
        identical = len({arguments.must_match(world.size) for arguments in ranks}) == 1
        assert {outside for _, outside in outcomes} == {0}, (number, ranks, outcomes)
        assert len({text for text, _ in outcomes}) == 1 and bool(error) != identical, (number, ranks, outcomes)
    cases.free()


SMALL = """
import sys
import torch
import mpitrain as mt

world = mt.init(timeout=30)
world.all_reduce(torch.ones(1))
if sys.argv[1] == "types":
    world.all_reduce(torch.ones(1000, dtype=torch.int32 if world.rank else torch.float32))
elif sys.argv[1] == "ways":  # of which only one needs staging memory, as a tuning table may choose for two sizes
    world.all_reduce(torch.ones(1_000_000 * (world.rank + 1)), "sum", ("staged", "shared")[world.rank])
else:
    world.broadcast(torch.ones(400_000 if world.rank else 1000), 1)
"""

BACKEND = """
import torch
import torch.distributed as dist
import mpitrain.backend

dist.init_process_group("mpitrain")
x = torch.ones(3_000_000)
dist.all_reduce(x[: 1_000_000 * (dist.get_rank() + 1)])
"""


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        (SMALL, ["types"], ["all_reduce of 1000 float32, sum", "all_reduce of 1000 int32, sum"]),
        (SMALL, ["sizes"], ["broadcast from rank 1 of 1000 float32", "broadcast from rank 1 of 400000 float32"]),
        (SMALL, ["ways"], ["all_reduce of 1000000 float32, sum", "all_reduce of 2000000 float32, sum"]),
        (BACKEND, [], ["all_reduce of 1000000 float32, sum", "all_reduce of 2000000 float32, sum"]),
    ],
    ids=["types by the library", "sizes by the library", "one through staging memory", "torch.distributed"],
)
def test_a_job_with_unequal_arguments_ends_with_both_calls_named(tmp_path, script, arguments, named):
    (tmp_path / "main.py").write_text(script)
    result = job(2, [sys.executable, str(tmp_path / "main.py"), *arguments], timeout=60)
    assert result.returncode not in (0, 128 + signal.SIGBUS, 128 + signal.SIGSEGV), result.stderr
    assert "ranks call different operations" in result.stderr
    assert all(text in result.stderr for text in named), result.stderr


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (3, 4)])
def test_random_mismatches_never_write_outside_the_buffers(tmp_path, ranks, count, full):
    lines = run_campaign(tmp_path, ranks, seed=2, count=count * (50 if full else 1))
    assert any("different operations" in line["outcome"] for line in lines)
    assert any(line["outcome"] == "done" for line in lines)


def run_campaign(folder: Path, ranks: int, seed: int, count: int) -> list[dict]:
    """Run `count` cases and return one line for each case and rank; after an aborted job, go on with the next case."""
    first, lines = 0, []
    while first < count:
        command = [sys.executable, str(Path(unequal.__file__)), *map(str, (seed, first, count, folder))]
        result = job(ranks, command, timeout=600)
        assert result.returncode in (0, unequal.EXIT_CODE), f"after case {first}: {result.stderr}"
        for rank in range(ranks):
            log = folder / f"rank-{rank}.jsonl"
            lines += [json.loads(line) for line in log.read_text().splitlines()]
            log.unlink()
        first = max(line["case"] for line in lines) + 1
    for line in lines:
        number = line["case"]
        arguments = unequal.make_case(seed, number, ranks)
        assert line["outside"] == 0, (line, arguments)
        if len({a.must_match(ranks) for a in arguments}) == 1:
            assert line["outcome"] == "done", (line, arguments)
        elif all(a.meets for a in arguments):
            assert "ranks call different operations" in line["outcome"], (line, arguments)
    assert {line["case"] for line in lines} == set(range(count))
    return lines
