"""Traffic counters count the bytes that a rank sends, by each operation's formula, and its waits."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.compression import from_name
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology
from mpitrain.comm.job.traffic import blocks_sent, even_shares

MANY = pytest.mark.ranks(2, 3)
DELAY = 0.2  # seconds


@pytest.fixture
def plain(world, monkeypatch):
    """Yield a communicator with a thread and its traffic counters on, without debug mode and without prepared calls."""
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, debug=False, spare_cores=1))
    comm = world.split(0, label="axis")
    comm.journal.start()
    yield comm
    comm.journal.stop()
    comm.free()


def totals(comm: Communicator) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return, by (operation, algorithm), this rank's calls and all ranks' bytes inside and between nodes."""
    mine = [
        [r.operation, r.algorithm, r.calls, r.inside, r.between] for r in comm.journal.account() if r.axis == "axis"
    ]
    comm.journal.start()
    traffic: dict[tuple[str, str], tuple[int, int, int]] = {}
    for rows in comm.all_gather_object(mine):
        for operation, algorithm, calls, inside, between in rows:
            _, a, b = traffic.get((operation, algorithm), (0, 0, 0))
            traffic[operation, algorithm] = calls, a + inside, b + between
    comm.journal.start()
    return traffic


@MANY
@pytest.mark.parametrize("numel", [0, 1, 1001])
def test_bytes_sent_by_every_operation_match_its_formula(plain, numel):
    n, rank, arena = plain.size, plain.rank, plain.arena(3 * 1001)
    x, whole = torch.zeros(numel), torch.zeros(numel * n)
    counts = [numel, 0, 2 * numel][:n]
    uneven, block = torch.zeros(sum(counts)), torch.zeros(counts[rank])
    block_bytes, whole_bytes = x.nbytes, whole.nbytes
    expected = {}
    for algorithm in ("mpi", "ring", "tree", "shared"):
        y = arena.tensor[:numel].zero_() if algorithm == "shared" else x
        for _ in range(3):  # the first call and repeated ones
            plain.all_reduce(y, algorithm=algorithm)
        expected["all_reduce", algorithm if numel else "none"] = 3, 3 * 2 * (n - 1) * block_bytes
    assert totals(plain) == {k: (calls * (1 if numel else 4), total, 0) for k, (calls, total) in expected.items()}
    for _ in range(2):
        plain.reduce_scatter(x, whole, algorithm="ring")
        plain.all_gather(whole, x, algorithm="mpi")
        plain.reduce_scatter(block, uneven, counts=counts, algorithm="mpi")
        plain.all_gather(uneven, block, counts=counts, algorithm="ring")
        plain.broadcast(x, 1, algorithm="mpi")
        plain.reduce(x, 1, algorithm="tree")
        plain.gather(whole if rank == 1 else None, x, 1)
        plain.scatter(x, whole if rank == 1 else None, 1)
        plain.all_to_all(whole.clone(), whole)
        plain.barrier()
    moved = {}
    for (operation, _), (calls, inside, between) in totals(plain).items():
        before = moved.get(operation, (0, 0))
        moved[operation] = before[0] + calls, before[1] + inside
        assert between == 0
    blocks = 2 * (n - 1)
    assert moved == {
        "reduce_scatter": (4, blocks * (whole_bytes + uneven.nbytes)),
        "all_gather": (4, blocks * (whole_bytes + uneven.nbytes)),
        "broadcast": (2, blocks * block_bytes),
        "reduce": (2, blocks * block_bytes),
        "gather": (2, blocks * block_bytes),
        "scatter": (2, blocks * block_bytes),
        "all_to_all": (2, blocks * whole_bytes),
        "barrier": (2, 0),
    }
    arena.free()


