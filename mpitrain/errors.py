"""Errors that mpitrain raises deliberately, with the exit code that each gives a job.

A message is one line that says what is wrong and how to fix it. A traceback is printed only for exceptions that are not
defined here, because they are bugs of mpitrain or of the model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: the run is saved and can be started again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# C0 and C1 controls, marks and overrides of the writing direction, line separators, and surrogates, which cannot be
# shown or encoded
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_LONG_WORD = re.compile(r"\S{301,}")
_LONGEST_MESSAGE = 4000


class MpitrainError(Exception):
    """Base class of deliberate errors.

    agreed: True if every rank raises the same error at the same point, so that rank 0 alone prints it and all ranks
    exit normally. False if this rank raises alone, which aborts the job.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class InputError(MpitrainError):
    """Error in a configuration, path, data file or argument, which the user can fix."""

    exit_code = EXIT_BAD_INPUT


def refusal(message: str) -> InputError:
    """Return an InputError for every rank to raise at the same point (see `MpitrainError`)."""
    return InputError(message, agreed=True)


class CommunicationError(MpitrainError):
    """Misuse or failure of a collective; the message names the operation and the arguments of the ranks."""


class CheckpointError(MpitrainError):
    """Checkpoint that cannot be written, or is not valid."""


class NothingLearned(MpitrainError):
    """End of a training run whose last steps learned nothing."""


def printable(text: object, most: int | None = 200, *, as_text: bool = False) -> str:
    r"""Return text from outside with characters that would control a terminal replaced by escapes.

    Args:
        text: Name, message or value from a file, another process or another user.
        most: Largest number of characters; a longer text is cut and ends in `...`. None means no limit.
        as_text: If true, keep newlines and tabs; otherwise they appear as \n and \t, like other control characters.
    """
    shown = str(text)
    if most is not None and len(shown) > most:
        shown = shown[: most - 3] + "..."
    return _UNPRINTABLE.sub(lambda match: _escaped(match[0], "\n\t" if as_text else ""), shown)


def _escaped(letter: str, allowed: str) -> str:
    return letter if letter in allowed else letter.encode("unicode_escape").decode()


def echo(*lines: object) -> None:
    """Print lines on standard output, with characters that would control the terminal replaced by escapes."""
    print(*(printable(line, None, as_text=True) for line in lines), sep="\n", flush=True)


def message_of(error: BaseException) -> str:
    """Return the message of an error for a terminal, with very long values shortened.

    It is one line, except for a `CommunicationError`, whose message may contain a table of ranks.
    """
    text = _LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-60:]}", str(error))
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE * 2 // 3]} ... {text[-_LONGEST_MESSAGE // 4 :]}"
    return printable(text, None, as_text=isinstance(error, CommunicationError))


@contextmanager
def refusing(what: str, fix: str, *, agreed: bool = False) -> Iterator[None]:
    """Turn any exception that a parser raises about the content of a file into an InputError of one line.

    Use it for parsers that do not document their exceptions. OSErrors and errors of mpitrain are not changed.

    Args:
        what: File and problem, such as "array x.npy is not a plain .npy array".
        fix: Advice for the message.
        agreed: True if every rank reads the same file (see `MpitrainError`).
    """
    try:
        yield
    except (OSError, MpitrainError):
        raise
    except MemoryError:
        raise InputError(f"{what} (it needs more memory than there is); {fix}", agreed=agreed) from None
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{what} ({printable(reason)}); {fix}", agreed=agreed) from None


def exit_code_of(act: Callable[[], int]) -> int:
    """Run a command without ranks and return its exit code; an error is printed in one line."""
    try:
        return act()
    except MpitrainError as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print("error: there is not enough memory; use a machine with more, or smaller input", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"error: {printable(error.filename or 'a file')}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a file in one line: its place, and what is expected there."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    text = problem["msg"].removeprefix("Value error, ")
    return f"{ascii(where)[1:-1]:.200}: {text.lower()}" if where else text
