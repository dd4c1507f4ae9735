"""The errors mpitrain raises on purpose, each with the exit code it ends a job with.

A message is one line: what is wrong, then how to mend it. A traceback is shown only for exceptions
that are not in this file, because those are bugs (ours or the model's).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved, start me again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class MpitrainError(Exception):
    """Base of every deliberate error.

    agreed: True when every rank raises the same error at the same point, so that rank 0 alone speaks and
    all ranks may leave through the front door. False when this rank stands alone and the job is aborted.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class InputError(MpitrainError):
    """A configuration, path, data file or argument that the user can mend."""

    exit_code = EXIT_BAD_INPUT


def refusal(message: str) -> InputError:
    """The InputError that every rank raises at the same point (see `MpitrainError`)."""
    return InputError(message, agreed=True)


class CommunicationError(MpitrainError):
    """A collective was misused or did not complete: names the operation and what the ranks passed."""


class CheckpointError(MpitrainError):
    """A checkpoint that cannot be written or trusted."""


class NothingLearned(MpitrainError):
    """Training came to its end, and its last steps taught nothing."""


def exit_code_of(act: Callable[[], int]) -> int:
    """Do what a command that needs no ranks does; returns its exit code, and says in one line why it failed."""
    try:
        return act()
    except MpitrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong in a file, in one line: where, and what is expected there."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    text = problem["msg"].removeprefix("Value error, ")
    return f"{ascii(where)[1:-1]:.200}: {text.lower()}" if where else text
