"""Startup of commands before they import torch and MPI, which takes seconds.

A signal that requests saving and stopping is recorded until the run can handle it, because Python would otherwise
terminate. The time limit for the other ranks to reach MPI's start, which an import triggers, is taken from the
settings. A package that is not installed is reported in one line. `--help`, `--version` and mistyped arguments do not
load MPI, which many login nodes forbid.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from mpitrain.errors import EXIT_DONE, InputError, refusal

__version__ = "0.1.0"  # setup.cfg reads it from here
START_TIMEOUT = "MPITRAIN_START_TIMEOUT"  # environment variable: seconds within which all ranks must reach MPI's start
MIN_START_TIMEOUT = 20.0  # least value in seconds, because imports may take longer than the limit for operations
RANK_NAMES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "SLURM_PROCID",
)  # variables in which launchers give the rank
_NEEDED = ("h5py", "numpy", "pydantic", "rich", "tomli", "tomli_w", "torch", "zlib_ng")  # without MPI's packages
_signals: list[int] = []
T = TypeVar("T")

VERSION = f"mpitrain {__version__}"  # text of --version


class Parser(argparse.ArgumentParser):
    """Parser of a command with --version, whose errors are one line, equal on all ranks.

    Args:
        command: Name of the command after `python -m mpitrain.`.
        **options: Further arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=f"python -m mpitrain.{command}", **options)
        self.add_argument("--version", action="version", version=VERSION)

    def error(self, message: str) -> NoReturn:
        raise refusal(f"{message}; see {self.prog} --help")


def positive_integer(text: str) -> int:
    """Return the positive integer in an argument, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def record_signals() -> None:
    """Record a SIGUSR1 that arrives from now on, for `received_signal`."""
    signal.signal(signal.SIGUSR1, lambda number, frame: _signals.append(number))


def received_signal() -> str:
    """Return the name of the signal that arrived, or ""."""
    return signal.Signals(_signals[0]).name if _signals else ""


def set_start_timeout(seconds: float) -> None:
    """Set the time limit for all ranks to reach MPI's start, in seconds, unless the environment has one."""
    os.environ.setdefault(START_TIMEOUT, str(max(seconds, MIN_START_TIMEOUT)))


def is_first_rank() -> bool:
    """Return whether this process has rank 0 or no launcher, and therefore prints for the job before MPI runs."""
    return next((os.environ[name] for name in RANK_NAMES if name in os.environ), "0") == "0"


def print_help(arguments: Sequence[str], help_text: Callable[[], str]) -> None:
    """Exit if --help or --version is among the arguments; the first rank prints the text.

    Args:
        arguments: Arguments of the command line.
        help_text: Function that returns the text for --help.
    """
    requested = {"-h", "--help", "--version"} & set(arguments)
    if not requested:
        return
    if is_first_rank():
        print(VERSION if "--version" in requested else help_text())
    raise SystemExit(EXIT_DONE)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Import packages in the body of the `with` statement without collecting garbage, of which imports leave none.

    Collections otherwise take a seventh of the time of importing torch. Later ones skip the imported objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_launched() -> bool:
    """Return whether mpirun, mpiexec or srun started this process as a rank of a job."""
    by_mpi = any(name in os.environ for name in RANK_NAMES if name != "SLURM_PROCID")  # also set in a batch script
    return by_mpi or int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def log(text: str) -> None:
    """Print a message on standard error before MPI runs, only on the first rank."""
    if is_first_rank():
        print(f"mpitrain: {text}", file=sys.stderr)


def read_arguments(read: Callable[[], T]) -> T | None:
    """Return the parsed command line before MPI is loaded.

    Without a launcher, a mistake in the command line ends the process.

    Args:
        read: Function that parses the command line, and raises InputError for a mistake.

    Returns:
        Result of `read`; None for a mistake under a launcher, which rank 0 reports once MPI runs.
    """
    try:
        return read()
    except InputError as error:
        if any(name in os.environ for name in RANK_NAMES):
            return None
        print(f"mpitrain: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def rehearsal_parser() -> Parser:
    """Return the parser of the options with which `mpitrain.train` only rehearses the job."""
    parser = Parser("train", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="take some steps on made-up samples, show memory and time")
    add("--as-rank", type=int, metavar="R", help="--dry-run of rank R alone, in one process, for a job of --ranks N")
    add("--ranks", type=positive_integer, metavar="N", help="ranks of that job")
    add("--ranks-per-node", type=positive_integer, default=0, metavar="N", help="ranks on a node [one per core here]")
    add("--memory", metavar="SIZE", help="memory that a rank may use, such as 32GiB [its share of this node's]")
    return parser


def rehearsal_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a rehearsal, and the other arguments.

    Args:
        arguments: Arguments of the command line.

    Raises:
        InputError: An option is malformed, or lacks the one that it belongs to.
    """
    options, rest = rehearsal_parser().parse_known_args(list(arguments))
    if (options.as_rank is None) != (options.ranks is None):
        raise refusal("--as-rank R and --ranks N belong together; give both")
    options.dry_run = options.dry_run or options.as_rank is not None
    if not options.dry_run and (options.memory or options.ranks_per_node):
        raise refusal("--memory and --ranks-per-node are for a rehearsal; add --dry-run")
    return options, rest


def report_errors(line_for: Callable[[BaseException], str | None]) -> None:
    """Report an uncaught error by one line of the first rank, and exit.

    Args:
        line_for: Function that returns the line for an error, or None if Python should print its traceback.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = line_for(error)
        if line is None:
            sys.__excepthook__(kind, error, trace)
            return
        if line:
            log(line)
        raise SystemExit(getattr(error, "exit_code", 2))

    sys.excepthook = hook


def missing_package(error: BaseException) -> str | None:
    """Return a line about a required package that is not installed; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in _NEEDED:
        return None
    name = error.name.replace("_", "-")
    advice = f"pip install {name}, or load the environment that has it"
    return f"the package {name} is not installed for {sys.executable}: {advice}"
