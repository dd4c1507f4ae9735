"""Messages between two ranks of a communicator.

A message consists of a header and the data. The header, under the caller's tag, contains the sender, the length of the
data and their tag. Thus a receiver never posts a receive for data of another length than it expects: Open MPI copies a
message that is too long beyond the end of the receiver's memory.

Where both ranks know the length for certain, as in a pipeline, `header=False` leaves the header out. That halves the
number of MPI's messages, and MPI completes such a receive without help from this rank. Each kind has tags of its own:

    0 ...    header, from the caller    |    no header, from the caller    |    data after a header    ... MPI's largest
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpitrain.comm.collectives.dispatch import Dispatcher, ProcessServices, check_rank
from mpitrain.comm.collectives.transports.choice import accepts_addresses
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology
from mpitrain.comm.job.traffic import Note, Volume, clock
from mpitrain.comm.memory.buffers import as_tensor, message_buffers
from mpitrain.comm.memory.device import current_stream, empty_pinned, record_event
from mpitrain.comm.runtime.work import Messages, MessageWait
from mpitrain.errors import InputError

ANY_SOURCE = MPI.ANY_SOURCE
_TAGS = 1 << 13  # more than the messages under way between two ranks
_BARE_TAGS = 16  # tags of messages without header


class PointToPoint(Dispatcher):
    """Messages of a communicator, on a separate MPI communicator, so that their tags never match those of programs."""

    def __init__(self, comm: MPI.Intracomm, topology: Topology, process: ProcessServices, label: str) -> None:
        super().__init__(comm, topology, process, label)
        self._message_record = process.watchdog.record(f"{label} (messages)")
        self._messages = self._owned_comms.keep(comm.Dup())
        self._sent = 0  # messages

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send x to another rank. May return before it is received.

        Args:
            x: Contiguous tensor or array.
            dest: Rank that receives it.
            tag: Number that the receiver passes as well.

        Raises:
            InputError: See `isend`.
        """
        self.isend(x, dest, tag).wait()

    def recv(self, x: Any, source: int, tag: int = 0) -> None:
        """Receive a message of exactly x's length into x.

        Args:
            x: Contiguous tensor or array.
            source: Rank that sends it, or ANY_SOURCE.
            tag: Number that the sender passes as well.

        Raises:
            InputError: See `irecv`.
            CommunicationError: The message has another length.
        """
        self.irecv(x, source, tag).wait()

    def isend(self, x: Any, dest: int, tag: int = 0, *, header: bool = True) -> Messages:
        """Begin to send x, which must not change until the returned handle is done.

        Args:
            x: Contiguous tensor or array.
            dest: Rank that receives it.
            tag: Number that the receiver passes as well.
            header: If false, send the data alone, which is faster. The receiver must pass false as well, and a length
                that differs from x's may overwrite its memory.

        Raises:
            InputError: x cannot be communicated, or there is no such rank or tag.
        """
        check_rank(self, dest)
        begin = clock() if self.journal.on else 0.0
        tensor = self._mpi_buffer(as_tensor(x, written=False))
        requests: list[MPI.Request] = []
        if header:
            self._sent += 1
            data_tag = _data_tags()[self._sent % _TAGS]
            requests.append(self._messages.Isend(np.array([self.rank, tensor.nbytes, data_tag]), dest, _check_tag(tag)))
        else:
            data_tag = _bare_tag(tag)
        requests += [self._messages.Isend(spec, dest, data_tag) for spec in message_buffers(tensor)]
        note = self._begin_note("send", dest, tag, tensor.nbytes, begin) if begin else None
        wait = MessageWait(self._message_record, (self.world_ranks[dest],), self.process.progress, note)
        return Messages(f"send to rank {dest}", tensor, requests, wait)

    def _free(self) -> None:
        """Cancel receives whose message was never sent, which then raise an error; see also `Dispatcher._free`."""
        for message in list(self.process.progress.in_flight):
            if isinstance(message, ReceiveWork):
                message.cancel(self._messages)
        super()._free()

    def _begin_note(self, operation: str, other: int, tag: int, nbytes: int, begin: float) -> Note:
        """Count the beginning of a message, and return its entry in the traffic counters, to be completed later.

        Args:
            operation: "send" or "recv".
            other: Rank at the other end, or ANY_SOURCE.
            tag: Tag of the message.
            nbytes: Bytes that leave this rank.
            begin: `clock()` at the beginning.
        """
        here = other != ANY_SOURCE and self.nodes[other] == self.node
        volume = Volume("message", nbytes * (here and other != self.rank), nbytes * (not here))
        ends = [self.world_ranks[self.rank], "{}" if other == ANY_SOURCE else self.world_ranks[other]]
        source, dest = ends if operation == "send" else reversed(ends)
        key = f"{self.label}: message {tag} from {source} to {dest}"
        self.journal.count(operation, self.label, volume, begin)
        number = 0 if other == ANY_SOURCE else self.journal.next_number(key)
        return Note(self.journal, operation, self.label, volume, key, number)

    def irecv(self, x: Any, source: int, tag: int = 0, *, header: bool = True) -> Messages:
        """Begin to receive a message of exactly x's length from rank source into x.

        It makes progress during any later wait of this rank; see `mpitrain.comm.runtime.progress`.

        Args:
            x: Contiguous tensor or array.
            source: Rank that sends it, or ANY_SOURCE.
            tag: Number that the sender passes as well.
            header: If false, receive a message that was sent without header; see `isend`. The source must be a rank.

        Raises:
            InputError: x cannot be communicated, or there is no such rank or tag.
            CommunicationError: The message has another length. Raised by the wait for it.
        """
        if source != ANY_SOURCE or not header:
            check_rank(self, source)
        tensor = as_tensor(x)
        device = self._device_of("recv", (tensor,))
        ranks = self.world_ranks
        awaited = [r for r in ranks if r != ranks[self.rank]] if source == ANY_SOURCE else [ranks[source]]
        note = self._begin_note("recv", source, tag, 0, clock()) if self.journal.on else None
        receive_buffer = self._receive_buffer(tensor, device)
        wait = MessageWait(self._message_record, awaited, self.process.progress, note)
        return ReceiveWork(self._messages, source, tag, receive_buffer, wait, header)

    def _mpi_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory that MPI can read, filled: the tensor itself, or a copy of it in host memory."""
        device = self._device_of("send", (tensor,))
        if device is None:
            return tensor
        buffer = tensor
        if not self._takes_addresses(device):
            buffer = empty_pinned(tensor.shape, tensor.dtype, device).copy_(tensor.detach(), non_blocking=True)
        record_event(device).synchronize()
        return buffer

    def _receive_buffer(self, tensor: torch.Tensor, device: torch.device | None) -> ReceiveBuffer:
        if device is None:
            return ReceiveBuffer(tensor, tensor, None)
        ready = record_event(device)
        if self._takes_addresses(device):
            ready.synchronize()
            return ReceiveBuffer(tensor, tensor, None)
        return ReceiveBuffer(tensor, empty_pinned(tensor.shape, tensor.dtype, device), ready)

    def _takes_addresses(self, device: torch.device) -> bool:
        memory = self.process.device_memory
        if memory.mpi_reads is None:
            memory.mpi_reads = accepts_addresses(device.type)
        return memory.way in ("auto", "mpi") and memory.mpi_reads


@dataclass(frozen=True)
class ReceiveBuffer:
    """Destination of a received message.

    Attributes:
        tensor: Tensor of the caller.
        buffer: Memory that MPI writes: that of the tensor, or a host buffer.
        ready: Event on the tensor's device; the host buffer may be copied to the tensor after it. None if MPI writes
            the tensor itself.
    """

    tensor: torch.Tensor
    buffer: torch.Tensor
    ready: torch.Event | None

    def copy(self) -> None:
        """Copy the received data to the caller's tensor if MPI has written a host buffer."""
        if self.ready is not None:
            current_stream(self.tensor.device).wait_event(self.ready)
            self.tensor.detach().copy_(self.buffer, non_blocking=True)


