"""Watchdog: finds operations that do not complete, asks every rank where it is, reports this once, and ends the job.

Each rank has one record per communicator, which shows its current operation. A thread checks the records at intervals
and answers questions of other ranks on its own communicator. If an operation is older than the limit, the rank asks all
others, waits a moment for the answers, and the lowest rank that noticed prints the table below. Ranks whose interpreter
has ended are handled by `mpitrain.comm.job.abort`. A rank that waits for ranks that may compute for any time
(`Record.without_deadline`) also asks, but continues to wait if all of them answer. If MPI must not be called from a
second thread, nobody is asked: each rank that noticed prints its own line and ends.

    all_reduce #12 of world did not complete in 30 s:
      rank 0  world: all_reduce #12 of float32 (4, 256), 31 s        train.py:88 in main
      rank 1  world: barrier #12, 31 s                               train.py:90 in main
      rank 2  not in an operation                                    model.py:17 in forward
      rank 3  does not answer: stopped, dead or cut off
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

import numpy as np
import torch

from mpitrain.comm.job.abort import Departures, print_error, receive_all
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.traffic import Record
from mpitrain.errors import EXIT_FAILED

_QUESTION, _ANSWER = 1, 2  # message tags
_PATIENCE = 3.0  # seconds to wait for answers
_LOOK = 0.1  # seconds between looks for dead ranks, if the job continues without them
_COMM_FOLDER = str(Path(__file__).resolve().parents[1]) + os.sep
_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class FailureHandler(Protocol):
    """Handler of dead ranks, for jobs that continue without them (see `mpitrain.comm.faults.ulfm`)."""

    def track(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Register a new communicator and return it."""

    def is_tracked(self, comm: MPI.Intracomm) -> bool:
        """Return True if a communicator is registered and has not been abandoned since."""

    def forget(self, comm: MPI.Intracomm) -> bool:
        """Unregister a communicator that is about to be freed; return what `is_tracked` returned before."""

    def check(self) -> None:
        """Check whether any rank has died."""

    def kill_silent(self, comm: MPI.Intracomm, silent: Sequence[int], answering: Sequence[int]) -> bool:
        """Kill ranks that do not answer; return True if the job can continue without them.

        If the other ranks have already switched to a world without the dead ranks, nobody is killed, because ranks have
        other numbers there.

        Args:
            comm: Registered communicator of the world in which the ranks are numbered.
            silent: Ranks that do not answer.
            answering: Ranks that answer.
        """


