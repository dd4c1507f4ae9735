"""Messages between two ranks of a communicator.

A message goes in two: a header under the caller's tag, which tells the length and under which tag the data come, then
the data. So a receiver never lends MPI memory for more than it expects: Open MPI copies a message that is too long out
of the sender's memory over whatever lies behind the receiver's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpitrain.comm.collectives.dispatch import Dispatcher, ProcessServices, check_rank
from mpitrain.comm.collectives.transports.choice import takes_addresses
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology
from mpitrain.comm.job.traffic import Moved, Note, clock
from mpitrain.comm.memory.buffers import as_tensor, in_messages
from mpitrain.comm.memory.device import current_stream, pinned, recorded
from mpitrain.comm.runtime.work import Messages, MessageWait
from mpitrain.errors import InputError

ANY_SOURCE = MPI.ANY_SOURCE
_TAGS = 1 << 13  # more than there are messages under way between two ranks


class PointToPoint(Dispatcher):
    """A communicator's messages, on an MPI communicator of their own: its tags must not meet those of programs."""

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: ProcessServices, label: str) -> None:
        super().__init__(comm, topology, process, label)
        self._message_record = process.watchdog.record(f"{label} (messages)")
        self._messages = self._owned.keep(comm.Dup())
        self._sent = 0  # messages

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send x to rank dest; may return before it is received. See `isend`."""
        self.isend(x, dest, tag).wait()

    def recv(self, x: Any, source: int, tag: int = 0) -> None:
        """Receive a message of exactly x's length from rank source into x. See `irecv`."""
        self.irecv(x, source, tag).wait()

    def isend(self, x: Any, dest: int, tag: int = 0) -> Messages:
        """Begin to send x, which must not change until the work is done.

        Args:
            x: A contiguous tensor or array.
            dest: The rank that receives it.
            tag: A number that the receiver gives as well.

        Raises:
            InputError: x cannot be communicated, or there is no such rank or tag.
        """
        check_rank(self, dest)
        begin = clock() if self.journal.on else 0.0
        tensor = self._near(as_tensor(x, written=False))
        self._sent += 1
        data_tag = _data_tags()[self._sent % _TAGS]
        header = np.array([tensor.nbytes, data_tag])
        requests = [self._messages.Isend(header, dest, _checked(tag))]
        requests += [self._messages.Isend(spec, dest, data_tag) for spec in in_messages(tensor)]
        note = self._noted("send", dest, tag, tensor.nbytes, begin) if begin else None
        wait = MessageWait(self._message_record, (self.world_ranks[dest],), self.process.progress, note)
        return Messages(f"send to rank {dest}", tensor, requests, wait)

    def _free(self) -> None:
        """See `Dispatcher._free`; receives that nothing was sent for end with an error."""
        for receive in list(self.process.progress.receives):
            if isinstance(receive, ReceiveWork):
                receive.cancel(self._messages)
        super()._free()

    def _noted(self, operation: str, other: int, tag: int, nbytes: int, begin: float) -> Note:
        """Enter a message that has begun. other: the rank at its other end. nbytes: those that leave this rank."""
        here = other != ANY_SOURCE and self.nodes[other] == self.node
        moved = Moved("message", nbytes * (here and other != self.rank), nbytes * (not here))
        ends = [self.world_ranks[self.rank], "{}" if other == ANY_SOURCE else self.world_ranks[other]]
        source, dest = ends if operation == "send" else reversed(ends)
        key = f"{self.label}: message {tag} from {source} to {dest}"
        self.journal.note(operation, self.label, moved, begin)
        number = 0 if other == ANY_SOURCE else self.journal.number(key)
        return Note(self.journal, operation, self.label, moved, key, number)

    def irecv(self, x: Any, source: int, tag: int = 0) -> Messages:
        """Begin to receive a message of exactly x's length from rank source into x.

        It completes whatever this rank waits for next; see `mpitrain.comm.runtime.progress`.

        Args:
            x: A contiguous tensor or array.
            source: The rank that sends it, or ANY_SOURCE.
            tag: The number that the sender gives.

        Raises:
            InputError: x cannot be communicated, or there is no such rank or tag.
            CommunicationError: When it is waited for: the message has another length.
        """
        if source != ANY_SOURCE:
            check_rank(self, source)
        tensor = as_tensor(x)
        device = self._device_of("recv", (tensor,))
        ranks = self.world_ranks
        awaited = [r for r in ranks if r != ranks[self.rank]] if source == ANY_SOURCE else [ranks[source]]
        note = self._noted("recv", source, tag, 0, clock()) if self.journal.on else None
        landing = self._landing(tensor, device)
        wait = MessageWait(self._message_record, awaited, self.process.progress, note)
        return ReceiveWork(self._messages, source, _checked(tag), landing, wait)

    def _near(self, tensor: torch.Tensor) -> torch.Tensor:
        """What MPI is to read: the tensor, or a copy of it in host memory. It is there when this returns."""
        device = self._device_of("send", (tensor,))
        if device is None:
            return tensor
        near = tensor
        if not self._takes_addresses(device):
            near = pinned(tensor.shape, tensor.dtype, device).copy_(tensor.detach(), non_blocking=True)
        recorded(device).synchronize()
        return near

    def _landing(self, tensor: torch.Tensor, device: torch.device | None) -> Landing:
        if device is None:
            return Landing(tensor, tensor, None)
        asked = recorded(device)
        if self._takes_addresses(device):
            asked.synchronize()
            return Landing(tensor, tensor, None)
        return Landing(tensor, pinned(tensor.shape, tensor.dtype, device), asked)

    def _takes_addresses(self, device: torch.device) -> bool:
        memory = self.process.device_memory
        if memory.mpi_reads is None:
            memory.mpi_reads = takes_addresses(device.type)
        return memory.way in ("auto", "mpi") and memory.mpi_reads


