"""One way to fail: any rank's fatal error ends the whole job with one message, within seconds.

A rank that fails tells the others, waits a moment, and speaks only if no other rank spoke first or failed at
the same time with a lower number. Then it aborts the job. Errors that every rank raises alike (`agreed`) need
no abort: rank 0 speaks and all leave.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from mpitrain.comm.job import launcher
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Record
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


# -- A rank whose interpreter ends while others still need it is named within seconds, instead of hanging them.
#
# A rank that ends waits, before MPI is finalized, until all ranks do. Where that takes longer than a moment, it says
# what it has done: for each communicator the number of its last operation. Rank 0 passes that on. A rank that waits in
# an operation which one that has left never began, or for a message of one, waits in vain and ends the job:
#
#     rank 1  ends          -> rank 0      I leave; of world I did #1 to #11
#     rank 0                -> all others  rank 1 left; ...
#     rank 2  in #12 of world, a moment later: ends the job, naming rank 1
#
# Ranks that have nothing to do with each other any more may end hours apart. Where all end together nothing is said.

_TAG = 3  # of messages; the watchdog has the others
_MOMENT = 1.0  # seconds: for all to end, for what a rank sent before it left to arrive
_NAP = 1e-4, 0.05  # seconds between looks for the others, at first and at most

exit_status: Any = None  # what this process gave to sys.exit last


def note_exit_status() -> None:
    """Let `sys.exit` note its argument, which cannot be asked for when the interpreter ends. Twice is fine."""
    original = sys.exit
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def leave(status: Any = None, /) -> None:
        global exit_status
        if threading.current_thread() is threading.main_thread():
            exit_status = status
        original(status)

    setattr(sys, "exit", leave)  # noqa: B010 - mypy knows that the original never returns


def arrived(comm: MPI.Intracomm, tag: int) -> Iterator[tuple[int, Any]]:
    """The JSON values that have arrived under a tag by now, and the ranks that sent them."""
    status = MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        text = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        comm.Recv(text, status.source, tag)
        yield status.source, json.loads(text.tobytes())


@dataclass(frozen=True)
class Departure:
    """A rank that has left.

    Attributes:
        rank: Its number in the world.
        code: The exit code it asked for.
        done: The number of its last operation on each communicator, by the names of their records.
        noticed: When this rank learned of it, as `time.monotonic` tells.
    """

    rank: int
    code: int
    done: dict[str, int]
    noticed: float  # time.monotonic()

    def fails(self, record: Record, now: float) -> bool:
        """Whether the operation that this rank is in can never complete because of the departure."""
        if not record.since or now - record.since < _MOMENT or now - self.noticed < _MOMENT:
            return False
        if record.awaited:
            return self.rank in record.awaited
        return self.rank in record.members and self.done.get(record.key, record.sequence) < record.sequence

    def text(self, record: Record, rank: int, line: str) -> str:
        """What is said where the job ends because of this.

        Args:
            record: The operation that waits in vain.
            rank: The rank that waits.
            line: Where in its program it does.
        """
        code = f" with exit code {self.code}" if self.code else ""
        return (
            f"mpitrain: rank {self.rank} left: its interpreter ended{code} while rank {rank} waits for it at {line}, "
            f"in {record.text()}; every rank must make the same calls, or raise an error to end them all"
        )


class Departures:
    """Who has left, as far as this rank knows."""

    def __init__(self, comm: MPI.Intracomm, records: Callable[[], list[Record]]) -> None:
        """Begin with nobody.

        Args:
            comm: The watchdog's communicator.
            records: Gives the records of this rank's operations.
        """
        self._comm, self._records = comm, records
        self._known: dict[int, Departure] = {}
        self._own: list[dict[str, Any]] = []  # what this rank has to tell, itself leaving
        self._sending: list[tuple[MPI.Request, np.ndarray]] = []  # MPI reads the arrays until they have left
        self._suspect: tuple[Record, float] | None = None

    def wait_for_all(self, code: int | None = None) -> None:
        """Return when every rank has come here, at its end.

        Args:
            code: This rank's exit code, where it is known.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        everybody = self._comm.Ibarrier()
        begun, nap, told = time.monotonic(), _NAP[0], False
        while not everybody.Test():
            if not told and time.monotonic() - begun > _MOMENT:
                status, told = exit_status if code is None else code, True
                asked = status if isinstance(status, int) else int(status is not None)
                done = {record.key: record.sequence for record in self._records() if record.members}
                self._own = [{"rank": self._comm.rank, "code": asked, "done": done}]
            time.sleep(nap)
            nap = min(2 * nap, _NAP[1])

    def look(self) -> None:
        """Take in, and on rank 0 pass on, who has left. Called again and again, from a thread."""
        self._sending = [(request, text) for request, text in self._sending if not request.Test()]
        own, self._own = self._own, []
        if own:
            self._send(own, [0])
        news = [told for _, several in arrived(self._comm, _TAG) for told in several]
        for told in news:
            if told["rank"] != self._comm.rank:
                self._known[told["rank"]] = Departure(**told, noticed=time.monotonic())
        if news and self._comm.rank == 0:
            self._send(news, (r for r in range(1, self._comm.size) if r not in self._known))

    def in_vain(self) -> tuple[Record, Departure] | None:
        """The operation that this rank waits in and that cannot complete, seen twice in a row; and who left it."""
        now = time.monotonic()
        for record in self._records() if self._known else ():
            failing = [left for left in list(self._known.values()) if left.fails(record, now)]
            if failing and len(failing) >= len(record.awaited):  # of several, any of which would do, all have left
                before, self._suspect = self._suspect, (record, record.since)
                return (record, failing[0]) if self._suspect == before else None
        self._suspect = None
        return None

    def _send(self, news: list[dict[str, Any]], ranks: Iterable[int]) -> None:
        text = np.frombuffer(json.dumps(news).encode(), dtype=np.uint8)
        self._sending += [(self._comm.Isend(text, rank, _TAG), text) for rank in ranks]
