"""`--train.precision bf16` trains a script as torch's own autocast does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import job
from warm import job as forked_job

SCRIPT = str(Path(__file__).parent / "scripts/bf16.py")

pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]


def losses_and_kinds(done) -> tuple[list[float], str]:
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, kinds = done.stdout.splitlines()
    return [float(line.split()[1]) for line in lines], kinds


def test_losses_are_those_of_autocast_in_one_process_and_parameters_stay_float32(tmp_path):
    alone, kinds = losses_and_kinds(job(0, [sys.executable, SCRIPT, "autocast"], cwd=tmp_path, timeout=60))
    plain, _ = losses_and_kinds(job(0, [sys.executable, SCRIPT], cwd=tmp_path, timeout=60))
    assert kinds == "['torch.bfloat16'] {torch.float32} {torch.float32}"
    assert alone != pytest.approx(plain, rel=1e-5)
    for ranks in (1, 2, 3):
        words = [sys.executable, "-m", "mpitrain.run", "--train.precision", "bf16", SCRIPT]
        losses, printed = losses_and_kinds(forked_job(ranks, words, cwd=tmp_path, timeout=100))
        assert printed == kinds and len(losses) == 12
        assert losses == pytest.approx(alone, rel=5e-3)
