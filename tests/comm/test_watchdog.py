"""Nothing hangs in silence: jobs that would are ended with a report of where every rank is, and mismatches are named.

The jobs are real ones, started under mpirun, each with ranks that do not do what the others do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from support import ROOT, job

import mpitrain
from mpitrain.errors import CommunicationError

MANY = pytest.mark.ranks(2, 3, 4)
TIMEOUT = 3  # seconds an operation may take in these jobs
PROLOGUE = """
import time
import numpy as np
import torch
import mpitrain as mt
from mpitrain.errors import CommunicationError, InputError
world = mt.init(timeout={timeout}, debug={debug})
x = torch.ones(4, 256)
"""


def run(
    tmp_path: Path, ranks: int, program: str, debug: bool, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """A job of ranks that each run the program, and say "done" at its end."""
    prologue = PROLOGUE.format(timeout=TIMEOUT, debug=debug)
    script = tmp_path / "job.py"
    script.write_text(prologue + textwrap.dedent(program) + "\nprint('done', flush=True)\n")
    return job(ranks, [sys.executable, str(script)], cwd=tmp_path, PYTHONPATH=str(ROOT), **environment)


def failed_job(
    tmp_path: Path, ranks: int, program: str, *, debug: bool = False, limit: float = 30, **environment: str
) -> str:
    """What a job that must fail says; limit: seconds it may take after its start, which is counted as well."""
    begun = time.monotonic()
    done = run(tmp_path, ranks, program, debug, environment)
    assert done.returncode != 0, done.stdout + done.stderr
    assert time.monotonic() - begun < TIMEOUT + limit
    assert "Traceback" not in done.stderr
    return re.sub(r"\b[3-9] s\b", f"{TIMEOUT} s", done.stderr)  # a busy machine looks a little later


def line(tmp_path: Path, text: str) -> str:
    """job.py:LINE of the line that contains the text."""
    lines = (tmp_path / "job.py").read_text().splitlines()
    return f"job.py:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def rows(report: str) -> dict[int, str]:
    """The table of a report: rank -> what is said of it. There must be one table."""
    found = re.findall(r"^  rank (\d+)  (.*)$", report, flags=re.MULTILINE)
    assert len(found) == len({rank for rank, _ in found}), report
    return {int(rank): text for rank, text in found}


def test_an_operation_that_one_rank_never_calls_ends_the_job_with_every_ranks_place(tmp_path):
    report = failed_job(
        tmp_path,
        3,
        """
        world.all_reduce(x)
        world.barrier()
        def compute():
            time.sleep(60)  # never calls
        if world.rank == 1:
            compute()
        world.all_reduce(x)  # the third
        """,
    )
    assert "all_reduce #3 of float32 (4, 256) did not complete in 3 s (comm.timeout)" in report
    said = rows(report)
    assert set(said) == {0, 1, 2}
    for rank in (0, 2):
        assert said[rank].startswith("world: all_reduce #3 of float32 (4, 256), 3 s")
        assert said[rank].endswith(f"{line(tmp_path, '# the third')} in <module>")
    assert said[1].startswith("not in an operation")
    assert said[1].endswith(f"{line(tmp_path, '# never calls')} in compute")


@pytest.mark.campaign
def test_ranks_in_different_operations_are_told_apart(tmp_path):
    report = failed_job(
        tmp_path,
        2,
        """
        half = world.split(0, label="pair")
        if world.rank == 0:
            half.broadcast(x, 1, "tree")  # waits for rank 1
        else:
            world.recv(torch.empty(7, dtype=torch.int64), 0, tag=3)  # waits for rank 0
        """,
    )
    said = rows(report)
    assert said[0].startswith("pair: broadcast #1 of float32 (4, 256), 3 s")
    assert said[0].endswith(f"{line(tmp_path, '# waits for rank 1')} in <module>")
    assert said[1].startswith("world (messages): receive from rank 0 #1 of int64 (7,), 3 s")
    assert said[1].endswith(f"{line(tmp_path, '# waits for rank 0')} in <module>")


@pytest.mark.campaign
def test_a_message_that_is_never_sent_ends_the_job(tmp_path):
    report = failed_job(
        tmp_path,
        2,
        """
        work = world.irecv(torch.empty(5), 1 - world.rank)
        work.wait()  # for ever
        """,
    )
    said = rows(report)
    for rank in (0, 1):
        assert said[rank].startswith(f"world (messages): receive from rank {1 - rank} #1 of float32 (5,)")
        assert said[rank].endswith(f"{line(tmp_path, '# for ever')} in <module>")


@pytest.mark.campaign
def test_a_stopped_rank_does_not_answer(tmp_path):
    report = failed_job(
        tmp_path,
        2,
        """
        import os, signal
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()
        """,
    )
    said = rows(report)
    assert said[0].startswith("world: barrier #1, 3 s")
    assert said[1] == "does not answer: stopped, dead or cut off"


def test_a_hang_in_the_communication_thread_is_reported_with_the_line_that_waits(tmp_path):
    report = failed_job(
        tmp_path,
        2,
        """
        assert world.overlaps
        works = [world.all_reduce(x, async_op=True)]
        if world.rank == 0:
            works.append(world.all_reduce(torch.ones(9), async_op=True))
        for work in works:
            work.wait()  # rank 0 waits here
        time.sleep(60)
        """,
        MPITRAIN_SPARE_CORES="1",
    )
    assert "all_reduce #2 of float32 (9,) did not complete" in report
    said = rows(report)
    assert said[0].startswith("world (async): all_reduce #2 of float32 (9,), 3 s")
    assert said[0].endswith(f"{line(tmp_path, '# rank 0 waits here')} in <module>")
    assert said[1].startswith("not in an operation")
    assert said[1].endswith(f"{line(tmp_path, 'time.sleep(60)')} in <module>")


@pytest.mark.campaign
def test_a_hang_where_nothing_overlaps_is_reported_as_well(tmp_path):
    report = failed_job(
        tmp_path,
        2,
        """
        assert not world.overlaps
        if world.rank == 1:
            time.sleep(60)
        world.all_reduce(x, async_op=True, compression=mt.compression.PowerSGD(1)).wait()  # compressed
        """,
        MPITRAIN_SPARE_CORES="0",
    )
    said = rows(report)
    assert said[0].startswith("world (async): all_reduce #1 of float32 (4, 256), 3 s")
    assert said[0].endswith(f"{line(tmp_path, '# compressed')} in <module>")


@pytest.mark.campaign
def test_in_debug_mode_a_rank_that_does_not_come_is_named_before_the_operation_begins(tmp_path):
    report = failed_job(
        tmp_path,
        2,
        """
        world.all_reduce(x)
        if world.rank == 1:
            time.sleep(60)
        world.all_reduce(x)
        """,
        debug=True,
    )
    assert rows(report)[0].startswith("world: before all_reduce #2 of float32 (4, 256), 3 s")


@pytest.mark.campaign
def test_in_debug_mode_a_mismatch_ends_the_job_with_both_calls_and_lines(tmp_path):
    report = failed_job(
        tmp_path,
        2,
        """
        world.barrier()
        if world.rank == 0:
            world.all_reduce(x)  # sums
        else:
            world.broadcast(x, 0)  # copies
        """,
        debug=True,
    )
    assert "ranks call different operations" in report
    said = rows(report)
    assert said[0].startswith("#2 all_reduce of 1024 float32") and line(tmp_path, "# sums") in said[0]
    assert said[1].startswith("#2 broadcast of 1024 float32") and line(tmp_path, "# copies") in said[1]


@pytest.mark.parametrize(
    ("waits", "code"),
    [
        ("world.all_reduce(x)", 0),
        pytest.param("world.recv(x, 1)", 3, marks=pytest.mark.campaign),
        pytest.param("world.all_reduce(x, async_op=True).wait()", 3, marks=pytest.mark.campaign),
        pytest.param("world.split(0)", 3, marks=pytest.mark.campaign),
        pytest.param("world.irecv(x, 1).wait(timeout=50)", 3, marks=pytest.mark.campaign),
    ],
)
def test_a_rank_whose_interpreter_ends_while_others_wait_for_it_is_named_within_seconds(tmp_path, waits, code):
    program = f"""
        import sys
        from mpitrain.comm import set_timeout
        set_timeout(600)
        half = world.split(world.rank % 2)
        world.all_reduce(x)
        if world.rank == 1:
            sys.exit({code})
        half.barrier()  # of ranks 0 and 2: rank 1 has nothing to do with it
        {waits}  # in vain
        """
    report = failed_job(tmp_path, 3, program, limit=15)
    assert (
        report.count("rank 1 left: its interpreter ended" + (f" with exit code {code} while" if code else " while"))
        == 1
    )
    assert re.search(rf"while rank [02] waits for it at {line(tmp_path, '# in vain')} in <module>", report)
    assert "[mpi" not in report.split("mpitrain: ")[1].splitlines()[0]


LATE = {
    "stopped when MPI's library is loaded": """
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
    "hangs in its imports": "time.sleep(60)",
    "stopped before init": "import mpitrain.comm; os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize(
    "kind",
    [
        "stopped when MPI's library is loaded",
        *(pytest.param(kind, marks=pytest.mark.campaign) for kind in list(LATE)[1:]),
    ],
)
def test_a_rank_that_does_not_come_to_the_start_is_named_with_its_process(tmp_path, kind):
    script = tmp_path / "job.py"
    late = textwrap.indent(textwrap.dedent(LATE[kind]), "    ")
    script.write_text(
        "import os, signal, time\n"
        "if (os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('PMI_RANK')) == '1':\n"
        f"    print('process', os.getpid(), flush=True)\n{late}\n"
        "import mpitrain as mt\n"
        f"mt.init(timeout={TIMEOUT})\n"
    )
    done = job(3, [sys.executable, str(script)], timeout=60, PYTHONPATH=str(ROOT), MPITRAIN_START_TIMEOUT="8")
    assert done.returncode != 0
    process = done.stdout.split("process ")[1].split()[0]
    what = "has not come so far" if "imports" in kind else "is stopped"
    ours = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert len(ours) == 1 and "not all 3 ranks came to the start of MPI in 8 s" in ours[0]
    assert re.search(rf": rank 1 \(python\S*, process {process} on \S+\) {what}$", ours[0])


