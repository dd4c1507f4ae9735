"""Builds the library of the simulated accelerator, once for each (sources, PyTorch, flags, compiler).

    python -m pretend       build it, where that was not done before; needs `tests` on PYTHONPATH

It is in `.pretend/` of the checkout. Processes that need it at the same time wait for the one that builds it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("source")
CACHE = Path(__file__).resolve().parents[2] / ".pretend"
TIMEOUT = 1800  # seconds for one file; 300 were not enough where the host was short of memory


class BuildError(Exception):
    """The library cannot be built; the message is one line."""


def missing() -> str:
    """Return why this machine has no simulated accelerator; "" if it has one."""
    if sys.platform != "linux":
        return "the simulated accelerator needs Linux"
    return "" if _compiler() else "the simulated accelerator needs a C++ compiler: g++, c++ or clang++, or CXX"


def library() -> Path:
    """Return the library's path; build it first if needed.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    if reason := missing():
        raise BuildError(reason)
    built = CACHE / f"{_key()}.so"
    if not built.exists():
        CACHE.mkdir(exist_ok=True)
        with open(CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _build(built)
    return built


@functools.cache
def _compiler() -> str:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "c++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), "")


def _flags() -> list[str]:
    installed = Path(torch.__file__).parent / "include"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-Wno-interference-size", f"-I{installed}", f"-I{installed}/torch/csrc/api/include"),
    ]


def _key() -> str:
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60).stdout
    made_of = hashlib.sha256(repr((torch.__version__, torch.version.git_version, _flags(), compiler, version)).encode())
    for path in sorted(SOURCES.iterdir()):
        made_of.update(path.read_bytes())
    return made_of.hexdigest()[:16]


def _build(built: Path) -> None:
    """Compile in parallel on all cores and link; other processes see only the complete library."""
    folder = CACHE / "building"  # only one process has the lock; what a killed one left is removed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        sources = _units(folder)
        objects = [folder / f"{path.stem}.o" for path in sources]
        commands = [
            [*_flags(), "-c", str(path), "-o", str(target)] for path, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_compile, commands))
        libraries = Path(torch.__file__).parent / "lib"
        link_options = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}", "-lpthread"]
        library_file = folder / "whole.so"
        _compile(["-shared", *map(str, objects), "-o", str(library_file), *link_options])
        os.replace(library_file, built)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _units(folder: Path) -> list[Path]:
    """Return the compilation units, the longest first; reading PyTorch's headers takes nearly all of the time."""
    small_sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "autocast.cpp"]
    small_unit = folder / "rest.cpp"
    small_unit.write_text("".join(f'#include "{path}"\n' for path in small_sources))
    return [SOURCES / "autocast.cpp", small_unit]


def _compile(arguments: list[str]) -> None:
    done = subprocess.run([_compiler(), *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        reason = errors[0].strip() if errors else f"exit code {done.returncode}"
        raise BuildError(f"building the simulated accelerator failed: {reason}")
