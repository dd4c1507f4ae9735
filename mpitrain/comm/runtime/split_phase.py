"""Operations in phases: begun, and completed later, without a thread.

A program with `Await` steps is cut before each of them. The first phase runs when the operation begins, the others
when the caller asks for what they do:

    begin      my vector is complete            Signal        -> the others
    wait       all vectors are complete         Await         <- theirs;  sum my share;  Signal: I have read theirs
    release    my vector may be written again   Await         <- they have read mine

With three vectors in turn, each begun before the one before it is waited for, and released when it is needed again, a
rank that is late keeps the others waiting only when it is late by more than the time between two of them:

    fill 0, begin 0 | fill 1, begin 1, wait 0 | fill 2, begin 2, wait 1 | release 0, fill 0, begin 3, wait 2 | ...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.comm.job.record import Record
from mpitrain.comm.job.traffic import Note, clock
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.runtime.work import Work, poll, seen
from mpitrain.errors import InputError


class SplitPhase(Work):
    """A bound program that has begun: `wait` runs its second phase, `release` the rest.

    Several of them are waited for and released in the order in which they began.
    """

    def __init__(
        self,
        name: str,
        phases: Sequence[Compiled],
        tensors: Sequence[torch.Tensor],
        record: Record,
        note: Note | None = None,
    ) -> None:
        """Run the first phase.

        Args:
            name: Of the operation, for messages.
            phases: Of the program, bound to memory; no other run of them may be under way.
            tensors: What the program reads and writes, kept alive. The first is the operation's.
            record: Where a wait is to be seen.
            note: Enters the operation in the journal, while that is on.

        Raises:
            InputError: A run of these phases is not complete.
        """
        self._name, self._phases, self._tensors, self._record, self._note = name, phases, tensors, record, note
        if any(phase.awaits is not None and phase.awaits.pending for phase in phases):
            raise InputError(f"{record.label}: {name} on this memory is under way; release it before it begins again")
        phases[0]()
        self._next = 1

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the signals of the second phase, then run it; see `Work.wait`."""
        if self._next > 1:
            return
        if timeout is not None:
            poll(self, f"{self._record.label}: {self._name}", timeout)
        else:
            self._proceed()

    def done(self) -> bool:
        """Whether the second phase has run; it runs here when the signals for it have come."""
        awaits = self._phases[1].awaits
        if self._next == 1 and awaits is not None and awaits.arrived():
            self._proceed()
        return self._next > 1

    def release(self) -> None:
        """Block until what the operation reads may be written again."""
        while self._next < len(self._phases):
            self._proceed()

    def _proceed(self) -> None:
        """Run the next phase; after an error there is none."""
        phase, following = self._phases[self._next], self._next + 1
        self._next = len(self._phases)
        begin = clock() if self._note is not None else 0.0
        seen(self._record, self._name, self._tensors[0], phase)
        if self._note is not None:
            enter = self._note.performed if following == 2 else self._note.waited
            enter(begin)
        self._next = following
