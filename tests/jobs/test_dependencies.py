"""The package's declared dependencies cover all its imports, and the package works with their lowest versions."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support import ROOT, clean_environment

CORE = ("openmpi", "data", "digits", "hf", "metrics", "zarr")  # extras that the core of the suite needs
TOOLS = ("hypothesis", "peft", "pytest", "pytest-mpi", "pytest-timeout")
SERIAL = ["tests/test_config.py", "tests/test_storage.py", "tests/train/test_schedules.py"]
SERIAL += ["tests/data", "tests/inference", "tests/models"]
RANKS = [
    "tests/comm/test_operations.py",
    "tests/backend/test_backend_operations.py",
    "tests/pipe/test_pipe_training.py",
]
RANKS += ["tests/shard", "tests/checkpoint/test_checkpoint_layouts.py", "tests/checkpoint/test_store.py"]
RANKS += ["tests/train/test_trainer.py", "tests/train/test_metrics.py"]
OFFERED = {"cupy", "nccl", "pynvml"}  # imported where somebody has installed them; these do not work without a driver


def requirements(*extras: str) -> list[Requirement]:
    """Return the requirements of the package and of these extras that apply on this machine."""
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    texts = [declared["options"]["install_requires"], *(declared["options.extras_require"][name] for name in extras)]
    lines = [line.split("#")[0].strip() for text in texts for line in text.splitlines()]
    candidates = [Requirement(line) for line in lines if line]
    return [each for each in candidates if each.marker is None or each.marker.evaluate()]


def extras() -> list[str]:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    return list(declared["options.extras_require"])


def lowest(requirement: Requirement) -> str:
    (floor,) = [each.version for each in requirement.specifier if each.operator == ">="]
    return f"{requirement.name}=={floor}"


def test_everything_that_the_package_imports_is_declared():
    imported: set[str] = set()
    for path in (ROOT / "mpitrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    outside = imported - sys.stdlib_module_names - {"mpitrain", "tomli"} - OFFERED
    of = packages_distributions()
    declared = {canonicalize_name(each.name) for each in requirements(*(name for name in extras() if name != "test"))}
    lacking = {name for name in outside if not declared & {canonicalize_name(each) for each in of.get(name, [name])}}
    assert not lacking


def test_requirements_have_a_lowest_version_and_unstable_ones_a_highest():
    for each in requirements(*extras()):
        assert each.name == "mpitrain" or lowest(each)
    (bindings,) = requirements("nccl")[len(requirements()) :]
    assert "0.7" not in bindings.specifier and "0.6" in bindings.specifier


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_core_of_the_suite_passes_with_the_lowest_versions(tmp_path):
    """torch is the lowest CPU-only version in the package index, because a CUDA build is 5 GB."""
    venv.create(tmp_path / "lowest", with_pip=True)
    python = tmp_path / "lowest/bin/python"
    tools = [each for each in requirements("test") if each.name in TOOLS]
    versions = {lowest(each) for each in [*requirements(*CORE), *tools] if each.name != "torch"}
    versions.add(f"torch==={lowest_torch(python)}")
    installed = run(python, "-m", "pip", "install", "-q", "--no-cache-dir", *sorted(versions), limit=900)
    assert installed.returncode == 0, installed.stderr[-3000:]
    result = run(python, "-m", "pytest", "-q", *SERIAL, limit=400)
    assert result.returncode == 0, result.stdout[-3000:]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start = [tmp_path / "lowest/bin/mpirun", "--oversubscribe", *root, "-n", "2", python, "-m", "pytest", "-q", "-x"]
    result = run(
        *start, "--color=no", "--only-mpi", "-p", "no:hypothesispytest", *RANKS, limit=450, MPITRAIN_TEST_RANKS="2"
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert re.search(r"\b[1-9]\d+ passed", result.stdout)


def lowest_torch(python: Path) -> str:
    """Return the lowest CPU-only version of torch that is allowed and offered; skip the test without one."""
    (declared,) = [each for each in requirements() if each.name == "torch"]
    listing = run(python, "-m", "pip", "index", "versions", "torch", limit=100).stdout
    offered = re.findall(r"[\d.]+\+cpu", listing.partition("Available versions:")[2].partition("\n")[0])
    allowed = sorted((each for each in offered if Version(each) in declared.specifier), key=Version)
    if not allowed:
        pytest.skip("the package index offers no torch for the CPU alone")
    return allowed[0]


def run(*command: str | Path, limit: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, with the commands of that Python's environment first on the PATH."""
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=clean_environment(PATH=path, PYTHONPATH=str(ROOT), **environment),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
    )
