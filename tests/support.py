"""Helpers that start jobs from tests: real mpirun, real ranks, always with a time limit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mpitrain.comm import Communicator
    from mpitrain.config.settings import Config

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = int(os.environ.get("MPITRAIN_TEST_PATIENCE", "1"))  # multiplies time limits, for slow machines
DEVICE = os.environ.get("MPITRAIN_TEST_DEVICE", "pretend")  # kind of device of the tests on a device, such as "cuda"
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
MACHINE = """
# a machine profile that needs no measuring
[node]
cores = 2
memory = "16 GiB"
memory_bandwidth = "20 GB/s"
[core.matrix]
fp32 = { 256 = "50 Gflop/s" }
"""


def config_of(**settings: object) -> Config:
    """Return a configuration from settings without sections, as `zero=1, bucket_mb=0.004`; no clipping by default."""
    from mpitrain.config.settings import Config, sections

    section_of = {key: section for section in ("comm", "run", "train", "parallel") for key in sections()[section]}
    values: dict[str, dict[str, object]] = {}
    for key, value in {"clip": 0.0, **settings}.items():
        values.setdefault(section_of[key], {})[key] = value
    return Config.from_dict(values)


def launcher(ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks of this environment's MPI on this machine."""
    prefix = Path(sys.prefix) / "bin"
    if (prefix / "ompi_info").exists():
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [str(prefix / "mpirun"), "--oversubscribe", *root, "-n", str(ranks)]
    return [str(prefix / "mpiexec") if (prefix / "mpiexec").exists() else "mpiexec", "-n", str(ranks)]


def environment_with(mpi: str) -> Path:
    """Return the environment with this MPI, "openmpi" or "mpich": this one or a second one, created if missing."""
    if (Path(sys.prefix) / "bin/ompi_info").exists() == (mpi == "openmpi"):
        return Path(sys.prefix)
    subprocess.run([str(ROOT / "tests/second_mpi.sh"), mpi], check=True, timeout=100)
    return ROOT / f".venv-{mpi}"


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment without the variables of launchers and batch systems."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "PBS_", "MPITRAIN_")
    remaining = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return remaining | {"OMP_NUM_THREADS": "1"} | extra


def pretend_environment(*, visible: str | None = None, late_ms: int = -1) -> dict[str, str]:
    """Return the variables that give a child process the simulated accelerator from `import torch` on.

    Args:
        visible: Numbers of the visible devices, such as "1,0"; None for all (two).
        late_ms: Delay of work that nothing waits for, in milliseconds; -1: it never runs.
    """
    path = [str(ROOT / "tests/pretend/autoload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    shown = {} if visible is None else {"PRETEND_VISIBLE_DEVICES": visible}
    knobs = {"PRETEND_LATE_MS": str(late_ms), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    return {"PYTHONPATH": os.pathsep.join(path)} | knobs | shown


@contextmanager
def shown_device() -> Iterator[torch.device]:
    """Yield this rank's device for a test: one of the simulated accelerator, which is hidden again afterwards.

    Of a real kind of device, which `MPITRAIN_TEST_DEVICE` names, ranks may share one.
    """
    import torch

    if DEVICE == "pretend":
        import pretend

        require_pretend()
        with pretend.shown(RANK) as shown:
            yield shown
        return
    device = torch.device(DEVICE, RANK % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    yield device
    torch.accelerator.synchronize(device)


def require_pretend() -> None:
    """Skip the test where the simulated accelerator cannot be built; CI has the required compiler."""
    import pretend
    import pytest

    if reason := pretend.build.missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def train_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mpitrain.train", *map(str, arguments)]


def job(
    ranks: int,
    command: Sequence[str],
    *,
    timeout: float = 90,
    cwd: Path | None = None,
    device: str = "cpu",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command on `ranks` ranks (0: without a launcher) and capture its output.

    device: "pretend" gives its processes the simulated accelerator; the job must still select it with run.device.
    """
    if device == "pretend":
        environment = pretend_environment() | environment
    return subprocess.run(
        [*(launcher(ranks) if ranks else []), *command],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        cwd=cwd,
        env=clean_environment(**environment),
    )


def one_line(
    ended: subprocess.CompletedProcess[str] | tuple[int, str], *words: str, code: int = 2, alone: bool = True
) -> str:
    """Return the one line with which a command refused its input; check that it has all these words.

    ended: the process, or its exit code and stderr. alone: stderr has no other line; False under mpirun, which writes
    more.
    """
    exit_code, errors = ended if isinstance(ended, tuple) else (ended.returncode, ended.stderr)
    assert exit_code == code, errors
    assert "Traceback" not in errors and "Logging error" not in errors, errors
    (message,) = [line for line in errors.splitlines() if alone or line.startswith(("mpitrain: ", "error: "))]
    assert message.startswith(("mpitrain: ", "error: ")) and len(message) < 1000, message
    assert all(word in message for word in words), (message, words)
    return message


def next_handle(world: Communicator) -> int:
    """Return MPI's number of the next communicator (collective). It stays small if all communicators are freed."""
    duplicate = world._comm.Dup()
    number = duplicate.py2f()
    duplicate.Free()
    return number


@contextmanager
def little_memory(extra: int = 2 << 30) -> Iterator[None]:
    """Limit this process' memory, so that huge requests raise MemoryError. extra: bytes beyond those in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size, such as 700k, in a new folder; skip the test where that is not allowed."""
    import pytest

    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(ballast: Path, free: int = 0) -> None:
    """Leave `free` bytes on the file system of a file, in whole pages."""
    with open(ballast, "wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(max(0, file.tell() - free))


def in_slice(name: str, part: str) -> bool:
    """Return whether a test or file belongs to part "K/N" of all: the same in every process and on every machine."""
    number, parts = map(int, part.split("/"))
    return zlib.crc32(name.encode()) % parts == number


@contextmanager
def memory_cgroup(nbytes: int) -> Iterator[list[str]]:
    """Make a cgroup inside this process' own that limits memory, and return the start of a command that runs in it.

    Skips the test where that is not allowed.
    """
    import pytest

    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    top, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if own is None:
        own, top, limit = lines[-1][2], Path("/sys/fs/cgroup"), "memory.max"
    folder = top / own.strip("/") / f"mpitrain-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("making a cgroup needs root")
    try:
        (folder / limit).write_text(str(nbytes))
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"']
    except PermissionError:
        pytest.skip("this cgroup cannot limit memory")
    finally:
        folder.rmdir()
