"""Goodput: the parts of a run's wall clock over all its starts, on folders written with known times."""

from __future__ import annotations

import pytest

from mpitrain import report
from mpitrain.monitor import EventLog, MetricsWriter, read_goodput, run_files
from mpitrain.monitor.report.findings import NamedRun
from mpitrain.monitor.report.goodput import PARTS
from mpitrain.monitor.report.page import page
from mpitrain.monitor.report.reading import read_run

START = {"launcher": 1.0, "packages": 5.0, "mpi": 0.5, "setup": 3.5}  # 10 s, half of them imports


class Clock:
    """Clock that writes a run folder as rank 0 does, at times that are known in advance."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.now = folder, 1_800_000_000.0
        self.log = EventLog(folder)
        monkeypatch.setattr(run_files.time, "time", lambda: self.now)

    def start(self, resumed=None, *, queue=0.0, script=0.0, failed_for=0.0):
        """Submit a job now, which waits `queue` seconds, and takes 10 s for its start after its script."""
        times = {"submitted": self.now, "allocated": self.now + queue} if queue else {}
        self.now += queue + script + sum(START.values())
        self.metrics = MetricsWriter(self.folder, resumed)
        if self.metrics.discarded:
            self.log.write("discard", resumed or 0, **self.metrics.discarded)
        self.log.write("start", resumed or 0, ranks=2, steps=99, resumed_step=resumed, start_s=START, **times)

    def step(self, step, seconds, data=0.0, wait=0.0, **more):
        self.now += seconds
        figures = {"loss": 1.0, "samples": 8, "tokens": 0, "world_size": 2} | more
        self.metrics.write(step=step, time=self.now, step_s=seconds, data_s=data, wait_s=wait, **figures)

    def event(self, kind, step, seconds):
        self.now += seconds
        more = {"folder": f"step-{step:08d}"} if kind == "save" else {}
        self.log.write(kind, step, seconds=seconds, **more)

    def end(self, step, seconds, outcome="stopped", since=1e4):
        self.now += seconds
        self.log.write("end", step, outcome=outcome, message="", seconds=since)


@pytest.fixture
def clock(tmp_path, monkeypatch):
    return Clock(tmp_path, monkeypatch)


def seconds(folder):
    """Return the parts that are not 0, after the check that they are the whole wall clock."""
    account = read_goodput(folder)
    parts = account.parts()
    assert tuple(parts) == PARTS and sum(parts.values()) == pytest.approx(account.wall, abs=1e-3)
    assert account.ratio == pytest.approx(parts["compute"] / account.wall)
    return {name: pytest.approx(value, abs=1e-3) for name, value in parts.items() if abs(value) > 1e-3}, account


def test_each_part_of_a_run_that_was_killed_twice(clock, tmp_path):
    began = clock.now
    clock.start(queue=100, script=2)
    clock.step(1, 4.0)
    for step in (2, 3, 4):
        clock.step(step, 2.0, data=0.25, wait=0.5)
    clock.event("evaluate", 4, 3.0)
    clock.event("save", 4, 1.0)
    for step in (5, 6, 7):  # lost: the job is killed 0.75 s into step 8, and the last checkpoint is that of step 4
        clock.step(step, 2.0, data=0.25, wait=0.5)
    clock.now += 0.75 + 20  # until the next submission
    clock.start(4, queue=50)
    clock.step(5, 5.0)  # a first step that is lost
    clock.step(6, 2.0, skipped=True)  # killed again: steps 5 and 6 are done three times, step 7 twice
    clock.now += 30
    clock.start(4, queue=40)
    clock.step(5, 4.0)
    clock.step(6, 2.0, data=0.25, wait=0.5)
    clock.step(7, 2.0, skipped=True)
    clock.now += 0.5  # callbacks
    clock.step(8, 2.0, data=0.25, wait=0.5)
    clock.event("save", 8, 1.5)
    clock.end(8, 1.25, "done")
    parts, account = seconds(tmp_path)
    assert parts == {
        "queue": 190.0, "down": 50.75, "start": 2 + 3 * 5.0, "imports": 15.0, "first_step": 8.0, "data": 5 * 0.25,
        "compute": 5 * 1.25, "waiting": 5 * 0.5, "checkpoint": 2.5, "evaluation": 3.0, "recomputed": 6.0 + 7.0,
        "skipped": 2.0, "other": 0.5, "tail": 1.25,
    }  # fmt: skip
    assert account.recomputed_steps == 3 + 2 and account.wall == pytest.approx(clock.now - began, abs=1e-3)


def test_a_run_killed_before_its_first_checkpoint_has_recomputed_all_steps(clock, tmp_path):
    for _ in range(2):
        clock.start()
        clock.step(1, 3.0)
        clock.step(2, 1.0)
        clock.now += 7
    parts, account = seconds(tmp_path)
    assert account.recomputed_steps == 2
    assert parts == {
        "down": 7.0, "start": 10.0, "imports": 10.0, "first_step": 3.0, "compute": 1.0, "recomputed": 4.0
    }  # fmt: skip


def test_a_job_that_fails_before_it_trains_is_down_time_and_not_the_tail_of_the_killed_one(clock, tmp_path):
    clock.start()
    clock.step(1, 3.0)
    clock.event("save", 1, 1.0)
    clock.step(2, 2.0)
    clock.now += 60
    clock.end(1, 5.0, "failed", since=4.0)
    clock.now += 11
    clock.start(1)
    clock.step(2, 3.0)
    clock.end(2, 0.5, "done")
    parts, account = seconds(tmp_path)
    assert account.recomputed_steps == 1 and parts["recomputed"] == 2.0 and parts["tail"] == 0.5
    assert parts["down"] == 60 + 5 + 11


def test_steps_of_workers_that_overlap_add_up_too(clock, tmp_path):
    clock.start()
    clock.step(1, 2.0)
    for step in (2, 3, 4, 5):
        clock.step(step, 2.0, wait=9.0)
        clock.now -= 1.0
    seconds(tmp_path)


def test_summary_and_page_show_the_goodput_and_folders_without_starts_have_none(clock, tmp_path, capsys):
    metrics = MetricsWriter(tmp_path)
    clock.metrics = metrics
    clock.step(1, 2.0)
    assert report.main([str(tmp_path)]) == 0 and "goodput" not in capsys.readouterr().out
    assert "goodput" not in page([NamedRun("r", read_run(tmp_path))])
    (tmp_path / "metrics.jsonl").unlink()
    clock.start(queue=6.0)
    clock.step(1, 2.0)
    clock.step(2, 2.0, data=0.5)
    assert report.main([str(tmp_path)]) == 0
    text = "goodput 7.5% of 0:00:20 (queue 6.0, start 5.0, imports 5.0, first step 2.0, data 0.5, compute 1.5 s)"
    assert text in " ".join(capsys.readouterr().out.split())
    html = page([NamedRun("r", read_run(tmp_path))])
    assert "<td>compute</td>" in html and "1.5 s (7.5%)" in html