@pytest.mark.ranks(4)
def test_bytes_inside_and_between_nodes_are_counted_separately(world, monkeypatch):
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, debug=False))
    topology = Topology(world.rank, (0, 0, 1, 1), world.world_ranks)
    comm = Communicator(MPI.Intracomm(world._comm.Dup()), topology, world.process, "axis")
    arena = comm.arena(4096)
    comm.journal.start()
    nbytes = arena.tensor.nbytes
    comm.all_reduce(arena.tensor, algorithm="ring")
    assert totals(comm) == {("all_reduce", "ring"): (1, 3 * nbytes, 3 * nbytes)}
    comm.all_reduce(arena.tensor, algorithm="mpi")
    assert totals(comm) == {("all_reduce", "mpi"): (1, 3 * nbytes, 3 * nbytes)}
    comm.all_reduce(arena.tensor, algorithm="two_level")  # 2 (M-1) X between two nodes, 2 (L-1) X inside each
    assert totals(comm) == {("all_reduce", "two_level"): (1, 4 * nbytes, 2 * nbytes)}
    comm.reduce_scatter(torch.empty(1024), arena.tensor, algorithm="two_level")  # (M-1) X and (L-1) X
    assert totals(comm) == {("reduce_scatter", "two_level"): (1, 2 * nbytes, nbytes)}
    comm.all_gather(arena.tensor, arena.tensor.chunk(4)[comm.rank], algorithm="two_level")  # (M-1) X and M (L-1) X
    assert totals(comm) == {("all_gather", "two_level"): (1, 2 * nbytes, nbytes)}
    there = [2, 3, 0, 1][comm.rank]
    comm.isend(torch.zeros(5), there)
    comm.recv(torch.zeros(5), there)
    comm.isend(torch.zeros(7), comm.rank ^ 1)
    comm.recv(torch.zeros(7), comm.rank ^ 1)
    assert totals(comm) == {("send", "message"): (2, 4 * 28, 4 * 20), ("recv", "message"): (2, 0, 0)}
    comm.journal.stop()
    arena.free()
    comm.free()


@MANY
def test_a_compressed_operation_counts_once_and_a_letter_by_its_bytes(plain):
    x = torch.zeros(1000)
    plain.all_reduce(x, compression=from_name("bf16"))
    (row,) = totals(plain).items()
    assert row[0] == ("all_reduce", "bf16") and row[1][0] == 1
    assert 0 < row[1][1] <= 2 * (plain.size - 1) * x.nbytes
    box = plain.mailbox("test")
    plain.journal.start()
    after = (plain.rank + 1) % plain.size
    box.post(after, [1, 2, 3], x)
    letter = box.wait(range(plain.size), "test")
    letter.receive(x).wait()
    traffic = totals(plain)
    assert traffic["post", "letter"] == (1, plain.size * (x.nbytes + 5 * 8), 0)
    assert traffic["letter", "letter"] == traffic["recv", "letter"] == (1, 0, 0)
    box.free()
    arena = plain.arena(300 * plain.size)
    out = torch.zeros(300)
    plain.journal.start()
    for _ in range(2):
        work = plain.deferred_reduce_scatter(out, arena.tensor)
        work.wait()
        work.release()
    assert totals(plain) == {("reduce_scatter", "deferred"): (2, 2 * (plain.size - 1) * arena.tensor.nbytes, 0)}
    arena.free()


