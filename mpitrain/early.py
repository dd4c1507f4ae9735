"""What commands do before they import torch and MPI, which takes seconds.

A signal that asks it to save and stop is kept until the run can honour it; Python's own answer would be to die. And the
time that the other ranks have to come to the start of MPI, which an import starts, is taken from the settings.
A package that is not installed is one line. `--help`, `--version` and a mistyped argument load no MPI, which many login
nodes forbid.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from mpitrain.errors import EXIT_DONE, InputError, refusal

__version__ = "0.1.0"  # setup.cfg reads it from here
START_TIMEOUT = "MPITRAIN_START_TIMEOUT"  # seconds that ranks have to come to the start of MPI
LEAST = 20.0  # seconds: a limit for operations is not for imports, which take longer on some hosts than on others
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")  # what launchers call the rank
_NEEDED = ("h5py", "numpy", "pydantic", "rich", "tomli", "tomli_w", "torch", "zlib_ng")  # beside MPI's
_came: list[int] = []
T = TypeVar("T")

VERSION = f"mpitrain {__version__}"  # what --version prints


class Parser(argparse.ArgumentParser):
    """A command's parser, with --version, whose errors are one line, the same on all ranks.

    Args:
        command: Name of the command, after `python -m mpitrain.`.
        **options: As `argparse.ArgumentParser` has them.
    """

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=f"python -m mpitrain.{command}", **options)
        self.add_argument("--version", action="version", version=VERSION)

    def error(self, message: str) -> NoReturn:
        raise refusal(f"{message}; see {self.prog} --help")


def whole_number(text: str) -> int:
    """Return the number that an argument gives, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def keep_signals() -> None:
    """Keep a SIGUSR1 that comes from now on, for `asked`."""
    signal.signal(signal.SIGUSR1, lambda number, frame: _came.append(number))


def asked() -> str:
    """The name of the signal that came, or nothing."""
    return signal.Signals(_came[0]).name if _came else ""


def allow(seconds: float) -> None:
    """Give the other ranks so long to come to the start of MPI, unless the environment says how long they have."""
    os.environ.setdefault(START_TIMEOUT, str(max(seconds, LEAST)))


def launched_first() -> bool:
    """Whether a launcher gave this process the number 0, or there was none: it speaks for a job without MPI."""
    return next((os.environ[name] for name in RANK_NAMES if name in os.environ), "0") == "0"


def answer(arguments: Sequence[str], help_text: Callable[[], str]) -> None:
    """End this process if it is asked for --help or --version, which the first rank prints.

    Args:
        arguments: Those of the command line.
        help_text: Makes what --help prints.
    """
    asked = {"-h", "--help", "--version"} & set(arguments)
    if not asked:
        return
    if launched_first():
        print(VERSION if "--version" in asked else help_text())
    raise SystemExit(EXIT_DONE)


def say(text: str) -> None:
    """Tell a person something before MPI runs, once: the first rank does, on standard error."""
    if launched_first():
        print(f"mpitrain: {text}", file=sys.stderr)


def read_arguments(read: Callable[[], T]) -> T | None:
    """Return what a command line says, before MPI is loaded. A mistake in it ends a process without a launcher.

    Args:
        read: Reads the command line; raises InputError for a mistake.

    Returns:
        The result of `read`; None for a mistake under a launcher, which rank 0 reports once MPI runs.
    """
    try:
        return read()
    except InputError as error:
        if any(name in os.environ for name in RANK_NAMES):
            return None
        print(f"mpitrain: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def explain(line_for: Callable[[BaseException], str | None]) -> None:
    """End this process with one line, said by the first rank, at an error that nothing catches.

    Args:
        line_for: Returns the line for an error; None for an error that Python is to report as it does.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = line_for(error)
        if line is None:
            sys.__excepthook__(kind, error, trace)
            return
        if line:
            say(line)
        raise SystemExit(getattr(error, "exit_code", 2))

    sys.excepthook = hook


def missing_package(error: BaseException) -> str | None:
    """Return the line for a package that mpitrain needs and that is not installed; None for another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in _NEEDED:
        return None
    name = error.name.replace("_", "-")
    advice = f"pip install {name}, or load the environment that has it"
    return f"the package {name} is not installed for {sys.executable}: {advice}"
