"""The errors mpitrain raises on purpose, each with the exit code it ends a job with.

A message is one line: what is wrong, then how to mend it. A traceback is shown only for exceptions
that are not in this file, because those are bugs (ours or the model's).
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
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved, start me again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# C0 and C1 controls, marks and overrides of the writing direction, line separators, and surrogates, which no terminal
# and no encoding can show
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_LONG_WORD = re.compile(r"\S{301,}")
_LONGEST_MESSAGE = 4000


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


def printable(text: object, most: int | None = 200, *, as_text: bool = False) -> str:
    r"""Return foreign text as it may be shown on a terminal: without characters that would control the terminal.

    Args:
        text: A name, message or value that a file, another process or another user chose.
        most: Characters after which a long value is cut, with `...` in place of the rest; None shows all of it.
        as_text: Whether newlines and tabs stay; otherwise they appear as \n and \t, like other controls.
    """
    shown = str(text)
    if most is not None and len(shown) > most:
        shown = shown[: most - 3] + "..."
    return _UNPRINTABLE.sub(lambda found: _escaped(found[0], "\n\t" if as_text else ""), shown)


def _escaped(letter: str, allowed: str) -> str:
    return letter if letter in allowed else letter.encode("unicode_escape").decode()


def tell(*lines: object) -> None:
    """Print lines for a person on standard output, without anything that would control the terminal."""
    print(*(printable(line, None, as_text=True) for line in lines), sep="\n", flush=True)


def message_of(error: BaseException) -> str:
    """Return the message of an error for a terminal: printable, with values of thousands of characters shortened.

    It is one line, except for the table of ranks of a `CommunicationError`.
    """
    text = _LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-60:]}", str(error))
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE * 2 // 3]} ... {text[-_LONGEST_MESSAGE // 4 :]}"
    return printable(text, None, as_text=isinstance(error, CommunicationError))


@contextmanager
def refusing(what: str, mend: str, *, agreed: bool = False) -> Iterator[None]:
    """Turn whatever a parser raises about the content of a file into an InputError of one line.

    For parsers that do not say what they raise. OSErrors, and errors that are ours already, pass.

    Args:
        what: The file, and what it is not, as "array x.npy is not a plain .npy array".
        mend: How to fix it.
        agreed: Whether every rank reads the same (see `MpitrainError`).
    """
    try:
        yield
    except (OSError, MpitrainError):
        raise
    except MemoryError:
        raise InputError(f"{what} (it asks for more memory than there is); {mend}", agreed=agreed) from None
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{what} ({printable(reason)}); {mend}", agreed=agreed) from None


def exit_code_of(act: Callable[[], int]) -> int:
    """Do what a command that needs no ranks does; returns its exit code, and says in one line why it failed."""
    try:
        return act()
    except MpitrainError as error:
        print(f"error: {message_of(error)}", file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print("error: there is not enough memory for this; use a machine with more, or smaller input", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"error: {printable(error.filename or 'a file')}: {error.strerror or error}", file=sys.stderr)
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