@MANY
def test_recorded_operations_agree_on_all_ranks_and_mark_the_background(plain):
    journal, x = plain.journal, torch.zeros(1000)
    plain.all_reduce(x)
    journal.record(True)
    for _ in range(2):
        plain.all_reduce(x)
    plain.all_reduce(x, async_op=True).wait()
    plain.barrier()
    if plain.rank == 0:
        plain.send(x, 1, 7)
    elif plain.rank == 1:
        plain.recv(x, 0, 7)
    records = journal.take()
    assert journal.take() == []
    journal.record(False)
    plain.barrier()
    assert journal.take() == []
    assert [one.end for one in records] == sorted(one.end for one in records)
    assert all(one.begin <= one.end for one in records)
    collective = [one for one in records if one.operation not in ("send", "recv")]
    assert [one.operation for one in collective] == ["all_reduce"] * 3 + ["barrier"]
    assert [one.background for one in collective] == [False, False, True, False]
    same = [[one.operation, one.axis, one.algorithm, one.key, one.sequence] for one in collective]
    everyone = plain.all_gather_object(same)
    assert all(each == same for each in everyone)
    assert len({(key, number) for *_, key, number in same}) == 4
    messages = plain.all_gather_object([[o.key, o.sequence] for o in records if o.operation in ("send", "recv")])
    assert messages[0] == messages[1] and len(messages[0]) == 1


@pytest.mark.ranks(2)
def test_waiting_for_other_ranks_is_counted_and_computing_is_not(plain):
    journal, x, rank = plain.journal, torch.zeros(100), plain.rank

    def measure_waits(act) -> list[float]:
        """Return the seconds this rank waits in each of three calls of `act` to which rank 0 comes late."""
        waits = []
        for _ in range(3):  # the machine may be busy in one of them
            plain.barrier()
            begin = journal.waited
            if rank == 0:
                time.sleep(DELAY)
            act()
            waits.append(journal.waited - begin)
        return waits

    def wait_after_computing() -> None:
        nonlocal hidden
        work = plain.all_reduce(x, async_op=True)
        time.sleep(DELAY)  # computing, while the thread communicates
        begin = journal.waited
        work.wait()
        hidden = min(hidden, journal.waited - begin)

    def send_message() -> None:
        if rank == 0:
            plain.send(x, 1)
        elif rank == 1:
            plain.recv(x, 0)

    hidden = float("inf")
    acts = lambda: plain.all_reduce(x), lambda: plain.all_reduce(x, async_op=True).wait(), send_message
    spent = [measure_waits(act) for act in acts]
    measure_waits(wait_after_computing)
    for number, each in enumerate(spent):
        if rank == 0:
            assert min(each) < DELAY / 2, (number, each)
        elif rank == 1:
            assert max(each) > 0.8 * DELAY, (number, each)
    assert hidden < DELAY / 2


@MANY
def test_stopped_traffic_counters_count_nothing_and_wrap_no_call(plain):
    journal, x = plain.journal, torch.zeros(16)

    def performing_classes() -> list[str]:
        """Return the names of the classes that perform the repeated operation."""
        for _ in range(2):
            plain.all_reduce(x)
        return [ready.__qualname__.split(".")[0] for key, ready in plain.ready.items() if key[0] == "all_reduce"]

    journal.stop()
    off = performing_classes()
    journal.start()
    assert performing_classes() == ["TrafficCounters"]
    before = journal.account()
    assert [(row.operation, row.calls) for row in before] == [("all_reduce", 2)]
    journal.stop()
    assert performing_classes() == off == [name for name in off if name in ("make_repeated_call", "_unsigned")] != []
    assert journal.account() == before and journal.take() == []
    assert plain.irecv(torch.zeros(1), plain.rank)._note is None
    plain.send(torch.zeros(1), plain.rank)


def test_blocks_sent_add_up_to_the_bytes_of_each_operation():
    for size in (1, 2, 3, 8):
        for nbytes in (0, 1, 1001):
            blocks = even_shares(nbytes, size)
            assert sum(blocks) == nbytes and len(blocks) == size
            for operation, times in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("broadcast", 1)):
                sent = [to for rank in range(size) for to in blocks_sent(operation, rank, blocks)]
                assert sum(n for _, n in sent) == times * (size - 1) * nbytes
    assert blocks_sent("gather", 2, [5, 6, 7], 1) == [(1, 7)] and blocks_sent("gather", 1, [5, 6, 7], 1) == []
    assert blocks_sent("scatter", 1, [5, 6, 7], 1) == [(0, 5), (2, 7)]
