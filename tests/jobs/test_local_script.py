"""jobs/local.sh for users who are not root, with every Python on this machine.

The clone lies in a folder with a space in its name, the home cannot be written, the working directory is another one,
and the system lets no process read another's memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support import ROOT, clean_environment

STRANGER = 54321  # a user id that no account has
FLAWS = re.compile(r"Traceback|command not found|Permission denied|CRITICAL|\bERROR\b")
LONG = 900  # seconds: torch with CUDA's libraries takes minutes to install


def runs(python: Path, version: str = "") -> bool:
    """Return True where `python` starts and has the version, such as "3.12"; by default 3.10 or newer."""
    expression = "'%d.%d' % sys.version_info[:2]"
    try:
        script = f"import sys; sys.exit({expression} != '{version}' if '{version}' else sys.version_info < (3, 10))"
        return subprocess.run([python, "-c", script], capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def find_python(version: str, folders: Iterable[Path]) -> str:
    """Return the first Python of this version in the folders; skip the test without one."""
    for folder in folders:
        python = folder / f"python{version or 3}"
        if python.exists() and runs(python, version):  # the shim of a version manager may have nothing behind it
            return str(python)
    pytest.skip(f"there is no Python {version or '3.10 or newer'} that this user may start")


class Newcomer:
    """A user who has only a clone. stranger: a user without an account, a home and privileges."""

    def __init__(self, folder: Path, *, stranger: bool) -> None:
        self.folder, self.clone = folder, folder / "a clone" / "mpitrain"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(self.clone)], check=True, timeout=60)
        path = [p for p in os.environ["PATH"].split(os.pathsep) if ".venv" not in p]
        self.become: list[str] = []
        self.environment = {"PATH": os.pathsep.join(path)}
        if stranger:
            self.become = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
            self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
            for path in (folder, *folder.rglob("*")):
                os.lchown(path, STRANGER, STRANGER)

    def run(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder above the clone."""
        return subprocess.run(
            [*self.become, *map(str, command)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONG - 60,
            cwd=self.folder,
            env=clean_environment() | self.environment | environment,
        )

    def trains(self, *before: object, **environment: str) -> None:
        result = self.run(*before, self.clone / "jobs" / "local.sh", "--train.steps", 2, N="2", **environment)
        assert result.returncode == 0, result.stderr
        assert "done at step 2 of 2" in result.stdout
        assert re.search(r"continue  +N=2 \S.*/jobs/local\.sh runs/\S+/config\.toml --train\.steps 4\n", result.stdout)
        assert not FLAWS.search(result.stdout + result.stderr), result.stdout + result.stderr

    def trains_with_closed_memory(self, **environment: str) -> None:
        """Train where no process may read another's memory."""
        self.trains(self.clone / ".venv/bin/python", self.clone / "tests" / "without_ptrace.py", **environment)


def test_ranks_are_started_by_others_than_root_too():
    script = 'set -euo pipefail; root=/nowhere mpi=openmpi; . "$0"; echo "${MPIRUN[@]}"'
    command = ["bash", "-c", script, str(ROOT / "jobs" / "mpirun.sh")]
    if os.geteuid() == 0:
        command = ["setpriv", f"--reuid={STRANGER}", "--clear-groups", *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stdout) == (0, "mpirun --oversubscribe\n"), result.stderr


def test_too_old_a_python_is_one_line(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit\nexit 1\n')
    old.chmod(0o755)
    shutil.copytree(ROOT / "jobs", tmp_path / "clone" / "jobs")
    shutil.copy(ROOT / "constraints.txt", tmp_path / "clone")
    result = subprocess.run(
        [tmp_path / "clone" / "jobs" / "local.sh"],
        capture_output=True,
        text=True,
        timeout=20,
        env=clean_environment(PYTHON=str(old)),
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "3.10 or newer" in result.stderr and "PYTHON=" in result.stderr


@pytest.fixture(scope="module")
def stranger() -> Iterator[Newcomer]:
    root = os.geteuid() == 0
    if root:
        find_python("", [Path("/usr/local/bin"), Path("/usr/bin"), Path("/bin")])
    with tempfile.TemporaryDirectory(prefix="stranger-") as folder:  # pytest's own are closed to others
        yield Newcomer(Path(folder), stranger=root)


@pytest.mark.campaign
@pytest.mark.timeout(LONG)
def test_the_first_command_works_for_somebody_without_privileges(stranger):
    stranger.trains()
    stranger.trains_with_closed_memory()


@pytest.mark.campaign
@pytest.mark.timeout(LONG)
def test_a_part_of_the_suite_passes_for_somebody_without_privileges(stranger):
    files = ["tests/comm/test_operations.py", "tests/checkpoint/test_store.py"]
    result = stranger.run(stranger.clone / "tests" / "run.sh", "--sizes", 2, "--no-serial", *files)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert re.search(r"^[1-9]\d+ passed, 0 failed", result.stdout, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(LONG)
def test_mpich_works_for_somebody_without_privileges(stranger):
    stranger.trains(MPI="mpich")
    stranger.trains_with_closed_memory(MPI="mpich")


@pytest.mark.campaign
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize(
    "version", ["3.10", *(pytest.param(f"3.{minor}", marks=pytest.mark.full) for minor in range(11, 16))]
)
def test_another_python_installs_trains_and_is_in_order(tmp_path, version):
    if version == f"3.{sys.version_info.minor}":
        pytest.skip("the rest of the suite runs on this one")
    manager = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *sorted(manager.glob(f"{version}.*/bin"))]
    python = find_python(version, folders)
    newcomer = Newcomer(tmp_path, stranger=False)
    try:
        newcomer.trains(PYTHON=python)
        start = '. "$root/jobs/mpirun.sh" && "${MPIRUN[@]}" -n 2 python -m mpitrain.doctor'
        result = newcomer.run("bash", "-c", start, root=str(newcomer.clone), mpi="openmpi")
        assert result.returncode == 0, result.stdout + result.stderr
        assert re.search(rf"python +{version}\.", result.stdout), result.stdout
    finally:
        shutil.rmtree(newcomer.clone / ".venv", ignore_errors=True)  # gigabytes
