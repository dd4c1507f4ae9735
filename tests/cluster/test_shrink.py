"""Jobs that go on without a restart when ranks die: Open MPI with fault tolerance, and real kills by process number.

Hosts are network namespaces; one whose link is taken down falls silent, as a machine that lost its power.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from mortal_jobs import Job

from mpitrain.data.prepare import prepare
from mpitrain.monitor import read_events, read_metrics
from mpitrain.monitor.run_files import summary

OPEN_MPI = (Path(sys.prefix) / "bin/ompi_info").exists()
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not OPEN_MPI, reason="ranks can die alone only under Open MPI 5; this environment has another"),
]
STEPS = 150  # of some milliseconds each, in which a test that waits for a core can still kill
SMALL = ("--model.layers", 1, "--model.width", 32, "--model.heads", 2, "--model.sequence", 32, "--train.batch", 24)
ACROSS = ("--with-ft", "ulfm", "--prtemca", "oob_tcp_keepalive_time", "0")  # options of mpirun


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    source = folder / "a.txt"
    source.write_text("All happy families are alike; each unhappy family is unhappy in its own way.\n" * 400)
    prepare([str(source)], folder / "text")
    return ("--data.path", folder / "text", *SMALL, "--train.steps", STEPS, "--data.record_ids", "true",
            "--checkpoint.every", 0, "--elastic.mode", "shrink")  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    """Return the metrics rows of a run in which no rank died."""
    folder = tmp_path_factory.mktemp("undisturbed") / "r"
    job = Job(folder, 2, arguments)
    job.end()
    return read_metrics(folder)


def same_run(folder: Path, undisturbed: list[dict]) -> None:
    """Assert that the run has every step once, with the samples and losses of the undisturbed run."""
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["ids"] for row in rows] == [row["ids"] for row in undisturbed]
    assert [row["lr"] for row in rows] == [row["lr"] for row in undisturbed]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in undisturbed], rel=1e-5)


@pytest.mark.parametrize(
    ("zero", "victim", "every"),
    [*(pytest.param(*case, marks=pytest.mark.full) for case in ((0, 0, 1), (1, 2, 1))), (2, 0, 4), (3, 2, 1)],
)
def test_training_continues_from_the_newest_copy_without_a_killed_rank(
    tmp_path, arguments, undisturbed, zero, victim, every
):
    job = Job(tmp_path / "r", 4, (*arguments, "--parallel.zero", zero, "--elastic.copy_every", every))
    try:
        job.until(lambda: job.rows() >= 15)
        measured = job.time_to_recover(lambda: job.signal(victim))
    finally:
        job.end()
    [(lost, step, left, seconds)] = job.recoveries()
    assert lost == [victim] and left == 3 and step >= 15 - every and step % every == 0 and seconds < 5
    assert job.recovered() == [pytest.approx(seconds, abs=0.06)] and job.is_told(seconds, measured), (seconds, measured)
    assert f"s from the loss of ranks to step {step + 1}" in summary(tmp_path / "r")
    events = [event for event in read_events(tmp_path / "r") if event["event"] not in ("evaluate", "discard")]
    start, noted, saved, end = events  # whoever was the first rank when it happened
    assert (start["event"], start["ranks"], noted["event"], noted["ranks"]) == ("start", 4, "lost", [victim])
    assert noted["step"] == step + 1 and noted["recovered_s"] == job.recovered()[0]
    assert (saved["event"], end["event"], end["outcome"]) == ("save", "end", "done")
    same_run(tmp_path / "r", undisturbed)


@pytest.mark.parametrize(
    ("axis", "zero"),
    [
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("pipeline", 0), ("tensor", 1))),
        ("pipeline", 3),
        ("tensor", 2),
    ],
)
def test_a_mesh_continues_at_the_largest_size_that_fits(tmp_path, arguments, undisturbed, axis, zero):
    job = Job(tmp_path / "r", 6, (*arguments, f"--parallel.{axis}", 2, "--parallel.zero", zero))
    try:
        job.until(lambda: job.rows() >= 10)
        job.signal(2)
        job.until(lambda: len(job.recoveries()) == 1)
        job.until(lambda: job.rows() >= 25)
        job.signal(0)
    finally:
        job.end()
    [(lost, step, left, _), (lost_then, step_then, left_then, _)] = job.recoveries()
    assert (lost, left, lost_then, left_then) == ([2], 4, [0], 4) and step >= 9 and step_then >= 24
    assert "waiting: 4 of 5 ranks train" in job.log(5)
    same_run(tmp_path / "r", undisturbed)


def test_a_reproducible_run_continues_with_the_same_bits(tmp_path, arguments):
    """Only 4 of the 7 remaining ranks train, because run.workers is a multiple of no other number up to 7."""
    arguments = (*arguments, "--run.reproducible", "true")
    whole, job = Job(tmp_path / "whole", 2, arguments), Job(tmp_path / "r", 8, arguments)
    try:
        job.until(lambda: job.rows() >= 15)
        job.signal(6)
        job.until(lambda: len(job.recoveries()) == 1)
        job.signal(7)  # which waits
    finally:
        job.end()
        whole.end()
    assert [(lost, left) for lost, _, left, _ in job.recoveries()] == [([6], 4), ([7], 4)]
    losses = [[(row["step"], row["loss"]) for row in read_metrics(tmp_path / name)] for name in ("r", "whole")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("delay", [0.0, pytest.param(0.2, marks=pytest.mark.full)])
def test_a_rank_that_dies_during_recovery_is_excluded(tmp_path, arguments, undisturbed, delay):
    job = Job(tmp_path / "r", 6, (*arguments, "--parallel.zero", 2))
    try:
        job.until(lambda: job.rows() >= 15)
        job.signal(3)
        job.until(lambda: "ranks died" in job.log(4))
        time.sleep(delay)
        job.signal(5)
    finally:
        job.end()
    recoveries = job.recoveries()
    assert sorted(rank for lost, *_ in recoveries for rank in lost) == [3, 5]
    assert (
        recoveries[-1][2] == 4 and all(step >= 14 for _, step, *_ in recoveries) and all(s < 5 for *_, s in recoveries)
    )
    same_run(tmp_path / "r", undisturbed)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_that_dies_with_its_partner_costs_the_steps_since_the_checkpoint(tmp_path, arguments, undisturbed, zero):
    job = Job(tmp_path / "r", 4, (*arguments, "--checkpoint.every", 10, "--parallel.zero", zero))
    try:
        job.until(lambda: job.rows() >= 26)
        job.signal(1, 2)
    finally:
        job.end()
    assert sorted(rank for lost, *_ in job.recoveries() for rank in lost) == [1, 2]
    assert job.recoveries()[-1][1] >= (25 if zero == 0 else 20) and job.recoveries()[-1][2] == 2
    same_run(tmp_path / "r", undisturbed)


def test_a_stopped_rank_is_named_and_ended(tmp_path, arguments, undisturbed):
    """The other ranks notice at different times, and none may use rank numbers of the old world after leaving it."""
    job = Job(tmp_path / "r", 4, (*arguments, "--comm.timeout", 15))  # more than ranks need to start
    try:
        job.until(lambda: job.rows() >= 15)
        job.signal(1, number=signal.SIGSTOP)
    finally:
        job.end()
    assert re.search(r"rank 1 +does not answer: stopped, dead or cut off", job.said)
    assert [(lost, left) for lost, _, left, _ in job.recoveries()] == [([1], 3)]
    assert "Traceback" not in job.said, job.said
    same_run(tmp_path / "r", undisturbed)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 2])
def test_if_no_layout_fits_the_newest_copy_is_saved_for_a_restart(tmp_path, arguments, undisturbed, zero):
    arguments = (*arguments, "--parallel.tensor", 2, "--parallel.zero", zero)
    job = Job(tmp_path / "r", 2, arguments)
    try:
        job.until(lambda: job.rows() >= 15)
        job.signal(0)
    finally:
        job.end(75)
    message = re.search(
        r"1 rank is left, which cannot train: too few for .*; step (\d+) was saved; start the job", job.said
    )
    assert message is not None and int(message[1]) >= 14
    again = Job(tmp_path / "r", 2, arguments)
    again.end()
    assert f"resumed from {tmp_path}/r/checkpoints/step-{int(message[1]):08d}" in again.printed
    same_run(tmp_path / "r", undisturbed)


@pytest.fixture
def across(hosts, tmp_path, arguments):
    """Yield a function that starts a job across hosts, with ranks[0] ranks on the first host, and so on."""

    def start(*more: object, ranks: Sequence[int] = (2, 2, 2), options: Sequence[str] = ACROSS) -> Job:
        command = hosts.mpirun([], ranks, options)
        return Job(tmp_path / "r", sum(ranks), (*arguments, *more), command, **hosts.environment())

    yield start
    hosts.clear()


@pytest.mark.parametrize(("zero", "host"), [pytest.param(0, 1, marks=pytest.mark.full), (3, 3)])
def test_training_continues_without_a_killed_host(tmp_path, across, undisturbed, zero, host):
    job = across("--parallel.zero", zero)
    victims = [2 * host - 2, 2 * host - 1]
    try:
        job.until(lambda: job.rows() >= 15)
        measured = job.time_to_recover(lambda: job.signal(*victims))
    finally:
        job.end()
    recoveries = job.recoveries()
    assert sorted(rank for lost, *_ in recoveries for rank in lost) == victims
    assert recoveries[-1][2] == 4 and all(step >= 14 and seconds < 5 for _, step, _, seconds in recoveries)
    assert "done at most" in job.said and job.is_told(recoveries[-1][3], measured, at_most=True), (recoveries, measured)
    same_run(tmp_path / "r", undisturbed)


def test_training_continues_without_a_disconnected_host(tmp_path, hosts, across, undisturbed):
    job = across("--parallel.zero", 2, "--comm.timeout", 16)
    victims = [2, 3]
    try:
        job.until(lambda: job.rows() >= 15)
        measured = job.time_to_recover(lambda: hosts.cut(2))
    finally:
        job.end(-signal.SIGKILL)  # mpirun does not end by itself without a host
    [(lost, step, left, seconds)] = job.recoveries()
    assert lost == victims and left == 4 and step >= 14
    assert job.is_told(seconds, measured, at_most=True), (seconds, measured)
    assert 4 < seconds < 20  # 8 s of silence, then what takes no time
    assert all("4 of 6 ranks are left" in job.log(rank) for rank in range(6) if rank not in victims)
    assert all("without a connection to ranks" in job.log(rank) for rank in victims)
    assert "it is ended with exit code 137" in job.said and "8 minutes" not in job.said
    same_run(tmp_path / "r", undisturbed)


def test_a_job_ends_for_a_restart_if_its_first_host_is_disconnected(hosts, across):
    job = across("--comm.timeout", 12, ranks=(1, 2))
    try:
        job.until(lambda: job.rows() >= 10)
        hosts.cut(1)
    finally:
        job.end(-signal.SIGKILL)
    assert (
        "1 of 3 ranks are left, without a connection to ranks 1, 2, which may still run; start the job again"
        in job.said
    )


def test_unsupported_settings_across_nodes_are_refused_and_early_ends_reported(across):
    job = across(ranks=(1, 1), options=("--with-ft", "ulfm", "--mca", "coll", "^adapt"))
    job.end(2)
    assert "mpirun --with-ft ulfm --mca coll ^han" in job.said and "8 minutes" not in job.said
    job = across("--train.steps", 2, ranks=(1, 1), options=("--with-ft", "ulfm"))
    job.end()
    assert job.said.count("mpirun ends the job 8 minutes after a host stops answering") == 1