def good_job(tmp_path: Path, ranks: int, program: str, *, debug: bool = False, **environment: str) -> None:
    done = run(tmp_path, ranks, program, debug, environment)
    assert done.returncode == 0 and done.stdout.count("done") == ranks, done.stdout + done.stderr


def test_ranks_that_are_done_may_leave_long_before_the_others(tmp_path):
    good_job(
        tmp_path,
        3,
        """
        import sys
        from mpitrain.comm import set_timeout
        set_timeout(600)
        rest = world.split(0 if world.rank else None)
        world.broadcast(x, 0)
        if world.rank:
            if world.rank == 1:
                time.sleep(2)
            rest.all_reduce(x, async_op=True).wait()  # without rank 0, which has left
            sent = world.isend(x, 3 - world.rank)
            world.recv(torch.empty(4, 256), 3 - world.rank)
            sent.wait()
        print("done", flush=True)
        if world.rank == 1:
            time.sleep(2)
        sys.exit(0)
        """,
    )


@pytest.mark.campaign
def test_an_operation_that_is_only_slow_is_left_alone(tmp_path):
    good_job(
        tmp_path,
        2,
        """
        time.sleep(2 * world.rank)  # rank 1 comes 2 s late
        world.all_reduce(x)
        try:
            world.all_reduce(x, "sum" if world.rank else "max")
        except CommunicationError:
            time.sleep(4)  # longer than an operation may take, but in none
        world.barrier()
        """,
        debug=True,
    )


