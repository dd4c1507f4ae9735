"""A run saves and stops when a file or a signal requests it, or when its time is up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpitrain as mt
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE
from mpitrain.trainer.stopping import StopInTime, end_of_job, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("42", 42), ("1:02", 62), ("2:00:01", 7201), ("1-00:00:00", 86400), ("UNLIMITED", None), ("", None)],
)
def test_durations_of_slurm(text, seconds):
    assert seconds_of(text) == seconds


def test_the_end_of_the_job_is_what_the_batch_system_says():
    assert end_of_job({}) is None
    assert end_of_job({"SLURM_JOB_END_TIME": "1700000000"}) == 1700000000
    assert end_of_job({"PBS_WALLTIME": "60"}) == pytest.approx(time.time() + 60, abs=5)


def stopping_in(folder: Path | None, margin: float = 0) -> StopInTime:
    stopping, config = StopInTime(), SimpleNamespace(run=SimpleNamespace(stop_before=margin))
    trainer: Any = SimpleNamespace(config=config, world=SimpleNamespace(rank=0), folder=SimpleNamespace(path=folder))
    stopping.setup(trainer)
    if folder is not None:
        stopping.on_fit_start(trainer)
    return stopping


def test_a_file_stops_and_is_gone_afterwards(tmp_path):
    stopping = stopping_in(tmp_path, 60)
    assert stopping.reason() == ""
    (tmp_path / "stop").touch()
    stopping._checked = 0.0  # as if a while had passed
    assert "stop exists" in stopping.reason()
    stopping.teardown(None)
    assert not (tmp_path / "stop").exists()


def test_time_that_is_nearly_up_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 100))
    early, late = (stopping_in(tmp_path, margin) for margin in (60, 120))
    assert early.reason() == "" and late.reason() == "the job's time is up"
    early._longest = 50.0  # three more such steps would not fit
    assert early.reason() == "the job's time is up"
    late.teardown(None)
    early.teardown(None)


def test_a_signal_stops(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    stopping = stopping_in(None)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stopping.reason() == "SIGUSR1"
    stopping.teardown(None)
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.ranks(2)
def test_a_run_stops_and_is_saved_stop_before_seconds_before_the_end_of_its_job(world, folder, text, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 3600))
    for stop_before, code, steps in ((5400, EXIT_REQUEUE, 1), (1800, EXIT_DONE, 3)):
        sections = {
            "run": {"dir": str(folder / "r"), "stop_before": stop_before},
            "data": {"path": text},
            "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 16},
            "train": {"steps": 3, "batch": 2, "evaluate_samples": 2},
            "checkpoint": {"every": 0},
        }
        trainer = mt.Trainer(sections, world=world)
        with trainer.working():
            assert trainer.train() == code
        assert trainer.step == steps and trainer.resumed_step == (None if steps == 1 else 1)
