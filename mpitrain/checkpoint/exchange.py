"""Moving the bytes of files between ranks, a window at a time, without a rank waiting for another's disk alone.

Every rank knows all messages. A rank whose disk fails goes on sending and receiving, so that nobody waits for it,
and raises at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpitrain.errors import MpitrainError

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

WINDOW = 8 << 20  # bytes of a message at most
_TAG = 32_000  # apart from those of the training's messages


@dataclass(frozen=True)
class FileTransfer:
    """Bytes that go from one rank's file to another's.

    Attributes:
        source: The rank that has them.
        dest: The rank that gets them, which may be the same.
        nbytes: How many.
        get: Called on `source` with the memory to fill.
        put: Called on `dest` with the bytes.
    """

    source: int
    dest: int
    nbytes: int
    get: Callable[[memoryview], None]
    put: Callable[[memoryview], None]


def exchange(comm: Communicator, rounds: Iterable[Sequence[FileTransfer]]) -> None:
    """Send and receive the messages of each round, then those of the next. Collective.

    Args:
        comm: The ranks.
        rounds: The messages of each round, the same on all ranks.

    Raises:
        OSError, CheckpointError: After the last round, what this rank's `get` or `put` raised first.
    """
    failure: Exception | None = None
    limit = comm.process.watchdog.timeout
    for messages in rounds:
        receiving = []
        for message in messages:
            if message.dest == comm.rank != message.source:
                data = torch.empty(message.nbytes, dtype=torch.uint8)
                receiving.append((message, data, comm.irecv(data, message.source, _TAG)))
        sending = []
        for message in messages:
            if message.source != comm.rank:
                continue
            data = torch.zeros(message.nbytes, dtype=torch.uint8)
            failure = _attempt(message.get, data, failure)
            if message.dest == comm.rank:
                failure = _attempt(message.put, data, failure)
            else:
                sending.append(comm.isend(data, message.dest, _TAG))
        for message, data, work in receiving:
            work.wait(limit)
            failure = _attempt(message.put, data, failure)
        for work in sending:
            work.wait(limit)
    if failure is not None:
        raise failure


def _attempt(act: Callable[[memoryview], None], data: torch.Tensor, failure: Exception | None) -> Exception | None:
    if failure is None:
        try:
            act(data.numpy().data)
        except (OSError, MpitrainError) as error:
            return error
    return failure


def quiet_min(comm: Communicator, number: int) -> int:
    """The smallest of all ranks' numbers, when every rank has come here. Collective.

    MPI's own reductions spin while they wait, which would take a core from the training. So this is dissemination
    (Hensgen, Finkel and Manber, 1988): in round k every rank tells the one 2^k places on.

    Raises:
        CommunicationError: A rank has not come within the job's time limit.
    """
    distance, mine = 1, torch.tensor([number])
    while distance < comm.size:
        other = torch.empty_like(mine)
        receive = comm.irecv(other, (comm.rank - distance) % comm.size, _TAG)
        send = comm.isend(mine, (comm.rank + distance) % comm.size, _TAG)
        receive.wait(comm.process.watchdog.timeout)
        send.wait(comm.process.watchdog.timeout)
        mine = torch.minimum(mine, other)
        distance *= 2
    return int(mine)