@pytest.mark.parametrize("cores", [pytest.param("0", marks=pytest.mark.campaign), "1"])
def test_waiting_for_a_collective_for_too_long_raises_with_its_name(tmp_path, cores):
    good_job(
        tmp_path,
        2,
        """
        if world.rank == 1:
            time.sleep(1)
        work = world.all_reduce(x, async_op=True)
        if world.rank == 0:
            try:
                work.wait(timeout=0.2)
                raise SystemExit("did not raise")
            except CommunicationError as error:
                said = "all_reduce of 1024 elements on world is not complete after 0.2 s"
                assert said in str(error), error
        work.wait(timeout=20)  # it can still complete
        assert work.done() and x.eq(2).all()
        y = torch.ones(3)
        world.all_reduce(y)
        assert y.eq(2).all()
        """,
        MPITRAIN_SPARE_CORES=cores,
    )


def test_the_communication_thread_sums_in_order_of_submission_while_the_caller_computes(tmp_path):
    good_job(
        tmp_path,
        2,
        """
        assert world.overlaps
        buffers = [torch.empty(n) for n in (1, 1000, 300_000, 77, 40_000)]
        matrix = torch.full((200, 200), 0.5)
        # each operation works on what the one before it left behind: only in order the numbers come out
        for step in range(20):
            chain = torch.full((2000,), float(world.rank + step))
            works = []
            for i, buffer in enumerate(buffers):
                buffer.fill_(world.rank + i + step)
                works.append(world.all_reduce(buffer, async_op=True))
                works.append(world.all_reduce(chain, "sum" if i % 2 else "max", async_op=True))
            product = (matrix @ matrix).sum()  # while the thread is at work
            own = torch.full((5,), float(world.rank))
            world.all_reduce(own)  # a blocking one does not wait for them, nor disturb them
            assert own.eq(1).all() and product == 200 * 200 * 50
            works[-1].wait()
            assert all(work.done() for work in works)  # the last one is done: so are those before it
            assert all(b.eq(2 * (i + step) + 1).all() for i, b in enumerate(buffers))
            assert chain.eq(4 * (step + 1)).all()  # max, sum, max, sum, max
        """,
        MPITRAIN_SPARE_CORES="1",
    )


