"""Goodput of a run whose job is really killed twice, beside the clock of the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest
from support import clean_environment, launcher, train_command

from mpitrain.errors import InputError
from mpitrain.monitor import read_events, read_goodput, read_metrics

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(300)]
PAUSE = 3.0  # seconds between a kill and the next start
OPTIONS = {
    "model.layers": 1, "model.width": 64, "model.heads": 2, "model.sequence": 64, "train.batch": 16,
    "train.evaluate_every": 50, "train.evaluate_samples": 8, "checkpoint.every": 40,
}  # fmt: skip


def last_step(run):
    try:
        return read_metrics(run)[-1]["step"]
    except (InputError, IndexError):  # no file or no line yet
        return 0


def ended(run):
    return any(event["event"] == "end" for event in read_events(run))


def test_parts_of_a_run_that_is_killed_twice_add_up_to_the_clock_of_the_test(tmp_path):
    run, steps = tmp_path / "r", 400
    words = [str(w) for key, value in OPTIONS.items() for w in (f"--{key}", value)]
    command = [*train_command(), *words, "--run.dir", str(run), "--train.steps", str(steps)]
    began, done, down = time.time(), [], 0.0
    for kill_at in (110, 230, 0):
        process = subprocess.Popen(
            [*launcher(2), *command], env=clean_environment(), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while kill_at and last_step(run) < kill_at:
            assert process.poll() is None
            time.sleep(0.02)
        if kill_at:
            log = (run / "logs/rank-00000.log").read_text()
            down -= time.time()
            os.kill(int(re.findall(r"started: rank 0 of 2, process (\d+)", log)[-1]), signal.SIGKILL)
        while process.poll() is None and not ended(run):  # the launcher ends later, which no run can see
            time.sleep(0.02)
        at_end, code = time.time(), process.wait(120)
        if kill_at:
            time.sleep(PAUSE)
            done.append(last_step(run))
            down += time.time()
    assert code == 0
    resumed = [event["resumed_step"] for event in read_events(run) if event["event"] == "start"][1:]
    account = read_goodput(run)
    parts = account.parts()
    assert account.recomputed_steps == sum(done) - sum(resumed) and len(resumed) == 2
    assert sum(parts.values()) == pytest.approx(at_end - began, abs=1.0)
    assert 2 * PAUSE <= parts["down"] <= down + 1 and parts["recomputed"] > 0 and parts["queue"] == 0
    assert 0.01 < account.ratio < 1 and account.ratio == pytest.approx(read_metrics(run)[-1]["goodput"], rel=0.2)