@dataclass(frozen=True)
class Landing:
    """Where a message goes.

    Attributes:
        tensor: The caller's tensor.
        near: Memory that MPI writes: the tensor's own, or host memory in its stead.
        asked: Event on the tensor's device after which the host memory may be copied there; None if MPI writes the
            tensor.
    """

    tensor: torch.Tensor
    near: torch.Tensor
    asked: torch.Event | None

    def copy(self) -> None:
        """Put what has arrived into the caller's tensor."""
        if self.asked is not None:
            current_stream(self.tensor.device).wait_event(self.asked)
            self.tensor.detach().copy_(self.near, non_blocking=True)


class ReceiveWork(Messages):
    """A message that is received: first its header, then its data."""

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int, landing: Landing, wait: MessageWait) -> None:
        """Post the receive of the header.

        Args:
            comm: Communicator of the messages.
            source: The rank that sends, or ANY_SOURCE.
            tag: Tag of the header.
            landing: Where the data go.
            wait: Where a wait for them is noted.
        """
        name = "receive from any rank" if source == ANY_SOURCE else f"receive from rank {source}"
        self._comm, self._landing = comm, landing
        self._header = np.empty(2, dtype=np.int64)
        self._opened = False
        super().__init__(name, landing.tensor, [comm.Irecv(self._header, source, tag)], wait)
        self._progress.expect(self)

    def advance(self) -> None:
        """Post the data if the header has come; see `mpitrain.comm.runtime.progress`."""
        self._test(lambda: self._opened or self._complete)

    def cancel(self, comm: MPI.Intracomm) -> None:
        """Give up a receive on this communicator whose header has not come."""
        self.advance()
        with self._lock:
            if self._comm is comm and not self._opened and not self._complete:
                self._failure = f"{self._record.label} was freed before {self._name} was complete"
                self._requests[0].Cancel()
                self._requests[0].Wait()
                self._end()

    def has_left(self) -> bool:
        """See `Messages.has_left`."""
        return self._opened and super().has_left()

    def _proceed(self, statuses: list[MPI.Status]) -> list[MPI.Request]:
        if self._opened:
            self._landing.copy()
            return []
        self._opened = True
        self._progress.receives.discard(self)
        nbytes, data_tag = self._header.tolist()
        rank = self.source = statuses[0].source
        place = self._landing.near
        if nbytes != place.nbytes:
            self._failure = (
                f"{self._record.label}: {self._name}: a message of {nbytes} bytes arrived from rank {rank} where rank "
                f"{self._comm.rank} expects {place.nbytes}; send and receive tensors of one size and type"
            )
            # receive what nobody can use, because its sender may wait for that
            place = torch.empty(nbytes, dtype=torch.uint8)
            self._landing = Landing(place, place, None)
        return [self._comm.Irecv(spec, rank, data_tag) for spec in in_messages(place)]

    def _end(self) -> None:
        self._progress.receives.discard(self)
        super()._end()


@functools.cache
def _data_tags() -> range:
    """The tags of data: the highest that MPI allows."""
    highest = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)  # MPI promises 32767
    return range(highest - _TAGS + 1, highest + 1)


def _checked(tag: int) -> int:
    """The caller's tag. Raises InputError unless it is one of a header's."""
    if not 0 <= tag < _data_tags().start:
        raise InputError(f"tag {tag} is not possible; give one from 0 to {_data_tags().start - 1}")
    return tag