def test_an_error_in_the_communication_thread_surfaces_where_it_is_waited_for(tmp_path):
    good_job(
        tmp_path,
        2,
        """
        wrong = world.all_reduce(torch.ones(5), algorithm="no such", async_op=True)
        right = world.all_reduce(x, async_op=True)
        right.wait()
        assert x.eq(2).all() and wrong.done()
        try:
            wrong.wait()
            raise SystemExit("did not raise")
        except InputError as error:
            assert "no algorithm" in str(error)
        """,
        MPITRAIN_SPARE_CORES="1",
    )


def mismatched(world, call) -> list[str]:
    """The table of the error that all ranks get, without the lines."""
    with pytest.raises(CommunicationError) as caught:
        call()
    assert caught.value.agreed
    table = str(caught.value).splitlines()
    assert len(table) == world.size + 1 and all("at test_watchdog.py:" in row for row in table[1:])
    world.barrier()  # and the ranks are still together
    return table


@MANY
def test_different_operations_shapes_types_and_arguments_are_named(world):
    odd = world.rank == world.size - 1

    table = mismatched(world, lambda: world.barrier() if odd else world.all_reduce(torch.ones(3)))
    assert "different operations" in table[0] and "all_reduce of 3 float32" in table[1] and "barrier" in table[-1]

    table = mismatched(world, lambda: world.all_reduce(torch.ones(4 if odd else 3)))
    assert "all_reduce of 3 float32" in table[1] and "all_reduce of 4 float32" in table[-1]

    table = mismatched(world, lambda: world.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32)))
    assert "of 3 float32" in table[1] and "of 3 float64" in table[-1]

    table = mismatched(world, lambda: world.all_reduce(torch.ones(3), "max" if odd else "sum", async_op=True))
    assert "'sum'" in table[1] and "'max'" in table[-1]

    table = mismatched(world, lambda: world.broadcast(torch.ones(3), 1 if odd else 0))
    assert "(0, 'auto')" in table[1] and "(1, 'auto')" in table[-1]

    one, other = mpitrain.compression.TopK(0.5), mpitrain.compression.FP16()
    table = mismatched(world, lambda: world.all_reduce(torch.ones(3), compression=other if odd else one))
    assert "TopK(ratio=0.5" in table[1] and "FP16()" in table[-1]


