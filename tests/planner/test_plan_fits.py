"""A model that does not fit without sharding: the plan makes it fit, and it trains within the predicted bytes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import MACHINE, PATIENCE, clean_environment, launcher

from mpitrain.config.settings import Config
from mpitrain.parallel.layouts import ParallelLayout, layout_of
from mpitrain.plan import description_of
from mpitrain.planner.machine import read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of

MIB = 1 << 20
MODEL = {"layers": 6, "width": 512, "heads": 8, "sequence": 32}
FLAGS = [word for key, value in MODEL.items() for word in (f"--model.{key}", str(value))]
FLAGS += ["--train.batch", "4", "--train.steps", "6", "--train.evaluate_every", "0", "--checkpoint.every", "0"]


@pytest.mark.campaign
@pytest.mark.timeout(200)
def test_a_model_that_does_not_fit_trains_within_the_predicted_bytes(tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(MACHINE)
    config = Config.from_args(FLAGS)
    machine = read_machine(str(tmp_path / "machine.toml"))
    predictor = Predictor(profile_of(config, description_of(config), machine, measure=False), machine, 1, 2)
    sharded, plain = (ParallelLayout(2, zero=zero, microbatch=2) for zero in (3, 0))
    least, most = (sum(predictor.memory(layout).values()) for layout in (sharded, plain))
    assert most - least > 100 * MIB
    room = int((least + most) / 2)
    command = [sys.executable, "-m", "mpitrain.plan", *FLAGS, "--ranks-per-node", "2", "--memory", str(room)]
    result = subprocess.run(
        [*command, "--counted", "--machine", "machine.toml"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"2x1x1 mb\d .*too much", result.stdout.replace("\n", " ")), result.stdout
    layout = layout_of(Config.from_args([str(tmp_path / "plan.toml")]), 2)
    predicted = sum(predictor.memory(layout).values())
    assert predicted <= room
    most_used = _peak_bytes(tmp_path)
    print(f"{layout}: {most_used / MIB:.0f} MiB of {predicted / MIB:.0f} predicted, {room / MIB:.0f} allowed")
    assert most_used <= room
    assert 0.7 * predicted < most_used <= 1.05 * predicted  # what libraries take differs from one processor to the next


def _peak_bytes(folder: Path) -> float:
    """Train with the plan and return the peak bytes of a rank: resident pages, with its part of shared memory."""
    command = [*launcher(2), sys.executable, "-m", "mpitrain.train", "plan.toml", "--run.dir", "run"]
    with subprocess.Popen(command, cwd=folder, env=clean_environment(), stdout=subprocess.DEVNULL) as job:
        most, end = 0.0, time.monotonic() + 90 * PATIENCE
        while job.poll() is None and time.monotonic() < end:
            most = max([most, *map(_resident_bytes, _rank_processes(job.pid))])
            time.sleep(0.02)
        if job.poll() is None:
            job.kill()
    assert job.returncode == 0
    return most


def _rank_processes(launched: int) -> list[int]:
    """Return the processes that a launcher has started."""
    listed = subprocess.run(["pgrep", "-P", str(launched)], capture_output=True, text=True).stdout.split()
    return [int(word) for word in listed]


def _resident_bytes(process: int) -> float:
    """Return the resident bytes of a process, with its part of shared memory."""
    try:
        rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        status = Path(f"/proc/{process}/status").read_text()
        sizes = {row.split(":")[0]: int(row.split()[1]) << 10 for row in rows[1:] if row.endswith("kB")}
    except (OSError, ValueError):  # it has ended
        return 0.0
    if "Rss" not in sizes:
        return 0.0
    shared = re.search(r"RssShmem:\s+(\d+)", status)
    return sizes["Rss"] - (int(shared[1]) << 10 if shared else 0) + sizes["Pss_Shmem"]
