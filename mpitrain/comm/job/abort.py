"""Handling of fatal errors: a fatal error on any rank ends the whole job with one message, within seconds.

A failing rank notifies the others and waits a moment. It prints its message unless another rank failed earlier, or
failed at the same time and has a lower number. Then it aborts the job. Errors that all ranks raise together (`agreed`)
need no abort: rank 0 prints the message and all ranks exit.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import sys
import termios
import threading
import time
import traceback
from array import array
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
_GATHER = 0.3  # seconds in which ranks that fail together learn of each other


class Faults:
    """Fault handler, which ends the job when this rank fails.

    Attributes:
        before_leaving: Function called with the exit code before this rank exits together with all others.
    """

    def __init__(
        self, comm: MPI.Intracomm, end: Callable[[int], None] | None = None, leave: Callable[[int], None] | None = None
    ) -> None:
        """Prepare without catching anything yet; `install` catches uncaught exceptions.

        Args:
            comm: Duplicate of the world's communicator, for this purpose alone.
            end: Function that ends this process and with it all ranks; default: MPI's Abort.
            leave: Function that ends this process when all ranks exit together; default: `finalize`.
        """
        self._comm = comm
        self._end, self._leave = end, leave or finalize
        self._token = np.zeros(1, dtype=np.uint8)
        self._previous = sys.excepthook
        self.before_leaving: Callable[[int], object] = lambda code: None

    def install(self) -> None:
        """Pass uncaught exceptions to `fail`."""
        sys.excepthook = self._hook
        record_exit_status()

    def uninstall(self) -> None:
        """Restore the previous handling of uncaught exceptions."""
        sys.excepthook = self._previous

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if MPI.Is_finalized():  # by the program itself: no other rank can be notified
            self._previous(kind, error, trace)
            return
        self.fail(error.with_traceback(trace))

    def fail(self, error: BaseException) -> None:
        """Report this rank's error and end the job. Does not return."""
        code = exit_code(error)
        if self._comm.size == 1 or (isinstance(error, MpitrainError) and error.agreed):
            if self._comm.rank == 0:
                print_error(text := self.describe(error, alone=True))
                launcher.repeat_last(text)
            self.before_leaving(code)
            self._leave(code)
        self.end_job(self.describe(error), code)

    def describe(self, error: BaseException, *, alone: bool = False) -> str:
        """Return the text for stderr: one line for an mpitrain error, with the traceback for any other.

        Args:
            error: Error to describe.
            alone: If true, do not name the rank.
        """
        where = "" if alone else f"rank {self._comm.rank}: "
        if isinstance(error, MpitrainError):
            return f"mpitrain: {where}{message_of(error)}"
        if isinstance(error, KeyboardInterrupt):
            return f"mpitrain: {where}interrupted"
        trace = "".join(traceback.format_exception(error)).rstrip()
        return f"mpitrain: {where}{type(error).__name__}: {error}\n{trace}"

    def end_job(self, text: str, code: int = EXIT_FAILED) -> None:
        """Print the text, unless another rank reports the same failure, and abort all ranks.

        Args:
            text: Message for stderr.
            code: Exit code of the job.
        """
        try:
            first = self._is_first()
        except MPI.Exception:  # ranks died before this one failed
            first = True
        if first:
            print_error(text)
            launcher.repeat_last(text)
        if self._end is not None:
            self._end(code)
        if not first:
            time.sleep(5)  # the rank that prints the message is about to abort this one
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
    """Return the exit code of a job that ends with this error."""
    if isinstance(error, MpitrainError):
        return error.exit_code
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED


def print_error(text: str) -> None:
    """Write text to stderr in one system call, so that messages of several ranks do not mix."""
    sys.stdout.flush()
    os.write(2, (printable(text, None, as_text=True) + "\n").encode(errors="replace"))


def abort(comm: MPI.Intracomm, code: int) -> None:
    """End all ranks of the job with an exit code.

    Args:
        comm: Any communicator of this rank.
        code: Exit code of the job.
    """
    _wait_until_read(2)
    with suppress(OSError):  # hide MPICH's own message about the abort
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    comm.Abort(code)


def _wait_until_read(pipe: int) -> None:
    """Wait until nothing is left in a pipe, or for a moment: mpirun drops what it has not read when a rank aborts."""
    unread = array("i", [1])
    deadline = time.monotonic() + _MOMENT
    with suppress(OSError):  # not a pipe
        while unread[0] and time.monotonic() < deadline:
            fcntl.ioctl(pipe, termios.FIONREAD, unread)
            time.sleep(0.005)


def finalize(code: int) -> None:
    """Call MPI_Finalize and end this process with an exit code; all ranks must do so."""
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.Finalize()
    os._exit(code)


# -- A rank whose interpreter ends while others still need it is named within seconds, instead of hanging them.
#
# A rank that ends waits, before MPI is finalized, until all ranks do. If that takes longer than `_MOMENT`, it sends
# rank 0 the number of its last operation on each communicator, and rank 0 forwards this. A rank that waits for a
# message of a rank that has left, or in an operation that such a rank never began, would wait for ever, so it ends the
# job:
#
#     rank 1  ends          -> rank 0      I leave; of world I did #1 to #11
#     rank 0                -> all others  rank 1 left; ...
#     rank 2  in #12 of world, a moment later: ends the job, naming rank 1
#
# Ranks that no longer communicate may end hours apart. If all end together, nothing is sent.

