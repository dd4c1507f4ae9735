"""One way to fail: any rank's fatal error ends the whole job with one message, within seconds.

A rank that fails tells the others, waits a moment, and speaks only if no other rank spoke first or failed at
the same time with a lower number. Then it aborts the job. Errors that every rank raises alike (`agreed`) need
no abort: rank 0 speaks and all leave.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import numpy as np

from mpitrain.comm.job import launcher
from mpitrain.comm.job.leaving import note_exit_status
from mpitrain.comm.job.mpi import MPI
from mpitrain.errors import EXIT_FAILED, EXIT_INTERRUPTED, MpitrainError, message_of, printable

_FAILED = 7  # message tag
_GATHER = 0.3  # seconds in which ranks that fail together find each other


class Faults:
    """What ends the job where this rank fails.

    Attributes:
        before_leaving: Called with the exit code before this rank leaves together with all others.
    """

    def __init__(
        self, comm: MPI.Intracomm, end: Callable[[int], None] | None = None, leave: Callable[[int], None] | None = None
    ) -> None:
        """Prepare for it; `install` has it catch what nobody else does.

        Args:
            comm: A duplicate of the world for this alone.
            end: Ends this process and with it all ranks; without it MPI's Abort does.
            leave: Ends this process where all ranks do.
        """
        self._comm = comm
        self._end, self._leave = end, leave or finalize
        self._token = np.zeros(1, dtype=np.uint8)
        self._previous = sys.excepthook
        self.before_leaving: Callable[[int], object] = lambda code: None

    def install(self) -> None:
        """Route exceptions that nobody catches through `fail`."""
        sys.excepthook = self._hook
        note_exit_status()

    def uninstall(self) -> None:
        """Let the interpreter deal with exceptions as it did before."""
        sys.excepthook = self._previous

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if MPI.Is_finalized():  # by the program itself: no other rank can be told
            self._previous(kind, error, trace)
            return
        self.fail(error.with_traceback(trace))

    def fail(self, error: BaseException) -> None:
        """Report the error as this rank's and end the job; does not return."""
        code = exit_code(error)
        if self._comm.size == 1 or (isinstance(error, MpitrainError) and error.agreed):
            if self._comm.rank == 0:
                say(text := self.describe(error, alone=True))
                launcher.repeat_last(text)
            self.before_leaving(code)
            self._leave(code)
        self.end_job(self.describe(error), code)

    def describe(self, error: BaseException, *, alone: bool = False) -> str:
        """What stderr gets: one line for an error of ours, with the traceback for any other.

        Args:
            error: What went wrong.
            alone: Whether no rank need be named.
        """
        where = "" if alone else f"rank {self._comm.rank}: "
        if isinstance(error, MpitrainError):
            return f"mpitrain: {where}{message_of(error)}"
        if isinstance(error, KeyboardInterrupt):
            return f"mpitrain: {where}interrupted"
        trace = "".join(traceback.format_exception(error)).rstrip()
        return f"mpitrain: {where}{type(error).__name__}: {error}\n{trace}"

    def end_job(self, text: str, code: int = EXIT_FAILED) -> None:
        """Print the text, unless another rank speaks for the same end, and abort every rank.

        Args:
            text: What stderr gets.
            code: The job's exit code.
        """
        try:
            first = self._is_first()
        except MPI.Exception:  # ranks died before this one failed
            first = True
        if first:
            say(text)
            launcher.repeat_last(text)
        if self._end is not None:
            self._end(code)
        if not first:
            time.sleep(5)  # the rank that speaks is about to abort us
        abort(self._comm, code)

    def _is_first(self) -> bool:
        if self._comm.Iprobe(MPI.ANY_SOURCE, _FAILED):
            return False
        for other in range(self._comm.size):
            if other != self._comm.rank:
                with suppress(MPI.Exception):  # it may be dead
                    self._comm.Isend(self._token, other, _FAILED).Free()
        deadline = time.monotonic() + _GATHER
        status = MPI.Status()
        while time.monotonic() < deadline:
            if self._comm.Iprobe(MPI.ANY_SOURCE, _FAILED, status):
                self._comm.Recv(np.empty(1, dtype=np.uint8), status.source, _FAILED)
                if status.source < self._comm.rank:
                    return False
            else:
                time.sleep(0.01)
        return True


def exit_code(error: BaseException) -> int:
    """The exit code of a job that ends with this error."""
    if isinstance(error, MpitrainError):
        return error.exit_code
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED


def say(text: str) -> None:
    """One write to stderr, so that ranks' messages do not mix."""
    sys.stdout.flush()
    os.write(2, (printable(text, None, as_text=True) + "\n").encode(errors="replace"))


def abort(comm: MPI.Intracomm, code: int) -> None:
    """End all ranks of the job with an exit code.

    Args:
        comm: A communicator of this rank's.
        code: The exit code.
    """
    with suppress(OSError):  # MPICH has a line of its own about it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    comm.Abort(code)


def finalize(code: int) -> None:
    """End this process with an exit code after a proper MPI_Finalize; all ranks do."""
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.Finalize()
    os._exit(code)
