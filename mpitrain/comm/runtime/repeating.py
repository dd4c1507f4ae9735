"""An operation that is repeated, as one function with nothing left to look up or to make.

It signs for the operation, shows it to the watchdog and performs it. It does what `Record.begin`, `Signature` and
`Record.end` do, without calling them: for a few bytes, calls between Python functions would take longer than the
operation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Sized

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.record import Record
from mpitrain.comm.runtime.ordering import Call
from mpitrain.comm.runtime.signatures import STEP, Signature
from mpitrain.errors import CommunicationError

Repeated = Callable[["torch.Tensor | None"], object]
Timed = Callable[["torch.Tensor | None"], float]


def repeated(record: Record, name: str, calls: Sequence[Call], waiting: Sized, drain: Call) -> Timed:
    """Make one function that performs a repeated operation; it takes the operation's tensor, for the watchdog.

    It returns the time.monotonic() at which the operation began, for the journal.

    Args:
        record: Where the operation is to be seen.
        name: Of the operation.
        calls: What it calls; the first is its `Signature` if the ranks sign for it.
        waiting: Operations that come first, if there are any.
        drain: Performs those.

    Raises:
        CommunicationError: In the function that is returned: MPI fails, or another rank of the node is in another
            operation.
    """
    signature = calls[0] if calls else None
    if not isinstance(signature, Signature):
        return _unsigned(record, name, calls, waiting, drain)
    digest, together, register = signature.digest, signature.together, signature.register
    last, own, words, look = register.last, register.own, register.others, register.look
    thread, now, performed = threading.get_ident, time.monotonic, tuple(calls[1:])

    def perform(tensor: torch.Tensor | None) -> float:
        if waiting:
            drain()
        last[0] = number = last[0] + STEP
        own[0] = word = number + digest  # long before the others' words are read, which then may be there
        record.sequence += 1
        record.name = name
        record.tensor = tensor
        record.thread = thread()
        record.since = began = now()
        try:
            for theirs in words:
                if theirs[0] != word:
                    look(number, digest, together)
                    break
            for call in performed:
                call()
        except MPI.Exception as error:
            raise CommunicationError(f"{record.text()} failed in MPI: {error}") from error
        finally:
            record.since = 0.0
            record.tensor = None
        return began

    return perform


def _unsigned(record: Record, name: str, calls: Sequence[Call], waiting: Sized, drain: Call) -> Timed:
    """Likewise, where no rank signs: alone on its node, or for no data."""

    def perform(tensor: torch.Tensor | None) -> float:
        if waiting:
            drain()
        record.begin(name, tensor)
        began = record.since
        try:
            for call in calls:
                call()
        except MPI.Exception as error:
            raise CommunicationError(f"{record.text()} failed in MPI: {error}") from error
        finally:
            record.end()
        return began

    return perform