_TAG = 3  # message tag; the watchdog uses the others on this communicator
_MOMENT = 1.0  # seconds for all ranks to end, for mpirun to read a message, and for messages of a rank that left
_NAP = 1e-4, 0.05  # seconds between checks for the other ranks, at first and at most

exit_status: Any = None  # last argument of sys.exit in this process


def record_exit_status() -> None:
    """Wrap `sys.exit` to store its argument in `exit_status`, for use at interpreter exit. May be called twice."""
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


def receive_all(comm: MPI.Intracomm, tag: int) -> Iterator[tuple[int, Any]]:
    """Receive all JSON messages that have arrived, without waiting, and yield pairs (source rank, value).

    Args:
        comm: Communicator of the messages.
        tag: Their tag.
    """
    status = MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        text = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        comm.Recv(text, status.source, tag)
        yield status.source, json.loads(text.tobytes())


@dataclass(frozen=True)
class Departure:
    """A rank that has left, because its interpreter has ended.

    Attributes:
        rank: World rank.
        code: Exit code that it requested.
        last_sequences: Number of its last operation on each communicator, by record key.
        noticed_at: `time.monotonic()` when this rank learned of it.
    """

    rank: int
    code: int
    last_sequences: dict[str, int]
    noticed_at: float  # time.monotonic()

    def blocks(self, record: Record, now: float) -> bool:
        """Return True if the current operation of this rank can never complete because of the departure.

        Args:
            record: Record of the operation.
            now: Current `time.monotonic()`.
        """
        if not record.since or now - record.since < _MOMENT or now - self.noticed_at < _MOMENT:
            return False
        if record.awaited:
            return self.rank in record.awaited
        return self.rank in record.members and self.last_sequences.get(record.key, record.sequence) < record.sequence

    def text(self, record: Record, rank: int, line: str) -> str:
        """Return the message for a job that ends because of this departure.

        Args:
            record: Operation that can never complete.
            rank: Rank that waits in it.
            line: Line of the program in which it waits.
        """
        code = f" with exit code {self.code}" if self.code else ""
        return (
            f"mpitrain: rank {self.rank} has left: its Python interpreter ended{code} while rank {rank} waits for it "
            f"at {line}, in {record.text()}; every rank must make the same calls, or raise an error to end them all"
        )


class Departures:
    """Ranks that have left, as far as this rank knows."""

    def __init__(self, comm: MPI.Intracomm, records: Callable[[], list[Record]]) -> None:
        """Start with an empty list.

        Args:
            comm: Communicator of the watchdog.
            records: Function that returns the records of this rank's operations.
        """
        self._comm, self._records = comm, records
        self._departures: dict[int, Departure] = {}
        self._unsent: list[dict[str, Any]] = []  # this rank's departure, not sent yet
        self._pending_sends: list[tuple[MPI.Request, np.ndarray]] = []  # MPI reads the arrays until they have left
        self._suspected: tuple[Record, float] | None = None

    def wait_for_all(self, code: int | None = None) -> None:
        """Wait until every rank has called this at the end of its program.

        Args:
            code: Exit code of this rank, if known.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        everybody = self._comm.Ibarrier()
        begun, nap, is_announced = time.monotonic(), _NAP[0], False
        while not everybody.Test():
            if not is_announced and time.monotonic() - begun > _MOMENT:
                status, is_announced = exit_status if code is None else code, True
                own_code = status if isinstance(status, int) else int(status is not None)
                sequences = {record.key: record.sequence for record in self._records() if record.members}
                self._unsent = [{"rank": self._comm.rank, "code": own_code, "last_sequences": sequences}]
            time.sleep(nap)
            nap = min(2 * nap, _NAP[1])

    def poll(self) -> None:
        """Receive news of departures; rank 0 also forwards them. A thread calls this periodically."""
        self._pending_sends = [(request, text) for request, text in self._pending_sends if not request.Test()]
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._send(unsent, [0])
        news = [departure for _, several in receive_all(self._comm, _TAG) for departure in several]
        for departure in news:
            if departure["rank"] != self._comm.rank:
                self._departures[departure["rank"]] = Departure(**departure, noticed_at=time.monotonic())
        if news and self._comm.rank == 0:
            self._send(news, (r for r in range(1, self._comm.size) if r not in self._departures))

    def find_blocked(self) -> tuple[Record, Departure] | None:
        """Return the operation that can never complete, and the departure that causes this; None if there is none.

        The condition must hold in two calls in a row.
        """
        now = time.monotonic()
        for record in self._records() if self._departures else ():
            blocking = [departure for departure in list(self._departures.values()) if departure.blocks(record, now)]
            if blocking and len(blocking) >= len(record.awaited):  # no rank that could end the wait is left
                before, self._suspected = self._suspected, (record, record.since)
                return (record, blocking[0]) if self._suspected == before else None
        self._suspected = None
        return None

    def _send(self, news: list[dict[str, Any]], ranks: Iterable[int]) -> None:
        text = np.frombuffer(json.dumps(news).encode(), dtype=np.uint8)
        self._pending_sends += [(self._comm.Isend(text, rank, _TAG), text) for rank in ranks]