class Watchdog:
    """Thread that watches the operations of one process and answers questions of other ranks."""

    def __init__(
        self, comm: MPI.Intracomm, timeout: float, end_job: Callable[..., None], failures: FailureHandler | None = None
    ) -> None:
        """Prepare the thread without starting it.

        Args:
            comm: Duplicate of the world communicator, for the watchdog alone.
            timeout: Longest time in seconds that an operation may take.
            end_job: Prints a text and ends all ranks, with an exit code if given.
            failures: Handler of dead ranks; None if the job does not continue without them.
        """
        self.timeout = timeout
        self._comm, self._rank = comm, comm.rank
        self._single_threaded = MPI.Query_thread() != MPI.THREAD_MULTIPLE  # only the main thread may call MPI
        self._end_job = end_job
        self._failures = failures
        self._references: list[weakref.ref[Record]] = []  # weak: a record is dropped when nobody uses it
        self._record_counts: Counter[tuple[str, Sequence[int]]] = Counter()
        self._departures = Departures(comm, lambda: self.records)
        self._main = threading.main_thread().ident or 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpitrain-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before MPI is finalized."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def stop_with_all(self, code: int | None = None) -> bool:
        """Stop the thread once every rank has ended; ranks that still need this one learn that it has left.

        Args:
            code: Exit code of this rank, if known.

        Returns:
            True if this rank waited for all ranks; False if the thread was stopped at once.
        """
        waits = self._thread.is_alive() and self._failures is None and not MPI.Is_finalized()
        if waits:
            self._departures.wait_for_all(code)
        self.stop()
        return waits

    def record(self, label: str, members: Sequence[int] = ()) -> Record:
        """Create the record of one communicator's operations. It is watched until it is dropped or `forget` is called.

        Args:
            label: Name of the communicator, for messages.
            members: World ranks that all perform the recorded operations.
        """
        self._record_counts[label, members] += 1  # all ranks make communicators of the same ranks in the same order
        record = Record(
            label, members, f"{label} of {zlib.crc32(repr(members).encode())} #{self._record_counts[label, members]}"
        )
        self._references.append(weakref.ref(record, self._references.remove))
        return record

    def forget(self, record: Record) -> None:
        """Stop watching a record."""
        self._references.remove(weakref.ref(record))

    @property
    def records(self) -> list[Record]:
        """Records that are still in use."""
        referents = (reference() for reference in list(self._references))
        return [record for record in referents if record is not None]

    def _find_late(self) -> tuple[Record, float] | None:
        """Return a record whose operation exceeds the limit, and its age in seconds; None if there is none."""
        now = time.monotonic()
        for record in self.records:
            since = record.since
            if since and not record.has_deadline and now - since > self.timeout:
                return record, now - since
        return None

    def _watch(self) -> None:
        """Check records and answer questions at intervals; the body of the thread."""
        pause = 0.5 if self._failures is None else _LOOK
        while not self._stop.wait(min(pause, self.timeout / 4)):
            try:
                if self._failures is not None:
                    self._failures.check()
                if not self._single_threaded:
                    self._answer_questions()
                    self._departures.poll()
            except MPI.Exception:  # raised on communicators that were abandoned because of dead ranks
                if self._failures is None:
                    raise
            late = self._find_late()
            if late is not None and not self._report(*late):
                return
            blocked = self._departures.find_blocked()
            if blocked is not None:
                record, departure = blocked
                text = departure.text(record, self._rank, str(self.place()["line"]))
                self._end_job(text, departure.code & 0xFF or EXIT_FAILED)
                return

    def _answer_questions(self) -> None:
        """Answer the questions of other ranks that have arrived."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _QUESTION, status):
            question = np.empty(1, dtype=np.uint8)
            self._comm.Recv(question, status.source, _QUESTION)
            self._answer = np.frombuffer(json.dumps(self.place()).encode(), dtype=np.uint8)  # kept alive for Isend
            self._comm.Isend(self._answer, status.source, _ANSWER).Free()

    def place(self) -> dict[str, object]:
        """Return where this rank is: its operations, its source line outside this package, and whether it is late."""
        busy = [(record, since) for record in self.records if (since := record.since)]
        now = time.monotonic()
        doing = "; ".join(f"{record.text()}, {now - since:.0f} s" for record, since in busy) or "not in an operation"
        frames = sys._current_frames()
        main = frames.get(self._main)
        del frames[threading.get_ident()]  # the thread that asks is in no operation
        order = sorted(frames, key=lambda thread: thread != self._main)
        waiting = [frames[thread] for thread in order if _is_communicating(frames[thread])]
        frame = waiting[0] if waiting and busy else main
        line = line_of(frame) if frame is not None else "nowhere"
        return {"doing": doing, "line": line, "late": self._find_late() is not None}

    def _report(self, record: Record, seconds: float) -> bool:
        """Print where the ranks are and end the job; return True if the job continues instead."""
        late = f"mpitrain: {record.text()} did not complete in {seconds:.0f} s (comm.timeout)"
        if self._single_threaded:
            place = self.place()
            print_error(
                f"{late}; this MPI library allows calls from one thread only. Each waiting rank prints its own line:\n"
                f"  rank {self._rank}  {place['doing']!s:60}  {place['line']}"
            )
            time.sleep(_PATIENCE)  # other waiting ranks print their lines first: the end of this process ends them
            os._exit(EXIT_FAILED)
        early = self._failures is not None and seconds < 2 * self.timeout + _PATIENCE
        since = record.since
        try:
            places = self._query_ranks()
        except MPI.Exception as error:
            if self._failures is None:
                raise
            if early:  # ranks have died meanwhile, so the operation fails by itself
                self._wait(_PATIENCE)
                return True
            self._end_job(f"{late}, and the other ranks cannot be asked: {error}")
            return False
        rank, size = self._comm.rank, self._comm.size
        silent = [other for other in range(size) if other not in places]
        if record.without_deadline:
            if record.since != since:  # a message has arrived meanwhile
                return True
            if not silent:  # the others may be slow: ask them again after the same time
                record.restart()
                return True
            numbers = ", ".join(map(str, silent))
            who = f"rank {numbers} does" if len(silent) == 1 else f"ranks {numbers} do"
            silence = f"no message arrived for {seconds:.0f} s (comm.timeout), and {who} not answer"
            late = f"mpitrain: {record.text()}: {silence}"
        spoken = any(places[r]["late"] for r in places if r < rank)  # a lower rank reports
        if spoken:  # with a failure handler, wait less: it then ends the silent ranks, and the operation fails
            self._wait(2 * _PATIENCE if self._failures is None else _PATIENCE)
        if self._failures is not None and self._stop.is_set():  # the remaining ranks have a new world
            return False
        lines = [f"{late}; the ranks are at:"]
        for other in range(size):
            if other in places:
                lines.append(f"  rank {other}  {places[other]['doing']!s:60}  {places[other]['line']}")
            else:
                lines.append(f"  rank {other}  does not answer: stopped, dead or cut off")
        ends = silent if early else []
        if ends and self._failures is not None and self._failures.kill_silent(self._comm, ends, list(places)):
            if not spoken:
                print_error("\n".join(lines))
            self._wait(_PATIENCE)  # until the operation has failed
            return True
        self._end_job("\n".join(lines))
        return False

    def _wait(self, seconds: float) -> None:
        """Answer questions of other ranks for `seconds`, or until the thread must end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stop.wait(0.02):
            with suppress(MPI.Exception):  # raised on a world that was abandoned
                self._answer_questions()

    def _query_ranks(self) -> dict[int, dict[str, object]]:
        """Ask all ranks where they are; return the answers by rank."""
        rank, size = self._comm.rank, self._comm.size
        question = np.zeros(1, dtype=np.uint8)
        for other in range(size):
            if other != rank:
                self._comm.Isend(question, other, _QUESTION).Free()
        places: dict[int, dict[str, object]] = {rank: self.place()}
        deadline = time.monotonic() + _PATIENCE
        while len(places) < size and time.monotonic() < deadline:
            self._answer_questions()
            answers = dict(receive_all(self._comm, _ANSWER))
            places |= answers
            if not answers:
                time.sleep(0.02)
        return places


