"""The wheel and the source archive: built, checked, installed from the file into fresh environments, and used there.

The environments borrow the required packages from the one that runs the tests, because torch is large.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import ROOT, clean_environment, launcher

import mpitrain
from mpitrain import jobs
from mpitrain.config import schema

PATHS = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
ELSEWHERE = [path for path in PATHS if Path(path) != ROOT]  # where the checkout cannot hide an installed package

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(400)]


@dataclass
class Built:
    """The clone that the files were built from, and the files."""

    clone: Path
    wheel: Path
    archive: Path


def run(*command: object, cwd: Path, limit: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command, and assert that it succeeds."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean_environment(PYTHONPATH=os.pathsep.join(ELSEWHERE)) | environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("archives")
    run("git", "clone", "-q", ROOT, folder / "clone", cwd=folder)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "clone")
    (wheel,), (archive,) = (sorted((folder / "dist").glob(f"*.{suffix}")) for suffix in ("whl", "tar.gz"))
    return Built(folder / "clone", wheel, archive)


class Environment:
    """A fresh environment, in which pip installs the package without its requirements, which are borrowed."""

    def __init__(self, folder: Path, *source: object) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False)
        self.python = folder / "bin/python"
        own = Path(
            run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout[:-1]
        )
        (own / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # its own .pth files are not read
        install = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps"]
        run(*install, "--no-build-isolation", *source, cwd=folder)
        self.variables = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        for library in Path(sys.prefix, "lib").glob("libmpi.so.*"):  # an MPI from PyPI, which mpi4py looks for in its
            self.variables["MPI4PY_LIBMPI"] = str(library)  # own environment

    def run(self, *words: object, cwd: Path, ranks: int = 0) -> str:
        """Run `mpitrain WORDS`, and return its output."""
        command = [*(launcher(ranks) if ranks else []), self.folder / "bin/mpitrain", *words]
        return run(*command, cwd=cwd, **self.variables).stdout


def test_the_files_are_complete_and_pass_the_check_of_the_package_index(built):
    run(sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.archive, cwd=built.clone)
    tracked = run("git", "ls-files", "mpitrain", cwd=built.clone).stdout.split()
    expected = {name for name in tracked if name != "mpitrain/job_scripts"}
    scripts = {f"mpitrain/job_scripts/{name}" for names in jobs.KINDS.values() for name in names}
    with zipfile.ZipFile(built.wheel) as file:
        inside = {name for name in file.namelist() if name.startswith("mpitrain/")}
        metadata = email.message_from_bytes(file.read(f"mpitrain-{mpitrain.__version__}.dist-info/METADATA"))
    assert inside == expected | scripts
    assert metadata["Version"] == mpitrain.__version__
    with tarfile.open(built.archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    pages = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
    assert expected | scripts | pages | {"jobs/local.sh", "jobs/setup.sh", "constraints.txt"} <= names


def test_the_version_is_written_in_one_place(built):
    pattern = re.compile(rf"""^(__)?version(__)?\s*[=:]\s*["']?{re.escape(mpitrain.__version__)}""", re.MULTILINE)
    tracked = run("git", "ls-files", "*.py", "*.cfg", "*.toml", "*.cff", cwd=built.clone).stdout.split()
    found = [name for name in tracked if pattern.search((built.clone / name).read_text(encoding="utf-8"))]
    assert found == ["mpitrain/early.py"]


@pytest.mark.parametrize("kind", ["wheel", "archive", "editable"])
def test_an_installed_package_has_its_command_schema_and_job_scripts(built, tmp_path, kind):
    source = {"wheel": [built.wheel], "archive": [built.archive], "editable": ["-e", built.clone]}[kind]
    environment = Environment(tmp_path / "environment", *source)
    where = run(environment.python, "-c", "import mpitrain; print(mpitrain.__file__)", cwd=tmp_path).stdout
    assert Path(where.strip()).is_relative_to(built.clone if kind == "editable" else environment.folder)
    assert environment.run("--version", cwd=tmp_path) == f"mpitrain {mpitrain.__version__}\n"
    assert json.loads(environment.run("--print-schema", cwd=tmp_path)) == schema.schema()
    for batch_system, names in jobs.KINDS.items():
        environment.run("jobs", "--copy", batch_system, cwd=tmp_path)
        assert all((tmp_path / "jobs" / name).read_bytes() == (ROOT / "jobs" / name).read_bytes() for name in names)
    assert os.access(tmp_path / "jobs/shielded", os.X_OK)


def test_ranks_train_with_an_installed_wheel(built, tmp_path):
    environment = Environment(tmp_path / "environment", built.wheel)
    out = environment.run("train", "--train.steps", 2, "--run.dir", "first", cwd=tmp_path, ranks=2)
    assert "done at step 2 of 2" in out
    assert "1 to 2" in environment.run("report", "first", cwd=tmp_path)
    findings = json.loads(environment.run("doctor", "--json", cwd=tmp_path, ranks=2))["findings"]
    assert {"ok"} <= {each["verdict"] for each in findings} <= {"ok", "warn"}
    assert "--parallel.zero" in environment.run("--print-completion", "bash", cwd=tmp_path)
    planned = environment.run(
        "plan", "--ranks-per-node", 2, "--machine", "cpu-128", "--counted", "--top", 1, cwd=tmp_path
    )
    assert "mpitrain.train plan.toml" in planned and (tmp_path / "plan.toml").exists()
