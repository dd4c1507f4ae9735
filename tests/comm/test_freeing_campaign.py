"""Long campaign of thousands of saves and groups: MPICH has only 2,048 communicators, Open MPI only its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, job
from warm import shared

TIMES = 5000
# without --full: if each group leaked one communicator, or each save a few, MPICH would run out of them
GROUPS, SAVES = 2500, 800
MAX_GROWTH = 6 << 10  # KiB that a rank may grow by; 2,500 communicators of Open MPI are 75 MiB


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "mpi"),
    [
        ("saves", "own"),
        ("split", "own"),
        ("saves", "mpich"),
        ("split", "mpich"),
        *(pytest.param("subgroup", mpi, marks=pytest.mark.full) for mpi in ("own", "mpich")),
    ],
)
def test_repeated_saves_and_groups_do_not_leak_memory(tmp_path, kind, mpi, full):
    start = shared().launched(2, [sys.executable])
    if mpi == "mpich":
        subprocess.run([ROOT / "tests/second_mpi.sh", mpi], check=True, timeout=300)
        start = [str(ROOT / ".venv-mpich/bin" / name) for name in ("mpiexec", "python")]
        start[1:1] = ["-n", "2"]
    times = TIMES if full else SAVES if kind == "saves" else GROUPS
    script = Path(__file__).with_name("endless_groups.py")
    result = job(0, [*start, str(script), kind, str(times), str(tmp_path)], timeout=800, PYTHONPATH=str(ROOT))
    growth = result.stdout.partition("growth ")[2].partition(" in ")[0].split()
    assert result.returncode == 0 and len(growth) == 2, result.stdout[-1000:] + result.stderr[-3000:]
    assert all(int(kib) < MAX_GROWTH for kib in growth), result.stdout