def line_of(frame: FrameType) -> str:
    """Return "file:line in function" for a frame, at the place a user would look for.

    This is the innermost frame outside this package and torch; if there is none, the innermost frame outside
    `mpitrain.comm`; if there is none either, the innermost frame.
    """
    stack = traceback.extract_stack(frame)
    places = [f for f in stack if not f.filename.startswith("<") and "/threading.py" not in f.filename]
    inner = (_PACKAGE, _TORCH)
    outside = [f for f in places if not os.path.abspath(f.filename).startswith(inner) and "runpy" not in f.filename]
    # a job run by mpitrain.train is inside the package from top to bottom
    outside = outside or [f for f in places if not os.path.abspath(f.filename).startswith(_COMM_FOLDER)]
    place = outside[-1] if outside else stack[-1]
    return f"{os.path.basename(place.filename)}:{place.lineno} in {place.name}"


def _is_communicating(frame: FrameType) -> bool:
    """Return True if a thread of the user's program is in `mpitrain.comm`.

    A communication thread is there from top to bottom, so that it has no line in the user's program.
    """
    files = [os.path.abspath(f.filename) for f in traceback.extract_stack(frame)]
    inside = [file.startswith(_COMM_FOLDER) for file in files if not file.endswith("/threading.py")]
    return any(inside) and not all(inside)