@MANY
def test_arguments_that_differ_far_behind_are_found(world):
    """Signatures of many blocks are longer than what is sent of them."""
    counts = [[1000 + (r == world.size - 1)] * world.size for r in range(world.size)]
    long = "x" * 500 + str(world.rank == world.size - 1)
    with pytest.raises(CommunicationError, match="different operations"):
        world.all_reduce(torch.ones(3), compression=mpitrain.compression.FP16().bucket(long))
    mine = counts[world.rank]
    table = mismatched(world, lambda: world.all_gather(torch.empty(sum(mine)), torch.empty(mine[0]), counts=mine))
    assert "different operations" in table[0]


@MANY
def test_different_places_in_an_arena_are_named(world):
    arena = world.arena(1000)
    odd = world.rank == world.size - 1
    mine = arena.view(64 if odd else 0, (100,))
    for call in (
        lambda: world.all_reduce(mine),
        lambda: world.all_reduce(mine, algorithm="shared"),
        lambda: world.broadcast(mine, 0),
        lambda: world.reduce(mine, 0),
        lambda: world.all_gather(torch.empty(100 * world.size), mine),
        lambda: world.reduce_scatter(torch.empty(50), arena.view(64 if odd else 0, (50 * world.size,))),
        lambda: world.all_reduce(mine if odd else torch.ones(100)),  # in no arena at all
    ):
        table = mismatched(world, call)
        assert "different parts of an arena" in table[0] and "at byte 256 of an arena of 4000" in table[-1]
    mine.fill_(world.rank + 1.0)
    world.all_reduce(mine, algorithm="ring")  # by messages: the places do not matter
    assert mine.eq(sum(range(1, world.size + 1))).all()
    own = arena.view(100 * world.rank, (100,))  # a block in its own place is no mismatch
    world.all_gather(arena.view(0, (100 * world.size,)), own)
    arena.free()


@MANY
def test_waiting_for_too_long_raises_with_the_operations_name(world):
    lone = torch.empty(6)
    work = world.irecv(lone, (world.rank + 1) % world.size, tag=9)
    assert not work.done()
    begun = time.monotonic()
    with pytest.raises(CommunicationError, match=r"receive from rank \d is not complete after 0.2 s"):
        work.wait(timeout=0.2)
    assert 0.2 <= time.monotonic() - begun < 5
    world.barrier()  # all have waited in vain
    world.send(torch.arange(6.0), (world.rank - 1) % world.size, tag=9)
    work.wait(timeout=20)  # it can still complete
    assert lone.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_where_mpi_allows_one_thread_alone_the_watchdog_calls_it_never_and_still_ends_the_job(tmp_path, level):
    report = failed_job(
        tmp_path,
        3,
        """
        import threading
        work = world.all_reduce(x, "max", async_op=True)
        assert work.done() or work.wait(timeout=9) is None
        assert not world.overlaps and not any(t.name == "mpitrain-comm" for t in threading.enumerate())
        world.process.watchdog._comm = None  # nothing can be asked through it
        if world.rank == 1:
            time.sleep(60)  # never calls
        world.barrier()
        """,
        MPI4PY_RC_THREAD_LEVEL=level,
        MPITRAIN_SPARE_CORES="1",
    )
    assert "did not complete in 3 s (comm.timeout); this MPI lets no second thread ask the other ranks" in report
    places = re.findall(r"^  rank (\d)  world: barrier .* (job.py:\d+) in", report, flags=re.MULTILINE)
    assert sorted(places) == [(rank, line(tmp_path, "world.barrier()").split()[0]) for rank in ("0", "2")], report
