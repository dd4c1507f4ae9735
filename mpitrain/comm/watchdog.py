"""Finds operations that do not complete, asks every rank where it is, reports it once, and ends the job.

Each rank has a record per communicator of the operation it is in. A thread looks at them now and then, and
answers other ranks' questions over a communicator of its own. A rank whose operation is older than the limit
asks everybody, waits a moment for the answers, and the lowest of the ranks that noticed prints the table:

    all_reduce #12 of world did not complete in 30 s:
      rank 0  world: all_reduce #12 of 1024 float32, 31 s            train.py:88 in main
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
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
from mpi4py import MPI

_QUESTION, _ANSWER = 1, 2  # message tags
_PATIENCE = 3.0  # seconds to wait for answers
_PACKAGE = str(Path(__file__).resolve().parent.parent)


class Record:
    """The operation a rank is in on one communicator. Written by the hot path, read by the watchdog."""

    __slots__ = ("label", "name", "numel", "sequence", "since", "thread", "what")

    def __init__(self, label: str) -> None:
        self.label = label
        self.sequence = 0
        self.name = ""
        self.what: object = None  # the dtype
        self.numel = 0
        self.since = 0.0  # time.monotonic() of the beginning; 0: in no operation
        self.thread = 0

    def begin(self, name: str, numel: int, what: object) -> None:
        self.sequence += 1
        self.name, self.numel, self.what = name, numel, what
        self.thread = threading.get_ident()
        self.since = time.monotonic()

    def compare(self, name: str) -> None:
        """The ranks compare what they are about to do; the operation itself has not begun."""
        self.name, self.numel, self.what = f"before {name}", 0, None
        self.thread = threading.get_ident()
        self.since = time.monotonic()

    def end(self) -> None:
        self.since = 0.0

    def text(self) -> str:
        shape = f" of {self.numel} {str(self.what).removeprefix('torch.')}" if self.what is not None else ""
        return f"{self.label}: {self.name} #{self.sequence}{shape}"


class Watchdog:
    """The thread of one process. `comm`: a duplicate of the world for it alone."""

    def __init__(self, comm: MPI.Intracomm, timeout: float, end_job: Callable[[str], None]) -> None:
        """timeout: seconds an operation may take. end_job: prints a text and ends all ranks."""
        self.timeout = timeout
        self._comm = comm
        self._end_job = end_job
        self._records: list[Record] = []
        self._main = threading.main_thread().ident or 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpitrain-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before MPI is finalized."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def record(self, label: str) -> Record:
        made = Record(label)
        self._records.append(made)
        return made

    def forget(self, record: Record) -> None:
        self._records.remove(record)

    def _late(self) -> tuple[Record, float] | None:
        now = time.monotonic()
        for record in list(self._records):
            since = record.since
            if since and now - since > self.timeout:
                return record, now - since
        return None

    def _watch(self) -> None:
        while not self._stop.wait(min(0.5, self.timeout / 4)):
            self._answer_questions()
            late = self._late()
            if late is not None:
                self._report(*late)
                return

    def _answer_questions(self) -> None:
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _QUESTION, status):
            question = np.empty(1, dtype=np.uint8)
            self._comm.Recv(question, status.source, _QUESTION)
            self._send(status.source, self.place())

    def _send(self, dest: int, place: dict[str, object]) -> None:
        text = np.frombuffer(json.dumps(place).encode(), dtype=np.uint8)
        self._comm.Isend(text, dest, _ANSWER).Free()
        self._sent = text  # MPI reads it until it has left

    def place(self) -> dict[str, object]:
        """Where this rank is: its operations, and the Python line outside this package."""
        now = time.monotonic()
        busy = [r for r in list(self._records) if r.since]
        doing = "; ".join(f"{r.text()}, {now - r.since:.0f} s" for r in busy) or "not in an operation"
        thread = busy[0].thread if busy else self._main
        frame = sys._current_frames().get(thread) or sys._current_frames().get(self._main)
        return {"doing": doing, "line": line_of(frame), "late": self._late() is not None}

    def _report(self, record: Record, seconds: float) -> None:
        rank, size = self._comm.rank, self._comm.size
        question = np.zeros(1, dtype=np.uint8)
        for other in range(size):
            if other != rank:
                self._comm.Isend(question, other, _QUESTION).Free()
        places: dict[int, dict[str, object]] = {rank: self.place()}
        deadline = time.monotonic() + _PATIENCE
        status = MPI.Status()
        while len(places) < size and time.monotonic() < deadline:
            self._answer_questions()
            if not self._comm.Iprobe(MPI.ANY_SOURCE, _ANSWER, status):
                time.sleep(0.02)
                continue
            text = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
            self._comm.Recv(text, status.source, _ANSWER)
            places[status.source] = json.loads(text.tobytes())
        if any(places[r]["late"] for r in places if r < rank):  # that one reports
            time.sleep(2 * _PATIENCE)
        lines = [f"mpitrain: {record.text()} did not complete in {seconds:.0f} s (comm.timeout); the ranks are at:"]
        for other in range(size):
            if other in places:
                lines.append(f"  rank {other}  {places[other]['doing']!s:60}  {places[other]['line']}")
            else:
                lines.append(f"  rank {other}  does not answer: stopped, dead or cut off")
        self._end_job("\n".join(lines))


def line_of(frame: FrameType | None) -> str:
    """file:line of the innermost frame outside this package, else of the innermost."""
    if frame is None:
        return "nowhere"
    stack = traceback.extract_stack(frame)
    outside = [f for f in stack if not os.path.abspath(f.filename).startswith(_PACKAGE)]
    # a job run by mpitrain.train is inside the package from top to bottom but for runpy and threading
    outside = [f for f in outside if "/threading.py" not in f.filename and "runpy" not in f.filename]
    place = outside[-1] if outside else stack[-1]
    return f"{os.path.basename(place.filename)}:{place.lineno} in {place.name}"