class ReceiveWork(Messages):
    """Handle of a receive: the header arrives first, if there is one, then the data."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        source: int,
        tag: int,
        target: ReceiveBuffer,
        wait: MessageWait,
        header: bool,
    ) -> None:
        """Post the receive of the header, or of the data if no header precedes them.

        Args:
            comm: Communicator of the messages.
            source: Rank that sends, or ANY_SOURCE.
            tag: Tag from the caller.
            target: Destination of the data.
            wait: Description of a wait for the message, for the watchdog and the traffic counters.
            header: True if a header precedes the data.
        """
        name = "receive from any rank" if source == ANY_SOURCE else f"receive from rank {source}"
        self._comm, self._receive_buffer = comm, target
        self._bare, self._header_received = not header, not header
        if header:
            self._header = np.empty(3, dtype=np.int64)
            super().__init__(name, target.tensor, [comm.Irecv(self._header, source, _check_tag(tag))], wait)
            self._progress.expect(self)
        else:
            requests = [comm.Irecv(spec, source, _bare_tag(tag)) for spec in message_buffers(target.buffer)]
            super().__init__(name, target.tensor, requests, wait)
            self.source = source

    def advance(self) -> None:
        """Post the receive of the data if the header has arrived; see `mpitrain.comm.runtime.progress`."""
        self._test(lambda: self._header_received or self._complete)

    def cancel(self, comm: MPI.Intracomm) -> None:
        """Cancel the receive if it belongs to this communicator and none of it has arrived."""
        if self._comm is not comm:
            return
        self.advance()
        with self._lock:
            if (self._bare or not self._header_received) and not self._complete:
                self._failure = f"{self._record.label} was freed before {self._name} was complete"
                for request in self._requests:
                    request.Cancel()
                if MPI.Request.Testall(self._requests):  # not if the data are arriving
                    self._end()

    def is_buffer_free(self) -> bool:
        """Return True if MPI has finished with the message's memory; never blocks. See `Messages.is_buffer_free`."""
        return self._header_received and super().is_buffer_free()

    def _proceed(self) -> list[MPI.Request]:
        if self._header_received:
            self._receive_buffer.copy()
            return []
        self._header_received = True
        self._progress.receives.discard(self)
        rank, nbytes, data_tag = self._header.tolist()
        self.source = rank
        place = self._receive_buffer.buffer
        if nbytes != place.nbytes:
            self._failure = (
                f"{self._record.label}: {self._name}: a message of {nbytes} bytes arrived from rank {rank}, but rank "
                f"{self._comm.rank} expects {place.nbytes}; send and receive tensors of the same size and type"
            )
            # receive the data anyway and discard them, because their sender may wait for that
            place = torch.empty(nbytes, dtype=torch.uint8)
            self._receive_buffer = ReceiveBuffer(place, place, None)
        return [self._comm.Irecv(spec, rank, data_tag) for spec in message_buffers(place)]

    def _end(self) -> None:
        self._progress.receives.discard(self)
        super()._end()


@functools.cache
def _data_tags() -> range:
    """Return the tags of data: the highest ones that MPI allows."""
    highest = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)  # MPI guarantees 32767
    return range(highest - _TAGS + 1, highest + 1)


def _bare_tag(tag: int) -> int:
    """Return MPI's tag of a message without header. Raises InputError unless the caller's tag is in range."""
    return _data_tags().start - _BARE_TAGS + _check_tag(tag, _BARE_TAGS)


def _check_tag(tag: int, tags: int | None = None) -> int:
    """Return the caller's tag. Raises InputError unless it is in range.

    Args:
        tag: Tag from the caller.
        tags: Number of possible tags; None for all those of headers.
    """
    tags = _data_tags().start - _BARE_TAGS if tags is None else tags
    if not 0 <= tag < tags:
        raise InputError(f"tag {tag} is out of range; use one from 0 to {tags - 1}")
    return tag
