"""Jobs that would hang are ended with a report of where every rank is."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from ranks_apart import failed_job, good_job, line, rows

from mpitrain.comm.job.traffic import Record, RecordedOperation
from mpitrain.comm.runtime.agreement import make_repeated_call, run_watched


def test_a_record_notes_when_each_operation_is_first_seen():
    record, seen = Record("world"), []
    operation = RecordedOperation.on("all_reduce", torch.ones(2, 3, dtype=torch.int64))

    def look():
        seen.append(record.since)
        time.sleep(0.002)
        assert record.since == seen[-1]
        assert record.text() == f"world: all_reduce #{len(seen)} of int64 (2, 3)"

    repeated = make_repeated_call(record, operation, [look], (), lambda: None)
    for _ in range(3):
        repeated()
        assert record.since == 0
    for wait in (record.comparing("all_reduce", None), record.during("all_reduce")):  # have the same number
        with wait:
            seen.append(record.since)
            time.sleep(0.002)
    record.restart()
    assert 0 < seen[0] < seen[1] < seen[2] < seen[3] < seen[4] < time.monotonic()


def test_the_line_of_a_waiting_thread_is_found_while_the_main_thread_computes(world):
    watchdog, end = world.process.watchdog, threading.Event()
    record = watchdog.record("test")

    def wait():
        run_watched(record, "receive", None, end.wait)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while record.operation is None:
        time.sleep(0.001)
    place, _ = watchdog.place(), end.set()
    thread.join()
    assert place["doing"] == "test: receive #1, 0 s"
    assert place["line"] == f"test_watchdog.py:{wait.__code__.co_firstlineno + 1} in wait"
    assert watchdog.place()["doing"] == "not in an operation" and "test_the_line" in watchdog.place()["line"]


def test_an_operation_that_one_rank_never_calls_reports_all_ranks(tmp_path):
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
    table = rows(report)
    assert set(table) == {0, 1, 2}
    for rank in (0, 2):
        assert table[rank].startswith("world: all_reduce #3 of float32 (4, 256), 3 s")
        assert table[rank].endswith(f"{line(tmp_path, '# the third')} in <module>")
    assert table[1].startswith("not in an operation")
    assert table[1].endswith(f"{line(tmp_path, '# never calls')} in compute")


@pytest.mark.campaign
def test_ranks_in_different_operations_are_reported(tmp_path):
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
    table = rows(report)
    assert table[0].startswith("pair: broadcast #1 of float32 (4, 256), 3 s")
    assert table[0].endswith(f"{line(tmp_path, '# waits for rank 1')} in <module>")
    assert table[1].startswith("world (messages): receive from rank 0 #1 of int64 (7,), 3 s")
    assert table[1].endswith(f"{line(tmp_path, '# waits for rank 0')} in <module>")


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
    table = rows(report)
    for rank in (0, 1):
        assert table[rank].startswith(f"world (messages): receive from rank {1 - rank} #1 of float32 (5,)")
        assert table[rank].endswith(f"{line(tmp_path, '# for ever')} in <module>")


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
    table = rows(report)
    assert table[0].startswith("world: barrier #1, 3 s")
    assert table[1] == "does not answer: stopped, dead or cut off"


def test_a_hang_in_the_communication_thread_is_reported_with_the_waiting_line(tmp_path):
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
    table = rows(report)
    assert table[0].startswith("world (async): all_reduce #2 of float32 (9,), 3 s")
    assert table[0].endswith(f"{line(tmp_path, '# rank 0 waits here')} in <module>")
    assert table[1].startswith("not in an operation")
    assert table[1].endswith(f"{line(tmp_path, 'time.sleep(60)')} in <module>")


@pytest.mark.campaign
def test_a_hang_without_overlap_is_reported(tmp_path):
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
    table = rows(report)
    assert table[0].startswith("world (async): all_reduce #1 of float32 (4, 256), 3 s")
    assert table[0].endswith(f"{line(tmp_path, '# compressed')} in <module>")


@pytest.mark.campaign
def test_debug_mode_names_a_missing_rank_before_the_operation(tmp_path):
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
def test_debug_mode_reports_both_calls_and_lines_of_a_mismatch(tmp_path):
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
    table = rows(report)
    assert table[0].startswith("#2 all_reduce of 1024 float32") and line(tmp_path, "# sums") in table[0]
    assert table[1].startswith("#2 broadcast of 1024 float32") and line(tmp_path, "# copies") in table[1]


@pytest.mark.campaign
def test_a_slow_operation_does_not_end_the_job(tmp_path):
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


def test_the_watchdog_ends_the_job_without_mpi_calls_from_threads(tmp_path):
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
        MPI4PY_RC_THREAD_LEVEL="serialized",
        MPITRAIN_SPARE_CORES="1",
    )
    assert "did not complete in 3 s (comm.timeout); this MPI library allows calls from one thread only" in report
    places = re.findall(r"^  rank (\d)  world: barrier .* (job.py:\d+) in", report, flags=re.MULTILINE)
    assert sorted(places) == [(rank, line(tmp_path, "world.barrier()").split()[0]) for rank in ("0", "2")], report
