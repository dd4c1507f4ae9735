"""Disks that are full, over quota or without locks: each gives a one-line error at the start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest
import warm
from support import PATIENCE, clean_environment, fill, job, one_line, small_disk, train_command

from mpitrain.checkpoint.folders import additional_bytes
from mpitrain.monitor import read_metrics

SMALL = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.sequence": 32,
    "train.batch": 8,
    "train.steps": 4,
    "checkpoint.every": 1,
}  # a checkpoint of 0.3 MB


def arguments(text, run, **more):
    options = {**SMALL, "data.path": text, "run.dir": run, **{key.replace("__", "."): v for key, v in more.items()}}
    return [word for key, value in options.items() for word in (f"--{key}", value)]


@pytest.mark.timeout(120)
def test_space_for_checkpoints_is_checked_before_the_first_step(tmp_path, forked, sentence):
    with small_disk(tmp_path / "disk", "700k") as disk:
        refused = forked.run("train", *arguments(sentence, disk / "r"))
        one_line(refused, "checkpoint folder", "3 checkpoints of", "lower checkpoint.keep", "are free")
        assert not (disk / "r/metrics.jsonl").exists()
        done = forked.run("train", *arguments(sentence, disk / "r", checkpoint__keep=1))
        assert done.returncode == 0, done.stderr
        local = arguments(sentence, tmp_path / "s", checkpoint__local=disk / "l", checkpoint__flush_every=9)
        one_line(forked.run("train", *local), "checkpoint.local", "2 checkpoints of")
        shutil.rmtree(disk / "r")
        fill(disk / "ballast")
        full = warm.job(2, train_command(*arguments(sentence, disk / "full")))
        one_line(full, "the disk is full", alone=False)


def test_checkpoints_to_be_pruned_count_as_free_space():
    assert additional_bytes(100, saves=10, keep=2, existing=[]) == 300
    assert additional_bytes(100, saves=1, keep=2, existing=[]) == 100
    assert additional_bytes(100, saves=10, keep=2, existing=[100]) == 200
    assert additional_bytes(100, saves=10, keep=2, existing=[100, 100]) == 100
    assert additional_bytes(100, saves=10, keep=2, existing=[100, 100, 100, 100]) == 100
    assert additional_bytes(100, saves=10, keep=2, existing=[10, 10]) == 280  # of a smaller model
    assert additional_bytes(100, saves=0, keep=2, existing=[]) == 0


QUOTA = """
#include <errno.h>
#include <sys/types.h>
int fallocate(int descriptor, int mode, off_t offset, off_t length) { errno = EDQUOT; return -1; }
int fallocate64(int descriptor, int mode, off_t offset, off_t length) { errno = EDQUOT; return -1; }
"""


def test_small_quota_is_reported_at_the_start(tmp_path, sentence):
    if shutil.which("gcc") is None:
        pytest.skip("making a file system with a quota of a library needs gcc")
    (tmp_path / "quota.c").write_text(QUOTA)
    library = tmp_path / "quota.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "quota.c"], check=True)
    done = job(0, train_command(*arguments(sentence, tmp_path / "r")), LD_PRELOAD=str(library))
    one_line(done, "checkpoint folder", "the disk quota is used up", "checkpoint.keep")


NO_FLOCK = """
import errno, fcntl
def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
"""


@pytest.mark.timeout(120)
def test_one_job_per_run_folder_without_file_locks(tmp_path, forked, sentence):
    (tmp_path / "sitecustomize.py").write_text(NO_FLOCK)
    run = tmp_path / "r"
    run.mkdir()
    (run / "config.toml").write_text("# mine\n")
    without = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    endless = train_command(*arguments(sentence, run, train__steps=10**6, checkpoint__every=10))
    first = subprocess.Popen(endless, env=clean_environment(**without), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60 * PATIENCE
        while not (run / "checkpoints/latest").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        one_line(forked.run("train", *arguments(sentence, run), **without), "is in use by another job")
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        reached = read_metrics(run)[-1]["step"]
        done = forked.run("train", *arguments(sentence, run, train__steps=reached + 3), **without)
        assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
        assert not (run / "lock.held").exists()
    finally:
        first.kill()
        first.wait(30)
    assert (run / "config.toml.1").read_text() == "# mine\n"  # what is not ours is not replaced
    assert sorted(path.name for path in run.glob("config.toml*")) == ["config.toml", "config.toml.1"]
