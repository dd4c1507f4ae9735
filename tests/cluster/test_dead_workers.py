"""Workers and servers of a parameter server are killed or stopped by real signals."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from mortal_jobs import Job

from mpitrain.monitor import read_metrics

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (Path(sys.prefix) / "bin/ompi_info").exists(),
        reason="ranks can die alone only under Open MPI 5; this environment has another",
    ),
]
STEPS = 150
SMALL = {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.sequence": 32, "train.batch": 24}
RUN = SMALL | {"train.steps": STEPS, "train.evaluate_every": 0, "checkpoint.every": 0, "data.record_ids": "true"}


def _words(**more):
    settings = RUN | {"elastic.mode": "shrink", "parallel.mode": "server"}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


@pytest.mark.parametrize(
    ("staleness", "servers", "victim"), [pytest.param("none", 1, 1, marks=pytest.mark.full), (2, 1, 0), (0, 2, 1)]
)
def test_training_continues_without_a_dead_worker(tmp_path, staleness, servers, victim):
    job = Job(tmp_path / "r", 4, _words(parallel__staleness=staleness, parallel__servers=servers))
    try:
        job.until(lambda: job.rows() >= 40)
        job.signal(victim)
    finally:
        job.end()
    assert [(lost, left) for lost, _, left, _ in job.recoveries()] == [([victim], 3)]
    rows = read_metrics(tmp_path / "r")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"] and rows[-1]["held_out_loss"] < 0.8 * rows[0]["loss"]
    numbers = [number for row in rows for number in row["ids"]]
    assert len(numbers) == len(set(numbers)) == STEPS * 24
    if staleness == 0:  # the sums are those of a run in which nobody died, and of any other mode
        alone = Job(tmp_path / "alone", 1, [word for key, value in RUN.items() for word in (f"--{key}", value)])
        alone.end()
        expected = [row["loss"] for row in read_metrics(tmp_path / "alone")]
        assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)


def test_every_step_is_recorded_once_while_five_workers_die(tmp_path):
    job = Job(tmp_path / "r", 8, _words(parallel__staleness="none", parallel__servers=2))
    try:
        for number, victim in enumerate((1, 0, 4, 5, 3)):
            job.until(lambda rows=12 + 21 * number: job.rows() >= rows)
            job.signal(victim)
            job.until(lambda count=number + 1: len(job.recoveries()) == count)
    finally:
        job.end()
    assert [(lost, left) for lost, _, left, _ in job.recoveries()] == [([1], 7), ([0], 6), ([4], 5), ([5], 4), ([3], 3)]
    rows = read_metrics(tmp_path / "r")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    numbers = [number for row in rows for number in row["ids"]]
    assert len(numbers) == len(set(numbers)) == STEPS * 24


@pytest.mark.parametrize(
    ("victims", "number", "who"),
    [
        ([2], signal.SIGKILL, "rank 2, a server, failed"),
        ([0, 1], signal.SIGKILL, "all workers failed"),
        ([0, 1], signal.SIGSTOP, "all workers failed"),
    ],
)
def test_a_job_without_server_or_workers_ends_and_resumes(tmp_path, victims, number, who):
    words = _words(parallel__staleness="none", parallel__servers=1, checkpoint__every=20, comm__timeout=15)
    job = Job(tmp_path / "r", 3, words)
    try:
        job.until(lambda: job.rows() >= 50)
        job.signal(*victims, number=number)
    finally:
        job.end(75, 90)
    silent = re.findall(r"rank (\d) +does not answer: stopped, dead or cut off", job.said)
    assert silent == (["0", "1"] if number == signal.SIGSTOP else []), job.said
    messages = re.findall(rf"mpitrain: {who}.*; start the job again.*", job.said)
    assert len(messages) == 1 and "Traceback" not in job.said, job.said
    again = Job(tmp_path / "r", 3, words)
    again.end()
    assert re.search(r"resumed from .*step-00000(0[2-9]|1[0-4])0", again.printed), again.printed
    assert [row["step"] for row in read_metrics(tmp_path / "r")] == list(range(1, STEPS + 1))


def test_a_stopped_worker_is_named_and_excluded(tmp_path):
    # comm.timeout: more than ranks need to start together on a busy machine
    job = Job(tmp_path / "r", 3, _words(parallel__staleness="none", parallel__servers=1, comm__timeout=15))
    try:
        job.until(lambda: job.rows() >= 40)
        job.signal(1, number=signal.SIGSTOP)
    finally:
        job.end()
    assert re.search(r"rank 1 +does not answer: stopped, dead or cut off", job.said), job.said
    assert [(lost, left) for lost, _, left, _ in job.recoveries()] == [([1], 2)]
    assert [row["step"] for row in read_metrics(tmp_path / "r")] == list(range(1, STEPS + 1))
