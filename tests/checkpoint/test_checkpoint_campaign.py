"""Long tests: damaged checkpoints, full disks, and saves killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support import PATIENCE, clean_environment
from warm import job, shared

from mpitrain.checkpoint.contents import damaged_places, load_tensor
from mpitrain.checkpoint.folders import finished_steps
from mpitrain.checkpoint.manifest import read_manifest

HERE = Path(__file__).resolve().parent


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_damage_is_never_loaded_silently(ranks, tmp_path, full):
    cases = 1500 if full else 200 if ranks == 3 else 100
    ended = job(
        ranks, [sys.executable, str(HERE / "damage_cases.py"), "damage", str(tmp_path), str(ranks), str(cases)],
        timeout=800,
    )  # fmt: skip
    assert ended.returncode == 0 and f"{cases} cases" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-4000:]


@contextmanager
def _small_disk(folder, size):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here: " + mounted.stderr.decode().strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_loses_only_the_current_save(ranks, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    with _small_disk(folder, "2m"):
        ended = job(ranks, [sys.executable, str(HERE / "damage_cases.py"), "full", str(folder)], timeout=240)
    assert ended.returncode == 0 and "saves failed" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-4000:]


@pytest.mark.campaign
@pytest.mark.timeout(1500)
def test_a_save_killed_at_any_time_leaves_valid_checkpoints(tmp_path, full):
    from endless_saves import state

    chance = random.Random(11)
    reached = 0
    for number in range(150 if full else 6):
        ranks = chance.choice([0, 0, 2])
        for name in ("pids", "saving"):
            (tmp_path / name).unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "endless_saves.py"), str(tmp_path), str(number)]
        command = shared().launched(ranks, command) if ranks else shared().replace_python(command)
        with open(tmp_path / "out", "w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment())
        try:
            _wait_for(tmp_path / "saving", process, tmp_path / "out")
            time.sleep(chance.random() * 0.4)
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            os.kill(chance.choice(pids), signal.SIGKILL)
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(60)
        steps = finished_steps(tmp_path / "c")
        assert steps and steps[0] >= reached, f"kill {number}: {steps} after {reached}"
        for step in steps:
            folder = tmp_path / "c" / f"step-{step:08d}"
            assert list(damaged_places(folder)) == [], f"kill {number}"
            manifest = read_manifest(folder)
            assert manifest.step == step == manifest.values["position"]
            for name, tensor in state(step).items():
                assert torch.equal(load_tensor(folder, manifest, name), tensor), f"kill {number}: {name}"
        reached = steps[0]


def _wait_for(path, process, out):
    deadline = time.monotonic() + 60 * PATIENCE
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, out.read_text()[-4000:]
        time.sleep(0.01)
