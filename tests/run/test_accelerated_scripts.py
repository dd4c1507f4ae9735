"""A script on accelerators gives the lines and weights of one process there, also sharded and after a kill."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support import job

FOLDER = Path(__file__).parent
SCRIPT = FOLDER / "scripts/accelerated.py"

pytestmark = [
    pytest.mark.serial, pytest.mark.timeout(240), pytest.mark.parametrize("device", ["pretend"], indirect=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerated")


def run(ranks: int, folder: Path, device: torch.device, *words: str):
    folder.mkdir(exist_ok=True)
    return job(ranks, [sys.executable, *words, str(SCRIPT)], timeout=100, cwd=folder, device=device.type)


@pytest.fixture
def check(device, folder):
    """Return a function that compares an ended job, but for its first lines, with one process."""
    one = folder / "one"
    if not (one / "lines").exists():
        alone = run(0, one, device)
        assert alone.returncode == 0, alone.stderr[-3000:]
        (one / "lines").write_text(alone.stdout)
    expected = (one / "lines").read_text().splitlines()
    assert device.type in expected[-1]

    def compare(done, path: Path, lines: int = 0) -> None:
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines() == expected[lines:]
        a, b = (torch.load(each / "accelerated.pt", map_location="cpu") for each in (one, path))
        for part, values in a.items():
            for name, x in values.items():
                assert (x - b[part][name]).abs().max() <= 1e-12 * max(1.0, x.abs().max()), name

    return compare


def test_each_rank_trains_on_one_device_as_one_process_does(check, device, tmp_path):
    done = run(3, tmp_path, device, "-m", "mpitrain.run")
    check(done, tmp_path)
    assert "whole batches" not in done.stderr, done.stderr


def test_a_script_with_shards_on_devices_continues_after_a_kill(check, device, tmp_path):
    words = [str(FOLDER / "send_early.py"), "--parallel.zero", "3", "--resume", "--checkpoint.every", "3"]
    (tmp_path / "kill").touch()
    first = run(2, tmp_path, device, *words)
    assert first.returncode != 0 and len(first.stdout.splitlines()) == 2
    (tmp_path / "kill").unlink()
    check(run(2, tmp_path, device, *words), tmp_path, lines=2)
