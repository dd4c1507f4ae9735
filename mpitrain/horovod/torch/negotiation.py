"""Agreement of the ranks on which operations to carry out, without a background thread.

Submitted operations wait. A rank that needs a result meets the others: each sends a hash of what it has submitted, and
what all of them have submitted is carried out, fused, in one order. A rank meets until its own operation is complete.

    rank 0   submits a, submits b, waits for a    submits c, waits for c
    rank 1   submits b, submits a, waits for b    submits c, waits for c
    meeting                                a, b                        c

Equal hashes, the usual case, cost one small all_gather. Otherwise the ranks exchange the names, so that operations may
be submitted in different orders. If no rank can go on, each gets an error of one line instead of waiting for ever.

Horovod exchanges names in a background thread instead (Sergeev and Del Balso 2018, arXiv 1802.05799, section 3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b

import numpy as np

from mpitrain.comm import Communicator
from mpitrain.errors import CommunicationError
from mpitrain.horovod.torch.execution import FusedExecutor
from mpitrain.horovod.torch.submission import (
    HorovodArgumentError,
    HorovodInternalError,
    Submission,
    describe,
    kind_of,
    zeros_for,
)


class Presence(IntEnum):
    """Part of a rank in a meeting."""

    WAITING = 0  # for an operation
    POLLING = 1  # asks whether an operation is complete, and goes on if not
    JOINED = 2  # has no data left, and adds zeros to the others' sums
    LEAVING = 3  # shuts down


@dataclass(frozen=True)
class Outcome:
    """Result of a meeting.

    Attributes:
        ready: Names of the operations that all ranks carry out, in this order.
        failed: Messages about operations that no rank can carry out, by name.
        stuck: Message for the ranks that wait, if none of them can ever go on.
        agreed: True if every rank raises an error now.
    """

    ready: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    stuck: str = ""
    agreed: bool = False


def match(pending: Sequence[Mapping[str, str]], states: Sequence[Presence], awaited: Sequence[str]) -> Outcome:
    """Return what the ranks do, given what each has submitted; the same on all ranks.

    Args:
        pending: Keys of each rank's operations by name, in the order of submission.
        states: Presence of each rank.
        awaited: Name of the operation for which each rank waits; empty if it waits for none.
    """
    if Presence.LEAVING in states:
        left = states.index(Presence.LEAVING)
        message = f"rank {left} has called hvd.shutdown(); call it when all ranks have their results"
        return Outcome((), {name: message for names in pending for name in names}, message)
    active = [rank for rank, state in enumerate(states) if state != Presence.JOINED]
    if not active:
        return Outcome(())
    ready, failed = [], dict[str, str]()
    for name, key in pending[active[0]].items():
        keys = [pending[rank].get(name) for rank in active]
        if None in keys:
            continue
        others = [rank for rank, other in zip(active, keys, strict=True) if other != key]
        if others:
            there = describe(str(pending[others[0]][name]))
            failed[name] = (
                f"rank {active[0]} has submitted {describe(key)}, but rank {others[0]} {there}; make them equal"
            )
        elif len(active) < len(states) and kind_of(key) != "allreduce":
            joined = next(rank for rank, state in enumerate(states) if state == Presence.JOINED)
            failed[name] = (
                f"{describe(key)} is impossible after rank {joined} has joined; only allreduce is possible then"
            )
        else:
            ready.append(name)
    if ready or failed or Presence.POLLING in states:
        agreed = max(states) == Presence.WAITING and all(name in failed for name in awaited)
        return Outcome(tuple(ready), failed, agreed=agreed)
    waits = "; ".join(f"rank {r} waits for '{awaited[r]}'" for r in active[:4]) + ("; ..." if len(active) > 4 else "")
    message = f"no rank can go on: {waits}; submit operations of the same names on all ranks"
    return Outcome((), {}, message, agreed=len(active) == len(states))


class Negotiation:
    """Operations that this rank has submitted to one process set.

    Args:
        comm: Communicator of the process set, used by nothing else.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._pending: dict[str, Submission] = {}
        self._counts: dict[str, int] = {}  # unnamed operations of each kind since the last join
        self._joins = 0
        self._executor = FusedExecutor(comm)
        self._mine = np.zeros(3, dtype=np.int64)
        self._all = np.zeros((comm.size, 3), dtype=np.int64)
        self._meetings = 0
        self._joined = [0] * comm.size  # number of the meeting at which each rank joined

    def full_name(self, kind: str, name: str | None) -> str:
        """Return the name of an operation, numbered if the caller gives none.

        Args:
            kind: Kind of the operation.
            name: Name within the kind; None to number it.

        Raises:
            HorovodArgumentError: An operation of this name is pending.
        """
        if name is None:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            return f"{kind}.noname.{self._joins}.{number}"
        if f"{kind}.{name}" in self._pending:
            raise HorovodArgumentError(
                f"rank {self.comm.rank}: {kind} '{name}' is still pending; synchronize it before the next of that name"
            )
        return f"{kind}.{name}"

    def submit(self, operation: Submission) -> Submission:
        """Add an operation to those that wait, and return it. It is carried out in a later meeting."""
        operation.negotiator = self
        self._pending[operation.name] = operation
        return operation

    def wait(self, operation: Submission) -> None:
        """Meet the other ranks until an operation is complete. Collective.

        Raises:
            HorovodInternalError: The ranks disagree on the operation, one of them died, or none can go on.
        """
        while not operation.is_complete:
            self._meet(Presence.WAITING, operation)
        if operation.error is not None:
            raise operation.error

    def poll(self, operation: Submission) -> bool:
        """Meet the other ranks once, and return True if the operation is complete.

        A rank that has polled for longer than an operation may take counts as waiting, so that ranks which wait for
        each other get an error.
        """
        if not operation.is_complete:
            since = time.monotonic() - (operation.first_poll or 0.0)
            is_late = since > self.comm.process.watchdog.timeout
            self._meet(Presence.WAITING if is_late else Presence.POLLING, operation)
        return operation.is_complete

    def join(self) -> int:
        """Add zeros to the other ranks' sums until they have joined; return the last rank that joined. Collective."""
        while self._meet(Presence.JOINED, None):
            pass
        last = max(range(self.comm.size), key=lambda rank: (self._joined[rank], rank))
        self._joined = [0] * self.comm.size
        self._joins, self._counts = self._joins + 1, {}  # ranks may have submitted unequal numbers of operations
        return last

    def leave(self) -> None:
        """Wait until all ranks leave; ranks that wait for an operation get an error instead. Collective."""
        self._pending.clear()
        while self._meet(Presence.LEAVING, None):
            pass
        self._executor.free()
        self.comm.free()

    def _meet(self, state: Presence, operation: Submission | None) -> bool:
        """Carry out what all ranks have submitted. Collective.

        Returns:
            False if every rank is in the same final state, joined or leaving.
        """
        try:
            return self._meeting(state, operation)
        except CommunicationError as error:
            failure = HorovodInternalError(f"rank {self.comm.rank}: {error}")
            failure.__cause__ = error
            self._fail_all(lambda _: failure)
            raise failure from error

    def _meeting(self, state: Presence, operation: Submission | None) -> bool:
        text = "\n".join(pending.key for pending in self._pending.values())
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        self._mine[:] = digest, len(self._pending), state
        self.comm.all_gather(self._all.reshape(-1), self._mine)
        self._meetings += 1
        states = [Presence(number) for number in self._all[:, 2]]
        if state >= Presence.JOINED and states.count(state) == len(states):
            self._note_joined(states)
            return False
        if max(states) < Presence.JOINED and (self._all[:, :2] == self._mine[:2]).all():
            outcome, keys = Outcome(tuple(self._pending)), dict[str, str]()
        else:
            self._note_joined(states)
            mine = [operation.name if operation else "", [[p.name, p.key] for p in self._pending.values()]]
            reports = self.comm.all_gather_object(mine)
            pending = [dict(names) for _, names in reports]
            outcome = match(pending, states, [name for name, _ in reports])
            keys = {name: key for names in pending for name, key in names.items()}
        self._carry_out(outcome, state, operation, keys)
        if state == Presence.JOINED and Presence.LEAVING in states:
            raise HorovodInternalError(outcome.stuck)
        return True

    def _note_joined(self, states: Sequence[Presence]) -> None:
        for rank, state in enumerate(states):
            if state == Presence.JOINED and not self._joined[rank]:
                self._joined[rank] = self._meetings

    def _carry_out(
        self, outcome: Outcome, state: Presence, operation: Submission | None, keys: Mapping[str, str]
    ) -> None:
        for name, message in outcome.failed.items():
            if name in self._pending:
                self._pending.pop(name).fail(HorovodInternalError(message, agreed=outcome.agreed))
        if outcome.stuck and operation is not None and not operation.is_complete:
            self._pending.pop(operation.name)
            operation.fail(HorovodInternalError(outcome.stuck, agreed=outcome.agreed))
        if outcome.ready:
            joined = state == Presence.JOINED
            self._executor.run([zeros_for(keys[n]) if joined else self._pending.pop(n) for n in outcome.ready])

    def _fail_all(self, error: Callable[[Submission], Exception]) -> None:
        for operation in self._pending.values():
            operation.fail(error(operation))
        self._pending.clear()

    def abandon(self) -> None:
        """Drop all operations after the death of ranks."""
        self._fail_all(lambda _: HorovodInternalError("the operation was dropped after the death of a rank"))
        with suppress(CommunicationError):
            self.comm.free()
